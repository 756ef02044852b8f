"""Which version wrote each token, as SGLang says it, and what a trainer does about old ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from weightbus.trainer_agent.staleness import Lineage, MixedPolicy, Staleness, UnknownLineage, VersionSpan


def meta(*runs: tuple[str, int, int]) -> dict[str, Any]:
    spans = [{"version": version, "start": start, "end": end} for version, start, end in runs]
    return {"weight_version": runs[-1][0] if runs else "0", "weight_versions": spans, "completion_tokens": 9, "id": "x"}


def test_tokens_have_versions() -> None:
    """Runs become a version for each token; the launch's label is none."""
    found = Lineage.of(meta(("default", 0, 2), ("7", 2, 3), ("8", 3, 6)), 6)
    assert found.by_token() == [None, None, 7, 8, 8, 8]
    assert found.mixed
    assert found.lag(9) is None
    assert Lineage.of(meta(("7", 0, 2), ("8", 2, 4)), 4).lag(9) == 2
    assert Lineage.of(meta(("7", 0, 0)), 0).spans == ()
    assert Lineage.of(meta(("7", 0, 0)), 0).lag(9) == 0


def test_older_servers_say_the_last_version_only() -> None:
    """Before 0.5.19 there are no runs: the label at the end is all that is known, and it is said so."""
    found = Lineage.of({"weight_version": "12"}, 3)
    assert found.spans == (VersionSpan(12, 0, 3),)
    assert not found.exact
    assert Staleness(max_lag=0).judge(found, 12).keep
    assert not Staleness(max_lag=0, inexact=False).judge(found, 12).keep


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({}, 3),
        ({"weight_version": 3}, 3),
        (meta(("7", 0, 2)), 3),
        (meta(("7", 1, 3)), 3),
        (meta(("7", 0, 1), ("8", 2, 3)), 3),
        (meta(("7", 0, 2), ("8", 1, 3)), 3),
        (meta(), 3),
        ({"weight_version": "7", "weight_versions": [{"version": "7"}]}, 3),
        ({**meta(("7", 0, 1), ("8", 1, 3)), "weight_version": "9"}, 3),
        ({**meta(("7", 0, 1), ("8", 1, 3)), "weight_version": "7"}, 3),
        ({"weight_version": "7"}, -1),
        ([{"weight_version": "7"}], 3),
        (None, 3),
        ("7", 3),
    ],
)
def test_what_does_not_add_up_is_refused(said: Any, tokens: int) -> None:
    """Gaps, overlaps, contradictions, other counts and other words: learning from a guess is worse than an error."""
    with pytest.raises(UnknownLineage):
        Lineage.of(said, tokens)


@pytest.mark.parametrize(
    ("policy", "keep", "mask"),
    [
        (Staleness(max_lag=2), True, "1111"),
        (Staleness(max_lag=1), False, "0000"),
        (Staleness(max_lag=1, mixed=MixedPolicy.MASK), True, "0011"),
        (Staleness(max_lag=0, mixed=MixedPolicy.MASK), False, "0000"),
        (Staleness(max_lag=5, mixed=MixedPolicy.DROP), False, "0000"),
    ],
)
def test_old_tokens(policy: Staleness, keep: bool, mask: str) -> None:
    """Too old: dropped, or masked where that is wanted and something is left."""
    verdict = policy.judge(Lineage.of(meta(("7", 0, 2), ("8", 2, 4)), 4), current=9)
    assert (verdict.keep, "".join("01"[each] for each in verdict.mask)) == (keep, mask)
    assert bool(verdict.reason) == ("0" in mask)


@pytest.mark.parametrize(
    ("policy", "keep", "mask"),
    [
        (Staleness(max_lag=1), False, "0000"),
        (Staleness(max_lag=1, mixed="mask"), True, "1100"),
        (Staleness(max_lag=0, mixed="mask"), True, "1100"),
    ],
)
def test_tokens_of_versions_that_were_withdrawn(policy: Staleness, keep: bool, mask: str) -> None:
    """The channel went back from 9 to 7: what 9 wrote is as little of the policy in training as what is too old."""
    verdict = policy.judge(Lineage.of(meta(("7", 0, 2), ("9", 2, 4)), 4), current=7)
    assert (verdict.keep, "".join("01"[each] for each in verdict.mask)) == (keep, mask)
    assert "version 9 are of weights that were withdrawn" in verdict.reason


@pytest.mark.parametrize("wrong", [{"max_lag": -1}, {"max_lag": 1, "mixed": "some"}])
def test_a_policy_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    """When it is made, not when it has dropped every response."""
    with pytest.raises(ValueError, match=r"max_lag = -1|'some'"):
        Staleness(**wrong)


def test_weights_of_the_launch() -> None:
    """They have no version; who trains on from them may count them as the one before the first."""
    launched = Lineage.of(meta(("default", 0, 2)), 2)
    assert not Staleness(max_lag=1).judge(launched, 1).keep
    assert Staleness(max_lag=1, launch=True).judge(launched, 1).keep
    assert not Staleness(max_lag=1, launch=True).judge(launched, 2).keep


RUNS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6)


@given(RUNS, st.integers(0, 12), st.integers(0, 4), st.sampled_from(MixedPolicy))
def test_nothing_too_old_is_ever_learned_from(
    runs: list[tuple[int, int]], current: int, max_lag: int, mixed: MixedPolicy
) -> None:
    """Whatever wrote it: a token that counts is 0 to `max_lag` behind, and without masks a response counts whole."""
    at, spans = 0, []
    for version, length in runs:
        spans.append((str(version), at, at + length))
        at += length
    lineage = Lineage.of(meta(*spans), at)
    verdict = Staleness(max_lag, mixed).judge(lineage, current)
    counted = [version for version, good in zip(lineage.by_token(), verdict.mask, strict=True) if good]
    assert all(version is not None and 0 <= current - version <= max_lag for version in counted)
    assert bool(counted) == verdict.keep
    if mixed is not MixedPolicy.MASK and verdict.keep:
        assert all(verdict.mask)
    if all(0 <= current - version <= max_lag for version, _ in runs) and mixed is not MixedPolicy.DROP:
        assert verdict.keep


def sglang() -> ModuleType:
    """SGLang's own arithmetic of runs, without the rest of it."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("SGLang says what the runs are")
    source = Path(found.submodule_search_locations[0], "srt", "utils", "weight_versions.py").read_text()
    module = ModuleType("weight_versions")
    stand_in = ModuleType("sglang.srt.utils.msgspec_utils")
    stand_in.msgspec_struct_pydantic_core_schema = None  # type: ignore[attr-defined]  # pydantic's, which is not asked
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, stand_in.__name__, stand_in)
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, "weight_versions.py", "exec"), module.__dict__)
    return module


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=5), st.integers(0, 30))
def test_whatever_sglang_writes_is_read(changes: list[tuple[int, int]], tokens: int) -> None:
    """Its own events of a change of weights, in its own words for a client: every token gets one version."""
    theirs = sglang()
    counts = sorted(count for _, count in changes)
    events = [
        theirs.WeightVersionEvent(str(version), count) for (version, _), count in zip(changes, counts, strict=True)
    ]
    said: dict[str, Any] = {}
    theirs.add_weight_versions_to_meta_info(said, theirs.compute_weight_version_spans(events, "6", tokens), tokens)
    lineage = Lineage.of(said, tokens)
    assert len(lineage.by_token()) == tokens
    if tokens > max(counts, default=0):
        assert lineage.by_token()[-1] == 6
