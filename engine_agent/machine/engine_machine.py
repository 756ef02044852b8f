"""The decisions of a sidecar about its server, as a pure machine: `handle(event, now)` returns the effects, in order.

The state of the weights is a machine of its own (`Weights`, weight_state.py); this one decides what to do about it.
Three rules keep a client from an answer of mixed weights:

* before the first byte of served weights changes, the server is paused and a durable record calls it dirty;
* a dirty or pending server is resumed by the commit of a version that was verified on it; or, where no coordinator is
  heard of and the policy `orphaned` says so, for that version without its commit; and by nothing else;
* another process generation is another server: all facts about it are forgotten, and it is paused as soon as the
  coordinator has welcomed this sidecar with it. The address may lead to another sidecar's server by now: only one that
  a transfer of this sidecar may have met is paused without asking.

Of a server without a record the label tells whether its weights are those of its launch: before their first change it
is marked (`INCOMPLETE`). A server with such a label, or with a version's, is unknown. It serves again once it holds a
version that was verified on it, or once its digests are found to be those of the committed one.

One operation runs at a time. A command that comes meanwhile waits for its end, a `Transfer` behind its `Pause`; an
abort, or a command of a higher epoch, also asks it to end soon. control/protocol/PROTOCOL.md draws both sides.
"""

from __future__ import annotations

from collections import deque
from typing import Final, assert_never

import msgspec

from weightbus.control.protocol import (
    Abort,
    Channel,
    Commit,
    Digest,
    EngineHealth,
    EngineMessage,
    Epoch,
    Failed,
    HeldVersion,
    InvariantBroken,
    Pause,
    Paused,
    PauseMode,
    Prepare,
    Prepared,
    RequestId,
    Serving,
    Step,
    ToEngine,
    Transfer,
    Transferred,
    Verified,
    Version,
    Welcome,
)

