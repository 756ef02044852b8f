"""What the parts of the machine share: states with every legal move, limits, transport routes and decisions.

PROTOCOL.md draws its diagrams from the tables of moves; a test compares. A route is chosen by a policy (`Routing`) that
the coordinator is given, and it keeps its promises whatever that returns: an engine with a bad route fails its transfer
and is excluded. The policy of a real coordinator is routing.py; the simulation has a random one.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from ..protocol import (
    Abandon,
    Acquire,
    AgentId,
    EngineInfo,
    IllegalMove,
    Offered,
    Publish,
    RefusalCode,
    Release,
    Sent,
    Topology,
    TrainerInfo,
    TransportKind,
)


class RoundState(enum.StrEnum):
    """States of a round. Every state but IDLE has a deadline."""

    __hash__ = str.__hash__  # the one of enums is written in Python, and called for every answer

    IDLE = "idle"
    """No round is running. Engines serve the version that they hold."""
    PREPARING = "preparing"
    """Engines compare the manifest with their servers, while they serve."""
    OFFERING = "offering"
    """The trainer opens its half of the transports. Engines serve, except those of a retry."""
    PAUSING = "pausing"
    """Engines of the wave pause. Each takes the version once it is paused, or once all are (`Policy.min_engines`)."""
    TRANSFERRING = "transferring"
    """All engines of the wave are paused and receive bytes. A failing engine may hold mixed weights."""
    VERIFYING = "verifying"
    """The trainer's half is over. Engines compare their weights with the digest table."""
    COMMITTING = "committing"
    """Enough engines are verified, and the commit is on its way to the journal. No engine is told yet."""
    RESUMING = "resuming"
    """The version is durable and cannot be taken back. Verified engines are told until they serve it."""
    ABORTING = "aborting"
    """The round failed. Clean engines resume the previous version; others stay paused."""


class EnginePhase(enum.StrEnum):
    """Phases of one engine in a round."""

    __hash__ = str.__hash__

    PREPARING = "preparing"
    """It was sent `Prepare`, and serves."""
    PREPARED = "prepared"
    """It fits the manifest, serves, and waits for its wave."""
    PAUSING = "pausing"
    """It was sent `Pause` and, unless all must pause first, `Transfer`."""
    PAUSED = "paused"
    """It generates nothing, holds its old weights, and waits for the others of its wave to pause."""
    TRANSFERRING = "transferring"
    """It generates nothing and takes the version; its weights may be mixed."""
    TRANSFERRED = "transferred"
    """It has loaded everything, and not verified it yet."""
    VERIFIED = "verified"
    """It holds exactly the new version; it is paused, and labeled with the old version."""
    BROKEN = "broken"
    """It failed in the transfer, and waits for a retry."""
    RESUMING = "resuming"
    """It was sent `Commit`, and resumes with the new version."""
    LEAVING = "leaving"
    """It was sent `Abort`, and resumes with its old version if it is clean."""
    SERVING = "serving"
    """It serves the new version."""
    LEFT = "left"
    """It serves the old version, or had no part in the round."""
    QUARANTINED = "quarantined"
    """It failed its last command of the round, or has not answered one of an earlier round: PROTOCOL.md, Quarantine."""
    LOST = "lost"
    """It stopped answering."""


_R, _E = RoundState, EnginePhase

ROUND_MOVES: Final[Mapping[RoundState, frozenset[RoundState]]] = {
    _R.IDLE: frozenset({_R.PREPARING}),
    _R.PREPARING: frozenset({_R.OFFERING, _R.COMMITTING, _R.RESUMING, _R.ABORTING}),
    _R.OFFERING: frozenset({_R.PAUSING, _R.COMMITTING, _R.RESUMING, _R.ABORTING}),
    _R.PAUSING: frozenset({_R.TRANSFERRING, _R.VERIFYING, _R.RESUMING, _R.ABORTING}),
    _R.TRANSFERRING: frozenset({_R.VERIFYING, _R.RESUMING, _R.ABORTING}),
    _R.VERIFYING: frozenset({_R.OFFERING, _R.COMMITTING, _R.RESUMING, _R.ABORTING}),
    _R.COMMITTING: frozenset({_R.RESUMING, _R.ABORTING}),
    _R.RESUMING: frozenset({_R.IDLE, _R.OFFERING}),
    _R.ABORTING: frozenset({_R.IDLE}),
}
"""PREPARING -> COMMITTING: a channel without engines. VERIFYING -> OFFERING: a retry. OFFERING -> COMMITTING: a retry
that could not begin. PAUSING -> VERIFYING: the trainer was lost during a retry. RESUMING -> OFFERING: the next wave of
a rolling round. If the version is durable already, in a later wave or a resync, RESUMING follows once there is no more
to wait for. No move leads from RESUMING to ABORTING: a durable version only goes forward."""

