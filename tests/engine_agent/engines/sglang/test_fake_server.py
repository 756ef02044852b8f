"""The contract on the fake, for every dialect; and what the client makes of failures that only the fake can have."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightbus.engine_agent.engines.registry import Keys
from weightbus.engine_agent.engines.sglang import sglang_server as sglang
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import (
    AnotherGeneration,
    PauseEnded,
    ServerError,
    ServerRefused,
    ServerSilent,
    ServerUnreachable,
)

from ....kit import tiny_model
from ....kit.fake_sglang import FakeSGLang
from .sglang_contract import SGLangBench, SGLangContract


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return tiny_model.write(folder / "a", 1), tiny_model.write(folder / "b", 2)


@pytest.fixture
def fake(checkpoints: tuple[Path, Path]) -> Iterator[FakeSGLang]:
    """A server with one rank."""
    server = FakeSGLang(checkpoints[0]).start()
    yield server
    server.stop()


def calls_of(server: SGLangServer) -> list[str]:
    """Requests that are made from now on, as they end."""
    calls: list[str] = []

    def note(call: str, _: float, *, failed: bool) -> None:
        calls.append(f"{call} failed" if failed else call)

    server.observe(note)
    return calls


@pytest.fixture(scope="module", params=[("0.5.11", 1), ("0.5.20", 2), ("0.5.23", 2)], ids=str)
def bench(
    request: pytest.FixtureRequest, checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangBench]:
    """A fake of some version and number of ranks."""
    version, tp = request.param
    server = FakeSGLang(checkpoints[0], version, tp).start()
    made = SGLangBench(server.url, *checkpoints, tmp_path_factory.mktemp("run"), server.restart)
    yield made
    made.close()
    server.stop()


class TestFakeServer(SGLangContract):
    """The fake keeps the contract."""


def test_a_connection_is_asked_once_where_it_leads(fake: FakeSGLang) -> None:
    """Calls that change the server take only connections of which that is known, and ask nothing more (N37)."""
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    calls = calls_of(server)
    server.look_ahead(5)
    server.pause("in_place", 5)
    server.set_label("7", 5)
    server.flush(5)
    server.resume(5)
    assert calls == ["server_info", "pause_generation", "update_weight_version", "flush_cache", "continue_generation"]
    server.close()


def test_a_connection_that_has_ended_is_replaced_by_one_that_is_asked_again(fake: FakeSGLang) -> None:
    """Servers close idle connections; the next one may lead to another launch (N37)."""
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    server.pause("in_place", 5)
    assert fake._http is not None
    fake._http.hang_up()
    calls = calls_of(server)
    server.set_label("7", 5)
    assert calls == ["server_info", "update_weight_version"]
    server.close()


def test_every_call_that_changes_a_server_is_for_the_launch_that_was_meant(fake: FakeSGLang) -> None:
    """Pause, label, cache, memory, weights, proof: the server that took its place gets none of it (G1, N37)."""
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    server.pause("in_place", 5)
    fake.restart()
    fake.calls.clear()
    calls: tuple[Callable[[], object], ...] = (
        lambda: server.pause("retract", 5),
        lambda: server.set_label("8", 5),
        lambda: server.flush(1),
        lambda: server.resume(5),
        lambda: server.live_digests(5),
        lambda: server.load_checkpoint("/x", 5),
        lambda: server.load_broadcast("group", (), 5),
        lambda: server.load_direct("/socket", 5),
        lambda: server.confirm("the transfer", 5),
        lambda: server.prepare_release(5),
    )
    for call in calls:
        with pytest.raises(AnotherGeneration):
            call()
    assert not fake.calls
    assert not server.dirty
    server.close()


def test_a_process_that_is_seen_to_be_the_server_is_asked_nothing(
    fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers are below the process behind the port, so nothing is between: that process lives, or it does not."""
    monkeypatch.setattr(sglang, "workers_of", lambda _pid, _name: {1: 1})
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    calls = calls_of(server)
    server.pause("in_place", 5)
    server.set_label("7", 5)
    server.confirm("the transfer", 5)
    server.resume(5)
    server.confirm_label("the resume", 5)
    assert calls == ["pause_generation", "update_weight_version", "continue_generation"]
    monkeypatch.setattr(sglang, "has_ended", lambda _pid, _started: True)
    with pytest.raises(AnotherGeneration):
        server.set_label("8", 5)
    assert fake.label == "7"
    server.close()


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_a_launch_behind_a_proxy_is_found_out_wherever_it_comes(
    checkpoints: tuple[Path, Path], tmp_path: Path, version: str
) -> None:
    """At any call of a version the server is another one: the version fails before it counts as served (F33, N37)."""
    fake = FakeSGLang(checkpoints[0], version).start()
    bench = SGLangBench(fake.url, *checkpoints, tmp_path)
    server = bench.server

    def take() -> None:
        server.pin("")
        server.pin(server.identify(5).identity)
        server.pause("in_place", 5)
        bench.load(checkpoints[1])
        server.confirm("the transfer", 5)
        server.set_label("7", 5)
        server.confirm("the label", 5)
        server.flush(5)
        server.resume(5)
        server.confirm_label("the resume", 5)

    take()
    calls = len(fake.calls)
    assert calls > 6
    for number in range(1, calls + 1):
        fake.replace()
        fake.replace(number)
        with pytest.raises(ServerError):
            take()
    bench.close()
    fake.stop()


