"""The weights of one server, as a pure machine: which version they are, how far from it, and whether they may be used.

`handle(event, now)` takes a fact about the server and returns whether the state has to be durable before anything that
depends on it. `TABLE` has the next state for every event and state; an event that it lacks raises and changes nothing.
control/protocol/PROTOCOL.md draws it.

Two rules are behind it: a server generates in `CLEAN` and `SERVING` and in no other state, and the record on disk is
never of a better state than the true one, so that a crash at any moment is safe.
"""

import enum
from collections import deque
from collections.abc import Mapping
from typing import Final, assert_never

import msgspec

from weightbus.control.protocol import EngineHealth, Epoch, HeldVersion, IllegalMove, InvariantBroken, Version

from .events import Remember, StateRecord


class WeightState(enum.StrEnum):
    """State of the weights on a server. The version that it refers to is `Weights.version`."""

    UNKNOWN = "unknown"
    """Complete weights, perhaps, but of no version that was verified here: not seen yet, or launched again."""
    CLEAN = "clean"
    """Complete weights: those of the launch, or a version that was committed. May generate."""
    PAUSED = "paused"
    """As clean, and generates nothing."""
    STAGED = "staged"
    """The version is being received. On disk the server is dirty; how much has arrived is known at the end."""
    DIRTY = "dirty"
    """Part of a version arrived, and it was not verified to be all of it. Never generates."""
    LOADED = "loaded"
    """Verified to be the version, and not committed. Never generates."""
    SERVING = "serving"
    """The version is committed, the server labeled with it. Generates."""
    ORPHANED = "orphaned"
    """Verified, labeled, not known to be committed, and served because no coordinator was heard. Never ready."""


HEALTH: Final[Mapping[WeightState, EngineHealth]] = {
    WeightState.UNKNOWN: EngineHealth.PENDING,
    WeightState.CLEAN: EngineHealth.CLEAN,
    WeightState.PAUSED: EngineHealth.CLEAN,
    WeightState.STAGED: EngineHealth.DIRTY,
    WeightState.DIRTY: EngineHealth.DIRTY,
    WeightState.LOADED: EngineHealth.PENDING,
    WeightState.SERVING: EngineHealth.CLEAN,
    WeightState.ORPHANED: EngineHealth.PENDING,
}
"""Health as the coordinator is told it, and as the record has it."""

GENERATES: Final = frozenset({WeightState.CLEAN, WeightState.SERVING, WeightState.ORPHANED})

# -- events -----------------------------------------------------------------------------------------------------------


class ServerRecognized(msgspec.Struct, frozen=True):
    """The record is of this process generation of the server."""

    health: EngineHealth
    held: HeldVersion | None
    orphaned: bool = False
    """True if it served `held` without knowing of its commit."""


class ServerLaunched(msgspec.Struct, frozen=True):
    """Another process generation. `fresh`: no update can have happened, so the weights are those of the launch."""

    fresh: bool


class ServerPaused(msgspec.Struct, frozen=True):
    """The server answered that it is paused."""


class WeightsDoubted(msgspec.Struct, frozen=True):
    """A call was lost: whether the server generates is not known."""


class WeightsForeign(msgspec.Struct, frozen=True):
    """Another party changed the weights or the label, or the calls of an operation may have met another server."""


class TransferBegan(msgspec.Struct, frozen=True):
    """`version` is about to be received."""

    version: Version


class WeightsUnchanged(msgspec.Struct, frozen=True):
    """The transfer failed before the server was asked to change anything."""


class WeightsDirtied(msgspec.Struct, frozen=True):
    """Part of the version, or all of it, has reached the server."""


class VersionVerified(msgspec.Struct, frozen=True):
    """The weights are exactly the version `held`."""

    held: HeldVersion


class ServerResumed(msgspec.Struct, frozen=True):
    """The server generates again, with the label it had."""

    ordered: bool
    """By the coordinator. Worth a record even when nothing else changed: the order's epoch is in it."""


class VersionCommitted(msgspec.Struct, frozen=True):
    """The verified version is committed, the server labeled with it, and it generates."""


class OrphanServed(msgspec.Struct, frozen=True):
    """The verified version, whose commit was not heard of, is labeled and generates."""


WeightEvent = (
    ServerRecognized
    | ServerLaunched
    | ServerPaused
    | WeightsDoubted
    | WeightsForeign
    | TransferBegan
    | WeightsUnchanged
    | WeightsDirtied
    | VersionVerified
    | ServerResumed
    | VersionCommitted
    | OrphanServed
)

_U, _C, _P = WeightState.UNKNOWN, WeightState.CLEAN, WeightState.PAUSED
_T, _D, _L, _S = WeightState.STAGED, WeightState.DIRTY, WeightState.LOADED, WeightState.SERVING
_O = WeightState.ORPHANED

