"""How an engine's tensors travel: what is known of the two ends, and what was chosen for them. Chooses nothing.

The coordinator is given who chooses (`Routing`; that of a process is routing.py), and keeps its promises whatever that
says: an engine with a bad route fails its transfer and is left out. The simulation has one that says nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from ..protocol import AgentId, EngineInfo, Topology, TrainerInfo, TransportKind


class TransferEnds(msgspec.Struct, frozen=True):
    """A trainer and an engine, with what each has told of where it is."""

    trainer: TrainerInfo
    engine: EngineInfo
    from_trainer: Topology | None = None
    from_engine: Topology | None = None
    snapshot: bool = False
    """What is published was copied, and the trainer goes on: its memory is another by now."""

    @property
    def await_tables(self) -> bool:
        """Both said that they know versions whose digest table follows."""
        told = self.from_trainer, self.from_engine
        return all(each is not None and each.awaits_tables for each in told)


class Objection(NamedTuple):
    """Why a transport cannot serve an engine."""

    found: str
    needed: str = ""
    """What would change that; empty where nothing would."""


class Route(msgspec.Struct, frozen=True):
    """The chosen transport, or None; and why."""

    transport: TransportKind | None
    reason: str
    shares: bool = False
    """A worker is on a GPU of the trainer's, as far as is known."""
    awaits: bool = False
    """`TransferEnds.await_tables`: a fact, and no choice."""
    hurdles: dict[TransportKind, Objection] = {}
    """What speaks against those that would have been taken before it, fastest first."""
    gpus: tuple[str, ...] = ()
    """Those that its workers have in the group of `transport`, where it is one, as far as is known."""


Routing = Callable[[Mapping[AgentId, TransferEnds]], Mapping[AgentId, Route]]
"""Chooses for engines that are served together, in the order in which they are preferred. Each gets its route."""


def may_leave_open(routes: Iterable[Route]) -> bool:
    """Whether a live version's digest table may follow: whoever is routed takes it by `direct`, and knows how."""
    routed = [each for each in routes if each.transport]
    return bool(routed) and all(each.awaits and each.transport is TransportKind.DIRECT for each in routed)


def open_routes(routes: Mapping[AgentId, Route]) -> Mapping[AgentId, Route]:
    """Those of a version whose table is open: who does not know that is left out, as it would understand nothing."""
    return {name: each if each.awaits or not each.transport else _LEFT_OUT for name, each in routes.items()}


_LEFT_OUT: Final = Route(
    None,
    "the digest table follows in this round, and its agent has not said that it knows how: it takes a later version",
)
