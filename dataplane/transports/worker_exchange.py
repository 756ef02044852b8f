"""What a sidecar and its server's workers say to each other while schedulers are held, and the sidecar's end of it.

One exchange for each round: every worker connects to the sidecar's socket when the server calls our loader, and returns
from the call at `Done`. Only what a worker does not know yet is sent: a steady round is Hello, Replay, Replayed, Done.
Names are the tags on the wire. A word is said to all workers, and all are heard before anything is concluded.

    worker                       sidecar
      Hello  ------------------->
             <-------------------  Record      (only when layout or server are new)
      Recorded ----------------->
             <-------------------  Prove       (ahead of any version, and never again)
      Adopted ------------------>
             <-------------------  Adopt       (only when plan or exports are new)
      Adopted ------------------>
             <-------------------  Replay
      Replayed ----------------->
             <-------------------  Done

Where weights are sent, `Form` may come first, and `Expect` follows `Adopt`; the worker answers on a connection of a
thread of its own, which stays open between rounds and hears `Take`. Then `Flip` stands for `Replay`.

    worker's thread              sidecar
      Expecting ---------------->
             <-------------------  Weigh       (may it be taken while the server generates?)
      Room --------------------->
             <-------------------  Take
      Taken -------------------->
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import msgspec

from ..errors import DataplaneError, DeadlineExceeded, NotTraceable, PeerLost, TransferFailed
from ..memory import ArenaRegion
from ..processes import Deadline, FrameListener, Frames, WireEnd, WireMessage, find_ended_peer, host_identity
from ..reshard import LoadTrace, PlanReader, RankVerification, ReshardPlan, SendSchedule, verifiable_trace
from ..tensors import TensorSpec
from .interface import Exporting, Group
from .sessions import reason_of


class Hello(WireMessage, frozen=True, omit_defaults=True, tag="Hello"):
    """Worker, first: its rank and device, and what it has from earlier rounds."""

    rank: int
    device: str
    """``cpu`` or the GPU's uuid."""
    peers: tuple[str, ...] = ()
    layout: str = ""
    """Digest of the tensors of its recording."""
    recording: str = ""
    plan: str = ""
    schedule: str = ""
    """Of what it can be sent: a thread of its own is connected to the sidecar, and stays so."""
    nccl_gpu_id: str = msgspec.field(default="", name="seat")
    """By which a group over NCCL knows its GPU."""


class RecordTrace(WireMessage, frozen=True, tag="Record"):
    """Sidecar: run the loader once on these tensors, and say what it does."""

    layout: str
    tensors: tuple[TensorSpec, ...]


class TraceRecorded(WireMessage, frozen=True, tag="Recorded"):
    """Worker: `LoadTrace.encode`."""

    recording: bytes
    seconds: float


class Exports(WireMessage, frozen=True, omit_defaults=True, tag="Exports"):
    """Where one trainer rank's memory is had, and which regions of it."""

    holder: int
    address: str
    generation: int
    regions: tuple[int, ...]
    made: ArenaRegion | None = None
    """One of the regions, where it may be read before all of it is made."""


class FormGroup(WireMessage, frozen=True, tag="Form"):
    """Sidecar: begin to join this group beside the rest. The next schedule takes it along."""

    group: Group


class Prove(WireMessage, frozen=True, omit_defaults=True, tag="Prove"):
    """Sidecar: what is reported of the memory that was recorded. The tables are those of verification.py, encoded."""

    proof: bytes
    """`BoxTable.encode`: regions are the targets, and then the staging buffer."""
    groups: int
    odd: bytes
    """`CopyTable.encode`: boxes of targets, or of sources where they are cast, that are read back into one buffer."""
    odd_bytes: int
    staging_bytes: int
    sent: bool = False
    """It may be sent to: what a first group takes longer for is done beside."""


class InstallPlan(WireMessage, frozen=True, tag="Adopt"):
    """Sidecar: what to do in every round from now on.

    The tables are those of reshard_plan.py and verification.py, encoded.
    """

    plan: str
    recording: str
    """Digest of the recording that the plan was made for."""
    sources: tuple[tuple[int, int], ...]
    """(holder, region) by number."""
    copies: bytes
    staging: bytes
    staged: tuple[int, ...]
    prove: Prove


