"""The contract on the fake, for every dialect; and what the client makes of failures that only the fake can have."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.engine_agent.engines.registry import Keys
from weightbus.engine_agent.engines.sglang import sglang_server as sglang
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import AnotherGeneration, ServerRefused, ServerSilent, ServerUnreachable

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

    def again() -> None:
        server.restart()
        made.server._looked_at = float("-inf")  # a launch takes longer than a look holds good, but for the fake's

    made = SGLangBench(server.url, *checkpoints, tmp_path_factory.mktemp("run"), again)
    yield made
    made.close()
    server.stop()


class TestFakeServer(SGLangContract):
    """The fake keeps the contract."""


def test_a_launch_is_looked_at_before_the_pause_and_not_again_at_once(
    fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While requests wait, nothing is asked that was answered a moment ago; later it is asked again."""
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    server.pause("in_place", 5)
    calls: list[str] = []

    def note(call: str, _: float, *, failed: bool) -> None:
        assert not failed
        calls.append(call)

    server.observe(note)
    server.set_label("7", 5)
    server.resume(5)
    assert calls == ["update_weight_version", "continue_generation"]
    monkeypatch.setattr(sglang, "_LOOK_S", 0.0)
    server.resume(5)
    assert calls[2:] == ["model_info", "continue_generation"]
    server.close()


@pytest.mark.parametrize("other", [False, True])
def test_a_launch_that_was_looked_at_ahead_is_paused_at_once(fake: FakeSGLang, *, other: bool) -> None:
    """Another launch is paused all the same, but gets nothing that was meant for this one."""
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    server.set_label("7", 5)
    if other:
        fake.restart()
    server.pin("")
    server.pin(server.facts.identity)
    calls = calls_of(server)

    server.look_ahead(5)
    server.pause("in_place", 5)

    assert calls == ["model_info", *(["model_info"] if other else []), "pause_generation"]
    with pytest.raises(AnotherGeneration) if other else contextlib.nullcontext():
        server.set_label("8", 5)
    assert fake.label == ("default" if other else "8")
    server.close()


def test_a_look_of_long_ago_is_repeated_before_the_pause(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round may be long prepared before it pauses an engine; what follows the pause must not have to look."""
    server = SGLangServer(fake.url)
    server.pin(server.identify(5).identity)
    calls = calls_of(server)
    server.look_ahead(5)
    looked_at = server._looked_at
    monkeypatch.setattr(server, "_looked_at", looked_at - sglang._LOOK_S * 3 / 4)

    server.pause("in_place", 5)
    server.resume(5)

    assert calls == ["model_info", "model_info", "pause_generation", "continue_generation"]
    server.close()


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
    fake.inject("/model_info", "refuse")
    server.pause("in_place", 5)
    server.set_label("8", 5)
    assert calls == ["model_info failed", "pause_generation", "model_info", "update_weight_version"]
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
