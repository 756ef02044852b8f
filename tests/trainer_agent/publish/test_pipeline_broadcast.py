"""Whole rounds of a pipeline whose stages broadcast: real coordinator, transports and agents, on threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightbus.control.protocol.messages import Outcome, ReceivingEngine, Topology, TransportKind
from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.tensors.manifest import Sources
from weightbus.dataplane.transports.distributed.source_rank import SourceRank
from weightbus.trainer_agent.export.topology import topology_of
from weightbus.trainer_agent.machine.errors import PublishFailed, WeightsChanged
from weightbus.trainer_agent.publish import agent as agent_module
from weightbus.trainer_agent.publish.bucket_staging import BucketStaging
from weightbus.trainer_agent.source import AssemblyFailed

from ...kit.fake_source import StagedSource, pipeline_of, tiny_qwen3
from .test_rounds import Deployment

STAGES = 3
PROMPT_S = 30.0
"""Half of what a transfer may take."""
BROADCAST = {"transport": TransportKind.DISTRIBUTED.value}


class Pipeline(Deployment):
    """A trainer of three stages of two layers each."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sources = pipeline_of(tiny_qwen3(layers=2 * STAGES), STAGES, timeout_s=20.0)

    @property
    def gathered(self) -> int:
        """Buckets that were put together from all stages."""
        return sum(source.gathered for source in self.sources if isinstance(source, StagedSource))

    def step(self) -> None:
        """Other weights on every stage."""
        for weight in self.sources[0].weights.values():
            weight.add_(1.0)


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_every_stage_sends_its_own_and_nothing_is_gathered(pipeline: Pipeline, slots: int) -> None:
    """Three rounds, staged whole or not: one commit, one table, bit for bit on both engines."""
    for name in ("e0", "e1"):
        pipeline.engine(name, transport=TransportKind.DISTRIBUTED)
    pipeline.connect(slots=slots, **BROADCAST)
    for version in (1, 2, 3):
        pipeline.step()
        report = pipeline.publish(version)
        assert {each.engine: each.outcome for each in report.engines} == dict.fromkeys(("e0", "e1"), Outcome.COMMITTED)
        assert all(pipeline.holds(name) for name in pipeline.engines)
    assert {"acquire", "assemble", "digest", "prepare", "pause", "transfer", "verify", "total"} <= report.seconds.keys()
    assert [engine.server.joins for engine in pipeline.engines.values()] == [STAGES] * 2
    assert pipeline.gathered == 0
    passes = 1 if slots == 64 else 2
    for rank, source in enumerate(pipeline.sources):
        own = [index for index in range(report.buckets) if source.assembled.count(index)]
        assert source.assembled == own * passes * 3, f"rank {rank} reads its own, as often as it must"