BEFORE_COMMIT: Final = frozenset(RoundState) - {_R.IDLE, _R.COMMITTING, _R.RESUMING, _R.ABORTING}
TIMED_AS: Final[Mapping[RoundState, str]] = {
    _R.PREPARING: "prepare",
    _R.OFFERING: "offer",
    _R.PAUSING: "pause",
    _R.TRANSFERRING: "transfer",
    _R.VERIFYING: "verify",
    _R.COMMITTING: "commit",
    _R.RESUMING: "resume",
    _R.ABORTING: "abort",
}
"""Name of each state in `RoundDone.seconds`."""

SENDING: Final = frozenset({_R.PAUSING, _R.TRANSFERRING})
"""States in which the trainer's half is open and engines receive from it."""

BARRIER_PHASES: Final[Mapping[RoundState, tuple[EnginePhase, ...]]] = {
    _R.PREPARING: (_E.PREPARED,),
    _R.PAUSING: (_E.PAUSED, _E.TRANSFERRING, _E.TRANSFERRED, _E.VERIFIED),
    _R.TRANSFERRING: (_E.VERIFIED,),
    _R.VERIFYING: (_E.VERIFIED,),
    _R.RESUMING: (_E.SERVING,),
}
"""Phases that have reached the barrier of each state that waits for engines.

`StragglerPolicy` says for how long. A straggler is excluded, as if it had missed the deadline of the state.
"""

ENGINE_MOVES: Final[Mapping[EnginePhase, frozenset[EnginePhase]]] = {
    _E.PREPARING: frozenset({_E.PREPARED, _E.LEAVING, _E.LOST}),
    _E.PREPARED: frozenset({_E.PAUSING, _E.LEAVING, _E.LOST}),
    _E.PAUSING: frozenset({_E.PAUSED, _E.TRANSFERRING, _E.BROKEN, _E.LEAVING, _E.LOST}),
    _E.PAUSED: frozenset({_E.TRANSFERRING, _E.BROKEN, _E.LEAVING, _E.LOST}),
    _E.TRANSFERRING: frozenset({_E.TRANSFERRED, _E.VERIFIED, _E.BROKEN, _E.LEAVING, _E.LOST}),
    _E.TRANSFERRED: frozenset({_E.VERIFIED, _E.BROKEN, _E.LEAVING, _E.LOST}),
    _E.VERIFIED: frozenset({_E.RESUMING, _E.BROKEN, _E.LEAVING, _E.LOST}),
    _E.BROKEN: frozenset({_E.PAUSING, _E.LEAVING, _E.LOST}),
    _E.RESUMING: frozenset({_E.SERVING, _E.QUARANTINED, _E.LOST}),
    _E.LEAVING: frozenset({_E.LEFT, _E.QUARANTINED, _E.LOST}),
    _E.SERVING: frozenset(),
    _E.LEFT: frozenset(),
    _E.QUARANTINED: frozenset(),
    _E.LOST: frozenset(),
}

FINISHED: Final = frozenset({_E.SERVING, _E.LEFT, _E.QUARANTINED, _E.LOST})
"""Final phases: the round does not wait for an engine in one of them."""
GENERATING: Final = frozenset({None, _E.PREPARING, _E.PREPARED, _E.SERVING, _E.LEFT})
"""Phases of an engine that generates; None stands for an engine outside of a round."""

_State = TypeVar("_State", bound=enum.StrEnum)


def move(
    machine: str,
    table: Mapping[_State, frozenset[_State]],
    found: _State,
    wanted: _State,
    event_trace: Sequence[object] = (),
) -> _State:
    """The state `wanted`, if `table` has a move to it from `found`. Raises `IllegalMove` otherwise."""
    if wanted not in table[found]:
        raise IllegalMove(machine, found.value, f"a move to {wanted.value}", event_trace)
    return wanted


