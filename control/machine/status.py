"""The status document of the coordinator, for operators and request routers, as JSON: a pure function of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Set as AbstractSet
from typing import Final

import msgspec

from ..protocol import (
    AgentId,
    CoordinatorOnStandby,
    EngineHealth,
    HeldVersion,
    Malformed,
    Topology,
    TrainerInfo,
    TransportKind,
    Version,
)
from .channel import UNDESCRIBED_TRAINER, Channel, PastRound
from .engine_registry import EngineRecord, readiness
from .membership import Membership
from .states import RoundState

STARTING: Final = "starting"
"""`EngineView.state` of an engine whose server takes no version yet and has held none since its launch."""
LENT: Final = "lent"
"""`EngineView.state` of an engine whose memory is released until a later version is committed."""
_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")


class HeldStatus(msgspec.Struct, frozen=True):
    """A committed version."""

    version: int
    manifest: str
    table: str
    epoch: int


class PastStatus(msgspec.Struct, frozen=True):
    """A version of the channel's history."""

    version: int
    epoch: int
    rollback: bool
    """True if the channel went back to it."""


class LeaseView(msgspec.Struct, frozen=True):
    """The lease of a channel."""

    holder: str
    epoch: int
    version: int
    remaining_s: float


class RoundView(msgspec.Struct, frozen=True):
    """A running round; state ``idle`` and no version when there is none."""

    state: RoundState
    version: int | None = None
    epoch: int = 0
    age_s: float = 0.0
    mode: str = ""
    """``live``: the trainer waits for the round; ``snapshot``: it goes on training."""
    engines: dict[str, str] = {}
    """Engine -> its phase."""
    max_paused: int = 0
    """Most engines that may be paused at a time; 0: all."""
    catch_up: bool = False
    """True for the round of a resync, which brings the committed version to stale engines."""
    seconds: dict[str, float] = {}
    """Seconds by phase until now, as in `RoundDone`."""


class EngineView(msgspec.Struct, frozen=True):
    """One engine, alive or lost."""

    url: str
    state: str
    """``lost``, ``starting``, ``dirty``, ``pending``, ``lent`` (pending, its memory released until a later version is
    committed), ``paused``, ``serving``, or its phase in the running round."""
    version: int | None
    """Version that it holds, verified."""
    lag: int
    """Committed version minus its own. 0 while nothing is committed; all of it for an engine without a version, or with
    one that was never committed here, or that the channel went back from."""
    ready: bool
    reason: str
    """Why it is not ready."""
    last_seen_s: float | None
    incarnation: str
    server_version: str
    tp: int
    pp: int
    dp: int
    device: str
    transports: tuple[TransportKind, ...]
    known: bool = True
    """True if its version was committed in this channel, as far as the history goes."""
    last_transport: TransportKind | None = None
    """Transport of the last version that it took, since its agent and the coordinator started."""
    trouble: str = ""
    """Why its server can take no version now, and for how long; empty if it can."""
    starting: bool = False
    """True if that server has held no version since its launch: it may come yet."""

    @property
    def usable(self) -> bool:
        """Whether a version could be sent to it now, as far as is known. It need not serve the committed one."""
        return self.state not in {"lost", LENT} and not self.trouble


class TrainerView(msgspec.Struct, frozen=True):
    """A trainer that is connected, or that published last."""

    address: str
    """Address at which engines reach its rank 0; empty while it is unknown."""
    device: str
    ranks: int
    """0 while their number is unknown."""
    last_seen_s: float | None
    """None if it is not connected."""
    published: int | None = None
    """The last version that was announced in the channel, if this trainer announced it."""


class ChannelView(msgspec.Struct, frozen=True):
    """One channel."""

    epoch: int
    committed: HeldStatus | None
    lease: LeaseView | None
    round: RoundView
    engines: dict[str, EngineView]
    ready: tuple[str, ...]
    """URLs of engines to which requests may be sent."""
    history: tuple[PastStatus, ...] = ()
    """Committed versions, oldest first, as far as remembered; the last one is current."""
    trainers: dict[str, TrainerView] = {}
    rounds: tuple[PastRound, ...] = ()
    """The last finished rounds, oldest first."""
    owner: str = ""
    """The run to which the channel belongs; empty if none was named yet."""


class StatusView(msgspec.Struct, frozen=True):
    """The whole document."""

    boot: int
    read_only: bool
    stopping: bool
    agents: int
    blob_bytes: int
    channels: dict[str, ChannelView]
    warnings: tuple[str, ...] = ()
    """What is wrong around the coordinator: a disk that hangs, an allow-list that cannot be read."""
    refused: tuple[str, ...] = ()
    """Connections that were refused lately for their keys, each with what to do about it."""


class StandbyView(msgspec.Struct, frozen=True):
    """The document of a coordinator on standby, instead of any other."""

    stands_by: bool
    leader: str
    """Name of the leader; empty while there is none or it is unknown."""
    endpoint: str


_DECODER: Final = msgspec.json.Decoder(StatusView)
_STANDBY_DECODER: Final = msgspec.json.Decoder(StandbyView)


def encode(view: StatusView) -> bytes:
    """JSON, keys in a fixed order."""
    return _ENCODER.encode(view)


