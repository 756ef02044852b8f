"""A deployment without sockets, threads or time: one coordinator, with engines and trainers that answer correctly.

Agents answer at once unless a test told them otherwise. The journal is a list of records; a restart builds a new
machine from it. `check()` runs after every event.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from weightbus.control.machine.channel import ChannelOwner, Restored, history_with, round_reply_of
from weightbus.control.machine.coordinator import Coordinator
from weightbus.control.machine.effects import (
    Acknowledge,
    AnyEffect,
    AnyEvent,
    AnyObservation,
    AnyRecord,
    ChannelForgotten,
    Committed,
    ConnectionLost,
    EpochRaised,
    EpochTaken,
    Evict,
    MessageReceived,
    Observe,
    Peer,
    Persist,
    Persisted,
    PersistFailed,
    ReadinessChanged,
    Refusal,
    RoundClosed,
    RoundReadiness,
    SendTo,
    SendToAll,
    Tick,
    Unsent,
)
from weightbus.control.machine.routing import Router
from weightbus.control.machine.states import Limits
from weightbus.control.protocol.messages import (
    Abort,
    Ack,
    Acquire,
    AgentId,
    Alive,
    Bye,
    Channel,
    Commit,
    Digest,
    Endpoint,
    EngineHealth,
    EngineInfo,
    Epoch,
    Failed,
    Granted,
    Heartbeat,
    HeldVersion,
    Hello,
    Incarnation,
    Message,
    Offered,
    Pause,
    Paused,
    Policy,
    Prepare,
    Prepared,
    Publish,
    PutBlob,
    RefusalCode,
    Refused,
    RequestId,
    Role,
    RoundDone,
    Send,
    Sent,
    Serving,
    Step,
    ToCoordinator,
    Topology,
    TrainerInfo,
    Transfer,
    Transferred,
    TransportKind,
    Verified,
    Version,
    Welcome,
    Withdraw,
)
from weightbus.control.server.transport_plan import PlanView, plan_fleet

CHANNEL = Channel("policy")
MANIFEST = b"the layout"
LIMITS = Limits()


def digest(blob: bytes) -> Digest:
    return Digest(hashlib.sha256(blob).hexdigest())


def table_of(version: int) -> bytes:
    return f"digests of {version}".encode()


def engine_info(name: str = "e0", **changes: object) -> EngineInfo:
    info = EngineInfo(
        url=f"http://{name}:30000",
        server_version="0.5.23",
        tp=1,
        pp=1,
        dp=1,
        device="cpu",
        host="h0",
        transports=(TransportKind.LOCAL, TransportKind.DISTRIBUTED, TransportKind.DISK),
    )
    return msgspec.structs.replace(info, **changes)


def trainer_info(**changes: object) -> TrainerInfo:
    info = TrainerInfo(host="h0", device="cpu", ranks=2, transports=(TransportKind.LOCAL, TransportKind.DISTRIBUTED))
    return msgspec.structs.replace(info, **changes)


def replay(records: Sequence[AnyRecord]) -> dict[Channel, Restored]:
    """What a journal with these records restores: the naive oracle for sqlite_journal.py."""
    channels: dict[Channel, Restored] = {}
    for record in records:
        match record:
            case ChannelForgotten():
                channels.pop(record.channel, None)
            case EpochTaken() | EpochRaised():
                known = channels.get(record.channel, Restored())
                run = record.run if isinstance(record, EpochTaken) else ""
                owner = ChannelOwner(run, record.holder) if run and isinstance(record, EpochTaken) else known.owner
                epoch = max(known.epoch, record.epoch)
                channels[record.channel] = msgspec.structs.replace(known, epoch=epoch, owner=owner)
            case Committed():
                held = HeldVersion(version=record.version, manifest=Digest(record.manifest), table=Digest(record.table))
                known = channels[record.channel]
                channels[record.channel] = msgspec.structs.replace(
                    known,
                    committed=held,
                    committed_epoch=record.epoch,
                    history=history_with(known.history, record),
                    answers={**known.answers, record.request: round_reply_of(record)},
                )
            case RoundClosed():
                known = channels[record.done.channel]
                answers = {**known.answers, record.request: round_reply_of(record)}
                channels[record.done.channel] = msgspec.structs.replace(known, answers=answers)
            case _:
                pass
    return channels


def one_by_one(effects: Iterable[AnyEffect]) -> Iterator[AnyEffect]:
    """`effects`, with each message to each agent by itself."""
    for effect in effects:
        match effect:
            case SendToAll():
                yield from (SendTo(peer, effect.message) for peer in effect.peers)
            case Acknowledge():
                yield from (SendTo(peer, Ack(request=answer.request)) for peer, answer in effect.requests)
            case _:
                yield effect


def readiness_of(observed: Iterable[AnyObservation]) -> Iterator[tuple[AgentId, bool]]:
    """Engines that entered the ready list (True) or left it, one after the other."""
    for each in observed:
        match each:
            case ReadinessChanged():
                yield each.engine, each.ready
            case RoundReadiness():
                yield from ((engine, each.ready) for engine in each.engines)
            case _:
                pass


class Agent:
    """What trainers and engines have in common: a name, an incarnation, a connection."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = AgentId(name)
        self.lives = itertools.count(1)
        self.incarnation = Incarnation("")
        self.peer = Peer(b"")
        self.alive = False
        self.inbox: list[Message] = []
        self.deaf = False
        """Takes no messages, and answers none; its heartbeats go on."""
        self.pending: dict[RequestId, tuple[ToCoordinator, bytes | None]] = {}
        """Requests without a reply, repeated with every heartbeat."""
        self.boot = 0
        self.said: list[ToCoordinator] = []
        self.supports_deferred_digests = False
        """It says so after every `Welcome`."""

    def key(self) -> RequestId:
        return RequestId(f"{self.incarnation}-{next(self.world.keys)}")

    def live(self) -> None:
        """Start as a new incarnation on a new connection."""
        self.incarnation = Incarnation(f"{self.name}.{next(self.lives)}")
        self.pending.clear()
        self.connect()

    def connect(self) -> None:
        """A new connection of the same incarnation."""
        self.peer = Peer(f"peer{next(self.world.peers)}".encode())
        self.alive = True
        self.say(self.hello())

    def hello(self) -> Hello:
        raise NotImplementedError

    def die(self) -> None:
        """SIGKILL: no message is sent."""
        self.alive = False

    def say(self, message: ToCoordinator, blob: bytes | None = None) -> None:
        if not isinstance(message, Heartbeat | Bye):
            self.pending[message.request] = (message, blob)
            self.said.append(message)
        self.world.deliver(self, message, blob)

    def again(self) -> None:
        """Repeat all requests without a reply."""
        for message, blob in self.pending.values():
            self.world.deliver(self, message, blob)

    def take(self, message: Message) -> None:
        if isinstance(message, Ack | Welcome | Granted) or (
            isinstance(message, Refused) and message.code not in (RefusalCode.NAME_TAKEN, RefusalCode.SERVER_TAKEN)
        ):
            self.pending.pop(message.request, None)
        if isinstance(message, Welcome):
            if message.boot != self.boot:
                self.pending.clear()
            self.boot = message.boot
            if self.supports_deferred_digests:
                self.say(Topology(request=self.key(), supports_deferred_digests=True))
        stranger = isinstance(message, Refused) and message.code is RefusalCode.UNKNOWN_AGENT
        if stranger and not any(isinstance(said, Hello) for said, _ in self.pending.values()):
            self.connect()
        self.inbox.append(message)
        if not self.deaf:
            self.react(message)

    def react(self, message: Message) -> None:
        """Answer as an agent should."""

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(seq=1)

    def got(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.inbox if isinstance(message, kind)]


