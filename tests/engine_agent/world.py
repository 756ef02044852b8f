"""A hand-driven machine: commands go in by name, answers and operations come out; `check` runs after every event."""

from __future__ import annotations

from typing import Any

from weightbus.control import protocol as m
from weightbus.control.protocol.messages import Channel, Digest, Epoch, RequestId, Version
from weightbus.engine_agent.machine.engine_machine import EngineMachine
from weightbus.engine_agent.machine.events import (
    Answer,
    Cancel,
    Commanded,
    Effect,
    Event,
    Label,
    Operated,
    Operation,
    OperationDone,
    OperationFailed,
    OrphanPolicy,
    Received,
    Remember,
    Result,
    RunOperation,
    ServerFound,
    ServerGone,
    StateRecord,
    TimePassed,
    VerificationPassed,
    Welcomed,
)

CHANNEL = Channel("c")
MANIFEST, TABLE, OTHER = "a" * 64, "b" * 64, "c" * 64


class World:
    """One engine, its clock, and everything the machine asked for."""

    def __init__(
        self,
        record: StateRecord | None = None,
        *,
        up: bool = True,
        label: str = "default",
        joined: bool = True,
        orphans: OrphanPolicy = OrphanPolicy.WAIT,
    ) -> None:
        self.machine = EngineMachine(CHANNEL, "life1", record, orphans=orphans)
        self.now = 100.0
        self.heard_at = 100.0
        self.effects: list[Effect] = []
        self.record = record
        self.slow_label = False
        self.flush = True
        self.asked = TABLE
        """What commands name: empty where the table follows."""
        """Labeling ahead of the commit takes until `end` is called for it, too."""
        self._pending: list[RunOperation] = []
        if up:
            self.found("first", label)
        if joined:
            self.welcome()

    # -- events

    def event(self, event: Event) -> tuple[Effect, ...]:
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        self.effects += effects
        self._pending += [effect for effect in effects if isinstance(effect, RunOperation)]
        for effect in effects:
            if isinstance(effect, Remember):
                self.record = effect.record
        return effects

    def found(self, identity: str = "first", label: str = "default") -> tuple[Effect, ...]:
        return self.event(ServerFound(identity, label, "/models/served"))

    def relaunched(self, identity: str = "second") -> tuple[Effect, ...]:
        """Found as another launch, and welcomed with it."""
        return (*self.found(identity), *self.welcome())

    def gone(self) -> tuple[Effect, ...]:
        return self.event(ServerGone("connection refused"))

    def tick(self, seconds: float = 0.0, *, heard: bool = False) -> tuple[Effect, ...]:
        self.now += seconds
        if heard:
            self.heard_at = self.now
        return self.event(TimePassed(self.heard_at))

    def welcome(
        self, boot: int = 1, committed: m.HeldVersion | None = None, *, doubted: bool = False
    ) -> tuple[Effect, ...]:
        welcome = m.Welcome(
            request=RequestId("r"),
            boot=boot,
            epoch=Epoch(0),
            committed=committed,
            heartbeat_s=1.0,
            silence_s=10.0,
            doubted=doubted,
        )
        return self.event(Welcomed(welcome))

    def prepare(self, epoch: int = 1, version: int = 7) -> tuple[Effect, ...]:
        return self._say(
            m.Prepare,
            epoch,
            version=Version(version),
            manifest=MANIFEST,
            table=self.asked,
            transport=m.TransportKind.LOCAL,
            policy=m.Policy(flush=self.flush),
        )

    def pause(self, epoch: int = 1, lease_s: float = 10.0) -> tuple[Effect, ...]:
        return self.event(Commanded(self.pause_message(epoch, lease_s)))

    def pause_message(self, epoch: int = 1, lease_s: float = 10.0) -> m.Pause:
        return m.Pause(channel=CHANNEL, epoch=Epoch(epoch), mode=m.PauseMode.RETRACT, lease_s=lease_s, deadline_s=30.0)

    def transfer(self, epoch: int = 1, version: int = 7) -> tuple[Effect, ...]:
        return self.event(Commanded(self.transfer_message(epoch, version)))

    def transfer_message(self, epoch: int = 1, version: int = 7) -> m.Transfer:
        return m.Transfer(
            channel=CHANNEL,
            epoch=Epoch(epoch),
            version=Version(version),
            manifest=Digest(MANIFEST),
            table=Digest(self.asked),
            offer=m.Endpoint(transport=m.TransportKind.LOCAL, address="/run/x"),
            rank_offset=1,
            deadline_s=30.0,
        )

    def commit(self, epoch: int = 1, version: int = 7, table: str = TABLE, *, flush: bool = True) -> tuple[Effect, ...]:
        return self._say(m.Commit, epoch, version=Version(version), table=table, flush=flush)

    def abort(self, epoch: int = 1) -> tuple[Effect, ...]:
        return self._say(m.Abort, epoch, reason="the test says so")

    def _say(self, kind: type[Any], epoch: int, **fields: Any) -> tuple[Effect, ...]:
        return self.event(Commanded(kind(channel=CHANNEL, epoch=Epoch(epoch), deadline_s=30.0, **fields)))

    # -- operations

    @property
    def doing(self) -> Operation | None:
        """The operation that waits for its end."""
        return self._pending[0].operation if self._pending else None

    def end(self, result: Result | None = None, seconds: float = 0.5) -> tuple[Effect, ...]:
        """End the running operation, well unless told otherwise."""
        run = self._pending.pop(0)
        self.now += seconds
        name = type(run.operation).__name__
        good: dict[str, Result] = {
            "Receive": Received(1000, 2, checked=True),
            "Verify": VerificationPassed("live-digest"),
        }
        effects = self.event(Operated(run.number, result or good.get(name, OperationDone())))
        if isinstance(self.doing, Label) and not self.slow_label:
            self.end(seconds=0.0)
        return effects

    def fail(self, *, dirty: bool = False) -> tuple[Effect, ...]:
        return self.end(OperationFailed("it broke", dirty))

    # -- whole stretches

    def to_paused(self, epoch: int = 1, version: int = 7) -> None:
        self.prepare(epoch, version)
        self.end()
        self.pause(epoch)
        self.end()

    def to_loaded(self, epoch: int = 1, version: int = 7) -> None:
        self.to_paused(epoch, version)
        self.transfer(epoch, version)
        self.end()
        self.end()

    def to_serving(self, epoch: int = 1, version: int = 7) -> None:
        self.to_loaded(epoch, version)
        self.commit(epoch, version)
        self.end()


def answers(effects: tuple[Effect, ...]) -> list[Any]:
    """The messages among `effects`."""
    return [effect.message for effect in effects if isinstance(effect, Answer)]


def only(effects: tuple[Effect, ...]) -> Any:
    """The one message among `effects`."""
    (message,) = answers(effects)
    return message


def ran(effects: tuple[Effect, ...]) -> list[str]:
    """Names of the operations that `effects` start."""
    return [type(effect.operation).__name__ for effect in effects if isinstance(effect, RunOperation)]


def cancels(effects: tuple[Effect, ...]) -> bool:
    """Whether something was asked to end soon."""
    return any(isinstance(effect, Cancel) for effect in effects)