@pytest.mark.parametrize("slots", [1, 2])
def test_a_slot_is_written_again_when_its_bucket_was_taken(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """By each stage for itself: a rank 0 that has abandoned the round holds no stage back."""
    waits: dict[SourceRank, list[int]] = {}
    wait_free = SourceRank.wait_free

    def noting(part: SourceRank, taken: int) -> None:
        waits.setdefault(part, []).append(taken)
        wait_free(part, taken)

    monkeypatch.setattr(SourceRank, "wait_free", noting)
    pipeline.engine("e0", transport=TransportKind.DISTRIBUTED)
    pipeline.connect(slots=slots, **BROADCAST)
    pipeline.publish(1)
    assert len(waits) == STAGES - 1
    assert all(asked == [place + 1 - slots for place in range(len(asked))] for asked in waits.values()), waits


@pytest.mark.parametrize("other", [TransportKind.LOCAL, TransportKind.DISK])
def test_where_another_engine_needs_all_of_it_one_rank_sends_all(pipeline: Pipeline, other: TransportKind) -> None:
    """It is gathered anyhow; and by itself again as soon as that engine is gone."""
    pipeline.engine("e0", transport=TransportKind.DISTRIBUTED)
    pipeline.connect(transport=[TransportKind.DISTRIBUTED.value, other.value])
    assert pipeline.publish(1).committed
    assert pipeline.gathered == 0
    mixed = pipeline.engine("e1", transport=other)
    pipeline.step()
    before = sum(len(source.assembled) for source in pipeline.sources)
    report = pipeline.publish(2)
    assert {each.engine: each.outcome for each in report.engines} == dict.fromkeys(("e0", "e1"), Outcome.COMMITTED)
    assert pipeline.holds("e0")
    assert pipeline.holds("e1")
    gathered = pipeline.gathered
    assert gathered == sum(len(source.assembled) for source in pipeline.sources) - before > 0, (
        "and nothing else is read"
    )
    mixed.close()
    pipeline.step()
    assert pipeline.publish(3).committed
    assert pipeline.holds("e0")
    assert pipeline.gathered == gathered


def test_a_worker_on_the_gpu_of_another_rank_has_one_rank_send_all(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes no two members of a group on one GPU; which GPUs engines are on only the coordinator knows."""
    told: list[Sequence[str]] = []

    def topology(*arguments: Any, **more: Any) -> Topology:
        told.append([place.device for place in arguments[2]])
        return topology_of(*arguments, **more)

    def sources(staging: BucketStaging, receivers: Sequence[ReceivingEngine]) -> Sources | None:
        return plain(staging, [msgspec.structs.replace(each, shares=True) for each in receivers])

    plain = BucketStaging.sources
    monkeypatch.setattr(agent_module, "topology_of", topology)
    monkeypatch.setattr(BucketStaging, "sources", sources)
    pipeline.engine("e0", transport=TransportKind.DISTRIBUTED)
    pipeline.connect(**BROADCAST)
    assert told == [["cpu"] * STAGES], "the coordinator is told where all ranks are"
    for version in (1, 2):
        pipeline.step()
        assert pipeline.publish(version).committed
        assert pipeline.holds("e0")
    assert pipeline.gathered > 0
    assert pipeline.engines["e0"].server.joins == 1


@pytest.mark.parametrize("fits", [True, False])
def test_a_failed_attempt_is_driven_again_in_new_groups(pipeline: Pipeline, fits: bool) -> None:
    """One engine refuses a bucket: both are sent everything again, by every stage, within the round."""
    failures = iter([True])

    def fail(load: int) -> None:
        if load == 4 and next(failures, False):
            raise TransferFailed("the server refused a bucket")

    pipeline.engine("e0", fail, transport=TransportKind.DISTRIBUTED)
    pipeline.engine("e1", transport=TransportKind.DISTRIBUTED)
    pipeline.connect(slots=64 if fits else 2, **BROADCAST)
    report = pipeline.publish(1)
    assert {each.engine: each.outcome for each in report.engines} == dict.fromkeys(("e0", "e1"), Outcome.COMMITTED)
    assert all(pipeline.holds(name) for name in pipeline.engines)
    assert [engine.server.joins for engine in pipeline.engines.values()] == [2 * STAGES] * 2
    pipeline.step()
    assert pipeline.publish(2).committed
    assert all(pipeline.holds(name) for name in pipeline.engines)


@pytest.mark.parametrize("rank", range(STAGES))
@pytest.mark.parametrize("read_again", [False, True])
def test_a_stage_that_cannot_read_ends_the_round(pipeline: Pipeline, rank: int, read_again: bool) -> None:
    """On every rank, long before any deadline; a new agent on a new source publishes the version a moment later."""
    pipeline.engine("e0", transport=TransportKind.DISTRIBUTED)
    pipeline.connect(slots=1, redrives=0, **BROADCAST)
    source = pipeline.sources[rank]

    def fail(done: int) -> None:
        if (len(source.assembled) > len(set(source.assembled))) if read_again else done == 1:
            raise AssemblyFailed("gone")

    source.before_assembly = fail
    began = time.monotonic()
    with pytest.raises(PublishFailed):
        pipeline.publish(1)
    assert time.monotonic() - began < PROMPT_S
    for agent in pipeline.agents:
        agent.close()
    pipeline.sources = pipeline_of(tiny_qwen3(1, layers=2 * STAGES), STAGES, timeout_s=20.0)
    pipeline.connect(**BROADCAST)
    assert pipeline.publish(2).committed
    assert pipeline.holds("e0")


@pytest.mark.parametrize("rank", range(STAGES))
def test_weights_that_change_while_they_are_sent_are_refused_on_any_stage(pipeline: Pipeline, rank: int) -> None:
    """Every rank raises it, with the tensor's name, whichever stage has read it."""
    pipeline.engine("e0", transport=TransportKind.DISTRIBUTED)
    pipeline.connect(slots=1, **BROADCAST)
    source = pipeline.sources[rank]
    name = f"model.layers.{2 * rank}.mlp.up_proj.weight"

    def change(_done: int) -> None:
        if len(source.assembled) > len(set(source.assembled)):  # the second pass has begun
            source.weights[name].add_(1.0)

    source.before_assembly = change
    with pytest.raises(WeightsChanged, match=r"model\.layers"):
        pipeline.publish(1)