class Engine(Agent):
    """An engine agent and its server. `weights` is what the server really holds: None for mixed ones."""

    def __init__(self, world: World, name: str, info: EngineInfo) -> None:
        super().__init__(world, name)
        self.info = info
        self.label: int | None = None
        self.weights: int | None = 0
        self.beats = True
        """True: until its first command it sends a heartbeat right after `Welcome`, before one is due."""
        self.generating = True
        self.health = EngineHealth.CLEAN
        self.held: HeldVersion | None = None
        self.memory_released = False
        self.epoch = 0
        self.script: dict[type[Message], Callable[[Message], ToCoordinator | None]] = {}
        """Message type -> what to do instead of the right thing, once."""

    def hello(self) -> Hello:
        info = msgspec.structs.replace(
            self.info, health=self.health, held=self.held, memory_released=self.memory_released
        )
        return Hello(
            request=self.key(),
            agent=self.name,
            role=Role.ENGINE,
            channel=CHANNEL,
            incarnation=self.incarnation,
            engine=info,
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            seq=1, epoch=Epoch(self.epoch), health=self.health, held=self.held, memory_released=self.memory_released
        )

    def fail(
        self, on: type[Message], step: Step, health: EngineHealth = EngineHealth.CLEAN, reason: str = "broke"
    ) -> None:
        """Fail the next `on`."""

        def answer(message: Message) -> ToCoordinator:
            self.health = health
            if health is not EngineHealth.CLEAN:
                self.weights, self.held = None, None
            return self.failed(message, step, reason)

        self.script[on] = answer

    def ignore(self, on: type[Message]) -> None:
        self.script[on] = lambda _message: None

    def failed(self, message: Message, step: Step, reason: str) -> Failed:
        epoch: Epoch = getattr(message, "epoch")  # noqa: B009  # every command has one
        return Failed(request=self.key(), channel=CHANNEL, epoch=epoch, step=step, health=self.health, reason=reason)

    def crash(self) -> None:
        """The server dies with its agent: what comes back are complete weights of the launch."""
        self.die()
        self.weights, self.label, self.held, self.generating = 0, None, None, False
        self.health = EngineHealth.PENDING

    def react(self, message: Message) -> None:
        if isinstance(message, Prepare | Pause | Transfer | Commit | Abort):
            if message.epoch < self.epoch:
                return
            self.epoch = message.epoch
        if isinstance(message, Transfer) and self.generating:
            return  # its pause failed
        if script := self.script.pop(type(message), None):
            if (answer := script(message)) is not None:
                self.say(answer)
            return
        for answer in self.answers(message):
            self.say(answer)

    def answers(self, message: Message) -> list[ToCoordinator]:  # noqa: PLR0911  # one case per command
        common = {"channel": CHANNEL, "epoch": getattr(message, "epoch", 0)}
        match message:
            case Welcome() if self.beats and not self.epoch:
                return [self.heartbeat()]
            case Prepare():
                return [Prepared(request=self.key(), seconds=0.1, **common)]
            case Pause():
                self.generating = False
                return [Paused(request=self.key(), seconds=0.2, **common)]
            case Transfer():
                self.weights, self.health = message.version, EngineHealth.PENDING
                table = message.table or digest(table_of(message.version))  # as its sender says, where it follows
                self.held = HeldVersion(version=message.version, manifest=message.manifest, table=table)
                return [
                    Transferred(request=self.key(), bytes=100, buckets=2, seconds=0.3, **common),
                    Verified(
                        request=self.key(),
                        version=message.version,
                        table=table,
                        verified_by="bucket-digest",
                        seconds=0.4,
                        **common,
                    ),
                ]
            case Commit():
                if self.held is None or self.held.table != message.table:
                    return [self.failed(message, Step.COMMIT, "holds something else")]
                self.label, self.health, self.generating = message.version, EngineHealth.CLEAN, True
                return [Serving(request=self.key(), version=Version(self.label), seconds=0.5, paused_s=1.0, **common)]
            case Abort():
                if self.health is not EngineHealth.CLEAN:
                    return [self.failed(message, Step.RESUME, "not clean")]
                self.generating = True
                label = Version(self.label) if self.label is not None else None
                return [Serving(request=self.key(), version=label, seconds=0.5, paused_s=1.0, **common)]
            case _:
                return []


