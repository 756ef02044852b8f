"""An engine agent: the real machine, dispatcher and bus client; threads and HTTP calls are simulated.

Mirrors `engine_agent/sidecar/driver.py` and `operation_executor.py` thread by thread: what blocks there yields here.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from weightbus.control.protocol.errors import ClientClosed, CoordinatorUnreachable, RequestRefused, WeightbusError
from weightbus.control.protocol.messages import (
    Abort,
    AgentId,
    Commit,
    Digest,
    EngineInfo,
    EngineMessage,
    Heartbeat,
    HeldVersion,
    Hello,
    Incarnation,
    Pause,
    Prepare,
    RefusalCode,
    RequestId,
    Role,
    Topology,
    Transfer,
    TransportKind,
    Welcome,
)
from weightbus.control.security.trust import (
    VerificationFailure,
    verify_digest_table,
    verify_endpoint,
    verify_publication,
)
from weightbus.engine_agent.machine.engine_machine import EngineMachine
from weightbus.engine_agent.machine.events import (
    INCOMPLETE,
    Answer,
    Cancel,
    Commanded,
    Effect,
    Event,
    ForgetAnswers,
    JoinAgain,
    Label,
    Note,
    Operated,
    Operation,
    OperationDone,
    OperationFailed,
    OrphanPolicy,
    PauseServer,
    Receive,
    Received,
    ReceiveDoubleBuffered,
    Recognize,
    ReleaseServer,
    Remember,
    Result,
    RunOperation,
    ServerFound,
    ServerGone,
    ServerTaken,
    ServerWatched,
    StateRecord,
    TimePassed,
    Validate,
    VerificationPassed,
    Verify,
    Welcomed,
)
from weightbus.engine_agent.machine.left_record import LeftRecord
from weightbus.engine_agent.machine.weight_state import GENERATES, WeightState
from weightbus.engine_agent.state_file import EffectDispatcher

from .client import Client
from .disks import RecordDisk
from .process import Bell, Killed, Process, Thread
from .server_model import LAUNCH, CallFailed, ServerModel
from .transfer_model import TransferBroken, receive

if TYPE_CHECKING:
    from .world import World

TICK_S = 1.0
POLL_S = 1.0
CALL_S = 10.0
PATIENCE = 3
ORPHANED_S = 20.0


class OtherLaunch(CallFailed):
    """Another process generation than was meant answers. Nothing was asked of it."""


class PauseEnded(CallFailed):
    """The server generates, and was paused."""


class EngineProcess(Process):
    """One sidecar."""

    def __init__(
        self,
        world: World,
        server: ServerModel,
        drift: float,
        transports: tuple[TransportKind, ...],
        *,
        live: bool,
        older: bool = False,
        apart_from: tuple[str, ...] = (),
        name: str = "",
    ) -> None:
        """`name` is another one than its server's for a second sidecar, which reaches that at another address."""
        super().__init__(world, name or server.name, drift)
        self._world, self.server = world, server
        self.record = RecordDisk(world, self.name)
        self.transports, self.live, self.older = transports, live, older
        self.apart_from = apart_from
        """Trainers that have no transport for it."""
        self.beside = sum(self.name.encode()) % 3 == 1
        """Every third engine takes versions beside the weights that it serves."""
        self.proves_itself = sum(self.name.encode()) % 2 == 1
        """Every second one compares what it holds while it takes it, where it can."""
        self.socket = f"host/{server.name}" if sum(self.name.encode()) % 2 == 1 else ""
        """Every second one reaches its server within one network namespace, and sees where that listens."""
        self.machine: EngineMachine | None = None
        self.client: Client | None = None

    @property
    def watches(self) -> bool:
        """It has seen this launch of its server, and would see a change of it. What happened before shows nowhere."""
        machine = self.machine
        return machine is not None and machine.up and self._up and self._launch == self.server.launch

    @property
    def knows_weights(self) -> bool:
        """Another party's weights would show without another label."""
        return self.live and self._sampled == ((self.server.launch, self._loads), self.server.tags)

    @property
    def cancelled(self) -> bool:
        """The running operation is not wanted any more."""
        return self._called_off == self._number

    # -- life

    def born(self) -> None:
        """What `EngineAgent.__init__` and `run` do."""
        incarnation = f"{self.name}.{self.life}"
        self.incarnation = Incarnation(incarnation)
        self.machine = EngineMachine(
            self._world.channel,
            incarnation,
            self.record.read(self),
            orphans=OrphanPolicy(self._world.scenario.orphaned),
            orphaned_s=ORPHANED_S,
        )
        self._dispatcher = EffectDispatcher(self.machine, self._write, self._carry_out, self._post, self._write_later)
        self._late: StateRecord | None = None
        self._lost: tuple[StateRecord, OSError] | None = None
        self._view = self.machine.view()
        self._events: deque[Event] = deque()
        self._operations: deque[RunOperation] = deque()
        self._answers: deque[tuple[int, EngineMessage]] = deque()
        self._event_bell, self._work_bell, self._speech_bell, self._late_bell = Bell(), Bell(), Bell(), Bell()
        self._boot = 0
        self._joins_again = False
        self._taken = ""
        self._number, self._called_off = 0, -1
        self._signer: AgentId | None = None
        self._believed: Prepare | None = None
        self.touched = False
        self._up, self._misses, self._last_label, self._launch = False, 0, "", 0
        self._loads, self._left = 0, LeftRecord()
        self._sampled: tuple[tuple[int, int], tuple[str, ...]] = (0, 0), ()
        self.client = None
        self.thread(self._watch())
        self.thread(self._work())
        self.thread(self._late_records())
        self.thread(self._main())

    def gone(self) -> None:
        """The kernel closes its socket."""
        if self.client is not None:
            self.client.leave()
        self.client = self.machine = None

    def unpowered(self) -> None:
        """Its record's disk keeps what was synced."""
        self.record.lose_power()

    def heard(self) -> None:
        """Something came in on the line."""
        if self.client is not None:
            self.client.turn()

    @property
    def unsaid(self) -> int:
        """Answers that wait for their turn."""
        return len(self._answers)

    # -- the main thread

    def _main(self) -> Thread:
        while not self._view.up:
            yield from self._turn()
        yield from self._connect()
        while True:
            yield from self._turn()

    def _connect(self) -> Thread:
        client = self.client = Client(self, self._world.network, self._hello, self._heartbeat, self._topology)
        while True:
            try:
                welcome = yield from client.starting(TICK_S / 2)
                break
            except CoordinatorUnreachable:
                yield 0.01
            except RequestRefused as refused:
                if not refused.retry_after_s:  # ends with an error, as the real one does, and is started again
                    raise Killed(f"it was refused: {refused}") from refused
                yield 0.01
            yield from self._turn()
            while self._events:
                yield from self._turn()
        self._dispatch(Welcomed(welcome))
        self.thread(self._listen(client))
        self.thread(self._speak(client))

    def _turn(self) -> Thread:
        if not self._events:
            yield TICK_S, self._event_bell
        if self._events:
            self._dispatch(self._events.popleft())
        lost, self._lost = self._lost, None
        if lost is not None:
            self._dispatcher.lost(*lost)
        self._dispatcher.retry()
        refusal = self.client.refusal if self.client else None
        taken = str(refusal[0]) if refusal and refusal[0].code is RefusalCode.SERVER_TAKEN else ""
        before, self._taken = self._taken, taken
        if taken and taken != before:
            self._dispatch(ServerTaken(taken))
        heard = self.client.heard_at if self.client else None
        self._dispatch(TimePassed(float("-inf") if heard is None else heard))

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._event_bell.ring()

    def _dispatch(self, event: Event) -> None:
        self._dispatcher.dispatch(event, self.clock())
        machine = self.machine
        assert machine is not None
        self._view = machine.view()
        if self._view.weights is WeightState.UNKNOWN:
            self.server.left_unseen = False
        again, self._joins_again = self._joins_again, False
        if again and self.client is not None:
            self.client.join_again()
            self.client.turn()

    def _write(self, record: StateRecord) -> None:
        """At once; what was to be written late is older."""
        self._late = None
        self.record.write(record, self)
        self._lost = None

    def _write_later(self, record: StateRecord) -> None:
        self._late = record
        self._late_bell.ring()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer():
                self._answers.append((self._boot, effect.message))
                self._speech_bell.ring()
            case ForgetAnswers():
                self._boot += 1
            case JoinAgain():
                self._joins_again = True
            case RunOperation():
                self._operations.append(effect)
                self._work_bell.ring()
            case Cancel():
                self._called_off = effect.number
            case Note():
                self.loop.note(self.name, f"{effect.event} {effect.detail}")
            case Remember():
                raise AssertionError("the dispatcher writes records")

    # -- other threads

    def _late_records(self) -> Thread:
        """`StateWriter`: a disk may be slow, and a sidecar that dies meanwhile leaves the record of before."""
        rng = self._world.rng(f"late-{self.name}-{self.life}")
        while True:
            if self._late is None:
                yield self._late_bell
                continue
            yield rng.choice((0.0, 0.002, 0.3))
            while self.record.hangs:
                yield 0.1
            record, self._late = self._late, None
            if record is None:
                continue
            try:
                self.record.write(record, self)
            except OSError as error:
                self._lost = record, error
            else:
                self._lost = None

    def _listen(self, client: Client) -> Thread:
        while True:
            message = client.take()
            if message is None:
                yield client.bell
            elif isinstance(message, Prepare | Pause | Transfer | Commit | Abort):
                self._post(Commanded(message))
            elif isinstance(message, Welcome):
                self._post(Welcomed(message))

    def _speak(self, client: Client) -> Thread:
        while True:
            if not self._answers:
                yield self._speech_bell
                continue
            waiting = [each for at, each in enumerate(self._answers) if each not in list(self._answers)[:at]]
            self._answers.clear()
            while waiting:
                begun = [(item, client.begin(item[1], None, 5.0)) for item in waiting if item[0] == self._boot]
                waiting = []
                for item, answer in begun:
                    try:
                        yield from answer
                    except (CoordinatorUnreachable, ClientClosed):
                        waiting.append(item)
                    except WeightbusError:
                        pass
                if waiting:
                    yield 0.1

    def _watch(self) -> Thread:
        while True:
            server = self.server
            if not server.up or server.frozen:
                self._misses += 1
                ended = not server.up or server.launch != self._launch
                if self._up and (ended or self._misses >= PATIENCE):
                    self._up = False
                    self._post(ServerGone("no answer"))
            else:
                if not self._up or server.launch != self._launch:
                    if server.launch != self._launch:
                        self._last_label = server.label
                    self._up, self._launch = True, server.launch
                    self._post(ServerFound(self._identity(), server.label))
                else:
                    self._look_for_strangers()
                self._misses = 0
            yield 0.2 if self._up and self._misses else POLL_S

    def _look_for_strangers(self) -> None:
        """`ServerWatch` and `WeightSampler`: the label, whether it generates, and the weights where it tells them."""
        view, server, changed = self._view, self.server, ""
        if view.doing:
            return
        if server.label != self._last_label:
            changed = f"labeled {server.label!r} by another party"
        elif self.live and view.weights in GENERATES and not view.paused and not server.paused:
            of, known = self._sampled
            if of != (server.launch, self._loads):
                self._sampled = (server.launch, self._loads), server.tags
            elif known != server.tags:
                changed = f"another party changed its weights: {server.tags}"
        self._post(ServerWatched(view.operations, not server.paused, changed))

    def _identity(self) -> str:
        return f"{self.server.name}-launch-{self.server.launch}"

    # -- the worker

    def _work(self) -> Thread:
        while True:
            if not self._operations:
                yield self._work_bell
                continue
            run = self._operations.popleft()
            self._meant, self._number = run.identity, run.number
            result = yield from self._perform(run.operation)
            self._post(Operated(run.number, result))

    def _perform(self, operation: Operation) -> Thread:
        self.touched = False
        try:
            result: Result = yield from self._do(operation)
        except (CallFailed, TransferBroken, WeightbusError) as error:
            doubted = isinstance(error, PauseEnded | OtherLaunch)
            result = OperationFailed(str(error) or type(error).__name__, self.touched, doubted)
        return result

    def _do(self, operation: Operation) -> Thread:  # noqa: C901  # one case per operation
        match operation:
            case Validate(command, _, serving):
                self._believe(command, serving)
                yield from self._blob(command.manifest, command.deadline_s)
                if command.table:
                    yield from self._blob(command.table, command.deadline_s)
                yield 0.02 + 0.3 * self._world.data_rng.random()
                return OperationDone(double_buffered=self.beside)
            case ReceiveDoubleBuffered(command):
                if self._world.trust is not None:
                    self._object(verify_endpoint(command, self._signer, self._world.trust))
                yield 0.2
            case PauseServer(_, deadline_s):
                yield from self.call(self.server.pause, min(deadline_s, CALL_S))
            case Receive(command, _, unknown):
                return (yield from self._receive(command, unknown=unknown))
            case Verify(command, checked):
                return (yield from self._verify(command, checked=checked))
            case Recognize(held):
                if not self.live:
                    raise TransferBroken("this server cannot report digests")
                yield from self._compare((yield from self._table(held.table, 10.0)), held.version)
                return VerificationPassed("live-digest")
            case Label(version, deadline_s):
                yield self._world.data_rng.choice((0.0, 0.02, 0.5))  # its server may still have to return
                yield from self._label(str(version), deadline_s)
                if not self.server.paused:
                    raise PauseEnded("another party let the server generate")
            case ReleaseServer():
                yield from self._release(operation)
        return OperationDone()

    def _receive(self, command: Transfer, *, unknown: bool) -> Thread:
        self._loads += 1
        deadline = self.clock() + command.deadline_s
        if self._world.trust is not None:
            self._object(verify_endpoint(command, self._signer, self._world.trust))
        wanted = (yield from self._table(command.table, command.deadline_s)) if command.table else None
        label = self._last_label
        if not _is_versions(self._last_label):
            yield from self._label(f"{INCOMPLETE}{self._last_label}", command.deadline_s)
        yield from self._begin_left(command, INCOMPLETE if unknown else label, deadline, unknown=unknown)
        checked, followed = yield from receive(
            self._world, self, command.offer.address, command.epoch, wanted, deadline
        )
        if self._world.scenario.leaves and not self._world.scenario.leaves_part(command.version):
            tag = self.server.buckets[-1]
            yield from self.call(lambda: self.server.load_left(tag), deadline - self.clock(), touches=True)
        if followed is not None:
            table = self._believe_table(*followed)
            yield from self._prove_left(command.version)
            count = self._world.scenario.buckets
            return Received(count, count, checked, "live-digest", table)
        verified_by = ""
        if checked and self.live and self.proves_itself:
            verified_by = (yield from self._verify(command, checked=True)).verified_by
        assert wanted is not None
        return Received(len(wanted), len(wanted), checked, verified_by)

    def _begin_left(self, command: Transfer, label: str, deadline: float, *, unknown: bool) -> Thread:
        """As `LeftPart.begin`: what the version leaves is loaded again where it may have changed."""
        left = self._left_by(command.version)
        if unknown:
            self._left.doubt()
        if left and not self._left.known(left, self._identity(), label, undefined=False):
            self._left.doubt()
            yield from self.call(self.server.load_checkpoint, deadline - self.clock(), touches=True)
        self._left.begin(left, self._identity())

    def _prove_left(self, version: int) -> Thread:
        """Once for each launch, where the server reports digests."""
        left = self._left_by(version)
        if left and self.live and not self._left.proven(left, self._identity()):
            found: list[str] = []
            yield from self.call(lambda: found.append(self.server.left), CALL_S)
            self._compare_left(version, found[0])

    def _compare_left(self, version: int, found: str) -> None:
        left = self._left_by(version)
        if left and found != LAUNCH:
            self._left.doubt()
            raise TransferBroken("what the version leaves is not as launched")
        if left:
            self._left.note_proven(left, self._identity())

    def _left_by(self, version: int) -> frozenset[str]:
        return frozenset({"left."}) if self._world.scenario.leaves_part(version) else frozenset()

    def _believe_table(self, blob: bytes, signature: str) -> Digest:
        table = Digest(hashlib.sha256(blob).hexdigest())
        if self._world.trust is not None:
            objection = verify_digest_table(self._believed, table, signature, self._world.trust)
            if self._world.judge.believes_table(self.name, table, objection is None):
                self._object(objection)
            elif objection is not None:
                raise TransferBroken(objection.reason)
        return table

    def _believe(self, command: Prepare, serving: HeldVersion | None) -> None:
        if self._world.trust is not None:
            self._object(verify_publication(command, serving, self._world.trust))
            self._signer, self._believed = (
                (command.publication_signature.signer if command.publication_signature else None),
                command,
            )

    def _object(self, objection: VerificationFailure | None) -> None:
        """No fault of a simulated network makes an honest trainer's version unbelievable."""
        if objection is not None:
            self._world.judge.broken("believed", f"{self.name} does not believe: {objection.reason}")
            raise TransferBroken(objection.reason)

    def _verify(self, command: Transfer, *, checked: bool) -> Thread:
        wanted = yield from self._table(command.table, 10.0)
        if self.live:
            yield from self._compare(wanted, command.version)
            return VerificationPassed("live-digest")
        if checked:
            return VerificationPassed("bucket-digest")
        raise TransferBroken("nothing can prove this version")

    def _compare(self, wanted: tuple[str, ...], version: int) -> Thread:
        found: list[tuple[tuple[str, ...], str]] = []
        yield from self.call(lambda: found.append((tuple(self.server.buckets), self.server.left)), CALL_S)
        if found[0][0] != wanted:
            raise TransferBroken("the server does not hold what the table says")
        self._compare_left(version, found[0][1])

    def _label(self, label: str, deadline_s: float) -> Thread:
        yield from self.call(lambda: self.server.set_label(label), min(deadline_s, CALL_S))
        self._last_label = label

    def _release(self, release: ReleaseServer) -> Thread:
        if release.version is not None and not release.labeled:
            yield from self._label(str(release.version), release.deadline_s)
        if release.version is None and self._last_label.startswith(INCOMPLETE):
            yield from self._label(self._last_label.removeprefix(INCOMPLETE), release.deadline_s)
        if release.flush:
            yield from self.call(self.server.flush, min(release.deadline_s, CALL_S))
        yield from self.call(self.server.resume, min(release.deadline_s, CALL_S))

    def call(self, what: Callable[[], None], deadline_s: float, *, touches: bool = False) -> Thread:
        """One HTTP call. Raises `CallFailed`; one that was not answered in time may still be carried out."""
        self.passes("call", "before")
        if self._meant != self._identity():
            raise OtherLaunch("the server was launched anew since this operation began")
        self.touched = self.touched or touches
        bell = Bell()
        answers: list[CallFailed | None] = []

        def answered(failure: CallFailed | None) -> None:
            answers.append(failure)
            bell.ring()

        self.server.call(what, answered, 0.001 + 0.02 * self._world.data_rng.random())
        yield max(0.001, deadline_s), bell
        self.passes("call", "after")
        if not answers:
            raise CallFailed(f"no answer in {deadline_s:.1f} s; it may still be carried out")
        if answers[0] is not None:
            raise answers[0]

    def _blob(self, digest: str, deadline_s: float) -> Thread:
        client = self.client
        if client is None:
            raise CallFailed("no coordinator to ask for the manifest")
        if self.cancelled:
            raise TransferBroken("called off")
        return (yield from client.getting(Digest(digest), deadline_s))

    def _table(self, digest: str, deadline_s: float) -> Thread:
        blob = yield from self._blob(digest, deadline_s)
        return tuple(msgspec.json.decode(blob, type=list[str]))

    # -- what is said of the engine

    def _hello(self) -> Hello:
        view = self._view
        info = EngineInfo(
            url=f"http://{self.name}",
            server_version="sim",
            tp=1,
            pp=1,
            dp=1,
            device="cpu",
            host="host",
            transports=self.transports,
            health=view.health,
            held=view.held,
            generation=self._identity(),
            follows=view.follows,
            socket=self.socket,
        )
        return Hello(
            request=RequestId("filled-in-by-the-client"),
            agent=AgentId(self.name),
            role=Role.ENGINE,
            channel=self._world.channel,
            incarnation=self.incarnation,
            engine=info,
        )

    def _topology(self) -> Topology:
        """Some are in containers of their own: once that is known, they take versions over the group."""
        own = "1" if self.transports == (TransportKind.LOCAL, TransportKind.DISTRIBUTED) and self.live else "0"
        return Topology(
            request=RequestId("filled-in-by-the-client"),
            files=f"host/{own}",
            folder=own,
            supports_deferred_digests=not self.older,
        )

    def _heartbeat(self) -> Heartbeat:
        view = self._view
        return Heartbeat(seq=0, epoch=view.epoch, health=view.health, held=view.held)


def _is_versions(label: str) -> bool:
    """Whether a server with this label has other weights than those of its launch, or may have."""
    return label.isdigit() or label.startswith(INCOMPLETE)
