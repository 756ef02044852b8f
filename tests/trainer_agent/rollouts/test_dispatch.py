"""The choice of an engine, and what follows from its answer."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from weightbus.trainer_agent.rollouts.dispatch import (
    BUSY,
    Attempts,
    FleetView,
    NoEngineReady,
    ReadyEngine,
    RolloutRefused,
    Send,
    Wait,
    shares,
)


def engine(name: str, version: int | None = 7) -> ReadyEngine:
    return ReadyEngine(name, f"http://{name}", version)


def view(*engines: ReadyEngine) -> FleetView:
    return FleetView(engines, 7, "")


A, B, OLD, LAUNCHED = engine("a"), engine("b"), engine("old", 5), engine("launched", None)


def test_the_least_loaded_engine_that_serves_the_version() -> None:
    """Ties go to the first of the list; engines with older weights are not asked, however idle."""
    load = {"a": 2, "b": 1}
    assert Attempts(None, 9.0).next(view(A, B), load, 1.0) == Send(B, 8.0)
    assert Attempts(None, 9.0).next(view(A, B), {}, 1.0) == Send(A, 8.0)
    assert Attempts(None, 9.0).next(view(A, OLD), load, 1.0) == Send(OLD, 8.0)
    assert Attempts(6, 9.0).next(view(A, OLD, LAUNCHED), load, 1.0) == Send(A, 8.0)
    assert Attempts(0, 9.0).next(view(LAUNCHED), {}, 1.0) == Wait(8.0)


def test_an_engine_that_refused_is_left_alone_for_as_long_as_it_says() -> None:
    """Others are asked meanwhile, and it is asked at once when it serves another version."""
    attempts = Attempts(7, 100.0)
    attempts.answered(A, 409, "holds version 6", 3.0, 10.0)
    assert attempts.next(view(A, B), {"b": 50}, 10.0) == Send(B, 90.0)
    assert attempts.next(view(A), {}, 11.0) == Wait(2.0)
    assert attempts.next(view(A), {}, 13.0) == Send(A, 87.0)
    attempts.answered(A, 503, "dirty", None, 13.0)
    assert attempts.next(view(A), {}, 13.1) == Wait(pytest.approx(0.4))
    assert attempts.next(view(engine("a", 8)), {}, 13.1) == Send(engine("a", 8), pytest.approx(86.9))
    attempts.answered(B, 503, "for ever", 1e9, 14.0)
    assert attempts.next(view(B), {}, 14.0) == Wait(10.0)


def test_a_request_that_is_wrong_is_not_repeated() -> None:
    """400 and the like are raised with the engine's own words."""
    with pytest.raises(
        RolloutRefused, match="a refuses the request with 400: max_new_tokens must be positive"
    ) as refused:
        Attempts(None, 9.0).answered(A, 400, "max_new_tokens must be positive", None, 1.0)
    assert refused.value.status == 400


def test_the_deadline_tells_the_story() -> None:
    """What was ready, and what became of each try."""
    attempts = Attempts(8, 9.0)
    attempts.failed(A, "ConnectError: refused", 1.0)
    with pytest.raises(NoEngineReady) as late:
        attempts.next(FleetView((A, LAUNCHED), 7, "the coordinator is silent"), {}, 9.0)
    assert str(late.value) == (
        "no engine with version 8 or later answered before the deadline: a with version 7, launched with its launch"
        " weights ready (the coordinator is silent); a: ConnectError: refused. See `weightbus status`"
    )


def test_answers_are_compared_with_the_bound() -> None:
    """An engine that went back meanwhile is found by its answer."""
    assert Attempts(7, 9.0).within(7)
    assert not Attempts(7, 9.0).within(6)
    assert not Attempts(7, 9.0).within(None)
    assert Attempts(None, 9.0).within(None)


@pytest.mark.parametrize(("count", "engines"), [(0, 3), (1, 3), (3, 3), (7, 3), (8, 2), (5, 1), (4, 0)])
def test_shares(count: int, engines: int) -> None:
    """Every prompt once, in order, in runs that differ by one at most."""
    runs = shares(count, engines)
    assert [index for run in runs for index in range(count)[run]] == list(range(count))
    sizes = [run.stop - run.start for run in runs]
    assert len(sizes) <= max(1, engines)
    assert all(sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_requests_among_engines_that_come_go_and_refuse() -> None:
    """Every request ends by its deadline; none goes to an engine with old weights, or again before its time."""
    for seed in range(300):
        chance, now = random.Random(seed), 0.0
        least, attempts = chance.choice([None, 5, 7]), Attempts(None, 20.0)
        attempts.min_version = least
        left_alone: dict[ReadyEngine, float] = {}
        load: Counter[str] = Counter({name: chance.randrange(4) for name in "abc"})
        for _ in range(400):
            engines = [engine(name, chance.choice([None, 5, 6, 7, 8])) for name in "abc" if chance.random() < 0.7]
            try:
                step = attempts.next(view(*engines), load, now)
            except NoEngineReady:
                assert now >= 20.0
                break
            if isinstance(step, Wait):
                assert 0 <= step.seconds <= 20.0 - now
                assert all(
                    left_alone.get(each, now) > now
                    for each in engines
                    if least is None or (each.version is not None and each.version >= least)
                )
                now += min(step.seconds, chance.random()) + 1e-6
                continue
            chosen = step.engine
            assert chosen in engines
            assert least is None or (chosen.version is not None and chosen.version >= least)
            assert left_alone.get(chosen, now) <= now
            now += chance.random()
            after = chance.choice([None, 0.0, 1.0, 2.0])
            attempts.answered(chosen, chance.choice(sorted(BUSY)), "", after, now)
            left_alone[chosen] = now + (0.5 if after is None else after)
        else:
            raise AssertionError("the request did not end")