from . import weight_state as w
from .events import (
    INCOMPLETE,
    Answer,
    Cancel,
    Commanded,
    Effect,
    Event,
    ForeignAct,
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
from .weight_state import RecordedState, WeightState

TRACE_EVENTS: Final = 48
"""Number of recent events that an error carries."""
HOLD_S: Final = 30.0
"""Deadline for pausing or resuming a server outside of a round, and time between two tries."""
UNSETTLED_S: Final = 10.0
"""A clean server found in an unknown state resumes after so many seconds without word from the coordinator."""
ORPHANED_S: Final = 300.0
"""Default of the setting `orphaned_s`: longer than a coordinator, or its machine, takes to be started again."""
ASLEEP_S: Final = 2.0
"""Seconds between two looks at the time from which on this process has stood still (SIGSTOP, a suspended machine)."""
AWAKE_S: Final = 5.0
"""Seconds for which a process that stood still reads what it was told meanwhile, before silence counts for it."""
UNWELCOMED_S: Final = 5.0
"""Seconds for the coordinator to say whether another process generation is this sidecar's to pause."""
_TRY_AGAIN_S: Final = 1.0
"""Seconds between two tries to pause or resume a server unasked."""
_STILLED: Final = (
    "another party has paused the server, or its health check fails: let it continue (/continue_generation)"
)
_REASON: Final = 2000
"""Characters of a reason that are reported."""


class EngineMachine:
    """The machine of one engine. Drive it from one thread."""

    def __init__(
        self,
        channel: Channel,
        incarnation: str,
        record: StateRecord | None,
        *,
        orphans: OrphanPolicy = OrphanPolicy.WAIT,
        orphaned_s: float = ORPHANED_S,
        ends_pauses: bool = False,
    ) -> None:
        """`orphans`: what happens to a verified version once no coordinator was heard of for `orphaned_s`.

        With `ends_pauses` a serving engine that another party has paused is resumed.
        """
        self._ends_pauses = ends_pauses
        self.trace: deque[str] = deque(maxlen=TRACE_EVENTS)
        self.weights = w.Weights(self.trace)
        self.up = False
        self.epoch = Epoch(record.epoch if record else 0)
        self.identity = ""
        self.reason = "the server has not answered yet"
        self._recorded = RecordedState(record)
        self._server = ServerFound("", "")
        """The server as it was found last."""
        self._committed: HeldVersion | None = None
        """The version that was committed at the last welcome."""
        self._label = ""
        """Label of a server about which nothing is known; empty once its weights were compared."""
        self._taken = ""
        """Why the coordinator does not welcome this sidecar: the server is another one's."""
        self._prepared: tuple[Version, Digest, Digest] | None = None
        """Version, manifest and table that were last validated: no other is received."""
        self._can_double_buffer = False
        """True if there is a plan and memory to receive the prepared version into a second buffer."""
        self._pause_mode = PauseMode.RETRACT.value
        """Mode in which the server is paused for a swap."""
        self._checkpoint = ""
        self._labeled: Version | None = None
        """Version with which the server was labeled ahead of its commit."""
        self._running: RunningOperation | None = None
        self._waiting = QueuedCommands()
        self._answers = PendingReplies(channel, incarnation)
        self._reached: Step | None = None
        """The last step of the round that got a reply; it has failed if the server is lost before the next."""
        self._numbers = 0
        self.pause_lease = PauseLease()
        self._paused_at: float | None = None
        self._orphans, self._orphaned_s = orphans, orphaned_s
        self._flush = True
        """Whether caches are flushed with the prepared version."""
        self._ticked_at = self._awake_since = 0.0
        self._orphaned = False
        """True while the server may not be clean, and no coordinator was heard of for `orphaned_s`."""
        self._declined = ""
        """Why the last version that was announced does not fit the server; empty once one does."""
        self._stilled = ""
        """Why a clean server that this sidecar has not paused does not generate; empty while it does."""

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Take `event`, which happened at `now`, and return the effects, in order."""
        if not isinstance(event, TimePassed):
            self.trace.append(f"{now:.3f} {trace_line(event)}")
        match event:
            case Commanded():
                effects = self._command(event.message, now)
            case Welcomed():
                effects = self._welcomed(event.welcome, now)
            case ServerTaken():
                effects = self._server_taken(event.reason)
            case Operated():
                effects = self._operated(event, now)
            case ServerFound():
                effects = self._found(event, now)
            case ServerGone():
                effects = self._gone(event)
            case ServerWatched():
                effects = self._watched(event, now)
            case TimePassed():
                effects = self._tick(event.heard_at, now)
            case _:
                assert_never(event)
        return (*effects, *self._set_right(), *self._hold(now), *self._prove(now))

    @property
    def health(self) -> EngineHealth:
        """Health of the weights, in the coordinator's terms."""
        return self.weights.health

    @property
    def held(self) -> HeldVersion | None:
        """The complete, verified version on the server."""
        return self.weights.held

    @property
    def paused(self) -> bool | None:
        """Whether the server is paused; null: not known."""
        return self.weights.paused

    @property
    def owes_resume(self) -> bool:
        """True while a clean server may be paused, and would be resumed at the end of the pause lease."""
        clean = self.up and self.health is EngineHealth.CLEAN and self.paused is not False
        return clean and self.pause_lease.given

    def view(self) -> ServerView:
        """The view of the engine now. A server that does not answer counts as holding no version."""
        health, held, reason = self.health, self.held, self.reason
        if (not self.up or self._stilled) and health is not EngineHealth.DIRTY:
            health, held = EngineHealth.PENDING, None
            reason = self._stilled if self.up else reason
        return ServerView(
            up=self.up,
            health=health,
            held=held,
            paused=self.paused is True,
            weights=self.weights.state,
            version=self.weights.version,
            reached=self._reached,
            epoch=self.epoch,
            doing=name_of(self._running.operation) if self._running else "",
            reason=self._taken or reason,
            follows=self._recorded.follows(self.identity),
            operations=self._numbers,
            checkpoint=self._checkpoint,
            orphaned=self._orphaned,
            declined=self._declined,
            begins_with=self._begins_with(),
            paused_at=self._paused_at if self.paused is True else None,
        )

    def _begins_with(self) -> tuple[Version | None, ...]:
        state, held = self.weights.state, self.held
        if not self.up or self._stilled or self._taken:
            return ()
        if self.health is EngineHealth.CLEAN:
            serves = held.version if held else None
            coming = self._prepared[0] if self._prepared and self._reached is not None else serves
            return (serves,) if coming == serves else (serves, coming)
        if held is not None and (state is WeightState.ORPHANED or self._reached is Step.VERIFY):
            return (held.version,)
        arriving = self._running is not None and isinstance(self._running.operation, Receive | Verify)
        if not arriving or not self.weights.replaces_clean:
            return ()
        before = (self.weights.replaced,) if state is WeightState.STAGED else ()
        return tuple(dict.fromkeys((*before, self.weights.taking)))

    def check(self) -> None:
        """Raise `InvariantBroken`, with the event trace, when fields contradict each other."""
        self.weights.check()
        if self._waiting.next is not None and self._running is None:
            raise InvariantBroken("a command waits for nothing", tuple(self.trace))
        if self._running is not None and self._running.number != self._numbers:
            raise InvariantBroken("an operation was begun while another one ran", tuple(self.trace))

    def _learn(self, event: w.WeightEvent, now: float) -> tuple[Remember, ...]:
        """Tell `Weights` a fact; returns what must be durable because of it."""
        return (self._remember(),) if self.weights.handle(event, now) else ()

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, message: ToEngine, now: float) -> tuple[Effect, ...]:
        """Fencing, then repetition, then the command itself.

        A command that comes before this process generation is welcomed is for another one, or will come again.
        """
        if not self.pause_lease.accepted:
            return (Note("command_of_another_launch", f"{message.kind} of epoch {message.epoch}"),)
        if message.epoch < self.epoch:
            return (Note("stale_command", f"{message.kind} of epoch {message.epoch}, now {self.epoch}"),)
        if message.epoch > self.epoch:
            self.epoch = Epoch(message.epoch)
            self._answers.forget()
        if self._running is not None:
            return self._wait(message, self._running)
        return self._answers.again(message) or self._carry_out(message, now)

    def _carry_out(self, message: ToEngine, now: float) -> tuple[Effect, ...]:
        match message:
            case Prepare():
                return self._prepare(message, now)
            case Pause():
                return self._pause(message, now)
            case Transfer():
                return self._transfer(message, now)
            case Commit():
                return self._commit(message, now)
            case Abort():
                return self._abort(message, now)
            case _:
                assert_never(message)

    def _wait(self, message: ToEngine, running: RunningOperation) -> tuple[Effect, ...]:
        """Queue a command behind the running operation. A repeated one is dropped; another may end the operation."""
        served = running.command
        if served is not None and served.epoch == message.epoch:
            if type(served) is type(message):
                return ()
            if answered := self._answers.again(message):  # it led to the running operation
                return answered
        self._waiting.add(message)
        if isinstance(message, Abort) or (served is not None and served.epoch < message.epoch):
            return self._shorten()
        return self._arm() if isinstance(served, Pause) and self._fits(message) else ()

    def _prepare(self, command: Prepare, now: float) -> tuple[Effect, ...]:
        if not self.up:
            return self._fail(command, Step.PREPARE, self.reason)
        self._pause_mode, self._flush = command.policy.pause.value, command.policy.flush
        serving = self.held if self.health is EngineHealth.CLEAN else None
        return self._run(Validate(command, self._checkpoint, serving), command, now)

    def _pause(self, command: Pause, now: float) -> tuple[Effect, ...]:
        if not self.up:
            return self._fail(command, Step.PAUSE, self.reason)
        self.pause_lease.lease_s, self._pause_mode = command.lease_s, command.mode.value
        if self._double_buffers():
            self._reached = Step.PAUSE
            return (self._answers.done(Paused, command, 0.0),)
        return self._run(PauseServer(command.mode.value, command.deadline_s), command, now)

    def _transfer(self, command: Transfer, now: float) -> tuple[Effect, ...]:
        if not self.up:
            return self._fail(command, Step.TRANSFER, self.reason)
        if not self._fits(command):
            reason = f"version {command.version} with this manifest and table was not prepared here: prepare it first"
            return self._fail(command, Step.TRANSFER, reason)
        if self._double_buffers():
            return self._run(ReceiveDoubleBuffered(command, self._checkpoint), command, now)
        if self.paused is not True and self._answers.gave(Pause, command.epoch):
            return self._fail(command, Step.TRANSFER, "the server is not paused (any more): pause it first")
        if self.paused is not True:
            # what was to stop it got lost
            return self._run(PauseServer(self._pause_mode, HOLD_S), command, now)
        unknown = self.weights.state is WeightState.UNKNOWN
        known = self._recorded.begin_transfer(self.epoch)
        dirty = self._learn(w.TransferBegan(command.version), now)
        self._reached, self.reason, self._labeled = Step.PAUSE, f"began to take version {command.version}", None
        return (*(() if known else dirty), *self._run(Receive(command, self._checkpoint, unknown), command, now))

    def _double_buffers(self) -> bool:
        """Whether the version needs no pause before the swap: the server generates from clean weights meanwhile."""
        clean = self.health is EngineHealth.CLEAN and self.weights.state in w.GENERATES
        return self._can_double_buffer and clean and self.paused is False

    def _fits(self, command: ToEngine) -> bool:
        """Whether it is the transfer of the version that was prepared last."""
        return isinstance(command, Transfer) and (command.version, command.manifest, command.table) == self._prepared

    def _commit(self, command: Commit, now: float) -> tuple[Effect, ...]:
        if not self.up:
            return self._fail(command, Step.COMMIT, self.reason)
        held = self.held
        if held is None or (held.version, held.table) != (command.version, command.table):
            found = f"version {held.version}" if held else f"no verified version, {self.health.value}: {self.reason}"
            return self._fail(command, Step.COMMIT, f"holds {found}; asked to serve {command.version}")
        if self.health is EngineHealth.CLEAN and self.paused is False and not self._stilled:
            return (self._serving(command, 0.0, now),)
        if self.weights.state is WeightState.ORPHANED and self.paused is False:
            self._reached, self.reason = None, ""
            return (*self._learn(w.VersionCommitted(), now), self._serving(command, 0.0, now))
        labeled = self._labeled == command.version
        return self._run(ReleaseServer(command.version, command.flush, command.deadline_s, labeled), command, now)

    def _abort(self, command: Abort, now: float) -> tuple[Effect, ...]:
        """Release the server, also where it was not paused: that it serves is reported when it has just answered."""
        self._answers.forget()
        self._reached = None
        if self.up and self.weights.state is WeightState.ORPHANED:  # a coordinator is back, and never committed it
            return self._run(PauseServer(self._pause_mode, command.deadline_s), command, now)
        if not self.up or self.health is not EngineHealth.CLEAN or self._stilled:
            return self._fail(command, Step.RESUME, self.view().reason)
        return self._run(ReleaseServer(None, False, command.deadline_s, look=self.pause_lease.doubted), command, now)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _run(self, operation: Operation, command: ToEngine | None, now: float) -> tuple[Effect, ...]:
        self._numbers += 1
        self._running = RunningOperation(self._numbers, operation, command, now, self.identity)
        ahead = self._arm() if isinstance(operation, PauseServer) and isinstance(command, Transfer) else ()
        return (RunOperation(self._numbers, operation, self.identity), *ahead)

    def _operated(self, event: Operated, now: float) -> tuple[Effect, ...]:
        running = self._running
        if running is None or running.number != event.number:
            return (Note("unknown_operation", str(event.number)),)
        self._running = None
        if running.identity == self.identity:
            effects = self._settle(running, event.result, now)
        else:
            effects = self._outlived(running, event.result, now)
        while self._running is None and (waiting := self._waiting.take()):
            effects = (*effects, *self._command(waiting, now))
        return effects

    def _outlived(self, running: RunningOperation, result: Result, now: float) -> tuple[Effect, ...]:
        """Settle an operation during which the server was launched again; its calls may have met either generation.

        The weights are in doubt; after a receive they are dirty, unless it failed before it changed any.
        """
        effects: tuple[Effect, ...] = self._learn(w.WeightsDoubted(), now)
        unchanged = isinstance(result, OperationFailed) and not result.dirty
        if isinstance(running.operation, Receive) and not unchanged:
            effects = (*effects, *self._learn(w.WeightsDirtied(), now))
        if running.command is None:
            return effects
        return (*effects, *self._fail(running.command, STEP_OF[type(running.operation)], self.reason))

    def _settle(  # noqa: PLR0911  one line for each operation
        self, running: RunningOperation, result: Result, now: float
    ) -> tuple[Effect, ...]:
        command, seconds = running.command, now - running.started
        self.pause_lease.doubted |= isinstance(result, OperationFailed) and result.by_server
        match running.operation:
            case Validate():
                return self._validated(command, result, seconds)
            case PauseServer():
                return self._pausing_ended(command, result, seconds, now)
            case ReceiveDoubleBuffered():
                return self._staging_ended(running.operation.command, result, now)
            case Receive():
                return self._receiving_ended(running.operation.command, result, seconds, now)
            case Verify():
                return self._verifying_ended(running.operation.command, result, seconds, now)
            case Recognize(held):
                return self._recognizing_ended(held, result, now)
            case Label(version):
                return self._labeling_ended(version, result, now)
            case ReleaseServer():
                return self._releasing_ended(running.operation, command, result, seconds, now)

    def _validated(self, command: ToEngine | None, result: Result, seconds: float) -> tuple[Effect, ...]:
        assert isinstance(command, Prepare)
        if isinstance(result, OperationFailed):
            self._declined = f"version {command.version} was refused: {result.reason}"
            return self._fail(command, Step.PREPARE, result.reason)
        self._declined = ""
        self._prepared = (command.version, command.manifest, command.table)
        self._can_double_buffer = isinstance(result, OperationDone) and result.double_buffered
        self._reached = Step.PREPARE
        return (self._answers.done(Prepared, command, seconds),)

    def _pausing_ended(
        self, command: ToEngine | None, result: Result, seconds: float, now: float
    ) -> tuple[Effect, ...]:
        if isinstance(result, OperationFailed):
            doubted = self._learn(w.WeightsDoubted(), now)  # it may have happened all the same
            if command is None:
                return (*doubted, Note("pause_failed", result.reason))
            self._waiting.forget_transfer(command.epoch)
            step = Step.TRANSFER if isinstance(command, Transfer) else Step.PAUSE
            step = Step.RESUME if isinstance(command, Abort) else step
            return (*doubted, *self._fail(command, step, result.reason))
        if self.paused is not True:
            self._paused_at = now
        self._stilled = ""  # it is this sidecar's pause now
        stilled = self._learn(w.ServerPaused(), now)
        if command is None:
            return (*stilled, Note("server_held_back", self.reason))
        if isinstance(command, Abort):
            self.reason = f"version {self.weights.version} was served, and is not committed"
            return (*stilled, *self._fail(command, Step.RESUME, self.reason))
        self.pause_lease.quiet_since, self._reached = now, Step.PAUSE
        if isinstance(command, Transfer):
            return (*stilled, *(self._unless_unwanted(command) or self._transfer(command, now)))
        return (*stilled, self._answers.done(Paused, command, seconds))

    def _staging_ended(self, command: Transfer, result: Result, now: float) -> tuple[Effect, ...]:
        """No served weight has changed. Received or still to be received, the version needs the server paused now."""
        if isinstance(result, OperationFailed):
            return self._fail(command, Step.TRANSFER, result.reason)
        return self._unless_unwanted(command) or self._run(PauseServer(self._pause_mode, HOLD_S), command, now)

    def _unless_unwanted(self, command: Transfer) -> tuple[Effect, ...]:
        """Fail `command` when another one came meanwhile: the second buffer is not swapped in then."""
        other = self._waiting.next
        return self._fail(command, Step.TRANSFER, f"{other.kind} came before the swap") if other else ()

    def _receiving_ended(self, command: Transfer, result: Result, seconds: float, now: float) -> tuple[Effect, ...]:
        if isinstance(result, OperationFailed) and not result.dirty:
            self.reason = result.reason
            return (*self._learn(w.WeightsUnchanged(), now), *self._fail(command, Step.TRANSFER, result.reason))
        if not isinstance(result, Received) or not (command.table or result.table):
            incomplete = "the transfer ended without a receipt or a table"
            reason = result.reason if isinstance(result, OperationFailed) else incomplete
            self.reason = f"version {command.version} was not taken completely: {reason}"
            return (*self._learn(w.WeightsDirtied(), now), *self._fail(command, Step.TRANSFER, reason))
        arrived = self._learn(w.WeightsDirtied(), now)
        if not command.table:  # it came with the tensors
            command = msgspec.structs.replace(command, table=Digest(result.table))
        transferred = self._answers.transferred(command, result, seconds)
        if result.verified_by:
            return (*arrived, transferred, *self._proven(command, VerificationPassed(result.verified_by), 0.0, now))
        return (*arrived, transferred, *self._run(Verify(command, result.checked), command, now))

    def _verifying_ended(self, command: Transfer, result: Result, seconds: float, now: float) -> tuple[Effect, ...]:
        if not isinstance(result, VerificationPassed):
            reason = result.reason if isinstance(result, OperationFailed) else "the check ended without a proof"
            self.reason = f"version {command.version} was not proven: {reason}"
            doubted = isinstance(result, OperationFailed) and result.doubted
            return (
                *(self._learn(w.WeightsForeign(), now) if doubted else ()),
                *self._fail(command, Step.VERIFY, reason),
            )
        return self._proven(command, result, seconds, now)

    def _proven(self, command: Transfer, result: VerificationPassed, seconds: float, now: float) -> tuple[Effect, ...]:
        held = HeldVersion(version=command.version, manifest=command.manifest, table=command.table)
        loaded = self._learn(w.VersionVerified(held), now)
        self._reached, self.reason = Step.VERIFY, f"holds version {command.version}, which is not committed yet"
        # Requests wait: the server gets its label, and the state is written, while the coordinator commits.
        label = self._run(Label(command.version, HOLD_S), None, now)
        return (self._answers.verified(command, result, seconds), *label, *loaded)

    def _recognizing_ended(self, held: HeldVersion, result: Result, now: float) -> tuple[Effect, ...]:
        """The coordinator, which learns of the version by a heartbeat, has it served."""
        if not isinstance(result, VerificationPassed):
            why = result.reason if isinstance(result, OperationFailed) else "the check ended without a proof"
            self.reason = f"{self.reason}. It was not proven to hold version {held.version}: {why}"
            return (Note("server_not_proven", self.reason),)
        proven = self._learn(w.VersionVerified(held), now)
        self.reason = f"holds version {held.version} by its digests, and waits to be told to serve it"
        return (*proven, Note("server_proven", self.reason))

    def _labeling_ended(self, version: int, result: Result, now: float) -> tuple[Effect, ...]:
        """A server without its label by now gets it before it is resumed; one that is in doubt does not get so far."""
        if isinstance(result, OperationFailed) and result.doubted:
            self.reason = f"version {version} is in doubt: {result.reason}"
            return (*self._learn(w.WeightsForeign(), now), Note("version_doubted", result.reason))
        if isinstance(result, OperationFailed):
            return (Note("label_failed", result.reason),)
        self._labeled = Version(version)
        return ()

    def _releasing_ended(
        self, release: ReleaseServer, command: ToEngine | None, result: Result, seconds: float, now: float
    ) -> tuple[Effect, ...]:
        if isinstance(result, OperationFailed):
            # it may happen all the same, or later
            doubted = self._learn(w.WeightsForeign() if result.doubted else w.WeightsDoubted(), now)
            self.reason = result.reason if result.doubted else self.reason
            if command is None:
                return (*doubted, Note("resume_failed", result.reason))
            return (*doubted, *self._fail(command, Step.RESUME, result.reason))
        self._stilled = ""
        self.pause_lease.doubted &= not release.look
        if command is None and (release.version is not None or self.weights.state is WeightState.ORPHANED):
            self.reason = f"serves version {self.weights.version}, verified and not known to be committed"
            return (*self._learn(w.OrphanServed(), now), Note("orphan_served", self.reason))
        self._reached, self.reason = None, ""
        freed = w.ServerResumed(ordered=command is not None) if release.version is None else w.VersionCommitted()
        kept = self._learn(freed, now)
        if command is None:
            return (*kept, Note("resumed_by_itself", f"nothing heard for {self.pause_lease.lease_s:g} s"))
        return (*kept, self._serving(command, seconds, now))

    # -- answers -------------------------------------------------------------------------------------------------------

    def _serving(self, command: ToEngine, seconds: float, now: float) -> Answer:
        paused_s = now - self._paused_at if self._paused_at is not None else 0.0
        self._paused_at = None
        return self._answers.serving(command, self.held.version if self.held else None, seconds, paused_s)

    def _fail(self, command: ToEngine, step: Step, reason: str) -> tuple[Effect, ...]:
        failed = self._answers.failed(command, step, self.view().health, reason)
        return (failed, Note("step_failed", f"{step.value}: {reason}"))

    def _remember(self) -> Remember:
        orphaned = self.weights.state is WeightState.ORPHANED
        return self._recorded.remember(
            self.identity, self.health, self.held, self.epoch, self._checkpoint, orphaned=orphaned
        )

    def _arm(self) -> tuple[Effect, ...]:
        """Write the record that a transfer needs while the server is being paused for it."""
        return self._recorded.write_ahead(self.identity, self.health, self.epoch, self._checkpoint)

    def _set_right(self) -> tuple[Effect, ...]:
        """Write the record again if it was written ahead of a transfer that does not begin."""
        pausing = self._running is not None and isinstance(self._running.operation, PauseServer)
        return () if pausing or not self._recorded.ahead else (self._remember(),)

    # -- the coordinator and the server come and go --------------------------------------------------------------------

    def _welcomed(self, welcome: Welcome, now: float) -> tuple[Effect, ...]:
        """Keep weights and pause as they are: the coordinator settles every engine after its Hello.

        Unless another sidecar had the server since the record was written: then nothing is known of its weights. The
        record is written anew in any case, so that the coordinator sees in the next Hello which one it is.
        """
        self.pause_lease.accepted, self._taken, self._committed = True, "", welcome.committed
        self._recorded.welcomed = welcome.request
        effects = self._doubt(now) if welcome.doubted and self.up else ()
        if self.identity and self._recorded.follows(self.identity) != welcome.request:
            effects = (*effects, self._remember())
        if welcome.boot == self.pause_lease.boot:
            return effects
        self.pause_lease.boot = welcome.boot
        return (*effects, ForgetAnswers())

    def _doubt(self, now: float) -> tuple[Effect, ...]:
        self._prepared = self._reached = self._labeled = self._paused_at = None
        self._answers.forget()
        return (*self._shorten(), *self._new_generation(self._server, now, restarted=False))

    def _server_taken(self, reason: str) -> tuple[Effect, ...]:
        """Nothing is done to the server until a welcome: another sidecar pauses, loads and resumes it."""
        self.pause_lease.boot, self.pause_lease.accepted, self.pause_lease.ours = 0, False, False
        self._taken = reason
        return (*self._shorten(), Note("server_taken", reason))

    def _found(self, event: ServerFound, now: float) -> tuple[Effect, ...]:
        was_up, known = self.up, self.identity or self._recorded.identity
        self.up, self._server = True, event
        if self.identity == event.identity:
            if not was_up:
                self.reason = "" if self.health is EngineHealth.CLEAN else f"it answers again: {self.weights}"
            return () if was_up else (Note("server_answers_again"),)
        relaunched = bool(self.identity) and not event.undefined
        self.identity = event.identity
        self._prepared = self._reached = self._labeled = self._paused_at = None
        self._stilled = ""
        self.pause_lease.anew(now, accepted=not relaunched)
        self._answers.forget()
        told = (JoinAgain(),) if relaunched else ()
        return (*self._shorten(), *self._recognize(event, known, now), *told)

    def _shorten(self) -> tuple[Effect, ...]:
        """End the running operation soon: its result is not needed, or its server is gone."""
        if self._running is None:
            return ()
        self._running.ending = True
        return (Cancel(self._running.number),)

    def _recognize(self, event: ServerFound, known: str, now: float) -> tuple[Effect, ...]:
        record = self._recorded.record
        if known == event.identity and record is not None and not _contradicts(event.label, record):
            unknown = record.health is EngineHealth.PENDING and record.held is None  # needs no round to be written
            self.pause_lease.ours = not unknown
            known_again = self._learn(w.ServerRecognized(record.health, record.held, record.orphaned), now)
            self._checkpoint = record.checkpoint or event.checkpoint
            self.reason = "" if self.health is EngineHealth.CLEAN else "found as an earlier agent left it"
            return (*known_again, Note("server_recognized", self.health.value))
        return self._new_generation(event, now, restarted=bool(known))

    def _new_generation(self, event: ServerFound, now: float, *, restarted: bool) -> tuple[Effect, ...]:
        """Clean only if no update can have happened before: else the weights of a launch are an unknown version."""
        self._label = "" if event.undefined else event.label
        self._checkpoint, self.pause_lease.ours = (event.undefined and self._checkpoint) or event.checkpoint, False
        changed = _changed(event.label)
        updated = event.undefined or self._recorded.commanded or self.epoch > 0 or changed
        kept = self._learn(w.ServerLaunched(fresh=not updated), now)
        if not updated:
            self.reason = ""
            return (*kept, Note("server_found", event.identity))
        self.reason = event.lost if restarted and not changed else _without_record(event.label)
        return (*kept, Note("server_pending", self.reason))

    def _gone(self, event: ServerGone) -> tuple[Effect, ...]:
        before, reason = self.reason, event.reason
        self.reason = reason if event.answers else f"the server does not answer: {reason}"
        if not self.up:
            return () if self.reason == before else (Note("server_lost", reason),)
        self.up = False
        self._answers.forget()
        reached, self._reached = self._reached, None
        if reached is None or self._running is not None:  # the running operation will fail by itself, and reply
            return (*self._shorten(), Note("server_lost", reason))
        failed = self._answers.lost(self.epoch, reached, self.view().health, self.reason)
        return (failed, Note("server_lost", reason))

    def _watched(self, event: ServerWatched, now: float) -> tuple[Effect, ...]:
        """Compare what the server reveals with what this sidecar has done to it: the rest is another party's work.

        Weights or a label that this sidecar did not set are an unknown version. A pause leaves the weights as they are:
        the engine is not ready before it generates, and an operator may have meant it. A server that must not generate
        and does is paused again.
        """
        if not self.up or self._running is not None or event.number != self._numbers:
            return ()
        if event.changed and self.weights.state not in {WeightState.UNKNOWN, WeightState.DIRTY}:
            self.reason, self._labeled, self._stilled = event.changed, None, ""
            return (*self._learn(w.WeightsForeign(), now), ForeignAct("weights", event.changed))
        if event.generates is True and self.paused is True:
            return (*self._learn(w.WeightsDoubted(), now), ForeignAct("resume", f"it was paused: {self.weights}"))
        if event.generates is True and self._stilled:
            self._stilled = ""
            return (Note("server_generates_again"),)
        if event.generates is False and self.paused is False:
            return self._stilled_by_another(now)
        return ()

    def _stilled_by_another(self, now: float) -> tuple[Effect, ...]:
        told = () if self._stilled else (ForeignAct("pause", _STILLED),)
        self._stilled = _STILLED
        return (*told, *(self._unasked(ReleaseServer(None, False, HOLD_S), now) if self._ends_pauses else ()))

    # -- without a command ---------------------------------------------------------------------------------------------

    def _tick(self, heard_at: float, now: float) -> tuple[Effect, ...]:
        """The pause lease: a clean server must not stay paused because the coordinator is gone.

        An operation that was asked to end is asked again: it may have been between two waits that can be ended.
        """
        if self._running is not None and self._running.ending:
            return (Cancel(self._running.number),)
        ours = self.up and self.health is not EngineHealth.CLEAN and self.pause_lease.given
        if now > self._ticked_at + ASLEEP_S:  # this process stood still: what the coordinator said meanwhile is unread
            self._awake_since = now
        self._ticked_at = now
        silent_s = now - max(heard_at, self.pause_lease.quiet_since)
        self._orphaned = ours and silent_s >= self._orphaned_s and now - self._awake_since >= AWAKE_S
        if self._orphaned and self._orphans is OrphanPolicy.SERVE_VERIFIED and self.held and self.paused is not False:
            version, labeled = self.held.version, self._labeled == self.held.version
            return self._unasked(ReleaseServer(version, self._flush, HOLD_S, labeled), now)
        if not self.owes_resume or not self.pause_lease.over(heard_at, now):
            return ()
        return self._unasked(ReleaseServer(None, False, HOLD_S), now)

    def _hold(self, now: float) -> tuple[Effect, ...]:
        """Pause a running server whose weights are not clean, such as one launched again during a transfer."""
        may_generate = self.health is EngineHealth.CLEAN or self.weights.state is WeightState.ORPHANED
        held_back = may_generate or self.paused is True
        return () if held_back or not self.up else self._unasked(PauseServer(PauseMode.RETRACT.value, HOLD_S), now)

    def _prove(self, now: float) -> tuple[Effect, ...]:
        """Compare the weights of an unknown, paused server with the committed version whose label it has. Once."""
        held, idle = self._committed, self._running is None and self.paused is True
        unknown = self.up and idle and self.weights.state is WeightState.UNKNOWN and self.pause_lease.accepted
        if held is None or not unknown or self._label != str(held.version):
            return ()
        self._label = ""
        return self._run(Recognize(held), None, now)

    def _unasked(self, operation: Operation, now: float) -> tuple[Effect, ...]:
        lease, dirty = self.pause_lease, self.health is EngineHealth.DIRTY
        given = lease.given or (isinstance(operation, PauseServer) and lease.may_pause(now, at_once=dirty))
        return self._run(operation, None, now) if given and self._running is None and lease.due(now) else ()