class PlanInstalled(WireMessage, frozen=True, tag="Adopted"):
    """Worker: everything is bound."""

    seconds: float


class ExecutePlan(WireMessage, frozen=True, omit_defaults=True, tag="Replay"):
    """Sidecar: copy, then say what the engine holds."""

    epoch: int
    version: int
    exports: tuple[Exports, ...]
    rounds: tuple[int, ...] = ()
    """By the exports: what the marks of parts that are made have to show. Empty where nothing is made."""
    within_s: float = 0.0
    """How long they may be waited for."""


class PlanExecuted(WireMessage, frozen=True, omit_defaults=True, tag="Replayed"):
    """Worker: done. Lanes are of its groups, as little-endian uint64; `odd` are the bytes that were read back."""

    lanes: bytes
    odd: bytes
    copy_s: float
    verify_s: float
    wait_s: float = 0.0
    """Of neither: nothing was copied, because what there was to copy was not made yet."""
    remark: str = ""
    """Why it was slower than it could be."""


class Expect(WireMessage, frozen=True, tag="Expect"):
    """Sidecar: what the worker will be sent from now on, for the plan that it has.

    The tables are of send_schedule.py.
    """

    schedule: str
    messages: bytes
    unpack: bytes
    socket: str
    """Where its thread is to connect, and wait for `Take`."""


class Expecting(WireMessage, frozen=True, tag="Expecting"):
    """Worker's thread, first: which schedule it carries out."""

    rank: int
    schedule: str


class Weigh(WireMessage, frozen=True, tag="Weigh"):
    """Sidecar: is there room to take everything beside the parameters?"""


class Room(WireMessage, frozen=True, tag="Room"):
    """Worker's thread: bytes that it takes, and bytes that are free."""

    needed: int
    free: int


class Take(WireMessage, frozen=True, tag="Take"):
    """Sidecar: join this group, and take everything. `beside` the parameters, or into them while the server stands."""

    group: Group
    beside: bool


class Moving(WireMessage, frozen=True, tag="Moving"):
    """Worker's thread, every `sends_wire.BEAT_S` until it has taken everything: it does not stand still."""


class Taken(WireMessage, frozen=True, tag="Taken"):
    """Worker's thread: everything has arrived."""

    seconds: float
    nbytes: int


class Swap(WireMessage, frozen=True, tag="Flip"):
    """Sidecar: put what was taken into place, then say what the engine holds."""

    epoch: int
    version: int


class Done(WireMessage, frozen=True, tag="Done"):
    """Sidecar: return to the server."""


class Failed(WireMessage, frozen=True, omit_defaults=True, tag="Failed"):
    """Either side: it gives up. The worker has changed weights if `touched`."""

    reason: str
    touched: bool = False
    unrecordable: bool = False
    """The worker's loader is what cannot be followed: it would fail again."""
    less: bool = False
    """A worker had no memory or not the time for what it is sent at once: less at a time may do."""


ToWorker = RecordTrace | FormGroup | Prove | InstallPlan | Expect | ExecutePlan | Swap | Weigh | Take | Done | Failed
ToSidecar = Hello | TraceRecorded | PlanInstalled | PlanExecuted | Expecting | Room | Moving | Taken | Failed

SIDECAR: Final = WireEnd[ToWorker, ToSidecar](ToSidecar)
WORKER: Final = WireEnd[ToSidecar, ToWorker](ToWorker)


_LOOK_S: Final = 0.2
"""How often the server's call is looked at while workers are waited for."""
_LOOK_AGAIN_S: Final = 0.002
"""The same once a model is served: the server stands still, and mostly has only to say that it was the last one."""
_ANSWER_S: Final = 2.0
"""For a worker to say that it has waited in vain."""
_COME_S: Final = 30.0
"""For workers of a server that stands still to come into our loader. The first time they import it."""
RETURN_S: Final = 30.0
"""For workers to return from the call once they were told how it ended."""


class ReplayFailed(TransferFailed):
    """At least one worker did not copy. All have answered."""

    def __init__(self, detail: str, touched: bool) -> None:
        super().__init__(detail)
        self.touched = touched
        """Some worker began to write."""