def parse(document: bytes) -> StatusView:
    """The document, typed. Raises `CoordinatorOnStandby`, or `Malformed`."""
    try:
        return _DECODER.decode(document)
    except ValueError as problem:
        refuse_standby(document)
        raise Malformed(f"this is not the status of a coordinator of this version: {problem}") from problem


def refuse_standby(document: bytes) -> None:
    """Raise `CoordinatorOnStandby` if the document says so."""
    with contextlib.suppress(ValueError):
        view = _STANDBY_DECODER.decode(document)
        raise CoordinatorOnStandby(view.leader, view.endpoint)


def describe(channels: Iterable[Channel], members: Membership, lease_s: float, now: float) -> dict[str, ChannelView]:
    """Every channel, by name."""
    return {channel.name: _channel(channel, members, lease_s, now) for channel in channels}


def _channel(channel: Channel, members: Membership, lease_s: float, now: float) -> ChannelView:
    past = frozenset(each.version for each in channel.history)
    engines = {str(e.name): _engine(e, channel, past, members, now) for e in channel.engines.values()}
    lease, round_ = channel.lease, channel.round
    return ChannelView(
        epoch=channel.epoch,
        committed=_held(channel.committed, channel.committed_epoch),
        lease=LeaseView(lease.holder, lease.epoch, lease.version, max(0.0, lease.expires_at(lease_s) - now))
        if lease
        else None,
        round=RoundView(
            round_.state,
            round_.version,
            round_.epoch,
            round_.age_s(now),
            round_.publish.mode,
            {str(m.name): m.phase.value for m in round_.participants.by_name.values()},
            round_.publish.policy.max_paused,
            round_.publish.catch_up,
            round_.seconds(now),
        )
        if round_
        else RoundView(RoundState.IDLE),
        engines=engines,
        ready=tuple(engine.url for engine in engines.values() if engine.ready),
        history=tuple(PastStatus(each.version, each.epoch, each.rollback) for each in channel.history),
        trainers=_trainers(channel, members, now),
        rounds=channel.past_rounds(now),
        owner=channel.owner.run if channel.owner else "",
    )


def _trainers(channel: Channel, members: Membership, now: float) -> dict[str, TrainerView]:
    last = channel.publisher
    found = {last.name: _trainer(last.info, last.topology, None)} if last else {}
    for agent in members.trainers(channel.name):
        info, seen_s = agent.trainer or UNDESCRIBED_TRAINER, _last_seen(agent.name, members, now)
        found[agent.name] = _trainer(info, agent.topology, seen_s)
    return {
        str(name): msgspec.structs.replace(each, published=last.version) if last and last.name == name else each
        for name, each in found.items()
    }


def _trainer(info: TrainerInfo, topology: Topology | None, last_seen_s: float | None) -> TrainerView:
    address, places = (topology.address, topology.places) if topology else ("", ())
    return TrainerView(address, info.device, len(places), last_seen_s)


def _held(held: HeldVersion | None, epoch: int) -> HeldStatus | None:
    return HeldStatus(held.version, held.manifest, held.table, epoch) if held else None


def _was_committed(held: HeldVersion, committed: HeldVersion | None, past: AbstractSet[Version]) -> bool:
    """Whether `held` was committed in a channel with this history, which has the digest table of the newest alone."""
    if committed is None:
        return False
    if held.version == committed.version:
        return held.table == committed.table
    return held.version in past or held.version < min(past, default=committed.version)


def _engine(
    engine: EngineRecord, channel: Channel, past: AbstractSet[Version], members: Membership, now: float
) -> EngineView:
    """`past`: versions committed in the channel, as far as remembered."""
    verdict = readiness(engine, channel.phase(engine.name), channel.versions_allowed_to(engine.name))
    held, committed, info = engine.held, channel.committed, engine.info
    trouble = engine.trouble_for(now) if engine.alive else ""
    left_out = engine.left_out(now) if engine.alive and not verdict.ok else ""
    version = held.version if held else None
    known = held is None or _was_committed(held, committed, past)
    behind = held.version if held and known and committed and held.version <= committed.version else 0
    return EngineView(
        url=info.url,
        state=_state(engine, channel),
        version=version,
        lag=committed.version - behind if committed else 0,
        ready=verdict.ok,
        reason=f"starting: {trouble}" if trouble and engine.starting else trouble or left_out or verdict.reason,
        last_seen_s=_last_seen(engine.name, members, now),
        incarnation=engine.incarnation,
        server_version=info.server_version,
        tp=info.tp,
        pp=info.pp,
        dp=info.dp,
        device=info.device,
        transports=info.transports,
        known=known,
        last_transport=engine.last_transport,
        trouble=trouble,
        starting=bool(trouble) and engine.starting,
    )


def _state(engine: EngineRecord, channel: Channel) -> str:
    phase = channel.phase(engine.name)
    if not engine.alive:
        return "lost"
    if phase is not None:
        return phase.value
    if engine.starting and engine.trouble:
        return STARTING
    if engine.health is not EngineHealth.CLEAN:
        return LENT if engine.awaits_newer(channel.committed) else engine.health.value
    return "serving" if engine.serving else "paused"


def _last_seen(name: AgentId, members: Membership, now: float) -> float | None:
    agent = members.get(name)
    return max(0.0, now - agent.heard_at) if agent else None