def _contradicts(label: str, record: StateRecord) -> bool:
    """Whether a clean record is not of what the server holds now: another sidecar, or a stranger, has changed it since.

    A server has the label of its version before a record calls it clean.
    """
    served = "" if record.held is None else str(record.held.version)
    return record.health is EngineHealth.CLEAN and served != (label if _changed(label) else "")


def _changed(label: str) -> bool:
    """Whether a server with this label may hold other weights than those of its launch."""
    return label.isdigit() or label.startswith(INCOMPLETE)


def _without_record(label: str) -> str:
    """Why a server with this label is unknown, and the remedy."""
    by = "its sidecar's record is lost, or another party labeled it" if _changed(label) else "this sidecar is new to it"
    found = "an update of its weights began and did not end" if label.startswith(INCOMPLETE) else f"labeled {label!r}"
    return f"{found}, and nothing is known of it here ({by}): waits for the next version, or a resync"


STEP_OF: Final[dict[type[Operation], Step]] = {
    Validate: Step.PREPARE,
    PauseServer: Step.PAUSE,
    ReceiveDoubleBuffered: Step.TRANSFER,
    Receive: Step.TRANSFER,
    Verify: Step.VERIFY,
    Recognize: Step.VERIFY,
    Label: Step.RESUME,
    ReleaseServer: Step.RESUME,
}
"""The step of the round that has failed when an operation fails."""


