"""What `publish` does when engines are missing, start, or fail: a test for each row of the table in REFERENCE.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from weightbus.control.protocol.messages import Outcome
from weightbus.dataplane.errors import TransferFailed
from weightbus.trainer_agent.machine.errors import EnginesMissing, RoundAborted

from ...kit.waiting import until
from .test_rounds import Deployment

SHORT_S = 1.5


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    (tmp_path / "run").mkdir(mode=0o700)
    made = Deployment(tmp_path)
    yield made
    made.close()


def later(seconds: float, call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


def breaks(_load: int) -> None:
    raise TransferFailed("it broke")


def test_no_engine_and_none_asked_for(deployment: Deployment) -> None:
    """Committed at once, and said loudly: in a warning and in the report's line."""
    deployment.connect()
    with capture_logs() as logs:
        report = deployment.publish(1)
    assert (report.committed, report.engines) == (True, ())
    assert "committed, but no engine is there: start `weightbus engine-agent --channel c`" in report.line()
    (told,) = [line for line in logs if line["event"] == "published_to_no_engine"]
    assert told["log_level"] == "warning"
    assert deployment.agents[0].committed == 1


def test_no_engine_and_some_asked_for(deployment: Deployment) -> None:
    """`min_engines` is waited for up to `engines_timeout_s`, and named then."""
    deployment.connect(min_engines=1, engines_timeout_s=SHORT_S)
    began = time.monotonic()
    with pytest.raises(RoundAborted, match=r"waited 1.5 s for engines \(no other has joined\)"):
        deployment.publish(1)
    assert time.monotonic() - began >= SHORT_S


def test_engines_that_come_in_time(deployment: Deployment) -> None:
    """The publication goes on as soon as `min_engines` are there."""
    deployment.connect(min_engines=2, engines_timeout_s=60.0)
    deployment.engine("e0")
    timer = later(1.0, lambda: deployment.engine("e1"))
    assert deployment.publish(1).engines_by(Outcome.COMMITTED) == ("e0", "e1")
    timer.join()


def test_only_engines_that_start(deployment: Deployment) -> None:
    """A server that compiles is waited for, though none was asked for."""
    deployment.connect(engines_timeout_s=60.0)
    engine = deployment.engine("e0")
    engine.refuses = "no answer in 10.0 s"
    engine.say_trouble("has answered nothing", starting=True)

    def started() -> None:
        engine.refuses = ""
        engine.say_trouble("")

    timer = later(1.5, started)
    assert deployment.publish(1).engines_by(Outcome.COMMITTED) == ("e0",)
    timer.join()


def test_only_engines_that_start_and_never_do(deployment: Deployment) -> None:
    """At the end of `engines_timeout_s` the round's reason and the engine's trouble are told."""
    deployment.connect(engines_timeout_s=SHORT_S)
    engine = deployment.engine("e0")
    engine.refuses = "no answer in 10.0 s"
    engine.say_trouble("has answered nothing", starting=True)
    with pytest.raises(RoundAborted, match=r"waited 1.5 s for engines \(e0: starting: has answered nothing for \d s"):
        deployment.publish(1)


def test_some_are_behind(deployment: Deployment) -> None:
    """The others are enough: the version is committed with them, and the line says why one was left out."""
    deployment.connect()
    deployment.engine("e0")
    slow = deployment.engine("e1")
    slow.say_trouble("has answered nothing", starting=True)
    until(lambda: _told(deployment, "e1"), "the trouble")
    began = time.monotonic()
    report = deployment.publish(1)
    assert time.monotonic() - began < 5.0
    assert report.engines_by(Outcome.COMMITTED) == ("e0",)
    assert "1/2 engines (e1 aborted: has answered nothing)" in report.line()


def test_all_refuse(deployment: Deployment) -> None:
    """Waiting would not help: the publication ends at once, with the reasons."""
    deployment.connect(engines_timeout_s=60.0)
    deployment.engine("e0").refuses = "'lm_head.weight' has shape (1, 2), the server's has (2, 2)"
    began = time.monotonic()
    with pytest.raises(RoundAborted, match="has shape") as failed:
        deployment.publish(1)
    assert time.monotonic() - began < 20.0
    assert "0/1 engines (e0 aborted: prepare: 'lm_head.weight' has shape" in failed.value.report.line()


def test_all_fail_in_the_transfer(deployment: Deployment) -> None:
    """Aborted; the report says which engines are quarantined, and the version may be published again."""
    deployment.connect(redrives=0)
    deployment.engine("e0", breaks)
    with pytest.raises(RoundAborted, match="it broke"):
        deployment.publish(1)


def test_fewer_verify_than_were_asked_for(deployment: Deployment) -> None:
    """Enough engines are there, and one fails: nothing is committed, and nothing more is waited for."""
    deployment.connect(redrives=0, min_engines=2, engines_timeout_s=60.0)
    deployment.engine("e0")
    deployment.engine("e1", breaks)
    with pytest.raises(RoundAborted, match="1 engines can take the version, 2 are needed"):
        deployment.publish(1)


def test_the_wait_by_itself(deployment: Deployment) -> None:
    """On every rank alike: the names of those that are there, or who is there and why others are not."""
    deployment.connect()
    deployment.engine("e0")
    slow = deployment.engine("e1")
    slow.say_trouble("no connection to http://e1:30000: refused; launch it", starting=True)
    until(lambda: _told(deployment, "e1"), "the trouble")

    def wait(n: int, timeout_s: float) -> list[object]:
        def one(agent: object) -> object:
            try:
                return agent.wait_for_engines(n, timeout_s=timeout_s)  # type: ignore[attr-defined]
            except EnginesMissing as missing:
                return missing

        with ThreadPoolExecutor(len(deployment.agents)) as pool:
            return list(pool.map(one, deployment.agents))

    assert wait(1, 30.0) == [("e0",)] * len(deployment.agents)
    for missing in wait(2, 1.0):
        assert isinstance(missing, EnginesMissing)
        assert (missing.wanted, missing.there, list(missing.missing)) == (2, ("e0",), ["e1"])
        assert "e1: starting: no connection to http://e1:30000 for" in str(missing)
        assert "refused; launch it" in str(missing)
    timer = later(1.0, lambda: slow.say_trouble(""))
    assert wait(2, 30.0) == [("e0", "e1")] * len(deployment.agents)
    timer.join()


def test_a_wait_to_which_none_has_come_says_what_to_start() -> None:
    """The next command, where no engine could name its reason."""
    assert "start `weightbus engine-agent` for it beside each server" in str(EnginesMissing(1, 20.0, (), {}))


def _told(deployment: Deployment, name: str) -> bool:
    assert deployment._service is not None
    channel = deployment._service.server.status.channels["c"]
    return bool(channel.engines[name].trouble)