class Trainer(Agent):
    """A trainer that publishes `version` as soon as it is granted the lease, and plays its part to the end."""

    def __init__(self, world: World, name: str, info: TrainerInfo) -> None:
        super().__init__(world, name)
        self.info = info
        self.version = 0
        self.rollback = self.rollback_publish_only = self.catch_up = False
        self.policy = Policy()
        self.mode = "live"
        self.open_table = False
        """It leaves its tables open, and says them when it has sent."""
        self.says_table: bytes | None = None
        """Instead of the one of its version."""
        self.publishing: Publish | None = None
        self.failed: Mapping[str, str] = {}
        self.spared: tuple[AgentId, ...] = ()
        """Of `failed`, as `Sent` says."""
        self.waits_in: set[int] = set()
        """Epochs of a group that does not form: only `Withdraw` ends the wait for it, and fails all its members."""
        self.sending: Send | None = None
        self.unopened: Mapping[str, str] = {}
        """Engines whose transport cannot be opened."""
        self.offering: Offered | None = None
        self.stop_before: type[Message] | None = None
        """Says nothing from this message on."""

    def hello(self) -> Hello:
        return Hello(
            request=self.key(),
            agent=self.name,
            role=Role.TRAINER,
            channel=CHANNEL,
            incarnation=self.incarnation,
            trainer=self.info,
        )

    def live(self) -> None:
        """A new process knows nothing of what the old one was publishing."""
        self.publishing = None
        super().live()

    def acquire(self, version: int) -> None:
        self.version = version
        self.try_say(Acquire(request=self.key(), channel=CHANNEL, version=Version(version), rollback=self.rollback))

    def put_table(self) -> Digest:
        """Of what it has sent."""
        blob = table_of(self.version) if self.says_table is None else self.says_table
        if blob:
            self.try_say(PutBlob(request=self.key(), digest=digest(blob), page=0, pages=1), blob)
        return digest(blob) if blob else Digest("")

    def try_say(self, message: ToCoordinator, blob: bytes | None = None) -> None:
        if self.stop_before is not None and isinstance(message, self.stop_before):
            self.deaf = True
        if not self.deaf:
            self.say(message, blob)

    def react(self, message: Message) -> None:
        match message:
            case Welcome() if self.publishing:
                self.try_say(self.publishing)
            case RoundDone():
                self.publishing = None
            case Refused() if self.publishing and message.request == self.publishing.request:
                self.publishing = None
                self.acquire(self.version)
            case Granted() if self.version and not self.publishing:
                for blob in (MANIFEST,) if self.open_table else (MANIFEST, table_of(self.version)):
                    self.try_say(PutBlob(request=self.key(), digest=digest(blob), page=0, pages=1), blob)
                self.publishing = Publish(
                    request=self.key(),
                    channel=CHANNEL,
                    epoch=message.epoch,
                    version=Version(self.version),
                    manifest=digest(MANIFEST),
                    table=Digest("") if self.open_table else digest(table_of(self.version)),
                    bytes=100,
                    buckets=2,
                    policy=self.policy,
                    rollback=self.rollback or self.rollback_publish_only,
                    catch_up=self.catch_up,
                    mode=self.mode,
                )
                self.rollback_publish_only = False
                self.try_say(self.publishing)
            case Send():
                self.sending = message
                lacking = {
                    each.engine: self.unopened[each.engine]
                    for each in message.receivers
                    if each.engine in self.unopened
                }
                kinds = dict.fromkeys(each.transport for each in message.receivers if each.engine not in lacking)
                offers = tuple(Endpoint(transport=kind, address=f"at-{kind}") for kind in kinds)
                self.offering = Offered(
                    request=self.key(), channel=CHANNEL, epoch=message.epoch, offers=offers, failed=lacking
                )
                self.try_say(self.offering)
            case Withdraw() if self.sending and message.epoch == self.sending.epoch and message.epoch in self.waits_in:
                members = [AgentId(each.engine) for each in self.sending.receivers]
                failed = {name: message.engines.get(name, "the group broke") for name in members}
                spared = tuple(name for name in members if name not in message.engines)
                self.sending = None
                self.try_say(
                    Sent(request=self.key(), channel=CHANNEL, epoch=message.epoch, failed=failed, spared=spared)
                )
            case Ack() if (
                self.offering and message.request == self.offering.request and self.offering.epoch in self.waits_in
            ):
                self.offering = None
            case Ack() if self.offering and message.request == self.offering.request:
                sent = Sent(
                    request=self.key(),
                    channel=CHANNEL,
                    epoch=self.offering.epoch,
                    failed=dict(self.failed),
                    table=self.put_table() if self.open_table else Digest(""),
                    spared=self.spared,
                )
                self.offering = None
                self.try_say(sent)
            case _:
                pass

    @property
    def done(self) -> RoundDone | None:
        found = self.got(RoundDone)
        last = found[-1] if found else None
        assert last is None or isinstance(last, RoundDone)
        return last


