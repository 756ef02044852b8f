"""What a device does for a version it does while the lease is asked for, and it is there before anything is said.

That is: what engines read of a quantized source, and the digests of what any source lets them read.

Devices do things later than they are asked to. The one of these tests does nothing before somebody waits for it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
import torch

from weightbus.control import protocol as m
from weightbus.control.protocol.errors import RequestRefused
from weightbus.dataplane.copy.copy_engine import DeviceFence
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.memory.exports import ExportableHostMemory
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes.host_facts import host_identity
from weightbus.dataplane.quantize.quantize_tasks import PreparedTasks, QuantizeTask, TorchTasks
from weightbus.dataplane.reshard.digest_shares import ShareDigester
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView, contiguous_strides
from weightbus.trainer_agent.export import memory_export
from weightbus.trainer_agent.export.memory_export import MemoryExport
from weightbus.trainer_agent.machine.errors import PublishFailed
from weightbus.trainer_agent.machine.events import EndReason
from weightbus.trainer_agent.machine.publication import PublicationResult, PublishReport
from weightbus.trainer_agent.publish import driver, rank_commands as commands
from weightbus.trainer_agent.publish.agent import RankZero, TrainerAgent
from weightbus.trainer_agent.publish.bucket_staging import BucketStaging, InPlaceExport
from weightbus.trainer_agent.publish.driver import PublisherContext
from weightbus.trainer_agent.quantized import quantized_assembly
from weightbus.trainer_agent.quantized.quantized_assembly import ReadableSource
from weightbus.trainer_agent.quantized.quantized_source import ReadableQuantizedSource, quantized
from weightbus.trainer_agent.settings import TrainerSettings
from weightbus.trainer_agent.source import AssemblyFailed

from ...kit import quantizing
from ...kit.fake_bus import FakeCoordinator, engine
from ...kit.fake_sender import FakeTablingSender

BLOCK = 16
DIRECT = m.TransportKind.DIRECT


class Trainer(quantizing.Held):
    """One rank of one process, every tensor whole. Satisfies `Exportable`, too."""

    def __init__(self, layers: int, agreed: Sequence[bytes] = ()) -> None:
        shapes = {"up_proj": (32, 48), "norm": (48,)}
        names = [(f"l.{layer}.{name}.weight", shape) for layer in range(layers) for name, shape in shapes.items()]
        self.memories = [torch.randn(shape).bfloat16() for _, shape in names]
        specs = [TensorSpec(name, "bfloat16", shape) for name, shape in names]
        rows = [
            Shard(spec.name, Box.whole(spec.shape), spec.dtype, ShardView(index, 0, contiguous_strides(spec.shape)))
            for index, spec in enumerate(specs)
        ]
        super().__init__(0, Shards.of(specs, rows, 0), self.memories, None)
        self._agreed = iter(agreed)
        self._gatherer: Device | None = None

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        return self.shards.ordered(tensors)

    def collect(self, blob: bytes) -> Sequence[bytes]:
        return (blob,)

    def agree(self, blob: bytes | None) -> bytes:
        return next(self._agreed) if blob is None else blob

    def step(self) -> None:
        """Other weights, where they are."""
        for memory in self.memories:
            memory.mul_(0.5)

    def gather_behind(self, device: Device) -> None:
        """From now on `memory` has a device write the last step, as Megatron does with overlapped gathers."""
        self._gatherer = device

    def memory(self) -> Sequence[torch.Tensor]:
        if self._gatherer is not None:
            self._gatherer.log.append("gather")
            self._gatherer.queue.append(self.step)
        return super().memory()

    def digests(self, *, quantized: bool = True) -> bytes:
        """Of what its weights become, each quantized at once; or of themselves."""
        specs = self.shards.tensors
        if not quantized:
            each = zip(specs, self.memories, strict=True)
            return b"".join(
                integrity.digest_tensors(at.view(-1).view(torch.uint8), (0, spec.nbytes)) for spec, at in each
            )
        names = [spec.name for spec in specs]
        made = quantizing.whole(dict(zip(names, self.memories, strict=True)), quantizing.config(BLOCK))
        packed = {name: each.contiguous().view(-1).view(torch.uint8) for name, each in made.items()}
        served = Manifest.of("M", source_of(self).tensors()).tensors
        return b"".join(integrity.digest_tensors(packed[spec.name], (0, spec.nbytes)) for spec in served)


def source_of(trainer: Trainer) -> ReadableQuantizedSource:
    found = quantized(trainer, quantizing.config(BLOCK))
    assert isinstance(found, ReadableQuantizedSource)
    return found


class Device:
    """Does what it was given when it is waited for, and not before. Writes down what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.queue: list[Callable[[], None]] = []
        self.broken = self.stuck = False
        begin, result = ShareDigester.begin, ShareDigester.result

        def digest(share: ShareDigester) -> None:
            self.log.append("digest")
            self.queue.append(lambda: begin(share))

        def digested(share: ShareDigester) -> Any:
            self._do()
            self.log.append("digested")
            return result(share)

        monkeypatch.setattr(quantized_assembly, "prepare_tasks", self._prepare)
        monkeypatch.setattr(quantized_assembly, "_wait_for", lambda _device: self.queue and self._do())
        monkeypatch.setattr(ExportableHostMemory, "settle", lambda _memory: self.settle())
        monkeypatch.setattr(memory_export, "DeviceFence", lambda _device: _Point(self))
        monkeypatch.setattr(ShareDigester, "begin", digest)
        monkeypatch.setattr(ShareDigester, "result", digested)

    def _prepare(self, tasks: Sequence[QuantizeTask], device: torch.device) -> PreparedTasks:
        assert device.type == "cpu"
        return _Later(self, TorchTasks(tasks))

    def settle(self) -> None:
        self._do()
        self.log.append("settled")

    def waited_for(self) -> bool:
        """The caller looks whether it is through, and will look again."""
        if not self.stuck:
            self._do()
            self.log.append("waited for")
        return not self.stuck

    def _do(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        queue, self.queue = self.queue, []
        for each in queue:
            each()


class _Point(DeviceFence):
    def __init__(self, device: Device) -> None:
        super().__init__(torch.device("cpu"))
        self._device = device

    def reached(self) -> bool:
        return self._device.waited_for()


class _Later:
    keeps = True

    def __init__(self, device: Device, tasks: PreparedTasks) -> None:
        self._device, self._tasks = device, tasks

    def run(self) -> None:
        if self._device.log[-1:] != ["make"]:  # part by part
            self._device.log.append("make")
        self._device.queue.append(self._tasks.run)


class Coordinator(FakeCoordinator):
    """Writes down in the device's log what it is asked."""

    def __init__(self, log: list[str], *kinds: m.TransportKind) -> None:
        super().__init__({f"e{at}": self.info(kind) for at, kind in enumerate(kinds)})
        self._log = log

    @staticmethod
    def info(kind: m.TransportKind) -> m.EngineInfo:
        return msgspec.structs.replace(engine(transports=(kind,)), host=host_identity())

    def request(self, message: m.ToCoordinator, blob: bytes | None = None, deadline_s: float = 30.0) -> m.ToAgent:
        self._log.append(type(message).__name__)
        return super().request(message, blob, deadline_s)


class Follower:
    """A rank that is told what to do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, said: Sequence[commands.RankCommand]) -> None:
        self.device = Device(monkeypatch)
        source = source_of(Trainer(2, [msgspec.msgpack.encode(each) for each in said]))
        manifest = Manifest.of("M", source.tensors())
        exported = MemoryExport(source, manifest, folder / "r", "c")
        self.agent = TrainerAgent(source, TrainerSettings(channel="c"), manifest, None, exported)
        exported.export()
        self.device.log.clear()


class Rig:
    """Rank 0 of one rank, and what it speaks to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, quantized: bool = True) -> None:
        self.device = Device(monkeypatch)
        self.trainer = Trainer(3)
        self.source: ReadableSource = source_of(self.trainer) if quantized else self.trainer
        self.coordinator = Coordinator(self.device.log, DIRECT)
        self.sender = FakeTablingSender()
        manifest = Manifest.of("M", self.source.tensors())
        settings = TrainerSettings(channel="c", request_timeout_s=1.0, beat_s=0.2)
        self.memory_export = MemoryExport(self.source, manifest, folder / "r", "c")
        self.memory_export.export()  # as rank 0 does at its start
        ranks, pool = commands.CommandedRanks(self.source), BucketBuffers("cpu", 1, manifest.largest_bucket, "test")
        kinds = (DIRECT, m.TransportKind.LOCAL)
        info = m.TrainerInfo(host=host_identity(), device="cpu", ranks=0, transports=kinds)
        context = PublisherContext(
            settings=settings,
            bus=self.coordinator,
            staging=BucketStaging(
                self.source, manifest, pool, ranks, None, InPlaceExport(self.memory_export, ranks, info)
            ),
            make_sender=lambda _kind: self.sender,
            senders={},
            boot=self.coordinator.boot,
        )
        self.rank_zero = RankZero(context, pool, self.source, self.memory_export)
        self.device.log.clear()

    def publish(self, version: int) -> tuple[PublicationResult, list[str]]:
        """How it ended, and what happened meanwhile."""
        result, *_ = self.rank_zero.publish(version)
        happened = list(self.device.log)
        self.device.log.clear()
        return result, happened

    def table(self) -> DigestTable:
        """The last one that the coordinator was given."""
        said = [message for message in self.coordinator.heard if isinstance(message, m.Publish | m.Sent)]
        publish = [message for message in said if isinstance(message, m.Publish)][-1]
        table = [message.table for message in said if message.table][-1]
        manifest = Manifest.decode(self.coordinator.blobs[publish.manifest])
        return DigestTable.decode(self.coordinator.blobs[table], manifest)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path, monkeypatch)
    yield made
    made.device.broken = False
    made.rank_zero.close()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Of a trainer whose engines read what it trains."""
    made = Rig(tmp_path, monkeypatch, quantized=False)
    yield made
    made.device.broken = False
    made.rank_zero.close()


def test_it_is_made_while_the_lease_is_asked_for(rig: Rig) -> None:
    """And digested behind that; both are waited for before anything is offered: nobody reads what is half made."""
    _, first = rig.publish(1)
    rig.trainer.step()

    result, second = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert first == ["Acquire", "make", "settled", "digest", "digested", "Publish", "Offered", "Sent"]
    assert second == ["make", "digest", "Acquire", "Publish", "digested", "Offered", "Sent"]
    assert rig.table().tensors == rig.trainer.digests()


def test_what_is_not_quantized_is_there_before_it_is_offered(rig: Rig) -> None:
    """Also what ranks still gathered for it: no mark speaks of it. What is quantized is waited for by nobody."""
    rig.publish(1)
    rig.trainer.gather_behind(rig.device)
    norms = [memory for memory in rig.trainer.memories if memory.dim() == 1]
    expected = [norm * 0.5 for norm in norms]

    rig.memory_export.prepare(digests=False, ready_flags=True)
    rig.memory_export.export(prepared=True, ready_flags=True)

    assert rig.device.log == ["gather", "make"]
    assert all(torch.equal(norm, wanted) for norm, wanted in zip(norms, expected, strict=True))
    assert rig.device.queue


class Event:
    """Of a GPU, which has done what it was given before when it is waited for."""

    def __init__(self, device: Device) -> None:
        self._device, self._before = device, 0

    def record(self, _stream: object) -> None:
        self._before = len(self._device.queue)

    def synchronize(self) -> None:
        before = [self._device.queue.pop(0) for _ in range(self._before)]
        for each in before:
            each()


def test_memory_without_parts_is_whole_when_it_is_exposed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too: who reads it looks at no mark. Nothing waits for what digests it."""
    rig.memory_export.digests()
    rig.trainer.step()
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(rig.device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(MemoryExport, "_device", torch.device("cuda", 0))
        rig.memory_export.prepare(digests=True)
    *makes, digests = rig.device.queue
    assert makes

    rig.memory_export.export(prepared=True)

    assert rig.device.queue == [digests]


def test_no_mark_of_what_was_there_before_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken away before a device is waited for: afterwards they show this round, or nothing."""
    rig.publish(1)
    standing = rig.memory_export._source._resident  # type: ignore[attr-defined]
    seen: list[list[int]] = []
    monkeypatch.setattr(
        quantized_assembly, "_wait_for", lambda _device: seen.append(standing._flags.of(standing._arena).tolist())
    )
    standing._flags.of(standing._arena).fill_(2**62)

    rig.memory_export.prepare(digests=False, ready_flags=True)

    assert seen == [[0] * len(standing._flags.parts)]


@pytest.mark.parametrize("switched_off", [False, True])
def test_only_a_worker_that_can_wait_is_told_of_parts(rig: Rig, switched_off: bool) -> None:
    """An older engine would not understand a map that names them, nor wait for a deferred table.

    For it all is there before it is offered anything. That may change from version to version.
    """
    context = rig.rank_zero._context
    context.settings = msgspec.structs.replace(context.settings, open_tables=not switched_off)
    layouts = set()
    for version, all_know in enumerate((True, True, False, False, True, True), 1):
        # Nor is a trainer told so that did not say that it knows how.
        rig.coordinator.supports_deferred_digests = awaits = all_know and not switched_off
        rig.trainer.step()

        result, happened = rig.publish(version)

        assert result.ending is EndReason.COMMITTED
        assert rig.table().tensors == rig.trainer.digests()
        exported = rig.memory_export.current
        assert [b"parts" in each.encode() for each in exported.exports] == [awaits]
        assert [bool(each.round) for each in exported.exporters] == [awaits]
        (publish,) = [each for each in rig.coordinator.heard if isinstance(each, m.Publish) and each.version == version]
        assert (publish.table == "") is (awaits and version > 1)
        assert happened.index("digested") < happened.index("Offered")
        layouts.add(exported.layout)
    assert len(layouts) == (1 if switched_off else 2)


def test_weights_that_are_read_as_they_are_are_digested_while_the_lease_is_asked_for(plain: Rig) -> None:
    """After the step that made them has ended on the device, and once in a publication."""
    _, first = plain.publish(1)
    plain.trainer.step()

    result, second = plain.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert first == ["Acquire", "settled", "digest", "digested", "Publish", "Offered", "Sent"]
    assert second == ["digest", "Acquire", "Publish", "digested", "Offered", "Sent"]
    assert plain.table().tensors == plain.trainer.digests(quantized=False)


@pytest.mark.parametrize("fixture", ["rig", "plain"])
def test_digests_of_a_publication_that_ended_are_of_no_other_one(fixture: str, request: pytest.FixtureRequest) -> None:
    """Nothing was read ahead for a version that follows one of buckets, or a lease that was refused."""
    rig: Rig = request.getfixturevalue(fixture)
    rig.publish(1)
    rig.coordinator.refusals[m.Acquire] = deque([RequestRefused(m.RefusalCode.VERSION_NOT_NEWER, "it is not")])
    _, refused = rig.publish(2)
    rig.trainer.step()
    rig.coordinator.engines = {"e0": Coordinator.info(m.TransportKind.LOCAL)}
    rig.publish(3)
    rig.trainer.step()
    rig.coordinator.engines = {"e0": Coordinator.info(DIRECT)}

    _, happened = rig.publish(4)

    assert refused[-3:] == ["digest", "Acquire", "waited for"]
    assert happened.index("Acquire") < happened.index("digest")
    assert rig.table().tensors == rig.trainer.digests(quantized=fixture == "rig")


def test_unused_digests_are_not_those_of_the_next_publication(plain: Rig) -> None:
    """What was begun for engines that read is of no use where another one takes buckets, and is not kept."""
    plain.publish(1)
    plain.coordinator.engines = {"e0": Coordinator.info(DIRECT), "e1": Coordinator.info(m.TransportKind.LOCAL)}
    plain.source.assemble = lambda _manifest, _index, _out: None  # type: ignore[method-assign]
    _, both = plain.publish(2)
    plain.trainer.step()
    plain.coordinator.engines = {"e0": Coordinator.info(DIRECT)}

    _, third = plain.publish(3)

    assert both.count("digest") == 1
    assert "digested" not in both
    assert third.index("Acquire") < third.index("digest") < third.index("digested")
    assert plain.table().tensors == plain.trainer.digests(quantized=False)


def test_ranks_that_learn_of_another_layout_digest_by_it(plain: Rig) -> None:
    """What this rank has begun to read was its share of the layout before."""
    plain.publish(1)
    plain.trainer.step()
    plain.memory_export._layouts = ("another rank's was",)

    _, happened = plain.publish(2)

    assert happened.count("digest") == 2
    assert plain.table().tensors == plain.trainer.digests(quantized=False)


def test_digests_are_of_the_memory_as_it_is_when_they_are_asked_for(plain: Rig) -> None:
    """Digests that were begun are used once."""
    plain.publish(1)
    plain.memory_export.prepare(digests=True)
    plain.memory_export.export(prepared=True)
    before = plain.memory_export.digests()
    plain.trainer.step()

    assert plain.memory_export.digests() == plain.trainer.digests(quantized=False) != before


def test_what_was_moved_since_is_digested_where_it_is(plain: Rig) -> None:
    """Nothing reads ahead where the weights lay in the version before."""
    plain.publish(1)
    for number, memory in enumerate(plain.trainer.memories):
        plain.trainer.memories[number] = memory.clone()
    plain.trainer.step()

    result, happened = plain.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert happened.index("Acquire") < happened.index("digest")
    assert plain.table().tensors == plain.trainer.digests(quantized=False)


def test_what_was_made_for_nothing_is_made_anew(rig: Rig) -> None:
    """A lease that is refused ends a publication; the next one is of other weights."""
    rig.publish(1)
    rig.coordinator.refusals[m.Acquire] = deque([RequestRefused(m.RefusalCode.VERSION_NOT_NEWER, "it is not")])

    refused, happened = rig.publish(2)
    rig.trainer.step()
    rig.publish(3)

    assert refused.ending is EndReason.REFUSED
    assert happened == ["make", "digest", "Acquire", "waited for"]
    assert rig.table().tensors == rig.trainer.digests()


REFUSED = RequestRefused(m.RefusalCode.VERSION_NOT_NEWER, "it is not")


@pytest.mark.parametrize("fixture", ["rig", "plain"])
@pytest.mark.parametrize("asked", [m.Acquire, m.Publish])
def test_weights_may_change_when_a_refused_publication_is_over(
    fixture: str, asked: type[m.ToCoordinator], request: pytest.FixtureRequest
) -> None:
    """What was begun on the device ends first: it reads what the trainer is about to step."""
    rig: Rig = request.getfixturevalue(fixture)
    rig.publish(1)
    rig.coordinator.refusals[asked] = deque([REFUSED])
    result, happened = rig.publish(2)
    assert result.ending is EndReason.REFUSED
    assert "digest" in happened
    assert not rig.device.queue
    _, committed = rig.publish(3)
    assert "waited for" not in committed, "nobody waits twice"


def test_a_device_that_does_not_come_to_an_end_is_not_waited_for_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is of no use then, and says why; a trainer that went on would change what is read."""
    monkeypatch.setattr(driver, "SETTLE_S", 0.1)
    rig.publish(1)
    rig.coordinator.refusals[m.Acquire] = deque([REFUSED])
    rig.device.stuck = True
    result, _ = rig.publish(2)
    assert result.ending is EndReason.SOURCE_FAILED
    assert "device to finish" in result.reason
    assert "it is not" in result.reason


@pytest.mark.parametrize("stuck", [False, True])
def test_other_ranks_wait_for_their_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stuck: bool) -> None:
    """The lease was refused while they prepared theirs."""
    monkeypatch.setattr(driver, "SETTLE_S", 0.1)
    report = PublishReport(channel="c", version=2, epoch=0, outcome=m.Outcome.ABORTED, reason="over")
    said = (
        commands.ExportMemory(digests=True),
        commands.PrepareExport(digests=True),
        commands.Finish(PublicationResult(EndReason.REFUSED, "it is not"), report),
    )
    follower = Follower(tmp_path, monkeypatch, said)
    follower.device.stuck = stuck
    with pytest.raises(PublishFailed, match="device to finish" if stuck else "it is not"):
        follower.agent.publish(2)
    assert bool(follower.device.queue) is stuck
    follower.agent.close()