WATCHDOG_S: Final = 8.0
"""Silence after which a watchdog takes the place of a sidecar or a source in a `distributed` group.

The watchdogs (engine_agent/engines/sglang/group_watchdog.py, dataplane/transports/distributed/source_watchdog.py) use
it, and the coordinator's deadlines allow for it.
"""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The deadlines and bounds of one coordinator."""

    heartbeat_s: float = 1.0
    """How often agents say that they are alive."""
    silence_s: float = 10.0
    """An agent not heard of for so long is lost."""
    takeover_s: float = 3.0
    """A name not heard of for so long may be taken by a newer incarnation."""
    reconnect_s: float = 3.0
    """An engine whose connection is gone is lost after so long, unless it is back by then."""
    lease_s: float = 10.0
    """A trainer silent for so long loses its lease; a paused clean engine that hears nothing for so long resumes."""
    publish_s: float = 1800.0
    """A lease under which nothing is published for so long is taken back."""
    retry_s: float = 1.0
    """A command without an answer is sent again after so long, then after twice as long, and so on..."""
    retry_max_s: float = 8.0
    """... up to this."""
    grace_s: float = 5.0
    """Extra wait beyond an agent's own deadline: the agent's own report says more than a timeout."""
    prepare_s: float = 60.0
    pause_s: float = 60.0
    offer_s: float = 60.0
    verify_s: float = 300.0
    commit_s: float = 30.0
    """Longest wait of a commit for a journal that refuses writes."""
    resume_s: float = 120.0
    abort_s: float = 60.0
    straggle_s: float = 10.0
    """Longest wait for the last engines to resume once others serve the version, while the trainer waits."""
    probe_s: float = 2.0
    """Time between tries of a journal that refused a record."""
    answers: int = 4096
    """Replies remembered by request key."""
    blob_bytes: int = 512 * 1024 * 1024
    """Memory for manifests and digest tables."""
    forget_s: float = 3600.0
    """How long a lost engine stays in the status document."""
    max_channels: int = 64
    max_agents: int = 2560
    """2,048 engines and other agents. `Granted` and `RoundDone` name every engine, in one frame."""


def earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two times."""
    if one is None or (other is not None and other < one):
        return other
    return one


class TransferEnds(msgspec.Struct, frozen=True):
    """A trainer and an engine, with their topology reports."""

    trainer: TrainerInfo
    engine: EngineInfo
    from_trainer: Topology | None = None
    from_engine: Topology | None = None
    snapshot: bool = False
    """True if the version was copied and the trainer goes on: its memory has other weights by now."""

    @property
    def both_await_tables(self) -> bool:
        """True if both have reported that they can handle deferred digests."""
        told = self.from_trainer, self.from_engine
        return all(each is not None and each.supports_deferred_digests for each in told)


class Objection(NamedTuple):
    """Why a transport cannot serve an engine."""

    found: str
    needed: str = ""
    """What would change that; empty if nothing would."""


class Route(msgspec.Struct, frozen=True):
    """The transport chosen for an engine, or None, and why."""

    transport: TransportKind | None
    reason: str
    shares_gpu: bool = False
    """True if a worker is known to be on a GPU of the trainer."""
    supports_deferred_digests: bool = False
    """`TransferEnds.both_await_tables`."""
    objections: dict[TransportKind, Objection] = {}
    """Why each faster transport was not chosen, fastest first."""
    gpus: tuple[str, ...] = ()
    """Known GPUs of its workers, if `transport` is a collective group; a GPU is in one group only once."""


Routing = Callable[[Mapping[AgentId, TransferEnds]], Mapping[AgentId, Route]]
"""A policy: returns a route for every engine of a fleet that is served together, given in order of preference."""


_LEFT_OUT: Final = Route(
    None,
    "the digest table is deferred in this round, which its agent has not said to support: it takes a later version",
)


def may_defer_digests(routes: Iterable[Route]) -> bool:
    """Whether a live version's digest table may be deferred: every routed engine uses `direct` and can handle it."""
    routed = [each for each in routes if each.transport]
    return bool(routed) and all(
        each.supports_deferred_digests and each.transport is TransportKind.DIRECT for each in routed
    )


def open_routes(routes: Mapping[AgentId, Route]) -> Mapping[AgentId, Route]:
    """The routes for a version with deferred digests: engines that cannot handle them get none."""
    return {
        name: each if each.supports_deferred_digests or not each.transport else _LEFT_OUT
        for name, each in routes.items()
    }


KeyedRequest = Acquire | Release | Publish | Offered | Sent | Abandon
"""Requests whose reply is remembered."""
_ENCODE: Final = msgspec.msgpack.Encoder()


class Decision(msgspec.Struct, frozen=True):
    """Yes, or a refusal with its code and reason."""

    code: RefusalCode | None
    """None for yes."""
    reason: str = ""
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True for yes."""
        return self.code is None


YES = Decision(None)


def question(message: KeyedRequest) -> str:
    """Digest of a request in hex: equal for equal messages, even from a sender that knows fewer fields."""
    return hashlib.blake2b(_ENCODE.encode(message), digest_size=16).hexdigest()


def key_reused(message: KeyedRequest, before: type[KeyedRequest]) -> Decision:
    """The refusal of a request whose key was used for another one."""
    tag = before.__struct_config__.tag
    reason = f"key {message.request} was used for another {tag}: every request has a key of its own"
    return Decision(RefusalCode.NOT_ALLOWED, reason)