TABLE: Final[Mapping[type[WeightEvent], Mapping[WeightState, tuple[WeightState, ...]]]] = {
    ServerPaused: {_U: (_U,), _C: (_P,), _P: (_P,), _D: (_D,), _L: (_L,), _S: (_P,), _O: (_L,)},
    WeightsDoubted: {_U: (_U,), _C: (_C,), _P: (_C,), _T: (_T,), _D: (_D,), _L: (_L,), _S: (_S,), _O: (_O,)},
    WeightsForeign: {_U: (_U,), _C: (_U,), _P: (_U,), _D: (_D,), _L: (_D,), _S: (_U,), _O: (_D,)},
    TransferBegan: {_U: (_T,), _P: (_T,), _D: (_T,), _L: (_T,)},
    WeightsUnchanged: {_T: (_U, _P, _D, _L)},
    WeightsDirtied: {_T: (_D,), _D: (_D,), _U: (_D,)},
    VersionVerified: {_D: (_L,), _U: (_L,)},
    ServerResumed: {_C: (_C,), _P: (_C,), _S: (_C,)},
    VersionCommitted: {_C: (_S,), _P: (_S,), _L: (_S,), _S: (_S,), _O: (_S,)},
    OrphanServed: {_L: (_O,), _O: (_O,)},
}
"""Event -> state -> state.

`WeightsUnchanged` goes back to where `TransferBegan` came from. `WeightsDirtied` in UNKNOWN: a transfer that was meant
for an earlier launch may have met this one. `VersionVerified` in UNKNOWN: the digests of a server of which no record is
left are those of the committed version. DIRTY is left by a complete, verified transfer, and by nothing else.

`ServerRecognized` and `ServerLaunched` are not in it: another launch of the server is another server, and begins
anew."""

MOVES: Final[Mapping[WeightState, frozenset[WeightState]]] = {
    state: frozenset(to for row in TABLE.values() for to in row.get(state, ()) if to is not state)
    for state in WeightState
}
"""Moves without the events, for the diagram."""


class Weights:
    """The machine of one server's weights."""

    def __init__(self, trace: deque[str]) -> None:
        """`trace` gets a line for every move, and goes into the errors."""
        self.state = WeightState.UNKNOWN
        self.held: HeldVersion | None = None
        """The complete, verified version on the server; null without one, and for the weights of a launch."""
        self.taking: Version | None = None
        """The version that is being received."""
        self.paused: bool | None = None
        """Whether the server is paused; null: not known, an earlier sidecar may have paused it."""
        self._trace = trace
        self._before: tuple[WeightState, HeldVersion | None] = (self.state, None)
        """State and version from before the transfer that is under way."""

    @property
    def health(self) -> EngineHealth:
        """The state, in the coordinator's words."""
        return HEALTH[self.state]

    @property
    def version(self) -> Version | None:
        """The version that the state refers to; null: none, or the weights of the launch."""
        return self.held.version if self.held else self.taking

    @property
    def replaces_clean(self) -> bool:
        """Whether the last transfer began over clean weights, to which `WeightsUnchanged` goes back."""
        return self._before[0] is WeightState.PAUSED

    @property
    def replaced(self) -> Version | None:
        """The version from before the last transfer; null: none, or the weights of the launch."""
        return self._before[1].version if self._before[1] else None

    def handle(self, event: WeightEvent, now: float) -> bool:
        """Take `event`, which happened at `now`; returns whether the state must be durable before its effects.

        Raises `IllegalMove` on an event that the state does not allow.
        """
        if isinstance(event, ServerRecognized | ServerLaunched):
            return self._begin(event, now)
        before = (self.state, self.held)
        self._go(event, now)
        match event:
            case ServerPaused():
                self.paused = True
            case WeightsDoubted():
                self.paused = None
            case WeightsForeign():
                self.paused, self.held = None, None
            case TransferBegan():
                self._before, self.held, self.taking = before, None, event.version
            case WeightsUnchanged():
                self.held, self.taking = self._before[1], None
            case WeightsDirtied():
                self.held = None
            case VersionVerified():
                self.held, self.taking = event.held, None
            case ServerResumed() | VersionCommitted() | OrphanServed():
                self.paused = False
            case _:
                assert_never(event)
        ordered = isinstance(event, ServerResumed) and event.ordered
        changed = (self.health, self.held) != (HEALTH[before[0]], before[1])
        return ordered or changed or isinstance(event, VersionCommitted | OrphanServed)

    def check(self) -> None:
        """Raise `InvariantBroken` when fields contradict each other."""
        for wrong in self._contradictions():
            raise InvariantBroken(f"weights in state {self.state}: {wrong}", tuple(self._trace))

    def _contradictions(self) -> tuple[str, ...]:
        state, held = self.state, self.held
        found = {
            "a server that is not clean may generate": self.paused is False and state not in GENERATES,
            "it generates, and is known to be paused": self.paused is True and state in GENERATES,
            "paused, and not known to be": state is WeightState.PAUSED and self.paused is not True,
            "loaded nothing": state is WeightState.LOADED and held is None,
            "a version is held that was not verified": held is not None
            and state in {WeightState.UNKNOWN, WeightState.STAGED, WeightState.DIRTY},
            "serves no version": state in {WeightState.SERVING, WeightState.ORPHANED} and held is None,
            "being received, and no version is named": state is WeightState.STAGED and self.taking is None,
        }
        return tuple(what for what, wrong in found.items() if wrong)

    def _begin(self, event: ServerRecognized | ServerLaunched, now: float) -> bool:
        """A process generation that was not known before. Facts from its record need not be written again."""
        self.paused, self.taking, self.held = None, None, None
        if isinstance(event, ServerLaunched):
            self.state = WeightState.CLEAN if event.fresh else WeightState.UNKNOWN
        else:
            self.state = _AS_RECORDED[event.health, event.held is not None]
            if event.orphaned and self.state is WeightState.LOADED:
                self.state = WeightState.ORPHANED
            self.held = None if self.state is WeightState.DIRTY else event.held
        self._trace.append(f"{now:.3f} weights begin anew: {self}")
        return event == ServerLaunched(fresh=False)

    def _go(self, event: WeightEvent, now: float) -> None:
        choice = TABLE[type(event)].get(self.state, ())
        wanted = self._before[0] if isinstance(event, WeightsUnchanged) else next(iter(choice), None)
        if wanted is None or wanted not in choice:
            raise IllegalMove("weights", str(self), type(event).__name__, tuple(self._trace))
        if wanted is not self.state:
            self.state = wanted
            self._trace.append(f"{now:.3f} weights {wanted} after {type(event).__name__}")

    def __str__(self) -> str:
        """As in the protocol: ``CLEAN(7)``, ``STAGED(8)``, ``DIRTY``."""
        return self.state.name if self.version is None else f"{self.state.name}({self.version})"