@dataclass(slots=True, eq=False)
class _Worker:
    frames: Frames
    hello: Hello


class Workers:
    """The workers of one server in the order of their ranks, once they have come, with one of its models."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self.held_dtypes: dict[str, frozenset[str]] = {}
        """By tensor, the dtypes of the parameters that workers which recorded hold it in, of all models."""

    def __len__(self) -> int:
        """Workers that have come."""
        return len(self._workers)

    def gather(  # noqa: PLR0917
        self,
        listener: FrameListener,
        call: Future[None],
        count: int,
        first: bool,
        deadline: Deadline,
        pulse: Callable[[], None],
    ) -> bool:
        """Wait for `count` workers with the first, or with the next model. False when the server has no next one.

        An answer of the server before all of them came is a failure. `pulse` is called meanwhile, and may raise.
        """
        look = _LOOK_S if first else _LOOK_AGAIN_S
        deadline = Deadline(min(deadline.left(), _COME_S))
        while len(self._workers) < count:
            if call.done():
                call.result()
                if not first and not self._workers:
                    return False
                raise PeerLost(f"the server returned before its {count} workers had come: was our loader called?")
            left = deadline.check("the server's workers")
            try:
                frames = listener.accept(Deadline(min(look, left)), "a worker")
            except DeadlineExceeded:
                pulse()
                continue
            self._workers.append(_Worker(frames, _introduced(frames, deadline)))
        self._workers.sort(key=lambda worker: worker.hello.rank)
        return True

    @property
    def readers(self) -> tuple[PlanReader, ...]:
        """As plans know them."""
        return tuple(
            PlanReader(worker.hello.rank, host_identity(), worker.hello.device, worker.hello.peers)
            for worker in self._workers
        )

    @property
    def nccl_gpu_ids(self) -> tuple[str, ...]:
        """The workers' GPUs as an NCCL group knows them; empty for a worker without one."""
        return tuple(worker.hello.nccl_gpu_id for worker in self._workers)

    def ask_to_record(
        self, layout: str, tensors: tuple[TensorSpec, ...], known: Mapping[str, LoadTrace], deadline: Deadline
    ) -> Sequence[int]:
        """Have workers without a `known` trace of this layout make one; their numbers, for `recorded`."""
        without = [
            number
            for number, worker in enumerate(self._workers)
            if not _recorded(worker.hello, layout, tensors, known.get(worker.hello.recording))
        ]
        for number in without:
            SIDECAR.say(self._workers[number].frames, RecordTrace(layout=layout, tensors=tensors), deadline)
        return without

    @property
    def recordings(self) -> tuple[str, ...]:
        """The digest of each worker's recording."""
        return tuple(worker.hello.recording for worker in self._workers)

    def recorded(
        self, without: Sequence[int], tensors: tuple[TensorSpec, ...], deadline: Deadline
    ) -> dict[str, LoadTrace]:
        """Load traces of the workers that were asked to record, by digest. Raises `NotTraceable`, `TransferFailed`."""
        made: dict[str, LoadTrace] = {}
        for worker in [self._workers[number] for number in without]:
            reply = SIDECAR.hear(worker.frames, deadline, f"worker {worker.hello.rank} to record its loader")
            if isinstance(reply, Failed) and reply.unrecordable:
                raise NotTraceable(f"worker {worker.hello.rank}: {reply.reason}")
            if not isinstance(reply, TraceRecorded):
                raise TransferFailed(f"worker {worker.hello.rank} could not record its loader: {reason_of(reply)}")
            trace = LoadTrace.decode(reply.recording, tensors)
            for name, dtypes in trace.held_dtypes.items():
                self.held_dtypes[name] = self.held_dtypes.get(name, frozenset()) | dtypes
            recording = verifiable_trace(trace)
            digest = recording.digest()
            made[digest] = recording
            # A worker that records has dropped its plan, also where the same one will be made again.
            worker.hello = msgspec.structs.replace(worker.hello, recording=digest, plan="")
        return made

    def ask_to_adopt(
        self,
        digests: Sequence[str],
        plans: Sequence[ReshardPlan],
        proofs: Sequence[RankVerification],
        deadline: Deadline,
    ) -> Sequence[int]:
        """Give each worker its plan, unless it has that one. All bind at a time.

        Returns the numbers of the workers that got one, for `adopted`.
        """
        new = [number for number, worker in enumerate(self._workers) if worker.hello.plan != digests[number]]
        for number in new:
            adopt = _adopt(digests[number], plans[number], proofs[number])
            SIDECAR.say(self._workers[number].frames, adopt, deadline)
        return new

    def adopted(self, new: Sequence[int], deadline: Deadline) -> None:
        """Hear the workers that were given a plan. Raises `TransferFailed`."""
        self._taken([self._workers[number] for number in new], "plan", deadline)

    def form(self, group: Group, deadline: Deadline) -> bool:
        """Have all begin to join `group`, from its rank on; not where a thread may take something."""
        if any(worker.hello.schedule for worker in self._workers):
            return False
        for at, worker in enumerate(self._workers):
            mine = msgspec.structs.replace(group, rank=group.rank + at)
            SIDECAR.say(worker.frames, FormGroup(group=mine), deadline)
        self._taken(self._workers, "group", deadline)
        return True

    def prove(
        self, proofs: Sequence[RankVerification], staging_bytes: Sequence[int], deadline: Deadline, *, sent: bool
    ) -> None:
        """Have each worker bind what it will report, before there is a plan. Raises `TransferFailed`."""
        for worker, proof, nbytes in zip(self._workers, proofs, staging_bytes, strict=True):
            SIDECAR.say(worker.frames, msgspec.structs.replace(_prove(proof, nbytes), sent=sent), deadline)
        self._taken(self._workers, "proof", deadline)

    def replay(  # noqa: PLR0917
        self,
        epoch: int,
        version: int,
        exporters: Sequence[Exporting],
        made: Mapping[int, ArenaRegion],
        reads: Sequence[Mapping[int, tuple[int, ...]]],
        deadline: Deadline,
    ) -> list[PlanExecuted]:
        """All copy at a time, of what holders have `made` each part once it is there.

        `reads` is `regions_read` of each worker's plan.
        Raises `ReplayFailed` when all have answered and one did not copy.
        """
        for worker, regions in zip(self._workers, reads, strict=True):
            of = [each for each in exporters if each.holder in regions]
            read = [(each, _exports(each, made.get(each.holder), regions[each.holder])) for each in of]
            rounds = tuple(each.round for each, _ in read)
            replay = ExecutePlan(epoch=epoch, version=version, exports=tuple(exports for _, exports in read))
            if any(rounds):  # a loader that is older than marks understands the rest
                left = deadline.left()
                replay = msgspec.structs.replace(replay, rounds=rounds, within_s=max(left / 2, left - _ANSWER_S))
            SIDECAR.say(worker.frames, replay, deadline)
        return self._replayed(deadline, None)

    def expect(
        self, schedules: Sequence[SendSchedule], there: Collection[int], socket: str, deadline: Deadline
    ) -> frozenset[int]:
        """Give each worker its schedule, unless it has that one and its thread is `there`; the ranks that got one."""
        new: list[_Worker] = []
        for worker, each in zip(self._workers, schedules, strict=True):
            digest = each.digest()
            if worker.hello.schedule == digest and worker.hello.rank in there:
                continue
            expect = Expect(
                schedule=digest, messages=each.messages.encode(), unpack=each.unpack.encode(), socket=socket
            )
            SIDECAR.say(worker.frames, expect, deadline)
            new.append(worker)
        self._taken(new, "schedule", deadline)
        return frozenset(worker.hello.rank for worker in new)

    @staticmethod
    def _taken(workers: Sequence[_Worker], what: str, deadline: Deadline) -> None:
        """Hear all of `workers`, which were given `what`. Raises `TransferFailed` for one that did not take it."""
        told = [(worker, f"worker {worker.hello.rank} to take its {what}") for worker in workers]
        replies = [SIDECAR.hear(worker.frames, deadline, waiting_for) for worker, waiting_for in told]
        for worker, reply in zip(workers, replies, strict=True):
            if not isinstance(reply, PlanInstalled):
                raise TransferFailed(f"worker {worker.hello.rank} did not take its {what}: {reason_of(reply)}")

    @property
    def plans(self) -> tuple[str, ...]:
        """Digests of the workers' plans."""
        return tuple(worker.hello.plan for worker in self._workers)

    def swap(self, epoch: int, version: int, deadline: Deadline, pulse: Callable[[], None]) -> list[PlanExecuted]:
        """All put what they were sent into place. Raises `ReplayFailed` when all have answered and one did not.

        `pulse` is called meanwhile, and may raise.
        """
        for worker in self._workers:
            SIDECAR.say(worker.frames, Swap(epoch=epoch, version=version), deadline)
        return self._replayed(deadline, pulse)

    def _replayed(self, deadline: Deadline, pulse: Callable[[], None] | None) -> list[PlanExecuted]:
        replies: list[ToSidecar] = []
        for worker in self._workers:
            while pulse is not None and not worker.frames.readable(_LOOK_S):
                deadline.check(f"worker {worker.hello.rank} to copy")
                pulse()
            replies.append(SIDECAR.hear(worker.frames, deadline, f"worker {worker.hello.rank} to copy"))
        replayed = [reply for reply in replies if isinstance(reply, PlanExecuted)]
        if len(replayed) < len(replies):
            reasons = "; ".join(
                f"worker {worker.hello.rank} could not copy: {reason_of(reply)}"
                for worker, reply in zip(self._workers, replies, strict=True)
                if not isinstance(reply, PlanExecuted)
            )
            wrote = any(not isinstance(reply, Failed) or reply.touched for reply in replies)
            raise ReplayFailed(reasons, wrote)
        return replayed

    @property
    def dead(self) -> int | None:
        """The rank of a worker whose process has ended; None where none is known to have."""
        return find_ended_peer((worker.hello.rank, worker.frames) for worker in self._workers)

    def let_go(self, message: Done | Failed) -> None:
        """Let the workers return. A worker that is gone is skipped; the server's answer says so."""
        for worker in self._workers:
            try:
                SIDECAR.say(worker.frames, message, Deadline(RETURN_S))
            except DataplaneError:
                continue

    def close(self) -> None:
        """Hang up. Workers that wait for us return from their call."""
        for worker in self._workers:
            worker.frames.close()
        self._workers = []


