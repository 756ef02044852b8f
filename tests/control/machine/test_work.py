"""What an event costs in a large fleet, counted in interpreter instructions, so that no machine is too slow for it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from weightbus.control.machine.effects import AnyEffect, AnyEvent, ConnectionLost, MessageReceived, Peer, SendTo
from weightbus.control.protocol.messages import (
    EngineHealth,
    Failed,
    Heartbeat,
    Outcome,
    Paused,
    Prepared,
    Serving,
    Step,
    Transfer,
    Transferred,
    Verified,
)

from ..world import Agent, World, one_by_one

ANSWERS = Prepared | Paused | Transferred | Verified | Serving | Failed | Heartbeat
SMALL, LARGE = 32, 256
GROWTH = 1.5
"""How much dearer an answer may be in the large fleet. Work that grows with the fleet would make it eight times so."""


class CountingWorld(World):
    """Counts the instructions that the machine spends on engines' answers. Skips its checks, which cost more."""

    def __init__(self) -> None:
        self.instructions, self.answers = 0, 0
        self.by_peer: dict[Peer, Agent] = {}
        super().__init__()

    @property
    def price(self) -> float:
        """Instructions for one answer, on average."""
        return self.instructions / self.answers

    def handle(self, event: AnyEvent) -> tuple[AnyEffect, ...]:
        counted = isinstance(event, MessageReceived) and isinstance(event.message, ANSWERS)
        before = sys.gettrace()
        if counted:
            self.answers += 1
            sys.settrace(self.trace)
        try:
            effects = self.machine.handle(event, self.now)
            self.machine.next_deadline()
        finally:
            sys.settrace(before)
        for effect in one_by_one(effects):
            self.perform(effect)
        return effects

    def perform(self, effect: AnyEffect) -> None:
        if not isinstance(effect, SendTo):
            super().perform(effect)
            return
        if effect.peer not in self.by_peer:
            self.by_peer = {agent.peer: agent for agent in self.agents.values()}
        agent = self.by_peer.get(effect.peer)
        if agent is None or not agent.alive:
            self.handle(ConnectionLost(peer=effect.peer))
        else:
            agent.take(effect.message)

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.instructions += 1
        return self.trace


def fleet_of(engines: int) -> CountingWorld:
    world = CountingWorld()
    for number in range(engines):
        world.engine(f"e{number}")
    return world


def price_of_a_round(engines: int) -> float:
    """A round in which one engine of sixteen fails in the transfer and is driven again."""
    world = fleet_of(engines)
    for number in range(0, engines, 16):
        engine: Any = world.agents[f"e{number}"]
        engine.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
    done = world.publish(world.trainer(), 1)
    assert {report.outcome for report in done.engines} == {Outcome.COMMITTED}
    assert world.answers > 5 * engines
    return world.price


def price_of_heartbeats(engines: int) -> float:
    world = fleet_of(engines)
    world.instructions = world.answers = 0
    world.advance(3.0)
    assert world.answers >= 3 * engines
    return world.price


@pytest.mark.parametrize("price", [price_of_a_round, price_of_heartbeats])
def test_what_an_engine_says_costs_the_same_in_any_fleet(price: Any) -> None:
    """Eight times the engines make eight times the answers, none dearer: a round is not quadratic in them (F23).

    What an answer really costs is `make bench-control`.
    """
    small, large = price(SMALL), price(LARGE)
    assert large < GROWTH * small, f"{small:.0f} instructions with {SMALL} engines, {large:.0f} with {LARGE}"
