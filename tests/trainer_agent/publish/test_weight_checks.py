"""Weights that are no numbers, and replicas that differ: told of, or refused before any engine hears of the version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from weightbus.control.protocol.messages import TransportKind
from weightbus.dataplane.tensors import Box, Shard, Shards, ShardView, TensorSpec, contiguous_strides
from weightbus.trainer_agent.machine.errors import PublishFailed, ReplicasDiffer, WeightsNotFinite
from weightbus.trainer_agent.publish import driver as driver_module, replica_check as replica_module
from weightbus.trainer_agent.publish.agent import TrainerAgent

from ...kit.fake_source import FakeSource, group_of, pipeline_of, tiny_qwen3
from .test_background_publisher import Loop
from .test_rounds import RANKS

NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


class ReplicatedSource(FakeSource):
    """One of several ranks that all hold the whole model. Satisfies `Exportable`."""

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        whole = [
            Shard(spec.name, Box.whole(spec.shape), spec.dtype, ShardView(at, 0, contiguous_strides(spec.shape)))
            for at, spec in enumerate(tensors)
        ]
        return Shards.of(tensors, whole, self.rank)

    def memory(self) -> Sequence[torch.Tensor]:
        self.group.meet()
        return list(self.weights.values())

    def collect(self, blob: bytes) -> Sequence[bytes]:
        return self.group.gather(self.rank, blob)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """Its coordinator is a thread of this process."""
    made = Loop(tmp_path)
    yield made
    made.close()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of this page."""
    said: list[str] = []

    class Log:
        def bind(self, **_: object) -> Log:
            return self

        def warning(self, event: str, **_: object) -> None:
            said.append(event)

        def __getattr__(self, _name: str) -> Callable[..., None]:
            return lambda *_args, **_more: None

    for module in (driver_module, replica_module):
        monkeypatch.setattr(module, "_log", Log())
    return said


def spoil(loop: Loop) -> None:
    """Three elements of two tensors, on every rank."""
    for source in loop.sources:
        source.weights[NORM].view(-1)[1] = torch.nan
        source.weights[GATE].view(-1)[2:4] = torch.tensor([torch.inf, -torch.inf])


def mend(loop: Loop) -> None:
    for source in loop.sources:
        for tensor in source.weights.values():
            tensor.nan_to_num_(0.0, 1.0, 1.0)


def refused(loop: Loop, error: type[PublishFailed], version: int) -> list[PublishFailed]:
    """What each rank is raised."""

    def one(agent: TrainerAgent) -> PublishFailed:
        with pytest.raises(error) as caught:
            agent.publish(version)
        return caught.value

    found = loop._each(one, loop.agents)
    assert all(each.report == found[0].report for each in found)
    return found


@pytest.mark.parametrize("transport", [TransportKind.LOCAL, TransportKind.DISK, TransportKind.DISTRIBUTED])
def test_nan_and_infinities_are_told_of(loop: Loop, transport: TransportKind, warned: list[str]) -> None:
    """With names and counts, in the report, its line, and the log once for a version; and engines serve the version."""
    if transport is TransportKind.DISTRIBUTED:
        loop.sources = pipeline_of(tiny_qwen3(), RANKS, timeout_s=20.0)
    loop.engine("e0", transport=transport)
    loop.connect(transport=transport.value, slots=2)
    assert loop.publish(1).nonfinite.elements == 0
    spoil(loop)
    report = loop.publish(2)
    assert report.committed
    assert (report.nonfinite.elements, report.nonfinite.tensors) == (3, 2)
    assert {each.name: each.elements for each in report.nonfinite.first} == {NORM: 1, GATE: 2}
    assert "3 elements NaN or infinite, in 2 tensors (" in report.line()
    assert f"{GATE}: 2" in report.line()
    assert warned.count("weights_not_finite") == 1
    mend(loop)
    assert "NaN" not in loop.publish(3).line()


def test_nan_is_refused_before_any_engine_hears_of_it(loop: Loop) -> None:
    """On every rank alike; the lease is free, the engine untouched, and the agent goes on with the next version."""
    loads: list[int] = []
    engine = loop.engine("e0", loads.append)
    loop.connect(nonfinite="refuse")
    assert loop.publish(1).committed
    before = len(loads)
    spoil(loop)
    failure = refused(loop, WeightsNotFinite, 2)[0]
    assert failure.report.nonfinite.elements == 3
    assert "nonfinite = refuse" in str(failure)
    assert (engine.label, len(loads), loop.committed()) == (1, before, 1)
    assert loop.round()["state"] == "idle"
    mend(loop)
    assert loop.publish(2).committed


def test_nan_in_a_snapshot_is_refused(loop: Loop) -> None:
    """By its handle, on every rank."""
    loop.engine("e0")
    loop.connect(nonfinite="refuse")
    spoil(loop)
    assert loop.failure(loop.snapshot(1)) == {WeightsNotFinite}


def replicated(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ranks with copies of their own; what they compare is noted."""
    group = group_of(tiny_qwen3(), RANKS, timeout_s=20.0)[0].group
    loop.sources = [
        ReplicatedSource({name: each.clone() for name, each in tiny_qwen3().items()}, group, rank)
        for rank in range(RANKS)
    ]
    compared: list[str] = []
    compare = replica_module.ReplicaCheck.command
    monkeypatch.setattr(
        replica_module.ReplicaCheck, "command", lambda self: (compared.append("compared"), compare(self))[1]
    )
    return compared


def test_replicas_that_differ_are_told_of(loop: Loop, monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    """At the first version and every so many later: names, and the ranks of each side."""
    compared = replicated(loop, monkeypatch)
    loop.sources[1].weights[NORM].view(-1)[3] += 1.0
    loop.engine("e0")
    loop.connect(transport="local", replicas_every=2)
    report = loop.publish(1)
    assert report.committed
    assert report.replicas is not None
    assert (report.replicas.differing, report.replicas.parts) == (1, len(loop.sources[0].weights))
    assert [(each.name, each.ranks) for each in report.replicas.first] == [(NORM, ((0,), (1,)))]
    assert f"replicas of 1 tensor differ ({NORM}: rank 0 / rank 1)" in report.line()
    assert warned.count("replicas_differ") == 1
    assert "replicas" in report.seconds
    assert loop.publish(2).replicas is None
    loop.sources[1].weights[NORM].copy_(loop.sources[0].weights[NORM])
    later = loop.publish(3)
    assert later.replicas is not None
    assert later.replicas.differing == 0
    assert len(compared) == 2


def test_replicas_that_differ_are_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a lease is asked for, on every rank alike, live and as a snapshot; equal ones are published."""
    replicated(loop, monkeypatch)
    loop.sources[1].weights[NORM].view(-1)[3] += 1.0
    loop.engine("e0")
    loop.connect(transport="local", replicas="refuse", replicas_every=1)
    failure = refused(loop, ReplicasDiffer, 1)[0]
    assert failure.report.replicas is not None
    assert failure.report.replicas.first[0].name == NORM
    assert "replicas = refuse" in str(failure)
    with pytest.raises(ReplicasDiffer):
        loop.snapshot(1)
    loop.sources[1].weights[NORM].copy_(loop.sources[0].weights[NORM])
    assert loop.publish(1).committed


def test_replicas_are_not_compared_where_switched_off(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read, and nothing is asked of other ranks."""
    compared = replicated(loop, monkeypatch)
    loop.sources[1].weights[NORM].view(-1)[3] += 1.0
    loop.engine("e0")
    loop.connect(transport="local", replicas="off")
    assert loop.publish(1).replicas is None
    assert not compared