def _adopt(digest: str, plan: ReshardPlan, proof: RankVerification) -> InstallPlan:
    return InstallPlan(
        plan=digest,
        recording=plan.trace,
        sources=tuple((source.rank, source.region) for source in plan.sources),
        copies=plan.copies.encode(),
        staging=plan.staging.encode(),
        staged=plan.staged,
        prove=_prove(proof, plan.staging_bytes),
    )


def _prove(proof: RankVerification, staging_bytes: int) -> Prove:
    return Prove(
        proof=proof.table.encode(),
        groups=proof.table.groups,
        odd=proof.odd.encode(),
        odd_bytes=proof.odd_bytes,
        staging_bytes=staging_bytes,
    )


def _recorded(hello: Hello, layout: str, tensors: tuple[TensorSpec, ...], recording: LoadTrace | None) -> bool:
    """Whether the worker has `recording`, and it is of this layout, or of one with these tensors."""
    return recording is not None and (hello.layout == layout or recording.tensors == tensors)


def regions_read(plan: ReshardPlan) -> dict[int, tuple[int, ...]]:
    """By holder: what a plan reads of it. Takes as long as there are regions, and is the same in every round."""
    found: dict[int, list[int]] = {}
    for source in plan.sources:
        found.setdefault(source.rank, []).append(source.region)
    return {holder: tuple(regions) for holder, regions in found.items()}


def _exports(exporting: Exporting, made: ArenaRegion | None, regions: tuple[int, ...]) -> Exports:
    """What is read of one holder."""
    return Exports(
        holder=exporting.holder,
        address=exporting.address,
        generation=exporting.generation,
        regions=regions,
        made=made if made is not None and made.region in regions else None,
    )


def _introduced(frames: Frames, deadline: Deadline) -> Hello:
    """The first words of a worker that has connected. Hangs up where there are none."""
    try:
        hello = SIDECAR.hear(frames, deadline, "a worker's first words")
    except BaseException:
        frames.close()
        raise
    if not isinstance(hello, Hello):
        frames.close()
        raise PeerLost(f"a worker began with {reason_of(hello)}")
    return hello