class RunningOperation(msgspec.Struct):
    """The one operation that the worker thread carries out."""

    number: int
    operation: Operation
    command: ToEngine | None
    """The command it serves; null for an operation that no command asked for."""
    started: float
    identity: str
    """Process generation it was started on. Its result tells little about any other."""
    ending: bool = False
    """True once its result is not needed: it was asked to end soon, and is asked again until it does."""


class ServerView(msgspec.Struct, frozen=True):
    """State of the engine as heartbeats, the HTTP port and the log show it."""

    up: bool
    health: EngineHealth
    held: HeldVersion | None
    paused: bool
    weights: WeightState
    version: Version | None
    """The version that `weights` refers to: clean(7), staged(8). Null: none, or the weights of the launch."""
    reached: Step | None
    """The last completed step of the round of `epoch`; null without a round."""
    epoch: Epoch
    doing: str
    reason: str
    operations: int = 0
    """Operations that this sidecar has begun."""
    memory_released: bool = msgspec.field(default=False, name="lent")
    """True if the server has released the memory of its weights, or is about to."""
    follows: str = ""
    """Key of the last welcomed `Hello` when what is known of the server was written down."""
    checkpoint: str = ""
    """Folder of the checkpoint that the server was launched with; after a load from files the server names another."""
    orphaned: bool = False
    """True while the server may not be clean, and no coordinator was heard of for the setting `orphaned_s`."""
    declined: str = ""
    """Why the last version that was announced does not fit the server; empty once one does."""
    begins_with: tuple[Version | None, ...] = ()
    """Versions that a request may begin with that reaches the server now; null: the weights of its launch.

    The first is the one that it holds; a second one is of the round under way, found to fit, and may be swapped in at
    any moment. Empty while neither is known: the weights are dirty or unknown, or the server does not generate."""
    paused_at: float | None = None
    """When this sidecar paused the server, on the clock of its events; null while it is not paused."""

    @property
    def settled(self) -> bool:
        """Whether the server generates from clean weights, outside of any round."""
        return self.health is EngineHealth.CLEAN and self.reached is None and not self.paused

    @property
    def on_its_way(self) -> bool:
        """Not clean because of a round under way: weights arrive, are verified, or wait for the commit."""
        return self.up and (self.doing in {name_of(Receive), name_of(Verify)} or self.reached is Step.VERIFY)


