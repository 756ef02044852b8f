"""Servers that give their GPU memory back between two rounds, and take it again in the order of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weightbus.control.server.http_server import HttpPort, Readiness
from weightbus.control.server.metrics import Metrics, MetricSource
from weightbus.engine_agent.engines.sglang.sglang_server import TAGS, WEIGHTS, MemoryOccupation, SGLangServer
from weightbus.engine_agent.errors import NothingToGive, ServerError, StateUnreadable

from ....kit import tiny_model
from ....kit.fake_sglang import FakeSGLang


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSGLang]:
    made = FakeSGLang(tiny_model.write(tmp_path / "a", 1)).start()
    yield made
    made.stop()


Connect = Callable[..., SGLangServer]


@pytest.fixture
def connected(fake: FakeSGLang) -> Iterator[Connect]:
    """What an agent that keeps its file there has, freshly started."""
    made: list[SGLangServer] = []

    def connect(file: Path | None = None) -> SGLangServer:
        made.append(SGLangServer(fake.url, memory=MemoryOccupation(file)))
        made[-1].identify()
        return made[-1]

    yield connect
    for server in made:
        server.close()


def orders(fake: FakeSGLang) -> list[str]:
    return [path for path in fake.calls if "memory" in path or path.endswith("_generation")]


def test_memory_comes_back_weights_first_and_before_anything_generates(fake: FakeSGLang, connected: Connect) -> None:
    """Requests are ended before it goes; the weights come when a version comes, the rest when the server goes on."""
    server = connected()
    server.prepare_release()
    server.release_memory()
    assert fake.lent == set(TAGS)

    with pytest.raises(ServerError, match="given its weights back"):
        server.resume()
    assert fake.mode == "abort"
    server.resume_weights_memory()
    assert fake.lent == set(TAGS) - {WEIGHTS}
    server.resume_weights_memory()
    server.resume()

    assert orders(fake) == [
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/resume_memory_occupation",
        "/resume_memory_occupation",
        "/continue_generation",
    ]
    assert (fake.lent, fake.mode) == (set(), "")


def test_another_agent_knows_what_was_given_back(fake: FakeSGLang, connected: Connect, tmp_path: Path) -> None:
    """SGLang would end if it were asked to take what it has: the file says what that is, for this launch alone."""
    file = tmp_path / "e0.memory.json"
    before = connected(file)
    name = before.facts.identity
    given_up = before.prepare_release().identity
    before.release_memory()

    after = connected(file)
    assert after.facts.identity == given_up != name
    assert after.facts.undefined
    after.resume_weights_memory()
    after.resume()
    assert not fake.lent
    fake.restart()

    again = connected(file)
    assert not again.facts.undefined
    again.resume()
    assert fake.calls.count("/resume_memory_occupation") == len(TAGS)


def test_what_was_refused_is_not_asked_back(fake: FakeSGLang, connected: Connect) -> None:
    """A server that said no has everything; of one that died over it that is not known, and the file says given."""
    server = connected()
    fake.inject("/release_memory_occupation", "refuse")
    server.prepare_release()
    with pytest.raises(ServerError, match="injected"):
        server.release_memory()
    server.resume()
    assert "/resume_memory_occupation" not in fake.calls

    fake.inject("/release_memory_occupation", "die")
    server.prepare_release()
    with pytest.raises(ServerError):
        server.release_memory()
    with pytest.raises(ServerError, match="given its weights back"):
        server.resume_memory()


def test_what_cannot_be_given_is_not_asked_for(fake: FakeSGLang, connected: Connect, tmp_path: Path) -> None:
    """A server without the memory saver answers 200 and keeps everything; one that gave it all has nothing left."""
    server = connected()
    server.prepare_release()
    server.release_memory()
    with pytest.raises(NothingToGive, match="already"):
        server.prepare_release()
    fake.memory_saver = False
    fake.restart()
    with pytest.raises(NothingToGive, match="--enable-memory-saver"):
        connected().prepare_release()
    assert fake.calls.count("/pause_generation") == 1

    for bad in (b"{", b'{"tags":["\xff"]}'):
        (tmp_path / "bad.json").write_bytes(bad)
        with pytest.raises(StateUnreadable, match="restart the server"):
            MemoryOccupation(tmp_path / "bad.json")


def test_orders_are_taken_by_post_alone() -> None:
    """A port without orders takes none."""
    asked: list[str] = []

    def order() -> Readiness:
        asked.append("x")
        return Readiness(len(asked) == 1, "so")

    common: dict[str, Any] = {"readiness": lambda: Readiness(True), "status": lambda: b"{}"}
    registry = Metrics(MetricSource.ENGINE).registry
    with_actions = HttpPort("127.0.0.1", 0, registry=registry, actions={"/give-back": order}, **common)
    without = HttpPort("127.0.0.1", 0, registry=registry, **common)
    for port in (with_actions, without):
        port.start()
    try:
        url = f"http://127.0.0.1:{with_actions.port}/give-back"
        codes = [httpx.request(method, url, trust_env=False).status_code for method in ("GET", "POST", "POST")]
        assert codes == [404, 200, 409]
        assert httpx.post(f"http://127.0.0.1:{without.port}/give-back", trust_env=False).status_code == 501
        assert len(asked) == 2
    finally:
        for port in (with_actions, without):
            port.stop()
