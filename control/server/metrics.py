"""All metrics, each declared once; the setup of logging; and the reporter of the coordinator's observations to both.

The table in control/README.md is generated from `METRICS` (`markdown_table`). Label values are names that the protocol
bounds (channels, agents, enums), never free text, so that their number stays small.
"""

from __future__ import annotations

import enum
import io
import logging
import re
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Never, TextIO, assert_never, get_args

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter as PrometheusCounter, Gauge, Histogram, disable_created_metrics

from ..log import get_log
from ..machine import (
    AgentJoined,
    AgentLeft,
    AnyObservation,
    ChannelView,
    EngineAhead,
    EngineFailed,
    EnginePhase,
    JournalChanged,
    LeaseEnded,
    LeaseGranted,
    ReadinessChanged,
    Refusal,
    RoundEnded,
    RoundReadiness,
    RoundState,
    StateEntered,
    StatusView,
    TransferRetried,
)
from ..protocol import AgentId, Channel, EngineMessage, EngineReport, InvariantBroken, Outcome, RefusalCode, Role
from ..terminal_text import terminal_safe


class MetricKind(enum.StrEnum):
    """Prometheus type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class MetricSource(enum.StrEnum):
    """Process that reports a metric."""

    COORDINATOR = "coordinator"
    ENGINE = "engine agent"
    TRAINER = "trainer agent"


class MetricSpec(msgspec.Struct, frozen=True):
    """Declaration of one metric, as it is exposed."""

    name: str
    kind: MetricKind
    side: MetricSource
    labels: tuple[str, ...]
    help: str


METRICS: list[MetricSpec] = []
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def _declare(side: MetricSource, kind: MetricKind, name: str, labels: str, meaning: str) -> MetricSpec:
    metric = MetricSpec(f"weightbus_{name}", kind, side, tuple(labels.split()), meaning)
    METRICS.append(metric)
    return metric


_C, _E, _T = MetricSource.COORDINATOR, MetricSource.ENGINE, MetricSource.TRAINER
_GAUGE, _COUNTER, _HISTOGRAM = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM

COMMITTED_VERSION = _declare(_C, _GAUGE, "committed_version", "channel", "version that is durable; it never goes back")
ENGINE_VERSION = _declare(
    _C, _GAUGE, "engine_version", "channel engine", "committed version that the engine holds; -1 for none"
)
ENGINE_LAG = _declare(
    _C, _GAUGE, "engine_version_lag", "channel engine", "committed version minus the engine's, if it holds one"
)
ENGINE_READY = _declare(_C, _GAUGE, "engine_ready", "channel engine", "1 while the engine is in the ready list")
ENGINES_QUARANTINED = _declare(
    _C, _GAUGE, "engines_quarantined", "channel", "engines that are dirty or pending: not to be served from"
)
ENGINES_WAITING = _declare(
    _C, _GAUGE, "round_engines_waiting", "channel", "engines of a rolling round that wait for their wave"
)
AGENTS_CONNECTED = _declare(_C, _GAUGE, "agents_connected", "channel role", "agents that count as alive")
LEASE_INFO = _declare(_C, _GAUGE, "lease_info", "channel holder", "1 for the trainer that holds the lease")
EPOCH = _declare(_C, _GAUGE, "epoch", "channel", "highest epoch granted; lower ones are refused")
EPOCHS_RAISED = _declare(
    _C,
    _COUNTER,
    "epochs_raised_total",
    "channel",
    "engines had seen a higher epoch than the journal: an older one was restored",
)
ROUNDS = _declare(_C, _COUNTER, "rounds_total", "channel outcome", "rounds by how they ended")
ENGINE_ROUNDS = _declare(_C, _COUNTER, "engine_rounds_total", "channel engine outcome", "an engine's part in rounds")
ROUND_SECONDS = _declare(_C, _HISTOGRAM, "round_seconds", "channel phase", "a round's time by phase, and in total")
PAUSE_SECONDS = _declare(_C, _HISTOGRAM, "pause_seconds", "channel", "time for which an engine was paused")
TRAINER_STOOD = _declare(
    _C,
    _HISTOGRAM,
    "trainer_stood_seconds",
    "channel",
    "time for which training was stalled by stale engines (max_lag)",
)
NONFINITE = _declare(
    _C, _COUNTER, "nonfinite_elements_total", "channel", "NaN and infinities in versions that were sent to engines"
)
DIFFERING = _declare(
    _C, _COUNTER, "differing_replicas_total", "channel", "tensors that the trainer's ranks held different replicas of"
)
TRANSFER_BYTES = _declare(_C, _COUNTER, "transfer_bytes_total", "channel transport", "bytes loaded into engines")
TRANSFER_BUCKETS = _declare(_C, _COUNTER, "transfer_buckets_total", "channel transport", "buckets loaded into engines")
REFUSED = _declare(_C, _COUNTER, "messages_refused_total", "code", "messages that changed nothing, by reason")
THROTTLED = _declare(_C, _COUNTER, "messages_throttled_total", "agent", "messages dropped unread: their agent floods")
CONNECTIONS = _declare(_C, _COUNTER, "connections_total", "event", "accepted, established, refused, closed")
ALLOW_LIST_IN_FORCE = _declare(
    _C, _GAUGE, "allow_list_in_force", "", "0 while the allow-list is missing, open to others, or cannot be used"
)
JOURNAL_WRITABLE = _declare(_C, _GAUGE, "journal_writable", "", "0 while nothing can be made durable")
JOURNAL_HUNG_SECONDS = _declare(_C, _GAUGE, "journal_hung_seconds", "", "time for which a write has hung; 0: none does")
JOURNAL_SECONDS = _declare(_C, _HISTOGRAM, "journal_write_seconds", "", "time to make one record durable")
BOOT = _declare(_C, _GAUGE, "coordinator_boot", "", "grows by one with every start")

SERVER_UP = _declare(_E, _GAUGE, "sidecar_server_up", "", "1 while the server answers")
SERVER_PAUSED = _declare(_E, _GAUGE, "sidecar_server_paused", "", "1 while the sidecar holds its server paused")
SIDECAR_VERSION = _declare(_E, _GAUGE, "sidecar_version", "", "verified version the server is labeled with; -1: none")
SIDECAR_HEALTH = _declare(_E, _GAUGE, "sidecar_health", "health", "1 for what the server holds: clean, pending, dirty")
SIDECAR_WEIGHTS = _declare(_E, _GAUGE, "sidecar_weights", "state", "1 for the state that the server's weights are in")
SIDECAR_ORPHANED = _declare(
    _E, _GAUGE, "sidecar_orphaned", "", "1 while it cannot serve what it holds, and hears no coordinator (orphaned_s)"
)
SIDECAR_CONNECTED = _declare(
    _E, _GAUGE, "sidecar_connected", "", "1 while the coordinator answers; NaN once it refuses the key"
)
PUBLICATIONS_REFUSED = _declare(
    _E, _COUNTER, "sidecar_publications_refused_total", "cause", "versions that no trusted trainer signed for here"
)
FOREIGN_ACTS = _declare(
    _E, _COUNTER, "sidecar_foreign_acts_total", "what", "weights, pauses and resumes of the server by another party"
)
ADMISSIONS = _declare(
    _E, _COUNTER, "sidecar_admissions_total", "verdict", "requests asked about at /admit: admitted, or why not"
)
CALL_SECONDS = _declare(_E, _HISTOGRAM, "sidecar_call_seconds", "call", "HTTP calls to the server")
CALL_FAILURES = _declare(_E, _COUNTER, "sidecar_call_failures_total", "call", "HTTP calls that failed")
STEP_SECONDS = _declare(_E, _HISTOGRAM, "sidecar_step_seconds", "step", "the engine's time by step of a round")
STEP_FAILURES = _declare(_E, _COUNTER, "sidecar_step_failures_total", "step", "steps of a round that failed")

CHECKPOINTS = _declare(_T, _COUNTER, "watch_checkpoints_total", "outcome", "published, skipped, bad or failed")
LOOKS_FAILED = _declare(_T, _COUNTER, "watch_looks_failed_total", "cause", "looks that failed, and are repeated")
PUBLISHED_VERSION = _declare(_T, _GAUGE, "watch_published_version", "", "the last version published from a checkpoint")
PUBLISH_SECONDS = _declare(_T, _HISTOGRAM, "watch_publish_seconds", "", "time to publish one checkpoint")

UNWATCHED: Final = frozenset(
    {
        ENGINES_WAITING.name,
        ENGINE_ROUNDS.name,
        TRAINER_STOOD.name,
        TRANSFER_BUCKETS.name,
        JOURNAL_HUNG_SECONDS.name,
        SIDECAR_VERSION.name,
        SIDECAR_HEALTH.name,
        SIDECAR_WEIGHTS.name,
        CALL_SECONDS.name,
        CALL_FAILURES.name,
        STEP_SECONDS.name,
        STEP_FAILURES.name,
        CHECKPOINTS.name,
        LOOKS_FAILED.name,
        ADMISSIONS.name,
        PUBLISHED_VERSION.name,
        PUBLISH_SECONDS.name,
    }
)
"""Metrics in no alert and on no panel of `deploy/`: for finding the cause of what those show."""


disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client does not say that it returns nothing
"""Otherwise each counter and histogram has a second series with the time of its creation."""


class Metrics:
    """The metrics of one process, in a registry of their own. Thread-safe."""

    def __init__(self, side: MetricSource) -> None:
        self.registry = CollectorRegistry()
        self._side = side
        self._shown: dict[str, frozenset[tuple[str, ...]]] = {}
        self._gauges, self._counters = dict[str, Gauge](), dict[str, PrometheusCounter]()
        self._histograms: dict[str, Histogram] = {}
        for m in (metric for metric in METRICS if metric.side is side):
            declared = m.name, m.help, m.labels
            match m.kind:
                case MetricKind.GAUGE:
                    self._gauges[m.name] = Gauge(*declared, registry=self.registry)
                case MetricKind.COUNTER:
                    self._counters[m.name] = PrometheusCounter(*declared, registry=self.registry)
                case MetricKind.HISTOGRAM:
                    self._histograms[m.name] = Histogram(*declared, registry=self.registry, buckets=_SECONDS)

    def set(self, metric: MetricSpec, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges.get(metric.name) or self._misused(metric, MetricKind.GAUGE)
        (gauge.labels(**labels) if labels else gauge).set(value)

    def live(self, metric: MetricSpec, value: Callable[[], float]) -> None:
        """Have a gauge without labels call `value` at every scrape, on the reader's thread."""
        gauge = self._gauges.get(metric.name) or self._misused(metric, MetricKind.GAUGE)
        gauge.set_function(value)

    def add(self, metric: MetricSpec, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        counter = self._counters.get(metric.name) or self._misused(metric, MetricKind.COUNTER)
        (counter.labels(**labels) if labels else counter).inc(amount)

    def forget(self, metric: MetricSpec, *labels: str) -> None:
        """Remove a counter's series with these label values, in the order of `MetricSpec.labels`."""
        counter = self._counters.get(metric.name) or self._misused(metric, MetricKind.COUNTER)
        counter.remove(*labels)

    def observe(self, metric: MetricSpec, value: float, **labels: str) -> None:
        """Add a sample to a histogram."""
        histogram = self._histograms.get(metric.name) or self._misused(metric, MetricKind.HISTOGRAM)
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def replace(self, metric: MetricSpec, values: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge for exactly these label values, in the order of `MetricSpec.labels`; remove its other series."""
        gauge = self._gauges.get(metric.name) or self._misused(metric, MetricKind.GAUGE)
        for labels, value in values.items():
            gauge.labels(*labels).set(value)
        for labels in self._shown.get(metric.name, frozenset()) - values.keys():
            gauge.remove(*labels)
        self._shown[metric.name] = frozenset(values)

    def _misused(self, metric: MetricSpec, used_as: MetricKind) -> Never:
        raise InvariantBroken(
            f"{metric.name} is a {metric.kind} of the {metric.side}, used as {used_as} of {self._side}"
        )


def markdown_table() -> str:
    """`METRICS` as the table of control/README.md, in the order of this file."""
    rows = [
        "| metric | type | labels | reported by | meaning | in `deploy/` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in METRICS:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        use = "for looking only" if each.name in UNWATCHED else "watched"
        rows.append(f"| `{each.name}` | {each.kind} | {labels} | {each.side} | {each.help} | {use} |")
    return "\n".join(rows) + "\n"


def configure_logging(level: str = "info", style: str = "auto") -> None:
    """Send log lines to standard error. `style`: ``human``, ``json``, or ``auto``: human on a terminal, else JSON."""
    human = style == "human" or (style == "auto" and sys.stderr.isatty())
    numeric = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            RepeatedWarnings(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(_for_people() if human else _for_programs()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=sys.stderr, level=max(numeric, logging.WARNING), force=True)
    if human:
        logging.getLogger().handlers[0].setFormatter(_PlainFormatter(logging.BASIC_FORMAT))


class _PlainFormatter(logging.Formatter):
    """Formatter for lines of libraries, which may quote a server: control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return terminal_safe(super().format(record), lines=True)


class _Shown(str):
    """Text whose `repr` is itself, because the renderer would quote it once more."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _for_programs() -> tuple[structlog.typing.Processor, ...]:
    # Without the local variables of a traceback, which is the default: keys and tokens are among them.
    plain_facts = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return structlog.processors.ExceptionRenderer(plain_facts), structlog.processors.JSONRenderer()


def _for_people() -> tuple[structlog.typing.Processor, ...]:
    colors = sys.stderr.isatty()  # a file is read by other programs too
    return _made_plain, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_plain_traceback)


class RepeatedWarnings:
    """A processor that passes a warning once, and then once a minute with the number of those withheld since.

    Two warnings are the same if all fields are, but for numbers in texts: "for 4 s", "for 9 s".
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """When each was passed last, and how often it was withheld since; the oldest are dropped."""

    def __call__(self, _logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Pass the event, or raise `structlog.DropEvent`."""
        if event.get("level") not in {"warning", "error"} or event.get("exc_info"):
            return event
        texts = {name: _NUMBER.sub("#", each) if isinstance(each, str) else each for name, each in event.items()}
        key, now = repr(texts), self._clock()
        at, withheld = self._seen.get(key, (float("-inf"), 0))
        if now < at + REPEATED_S:
            self._seen[key] = (at, withheld + 1)
            raise structlog.DropEvent
        self._seen[key] = (now, 0)
        self._seen.move_to_end(key)
        while len(self._seen) > _MOST_WARNINGS:
            self._seen.popitem(last=False)
        return {**event, "repeated": withheld} if withheld else event


REPEATED_S: Final = 60.0
"""Seconds for which a warning that was logged is not logged again."""
_MOST_WARNINGS: Final = 512
_NUMBER: Final = re.compile(r"(?<![\w.:-])\d+(\.\d+)?(?= ?(s|ms)\b)")
"""A number of seconds. Other numbers, such as ports and versions, make another warning."""


def _made_plain(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters: values may come from an agent or a server."""
    for name, value in event.items():
        if name == "event":
            event[name] = terminal_safe(str(value))
        elif name != "exc_info" and not (isinstance(value, str) and terminal_safe(value) == value):
            event[name] = _Shown(terminal_safe(repr(value)))
    return event


def _plain_traceback(file: TextIO, problem: structlog.typing.ExcInfo) -> None:
    """A traceback with control characters escaped: an exception's message may quote an agent or a server."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, problem)
    file.write(terminal_safe(text.getvalue(), lines=True))


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
        """Labels of `ENGINE_ROUNDS`."""
        self._refusals = LogLimiter(REFUSALS_LOGGED)
        metrics.set(JOURNAL_WRITABLE, 1)

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
                    self._metrics.observe(ROUND_SECONDS, what.seconds, **labels)
                self._say("debug", what)
            case Refusal():
                self._metrics.add(REFUSED, code=what.code.value)
                self._refused(what)
            case JournalChanged():
                self._metrics.set(JOURNAL_WRITABLE, float(what.writable))
                self._say("info" if what.writable else "error", what)
            case EngineAhead():
                self._metrics.add(EPOCHS_RAISED, channel=what.channel)
                self._say("warning", what)
            case EngineFailed() | TransferRetried():
                self._say("warning", what)
            case ReadinessChanged() | LeaseGranted() | LeaseEnded():
                self._say("info", what)
            case _:
                assert_never(what)

    def count(self, connections: Mapping[str, int], throttled: Mapping[AgentId, int]) -> None:
        """Raise the counters to the bus's counts so far: connections by event, throttled messages by agent."""
        for event, count in connections.items():
            self._metrics.add(CONNECTIONS, count - self._connections[event], event=event)
            self._connections[event] = count
        for agent, count in list(throttled.items()):
            self._metrics.add(THROTTLED, count - self._throttled[agent], agent=agent)
            self._throttled[agent] = count

    def show(self, view: StatusView) -> None:
        """Set the gauges from the status."""
        channels = view.channels.items()
        committed: dict[tuple[str, ...], float] = {
            (name,): float(c.committed.version) for name, c in channels if c.committed
        }
        engines = [(name, engine, e) for name, c in channels for engine, e in c.engines.items()]
        set_all = self._metrics.replace
        self._metrics.set(BOOT, view.boot)
        set_all(COMMITTED_VERSION, committed)
        set_all(EPOCH, {(name,): float(c.epoch) for name, c in channels})
        set_all(LEASE_INFO, {(name, c.lease.holder): 1.0 for name, c in channels if c.lease})
        set_all(ENGINES_QUARANTINED, {(name,): float(_quarantined(c)) for name, c in channels})
        set_all(ENGINES_WAITING, {(name,): float(_waiting(c)) for name, c in channels})
        versions: dict[tuple[str, ...], float] = {
            (c, n): -1.0 if e.version is None or not e.known else float(e.version) for c, n, e in engines
        }
        set_all(ENGINE_VERSION, versions)
        set_all(ENGINE_LAG, {(c, n): float(e.lag) for c, n, e in engines})
        set_all(ENGINE_READY, {(c, n): float(e.ready) for c, n, e in engines})
        counts = Counter((str(channel), role.value) for channel, role in tuple(self._agents.values()))
        self._forget({(str(channel), str(engine)) for channel, engine, _ in engines})
        set_all(AGENTS_CONNECTED, {labels: float(count) for labels, count in counts.items()})

    def _forget(self, known: Container[tuple[str, str]]) -> None:
        """Drop the counters of engines not in `known`: an elastic fleet brings new names for months."""
        for labels in [each for each in tuple(self._counted) if each[:2] not in known]:
            self._counted.discard(labels)
            self._metrics.forget(ENGINE_ROUNDS, *labels)

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
        self._metrics.add(ROUNDS, channel=channel, outcome=what.outcome.value)
        if (total := done.seconds.get("total")) is not None:
            self._metrics.observe(ROUND_SECONDS, total, channel=channel, phase="total")
        if what.stood_s:
            self._metrics.observe(TRAINER_STOOD, what.stood_s, channel=channel)
        self._metrics.add(NONFINITE, what.nonfinite, channel=channel)  # 0, too: an increase needs a beginning
        self._metrics.add(DIFFERING, what.differing, channel=channel)
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
            self._metrics.add(ENGINE_ROUNDS, channel=channel, engine=report.engine, outcome=outcome)
            self._counted.add((channel, report.engine, outcome))
            if (paused := report.seconds.get("paused")) is not None:
                self._metrics.observe(PAUSE_SECONDS, paused, channel=channel)
            if report.transport is not None:
                loaded[report.transport.value] += report.bytes
                buckets[report.transport.value] += report.buckets
        for transport, count in loaded.items():
            self._metrics.add(TRANSFER_BYTES, count, channel=channel, transport=transport)
            self._metrics.add(TRANSFER_BUCKETS, buckets[transport], channel=channel, transport=transport)

    def _say(self, level: str, what: AnyObservation) -> None:
        fields = {name: value for name, value in msgspec.structs.asdict(what).items() if value != ""}
        getattr(self._log, level)(str(what.__struct_config__.tag), **msgspec.to_builtins(fields))


def _waiting(channel: ChannelView) -> int:
    """Engines of a rolling round that are prepared and wait for their wave."""
    phases = channel.round.engines.values() if channel.round.max_paused else ()
    return sum(phase == EnginePhase.PREPARED for phase in phases)


def _quarantined(channel: ChannelView) -> int:
    return sum(engine.state in _QUARANTINED for engine in channel.engines.values())