def test_nothing_is_made_ahead_where_buckets_were_wanted(rig: Rig) -> None:
    """What no engine reads in place is not worth the time; who comes back to it is served as before."""
    rig.coordinator.engines = {"e0": Coordinator.info(m.TransportKind.LOCAL)}
    rig.publish(1)
    _, second = rig.publish(2)
    rig.coordinator.engines = {"e0": Coordinator.info(DIRECT)}
    _, third = rig.publish(3)
    _, fourth = rig.publish(4)

    assert second[0] == third[0] == "Acquire"
    assert third.count("make") == 1
    assert fourth[:3] == ["make", "digest", "Acquire"]


def test_a_source_that_fails_then_asks_for_no_lease(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publication ends with the source's own error, and the coordinator has heard nothing."""
    rig.publish(1)
    told = len(rig.coordinator.heard)

    def fail(_source: object) -> None:
        raise AssemblyFailed("a rank is gone")

    monkeypatch.setattr(ReadableQuantizedSource, "prepare", fail)
    result, happened = rig.publish(2)

    assert (result.ending, result.reason) == (EndReason.SOURCE_FAILED, "a rank is gone")
    assert happened == []
    assert len(rig.coordinator.heard) == told


def test_a_device_that_fails_ends_the_round(rig: Rig) -> None:
    """What was begun is found to have failed when it is waited for: nothing is offered, and the next one is whole."""
    rig.publish(1)
    rig.device.broken = True

    result, happened = rig.publish(2)
    rig.device.broken = False
    rig.trainer.step()
    again, _ = rig.publish(3)

    assert result.ending is EndReason.INTERNAL
    assert "illegal memory access" in result.reason
    assert happened == ["make", "digest", "Acquire", "Publish", "Abandon"]
    assert again.ending is EndReason.COMMITTED
    assert rig.table().tensors == rig.trainer.digests()


def test_other_ranks_make_theirs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that follows makes what it lets others read when it is told to, digests it once, and exposes that."""
    report = PublishReport(channel="c", version=2, epoch=0, outcome=m.Outcome.ABORTED, reason="over")
    said = (
        commands.ExportMemory(digests=True),
        commands.PrepareExport(digests=True),
        commands.ExportMemory(digests=True, prepared=True),
        commands.Finish(PublicationResult(EndReason.COMMITTED), report),
    )
    follower = Follower(tmp_path, monkeypatch, said)

    follower.agent.publish(2)

    assert follower.device.log == ["make", "settled", "digest", "digested", "make", "digest", "digested"]
    follower.agent.close()


def test_a_steady_publication_asks_the_same_of_many_tensors_as_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls made by Python's interpreter, apart from what the device does: none is for a single tensor."""
    monkeypatch.setattr(quantized_assembly, "prepare_tasks", lambda _tasks, _device: _Nothing())

    def calls(layers: int) -> int:
        trainer = Trainer(layers)
        source = source_of(trainer)
        memory_export = MemoryExport(source, Manifest.of("M", source.tensors()), tmp_path / f"r{layers}", "c")
        memory_export.export()
        memory_export.digests()
        share = memory_export._share
        assert share is not None
        found = share.run()
        monkeypatch.setattr(ShareDigester, "begin", lambda _share: None)
        monkeypatch.setattr(ShareDigester, "result", lambda _share: found)
        counted = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event in {"call", "c_call"}

        for _ in range(2):  # once for what is kept from then on
            counted, before = 0, sys.getprofile()
            sys.setprofile(count)
            try:
                memory_export.prepare(digests=True)
                memory_export.export(prepared=True)
                memory_export.digests()
            finally:
                sys.setprofile(before)
        monkeypatch.undo()
        monkeypatch.setattr(quantized_assembly, "prepare_tasks", lambda _tasks, _device: _Nothing())
        memory_export.close()
        return counted

    assert calls(16) == calls(64)


class _Nothing:
    keeps = False

    def run(self) -> None:
        """A device would."""


def test_engines_that_join_once_the_version_is_digested_read_that_version(rig: Rig) -> None:
    """The lease named one engine, which takes buckets; another, which reads the ranks' memory, joins behind it.

    What it is offered was computed from this version's weights, not from those of the start.
    """
    local, direct = rig.coordinator.info(m.TransportKind.LOCAL), rig.coordinator.info(DIRECT)
    rig.coordinator.engines = {"e0": local}
    joins = deque([lambda: setattr(rig.coordinator, "engines", {"e0": local, "e1": direct})])
    rig.coordinator.after[m.Acquire] = joins
    rig.trainer.step()

    result, happened = rig.publish(1)

    assert result.ending is EndReason.COMMITTED
    assert happened.index("settled") < happened.index("Offered")
    assert rig.memory_export.digests() == rig.trainer.digests()