_AS_RECORDED: Final[Mapping[tuple[EngineHealth, bool], WeightState]] = {
    (EngineHealth.CLEAN, True): WeightState.CLEAN,
    (EngineHealth.CLEAN, False): WeightState.CLEAN,
    (EngineHealth.PENDING, True): WeightState.LOADED,
    (EngineHealth.PENDING, False): WeightState.UNKNOWN,
    (EngineHealth.DIRTY, True): WeightState.DIRTY,
    (EngineHealth.DIRTY, False): WeightState.DIRTY,
}


class RecordedState:
    """The record of one server as the machine sees it: its content on disk, and what is written there ahead of time.

    Before the first byte of served weights changes, the record calls the server dirty. To write that takes as long as
    to pause a server, so both happen at a time: while the server is being paused, the record already calls it dirty. If
    no transfer follows, the record is of a worse state than the true one until it is written again.
    """

    def __init__(self, record: StateRecord | None) -> None:
        """`record` is what an earlier sidecar left."""
        self.welcomed = ""
        """Key of the `Hello` that was welcomed last."""
        self.record = record
        """The record as last written, or about to be."""
        self.ahead = False
        """True while the record calls the server dirty for a transfer that has not begun."""

    @property
    def identity(self) -> str:
        """Identity of the process generation that the record is of."""
        return self.record.identity if self.record else ""

    @property
    def commanded(self) -> bool:
        """Whether a coordinator has ever told the sidecar of the record anything about a server."""
        record = self.record
        return record is not None and (record.epoch > 0 or record.health is not EngineHealth.CLEAN or bool(record.held))

    def follows(self, identity: str) -> str:
        """Key of the last welcomed `Hello` when the record of this process generation was written; empty for none."""
        return self.record.follows if self.record and self.record.identity == identity else ""

    def remember(
        self,
        identity: str,
        health: EngineHealth,
        held: HeldVersion | None,
        epoch: Epoch,
        folder: str,
        *,
        orphaned: bool = False,
    ) -> Remember:
        """Write the present state.

        A version that waits for its commit, or has just got it, may be written late: nothing depends on it, and until
        then the record is of a worse state of the same process generation and epoch.
        """
        self.ahead = False
        before = self.record
        self.record = StateRecord(
            identity=identity,
            health=health,
            held=held,
            epoch=epoch,
            checkpoint=folder,
            orphaned=orphaned,
            follows=self.welcomed,
        )
        waited = before == msgspec.structs.replace(self.record, health=EngineHealth.PENDING)
        return Remember(self.record, late=held is not None and (health is not EngineHealth.CLEAN or waited))

    def write_ahead(self, identity: str, health: EngineHealth, epoch: Epoch, folder: str) -> tuple[Remember, ...]:
        """Write the state that a transfer will begin with; nothing, if it is written already.

        Only for a clean server: for any other the record has facts that a restarted sidecar must not forget.
        """
        if health is not EngineHealth.CLEAN:
            return ()
        if self.ahead and self.record is not None and self.record.epoch == epoch:
            return ()
        remembered = self.remember(identity, EngineHealth.DIRTY, None, epoch, folder)
        self.ahead = True
        return (remembered,)

    def begin_transfer(self, epoch: Epoch) -> bool:
        """Note that the transfer of `epoch` begins. Returns whether the record already says so."""
        ahead, self.ahead = self.ahead, False
        return ahead and self.record is not None and self.record.epoch == epoch