def check_refusals(effects: tuple[AnyEffect, ...]) -> None:
    """Every refusal is in the metrics and the log too, whichever part of the machine made it."""
    sent = [each.message.code for each in effects if isinstance(each, SendTo) and isinstance(each.message, Refused)]
    noted = [each.what.code for each in effects if isinstance(each, Observe) and isinstance(each.what, Refusal)]
    assert sent == noted, f"refused {sent}, counted {noted}"


class World:
    """Everything, and the time."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.stride = 1
        """By how much the next start raises the epochs."""
        self.now = 0.0
        self.records: list[AnyRecord] = []
        self.boots = 0
        self.epochs: dict[Channel, Epoch] = {}
        self.peers = itertools.count(1)
        self.keys = itertools.count(1)
        self.agents: dict[str, Agent] = {}
        self.transcript: list[str] = []
        self.observed: list[AnyObservation] = []
        self.disk_full = False
        self.crash_on: Callable[[AnyEffect], bool] = lambda _effect: False
        """The coordinator dies right before it carries out such an effect."""
        self.crashed = False
        self.lose: Callable[[Message], bool] = lambda _message: False
        """Messages that get lost on the way."""
        self.unsendable: Callable[[Agent, Message], bool] = lambda _agent, _message: False
        """Messages that are none that could travel."""
        self.queue: list[tuple[Agent, ToCoordinator, bytes | None]] = []
        self.boot()

    def boot(self) -> None:
        """Start a coordinator on the journal."""
        self.boots += 1
        known: dict[Channel, Restored] = {}
        for name, each in replay(self.records).items():  # a boot raises every epoch, durably
            self.epochs[name] = Epoch(max(each.epoch, self.epochs.get(name, 0)) + self.stride)
            known[name] = msgspec.structs.replace(each, epoch=self.epochs[name])
        self.machine = Coordinator(self.limits, self.boots, Router(), known, stride=self.stride)
        self.crashed = False

    def restart(self) -> None:
        """The coordinator dies and comes back; every agent finds out and says Hello."""
        self.queue.clear()
        self.boot()
        for agent in self.agents.values():
            if agent.alive:
                agent.connect()
        self.settle()

    def engine(self, name: str, *, supports_deferred_digests: bool = False, **changes: object) -> Engine:
        engine = Engine(self, name, engine_info(name, **changes))
        engine.supports_deferred_digests = supports_deferred_digests
        self.agents[name] = engine
        engine.live()
        self.settle()
        return engine

    def trainer(self, name: str = "trainer", *, supports_deferred_digests: bool = False, **changes: object) -> Trainer:
        trainer = Trainer(self, name, trainer_info(**changes))
        trainer.supports_deferred_digests = supports_deferred_digests
        self.agents[name] = trainer
        trainer.live()
        self.settle()
        return trainer

    def deliver(self, agent: Agent, message: ToCoordinator, blob: bytes | None = None) -> None:
        self.queue.append((agent, message, blob))

    def settle(self) -> None:
        """Deliver messages until no agent has one left."""
        while self.queue and not self.crashed:
            self.step()

    def step(self) -> None:
        """Deliver one message."""
        agent, message, blob = self.queue.pop(0)
        if agent.alive and not self.lose(message):
            self.note(f"{agent.name} -> {brief(message)}")
            self.handle(MessageReceived(peer=agent.peer, message=message, blob=blob))

    def handle(self, event: AnyEvent) -> tuple[AnyEffect, ...]:
        """Give the machine one event, carry out what it asks, and check it."""
        effects = self.machine.handle(event, self.now)
        check_refusals(effects)
        for effect in one_by_one(effects):
            if self.crash_on(effect):
                self.crashed = True
                self.note("** the coordinator dies **")
                return effects
            self.perform(effect)
            if self.crashed:
                return effects
        self.machine.check()
        return effects

    def perform(self, effect: AnyEffect) -> None:  # noqa: C901  # one case per effect
        match effect:
            case Persist():
                if self.disk_full:
                    self.note(f"   disk full: {brief(effect.record)}")
                    self.handle(PersistFailed(token=effect.token, reason="disk full"))
                else:
                    self.note(f"   journal {brief(effect.record)}")
                    self.records.append(effect.record)
                    self.handle(Persisted(token=effect.token))
            case SendTo():
                for agent in self.agents.values():
                    if agent.peer == effect.peer and agent.alive and self.unsendable(agent, effect.message):
                        self.handle(Unsent(peers=(effect.peer,), message=effect.message, reason="could not be sent"))
                        return
                    if agent.peer == effect.peer and agent.alive:
                        if not isinstance(effect.message, Alive):
                            self.note(f"   {agent.name} <- {brief(effect.message)}")
                        if not self.lose(effect.message):
                            agent.take(effect.message)
                        return
                self.handle(ConnectionLost(peer=effect.peer))
            case Observe():
                self.observed.append(effect.what)
            case Evict():
                pass
            case SendToAll() | Acknowledge():
                raise AssertionError("taken apart before")

    def advance(self, seconds: float) -> None:
        """Let time pass, with heartbeats and every timer on the way."""
        until = self.now + seconds
        while self.now < until and not self.crashed:
            self.now = min(until, self.now + self.limits.heartbeat_s)
            for agent in self.agents.values():
                if agent.alive:
                    self.handle(MessageReceived(peer=agent.peer, message=agent.heartbeat()))
                    agent.again()
                    self.settle()
            deadline = self.machine.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.handle(Tick())
                self.settle()

    def advance_until(self, what: Callable[[], bool], limit_s: float = 1000.0) -> None:
        """Let time pass until `what`; fails after `limit_s`."""
        until = self.now + limit_s
        while not what():
            assert self.now < until, "it never happened:\n" + "\n".join(self.transcript[-60:])
            self.advance(self.limits.heartbeat_s)

    def publish(self, trainer: Trainer, version: int) -> RoundDone:
        """A whole round, until the trainer is told how it ended."""
        before = len(trainer.got(RoundDone))
        trainer.acquire(version)
        self.settle()
        self.advance_until(lambda: len(trainer.got(RoundDone)) > before)
        done = trainer.done
        assert done is not None
        return done

    @property
    def channel(self) -> object:
        return self.machine.channels[CHANNEL]

    @property
    def committed(self) -> int | None:
        held = self.machine.channels[CHANNEL].committed
        return held.version if held else None

    @property
    def plan(self) -> PlanView:
        return plan_fleet(self.machine.channels.values(), self.machine.membership)

    @property
    def ready(self) -> tuple[str, ...]:
        view = self.machine.status(self.now).channels[CHANNEL]
        return tuple(sorted(name for name, engine in view.engines.items() if engine.ready))

    def note(self, line: str) -> None:
        self.transcript.append(line)


_LOUD = (
    "epoch",
    "version",
    "code",
    "outcome",
    "step",
    "health",
    "transport",
    "reason",
    "offers",
    "receivers",
    "failed",
    "spared",
)


def brief(message: msgspec.Struct) -> str:
    """One line about a message: its name and its most telling fields."""
    told: list[str] = []
    if isinstance(message, RoundClosed):
        message = message.done
    for name in _LOUD:
        value = getattr(message, name, None)
        if value in (None, "", {}, ()):
            continue
        if name == "receivers":
            value = ",".join(f"{r.engine}/{r.transport}" for r in value)
        elif name == "offers":
            value = ",".join(str(offer.transport) for offer in value)
        told.append(f"{name}={value}")
    if isinstance(message, RoundDone):
        told.extend(f"{report.engine}={report.outcome}" for report in message.engines)
    return " ".join([type(message).__name__, *told])
