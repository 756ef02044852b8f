"""The coordinator: `control/server/event_loop.py` and all machines under it, on simulated bus, journal and clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightbus.control.machine.effects import (
    AnyEffect,
    AnyEvent,
    AnyObservation,
    Burst,
    JournalChanged,
    RoundEnded,
    StateEntered,
)
from weightbus.control.protocol.errors import InvariantBroken, JournalCorrupt
from weightbus.control.server.event_loop import EventLoop

from .disks import JournalDisk, SimJournal, SimWriter
from .network import Network
from .process import Process

if TYPE_CHECKING:
    from .world import World

CHECK_EVERY = 6
"""So many bursts of messages; what else happens, time, records and losses above all, is always checked after."""


class CoordinatorProcess(Process):
    """One name, many lives."""

    def __init__(self, world: World, network: Network, journal: JournalDisk, drift: float) -> None:
        super().__init__(world, "coordinator", drift)
        self._world, self._network, self._journal = world, network, journal
        self.server: EventLoop | None = None
        self._alarm = self.alarm(self.step)
        self._busy_until = 0.0
        self._away = True

    def born(self) -> None:
        """Open the journal, restore, serve."""
        self._alarm, self._busy_until, self._away = self.alarm(self.step), 0.0, True
        self._world.judge.restarted()
        journal = SimJournal(self._journal, self)
        writer = SimWriter(journal, self._journal)
        limits, clock = self._world.limits, self.clock
        server = EventLoop(self._network, journal, limits, observe=self._observed, clock=clock, writer=writer)
        self.server = server
        handle, check, unchecked = server.machine.handle, server.machine.check, 0

        def checked(event: AnyEvent, now: float) -> tuple[AnyEffect, ...]:
            nonlocal unchecked
            effects = handle(event, now)
            unchecked += 1
            if unchecked >= CHECK_EVERY or not isinstance(event, Burst):
                unchecked = 0
                check()
            return effects

        server.machine.handle = checked  # type: ignore[method-assign]
        self.step()

    def gone(self) -> None:
        """Its sockets close, its memory is lost."""
        self.look()
        self.server = None
        self._network.reset()
        if self._journal.sqlite is not None:
            self._journal.sqlite.crash()

    def unpowered(self) -> None:
        """The journal's disk keeps what was synced."""
        if self._journal.sqlite is not None:
            self._journal.sqlite.lose_power()

    def look(self) -> None:
        """Whether the machine agrees with itself now."""
        if self.server is not None:
            try:
                self.server.machine.check()
            except InvariantBroken as error:
                self._world.judge.broken("nothing-raises", f"{self.name}: {error}")

    def freeze(self) -> None:
        """SIGSTOP."""
        self._away = True
        super().freeze()

    def stop(self) -> None:
        """SIGTERM."""
        if self.server is not None:
            self.loop.note(self.name, "** is asked to stop (SIGTERM)")
            self.server.stop()
            self.soon(self.step)

    def step(self) -> None:
        """One turn of the loop, unless the last one still waits for its disk."""
        server = self.server
        if server is None:
            return
        if self.loop.now < self._busy_until:
            self._alarm.set(self.clock() + (self._busy_until - self.loop.now))
            return
        try:
            server.step(0.0)
        except JournalCorrupt as error:
            self._world.judge.broken("never-back", str(error))
            return
        if server._finished():
            self.die("was stopped")
            return
        self._busy_until = self.loop.now + self.lag
        self._world.judge.look_at_ready(fresh=self._away)
        self._away = False
        if server.acks_pending:  # the loop comes round at once
            self.soon(self.step)
        deadline = server.next_deadline()
        if deadline is not None:
            self._alarm.set(deadline)

    def _observed(self, what: AnyObservation) -> None:
        self._world.judge.observed(what)
        match what:
            case StateEntered():
                self.loop.note(self.name, f"round {what.version} epoch {what.epoch}: {what.state}")
                self._world.entered(what.state.value)
            case RoundEnded():
                told = " ".join(f"{each.engine}={each.outcome}" for each in what.done.engines)
                self.loop.note(
                    self.name, f"round {what.done.version} is over: {what.outcome} {told} {what.done.reason}"
                )
                self._world.round_ended(what.done)
            case JournalChanged():
                self.loop.note(self.name, "journal takes writes again" if what.writable else "journal is read-only")
            case _:
                pass
