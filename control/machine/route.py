"""The route of an engine's tensors: a trainer and an engine, and the transport chosen for them. Chooses nothing.

The coordinator is given a policy (`Routing`) and keeps its promises whatever that returns: an engine with a bad route
fails its transfer and is excluded. The policy of a real coordinator is routing.py; the simulation has a random one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from ..protocol import AgentId, EngineInfo, Topology, TrainerInfo, TransportKind


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


_LEFT_OUT: Final = Route(
    None,
    "the digest table is deferred in this round, which its agent has not said to support: it takes a later version",
)