class QueuedCommands:
    """Commands that came while an operation runs: the newest, or a `Pause` and the `Transfer` that follows it."""

    def __init__(self) -> None:
        self._commands: tuple[ToEngine, ...] = ()

    @property
    def next(self) -> ToEngine | None:
        """The command to be carried out first."""
        return self._commands[0] if self._commands else None

    def add(self, command: ToEngine) -> None:
        """Queue `command`; it replaces the queued one, unless it is the transfer that follows that pause."""
        first = self.next
        follows = isinstance(first, Pause) and isinstance(command, Transfer) and first.epoch == command.epoch
        self._commands = (first, command) if first is not None and follows else (command,)

    def take(self) -> ToEngine | None:
        """Remove and return the next command."""
        command = self.next
        self._commands = self._commands[1:]
        return command

    def forget_transfer(self, epoch: int) -> None:
        """Drop a transfer up to `epoch`: the pause that it follows has failed."""
        self._commands = tuple(each for each in self._commands if each.epoch > epoch or not isinstance(each, Transfer))


class PendingReplies:
    """Makes the replies of one engine, each under a key of its own, and remembers those of the current epoch."""

    def __init__(self, channel: Channel, incarnation: str) -> None:
        self._channel = channel
        self._generation = incarnation
        self._keys = 0
        self._given: dict[type[ToEngine], tuple[EngineMessage, ...]] = {}

    def forget(self) -> None:
        """Drop all replies: none of them answers a command that comes from now on."""
        self._given.clear()

    def gave(self, kind: type[ToEngine], epoch: Epoch) -> bool:
        """Whether a command of this kind got a reply at `epoch`."""
        return any(message.epoch == epoch for message in self._given.get(kind, ()))

    def again(self, command: ToEngine) -> tuple[Answer, ...]:
        """The earlier replies to `command`; empty when it has to be carried out."""
        given = self._given.get(type(command), ())
        return tuple(Answer(message) for message in given if message.epoch == command.epoch)

    def done(self, kind: type[Prepared | Paused], command: ToEngine, seconds: float) -> Answer:
        """Reply that the manifest fits, or that the server is paused."""
        message = kind(request=self._key(), channel=self._channel, epoch=command.epoch, seconds=seconds)
        return self._give(command, message)

    def transferred(self, command: Transfer, received: Received, seconds: float) -> Answer:
        """Reply that every bucket was loaded."""
        message = Transferred(
            request=self._key(),
            channel=self._channel,
            epoch=command.epoch,
            bytes=received.bytes,
            buckets=received.buckets,
            seconds=seconds,
        )
        return self._give(command, message)

    def verified(self, command: Transfer, proven: VerificationPassed, seconds: float) -> Answer:
        """Reply that the weights are the version. Sent after `transferred`, and repeated together with it."""
        message = Verified(
            request=self._key(),
            channel=self._channel,
            epoch=command.epoch,
            version=command.version,
            table=command.table,
            verified_by=proven.verified_by,
            seconds=seconds,
        )
        return self._give(command, message, after=self._given.get(Transfer, ()))

    def serving(self, command: ToEngine, version: Version | None, seconds: float, paused_s: float) -> Answer:
        """Reply which version is served. Made anew each time: it is a fact of now, not of the first command."""
        message = Serving(
            request=self._key(),
            channel=self._channel,
            epoch=command.epoch,
            version=version,
            seconds=seconds,
            paused_s=paused_s,
        )
        return Answer(message)

    def failed(self, command: ToEngine, step: Step, health: EngineHealth, reason: str) -> Answer:
        """Reply that `step` of `command` failed, and the server is `health` now."""
        lost = self.lost(command.epoch, step, health, reason)
        if isinstance(command, Prepare | Pause | Transfer):
            earlier = self._given.get(type(command), ()) if step is Step.VERIFY else ()
            return self._give(command, lost.message, after=earlier)
        return lost

    def lost(self, epoch: Epoch, step: Step, health: EngineHealth, reason: str) -> Answer:
        """Report a failure between two commands. Not repeated: the next command finds the server as it is then."""
        message = Failed(
            request=self._key(),
            channel=self._channel,
            epoch=epoch,
            step=step,
            health=health,
            reason=reason[:_REASON],
        )
        return Answer(message)

    def _give(self, command: ToEngine, message: EngineMessage, after: tuple[EngineMessage, ...] = ()) -> Answer:
        self._given[type(command)] = (*after, message)
        return Answer(message)

    def _key(self) -> RequestId:
        self._keys += 1
        return RequestId(f"{self._generation}-{self._keys}")