def test_a_balancer_is_found_out_before_anything_is_changed(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers take turns at one address: the first look at it shows both (F34)."""
    server = SGLangServer(fake.url)
    server.identify(5)
    assert server.answering(5) == {server.facts.identity}
    seeds, told = itertools.cycle((1, 2)), fake.server_info
    monkeypatch.setattr(fake, "server_info", lambda body: told(body) | {"random_seed": next(seeds)})
    assert len(server.answering(5)) == 2
    server.close()


def test_a_server_tells_whether_it_generates(fake: FakeSGLang) -> None:
    """/ready, which is 503 as well after a health check that got no answer: that is asked again (N57)."""
    server = SGLangServer(fake.url)
    server.identify(5)
    assert server.look(5) == (server.facts.identity, "default", True)
    fake.pause_generation({"mode": "retract"})
    assert server.look(5).generates is False
    server.confirm_paused("the label", 5)
    fake.continue_generation({})
    fake.inject("/ready", "refuse")
    server._health_at = float("-inf")
    assert server.look(5).generates is True
    with pytest.raises(PauseEnded):
        server.confirm_paused("the label", 5)
    fake.admin_key = "b"
    guarded = SGLangServer(fake.url, Keys("", "b"))
    guarded.identify(5)
    guarded.confirm_paused("the label", 5)
    for each in (server, guarded):
        each.close()


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_is_of_the_kind_that_was_asked_for(fake: FakeSGLang, mode: str) -> None:
    """Requests that run are kept, computed again or ended: that is the channel's policy alone."""
    server = SGLangServer(fake.url)
    server.identify(5)

    server.pause(mode, 5)

    assert fake.mode == mode
    server.resume(5)
    server.close()


def test_a_server_that_cannot_be_looked_at_is_paused_all_the_same(fake: FakeSGLang) -> None:
    """It may be one that must not generate; what changes it afterwards looks again."""
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    calls = calls_of(server)
    fake.inject("/server_info", "refuse")
    server.pause("in_place", 5)
    server.set_label("8", 5)
    assert calls == ["server_info failed", "pause_generation", "server_info", "update_weight_version"]
    server.close()


def test_an_update_never_goes_on_in_the_session_of_another_agent(
    fake: FakeSGLang, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """What a dead agent had loaded in it is closed off first; what comes is an update of its own."""
    fake.session = True
    bench = SGLangBench(fake.url, *checkpoints, tmp_path)
    calls = calls_of(bench.server)
    bench.load(checkpoints[1])
    bench.close()
    assert [call for call in calls if "session" in call or "weight_update" in call] == [
        "begin_weight_update failed",
        "end_weight_update",
        "begin_weight_update",
        "end_weight_update",
    ]


def test_death_in_a_call_is_unreachable(fake: FakeSGLang) -> None:
    """A connection that breaks before the answer: the weights count as touched."""
    server = SGLangServer(fake.url)
    server.identify(5)
    fake.inject("/update_weights_from_disk", "die")
    with pytest.raises(ServerUnreachable):
        server.load_checkpoint("/x", 5)
    assert server.dirty
    with pytest.raises(ServerUnreachable):
        server.label(5)
    server.close()


def test_a_server_that_hangs_is_left_at_the_deadline(fake: FakeSGLang) -> None:
    """No call outlives its own deadline (F22)."""
    server = SGLangServer(fake.url)
    server.identify(5)
    fake.inject("/pause_generation", "hang")
    with pytest.raises(ServerSilent, match=r"1\.0 s"):
        server.pause("retract", 1.0)
    server.close()


def test_both_keys_are_used_where_they_belong(checkpoints: tuple[Path, Path]) -> None:
    """With an admin key set, each kind of endpoint takes only its own key."""
    fake = FakeSGLang(checkpoints[0], api_key="a", admin_key="b").start()
    both, api_only = SGLangServer(fake.url, Keys("a", "b")), SGLangServer(fake.url, Keys("a"))
    both.identify(5)
    both.pause("retract", 5)
    both.resume(5)
    api_only.identify(5)
    with pytest.raises(ServerRefused) as caught:
        api_only.pause("retract", 5)
    assert caught.value.status == 401
    both.close()
    api_only.close()
    fake.stop()


def test_flush_is_tried_again_until_requests_are_gone(fake: FakeSGLang) -> None:
    """A refused flush is normal just after a pause; one that stays refused ends at the deadline (F21)."""
    server = SGLangServer(fake.url)
    server.identify(5)
    fake.inject("/flush_cache", "refuse")
    server.flush(5)
    assert fake.calls.count("/flush_cache") == 2
    fake.running = 1
    with pytest.raises(ServerRefused):
        server.flush(2.0)
    server.close()
