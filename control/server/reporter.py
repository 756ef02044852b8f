"""Turns the coordinator's observations into log lines and metrics; decides nothing.

At INFO a version takes a few lines: the lease, engines that left or failed, the end of the round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, assert_never, get_args

import msgspec

from ..journal import Journal
from ..log import get_log
from ..machine import (
    AgentJoined,
    AgentLeft,
    AnyObservation,
    AnyRecord,
    ChannelView,
    EngineAhead,
    EngineFailed,
    EnginePhase,
    JournalChanged,
    LeaseEnded,
    LeaseGranted,
    ReadinessChanged,
    Refusal,
    Restored,
    RoundEnded,
    RoundReadiness,
    RoundState,
    StateEntered,
    StatusView,
    TransferRetried,
)
from ..protocol import AgentId, Channel, EngineMessage, EngineReport, Outcome, RefusalCode, Role
from . import metrics as declared
from .metrics import Metrics

_ROUTINE: Final = frozenset(
    {RefusalCode.UNKNOWN_AGENT, RefusalCode.UNKNOWN_BLOB, RefusalCode.LEASE_HELD, RefusalCode.NOT_LEADER}
)
"""Refusals that are part of a healthy exchange."""
_ANSWERS: Final = frozenset(str(kind.__struct_config__.tag) for kind in get_args(EngineMessage))
"""Tags of engine messages. Those of an epoch that has ended are late, which is normal and needs no action."""
REFUSALS_LOGGED: Final = 20
"""Lines a second. Unknown senders must not fill the disk with the log."""
_QUARANTINED: Final = frozenset({"dirty", "pending"})


class LogLimiter:
    """Limits log lines a second, and counts the suppressed ones."""

    def __init__(self, a_second: int) -> None:
        self._a_second = a_second
        self._left = a_second
        self._until = 0.0
        self._withheld = 0

    def passes(self, now: float) -> bool:
        """True if one more line may be written at `now`."""
        if now >= self._until:
            self._until, self._left = now + 1.0, self._a_second
        if self._left == 0:
            self._withheld += 1
            return False
        self._left -= 1
        return True

    def take_withheld(self) -> int:
        """Number of lines suppressed since the last call."""
        withheld, self._withheld = self._withheld, 0
        return withheld


class ObservationReporter:
    """Reporter of one coordinator. `observe` runs on the loop's thread, `show` on an HTTP thread."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._log = get_log(__name__)
        self._agents: dict[AgentId, tuple[Channel, Role]] = {}
        self._connections: Counter[str] = Counter()
        self._throttled: Counter[AgentId] = Counter()
        self._counted: set[tuple[str, str, str]] = set()
        """Labels of `declared.ENGINE_ROUNDS`."""
        self._refusals = LogLimiter(REFUSALS_LOGGED)
        metrics.set(declared.JOURNAL_WRITABLE, 1)

    def observe(self, what: AnyObservation) -> None:  # noqa: C901  # one case per kind
        """Log and count one observation."""
        match what:
            case RoundReadiness():
                pass  # the end of the round names them all
            case AgentJoined() | AgentLeft():
                self._count_agent(what)
                self._say("info", what)
            case RoundEnded():
                self._round_ended(what)
            case StateEntered():
                if what.left is not RoundState.IDLE:
                    labels = {"channel": what.channel, "phase": what.left.value}
                    self._metrics.observe(declared.ROUND_SECONDS, what.seconds, **labels)
                self._say("debug", what)
            case Refusal():
                self._metrics.add(declared.REFUSED, code=what.code.value)
                self._refused(what)
            case JournalChanged():
                self._metrics.set(declared.JOURNAL_WRITABLE, float(what.writable))
                self._say("info" if what.writable else "error", what)
            case EngineAhead():
                self._metrics.add(declared.EPOCHS_RAISED, channel=what.channel)
                self._say("warning", what)
            case EngineFailed() | TransferRetried():
                self._say("warning", what)
            case ReadinessChanged() | LeaseGranted() | LeaseEnded():
                self._say("info", what)
            case _:
                assert_never(what)

    def count_connections(self, so_far: Mapping[str, int]) -> None:
        """Raise the connection counters to the bus's counts `so_far`, by event."""
        for event, count in so_far.items():
            self._metrics.add(declared.CONNECTIONS, count - self._connections[event], event=event)
            self._connections[event] = count

    def count_throttled(self, so_far: Mapping[AgentId, int]) -> None:
        """Raise the counters of throttled messages to the bus's counts `so_far`, by agent."""
        for agent, count in list(so_far.items()):
            self._metrics.add(declared.THROTTLED, count - self._throttled[agent], agent=agent)
            self._throttled[agent] = count

    def show(self, view: StatusView) -> None:
        """Set the gauges from the status."""
        channels = view.channels.items()
        committed: dict[tuple[str, ...], float] = {
            (name,): float(c.committed.version) for name, c in channels if c.committed
        }
        engines = [(name, engine, e) for name, c in channels for engine, e in c.engines.items()]
        set_all = self._metrics.replace
        self._metrics.set(declared.BOOT, view.boot)
        set_all(declared.COMMITTED_VERSION, committed)
        set_all(declared.EPOCH, {(name,): float(c.epoch) for name, c in channels})
        set_all(declared.LEASE_INFO, {(name, c.lease.holder): 1.0 for name, c in channels if c.lease})
        set_all(declared.ENGINES_QUARANTINED, {(name,): float(_quarantined(c)) for name, c in channels})
        set_all(declared.ENGINES_WAITING, {(name,): float(_waiting(c)) for name, c in channels})
        versions: dict[tuple[str, ...], float] = {
            (c, n): -1.0 if e.version is None or not e.known else float(e.version) for c, n, e in engines
        }
        set_all(declared.ENGINE_VERSION, versions)
        set_all(declared.ENGINE_LAG, {(c, n): float(e.lag) for c, n, e in engines})
        set_all(declared.ENGINE_READY, {(c, n): float(e.ready) for c, n, e in engines})
        counts = Counter((str(channel), role.value) for channel, role in tuple(self._agents.values()))
        self._forget({(str(channel), str(engine)) for channel, engine, _ in engines})
        set_all(declared.AGENTS_CONNECTED, {labels: float(count) for labels, count in counts.items()})

    def _forget(self, known: Container[tuple[str, str]]) -> None:
        """Drop the counters of engines not in `known`: an elastic fleet brings new names for months."""
        for labels in [each for each in tuple(self._counted) if each[:2] not in known]:
            self._counted.discard(labels)
            self._metrics.forget(declared.ENGINE_ROUNDS, *labels)

    def _refused(self, what: Refusal) -> None:
        """Log a refusal, at most `REFUSALS_LOGGED` a second; every one is counted elsewhere."""
        late = what.code is RefusalCode.STALE_EPOCH and what.message in _ANSWERS
        if late or what.code in _ROUTINE:
            self._say("debug", what)
        elif self._refusals.passes(self._clock()):
            self._say("info", what)
            if kept := self._refusals.take_withheld():
                self._log.info("refusals_not_logged", count=kept)

    def _count_agent(self, what: AgentJoined | AgentLeft) -> None:
        if isinstance(what, AgentJoined):
            self._agents[what.agent] = (what.channel, what.role)
        else:
            self._agents.pop(what.agent, None)

    def _round_ended(self, what: RoundEnded) -> None:
        done, channel = what.done, what.channel
        self._metrics.add(declared.ROUNDS, channel=channel, outcome=what.outcome.value)
        if (total := done.seconds.get("total")) is not None:
            self._metrics.observe(declared.ROUND_SECONDS, total, channel=channel, phase="total")
        if what.stood_s:
            self._metrics.observe(declared.TRAINER_STOOD, what.stood_s, channel=channel)
        self._count_engines(channel, done.engines)
        self._log.log(
            20 if what.outcome is Outcome.COMMITTED and not done.reason else 30,
            "round_ended",
            channel=channel,
            version=done.version,
            epoch=done.epoch,
            outcome=what.outcome.value,
            reason=done.reason,
            engines={str(report.engine): report.outcome.value for report in done.engines},
            seconds={phase: round(seconds, 4) for phase, seconds in done.seconds.items()},
        )

    def _count_engines(self, channel: Channel, reports: Sequence[EngineReport]) -> None:
        loaded: Counter[str] = Counter()
        buckets: Counter[str] = Counter()
        for report in reports:
            outcome = report.outcome.value
            self._metrics.add(declared.ENGINE_ROUNDS, channel=channel, engine=report.engine, outcome=outcome)
            self._counted.add((channel, report.engine, outcome))
            if (paused := report.seconds.get("paused")) is not None:
                self._metrics.observe(declared.PAUSE_SECONDS, paused, channel=channel)
            if report.transport is not None:
                loaded[report.transport.value] += report.bytes
                buckets[report.transport.value] += report.buckets
        for transport, count in loaded.items():
            self._metrics.add(declared.TRANSFER_BYTES, count, channel=channel, transport=transport)
            self._metrics.add(declared.TRANSFER_BUCKETS, buckets[transport], channel=channel, transport=transport)

    def _say(self, level: str, what: AnyObservation) -> None:
        fields = {name: value for name, value in msgspec.structs.asdict(what).items() if value != ""}
        getattr(self._log, level)(what.event, **msgspec.to_builtins(fields))


class TimedJournal:
    """A journal that measures its write latency."""

    def __init__(self, journal: Journal, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._journal = journal
        self._metrics = metrics
        self._clock = clock

    @property
    def boot(self) -> int:
        """The wrapped journal's."""
        return self._journal.boot

    @property
    def stride(self) -> int:
        """The wrapped journal's."""
        return self._journal.stride

    def confirm(self) -> None:
        """Forwarded to the wrapped journal."""
        self._journal.confirm()

    def write(self, record: AnyRecord) -> None:
        """Make `record` durable."""
        begun = self._clock()
        self._journal.write(record)
        self._metrics.observe(declared.JOURNAL_SECONDS, self._clock() - begun)

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as last written."""
        return self._journal.restore()

    def close(self) -> None:
        """Close the wrapped journal."""
        self._journal.close()


def _waiting(channel: ChannelView) -> int:
    """Engines of a rolling round that are prepared and wait for their wave."""
    phases = channel.round.engines.values() if channel.round.max_paused else ()
    return sum(phase == EnginePhase.PREPARED for phase in phases)


def _quarantined(channel: ChannelView) -> int:
    return sum(engine.state in _QUARANTINED for engine in channel.engines.values())