class PauseLease:
    """The lease of one process generation of the server."""

    def __init__(self) -> None:
        self.boot = 0
        """Boot number of the coordinator that welcomed this sidecar last; 0 before."""
        self.ours = False
        """True if the record shows that a round of this sidecar met this process generation."""
        self.accepted = True
        """False for a process generation with which the coordinator has not welcomed this sidecar yet."""
        self._found_at = float("-inf")
        """When that was found."""
        self.lease_s = UNSETTLED_S
        """How long a clean server stays paused without news."""
        self.quiet_since = 0.0
        """Earliest time from which silence counts."""
        self.doubted = False
        """True if an operation failed since the server was last seen to generate; the cause is not known here."""
        self._tried_at = float("-inf")

    def anew(self, now: float, *, accepted: bool) -> None:
        """Begin for another process generation."""
        self.accepted, self._found_at = accepted, now
        self.quiet_since, self.lease_s, self.doubted = now, UNSETTLED_S, False

    @property
    def given(self) -> bool:
        """Whether the sidecar may pause or resume the server unasked: a stray one must not touch the server of another.

        A welcome with this process generation allows it, or the record of a round on it.
        """
        return (self.boot > 0 and self.accepted) or self.ours

    def may_pause(self, now: float, *, at_once: bool) -> bool:
        """Whether it may pause another process generation, of which the coordinator has said nothing.

        Where no answer comes for `UNWELCOMED_S`; or `at_once`, if a transfer of this sidecar may have met it.
        """
        return self.boot > 0 and (at_once or now >= self._found_at + UNWELCOMED_S)

    def over(self, heard_at: float, now: float) -> bool:
        """Whether `heard_at`, when the coordinator was last heard of, is too long ago."""
        return now >= max(heard_at, self.quiet_since) + self.lease_s

    def due(self, now: float) -> bool:
        """Whether it is time for another try; it counts as made."""
        if now < self._tried_at + _TRY_AGAIN_S:
            return False
        self._tried_at = now
        return True


def name_of(operation: Operation | type[Operation]) -> str:
    """Label of an operation in metrics and in ``/status``: independent of the class name."""
    return str(operation.__struct_config__.tag)


def trace_line(event: Event) -> str:
    """A line of the event trace that errors carry."""
    match event:
        case Commanded(message):
            return f"told {message.kind} of epoch {message.epoch}"
        case Operated(number, result):
            broken = f": {result.reason}" if isinstance(result, OperationFailed) else ""
            return f"operation {number} ended, {type(result).__name__}{broken}"
        case ServerFound(identity, label):
            return f"the server is {identity}, labeled {label!r}"
        case ServerWatched(_, generates, changed):
            return f"the server was looked at: generates {generates}, {changed or 'unchanged'}"
        case ServerGone(reason):
            return f"the server is gone: {reason}"
        case _:
            return type(event).__name__
