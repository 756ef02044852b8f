"""The data plane: what a trainer has on offer under one epoch, and how an engine agent's receiver takes it.

Two kinds, as different as the real ones: over ``local`` and ``direct`` every engine takes its buckets by itself, and
each is compared with the digest table before the server sees it; over ``distributed`` all engines of a group go in
step, one failure fails all of them, and nothing was verified before the load. Over ``direct`` the table may be
deferred: then all is loaded first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightbus.control.protocol.messages import TransportKind

from .process import Process, Thread
from .server_model import CallFailed

if TYPE_CHECKING:
    from .engine_process import EngineProcess
    from .world import World

JOIN_S = 8.0
FORGED = "forged/forged"
STEP_S = 0.05


class TransferBroken(Exception):
    """The transfer came to nothing."""


class Outlet:
    """One transport of one epoch, in the trainer's memory."""

    def __init__(
        self, trainer: Process, kind: TransportKind, epoch: int, tags: tuple[str, ...], engines: tuple[str, ...]
    ) -> None:
        self.trainer, self.kind, self.epoch, self.tags, self.engines = trainer, kind, epoch, tags, engines
        self.life = trainer.life
        self.open = True
        self.told_at: float | None = None
        self.came: dict[str, int] = {}
        """Engine -> buckets it has."""
        self.done: dict[str, str] = {}
        """Engine -> why it failed; empty when it has everything."""
        self.spared: set[str] = set()
        """Engines that only another one's failure kept from it, before the first bucket."""
        self.corrupt: int | None = None
        """This bucket is not what it should be."""
        self.table: tuple[bytes, str] | None = None
        """The table that follows and the signature of it, once the trainer has said it."""
        self.forged_for = ""
        """This engine takes other bytes than the others, and another table that agrees with them."""
        self.mute_for = ""
        """This one is never told the table."""

    @property
    def there(self) -> bool:
        """The trainer's process still has it."""
        return self.open and self.trainer.alive and self.trainer.life == self.life

    @property
    def collective(self) -> bool:
        """All engines or none."""
        return self.kind is TransportKind.DISTRIBUTED

    def content(self, bucket: int, engine: str) -> str:
        """What `engine` reads from the trainer's memory, or takes for it."""
        if engine == self.forged_for:
            return FORGED
        return "garbage/garbage" if bucket == self.corrupt else self.tags[bucket]

    def told(self, engine: str) -> tuple[bytes, str] | None:
        """The table that follows, as `engine` gets it, and its signature; None as long as it does not."""
        if self.table is None or engine == self.mute_for:
            return None
        if engine == self.forged_for:
            return msgspec.json.encode([FORGED] * len(self.tags)), "0" * 128
        return self.table

    def finish(self, engine: str, why: str = "") -> None:
        """`engine` is through."""
        if engine in self.done:
            return
        self.done[engine] = why
        if why and self.collective:
            if not any(self.came.values()):
                self.spared.update(set(self.engines) - self.done.keys())
            for other in self.engines:
                self.done.setdefault(other, f"{engine} broke the group: {why}")

    def over(self, now: float, deadline: float) -> bool:
        """Nothing more can come of it."""
        if self.told_at is not None and now > self.told_at + JOIN_S:
            for engine in self.engines:
                if engine not in self.came:
                    self.finish(engine, "it did not come")
        if now > deadline:
            for engine in self.engines:
                self.finish(engine, "the transfer took too long")
        return all(engine in self.done for engine in self.engines)

    def failed(self) -> dict[str, str]:
        """Engines that did not get everything."""
        return {engine: why for engine, why in self.done.items() if why}


def receive(  # noqa: PLR0917
    world: World, engine: EngineProcess, address: str, epoch: int, wanted: tuple[str, ...] | None, deadline: float
) -> Thread:
    """Take every bucket and load it. Returns whether each was compared, and what followed; raises `TransferBroken`.

    Without `wanted` all is loaded, and compared with the table that follows: its blob and signature are returned.
    """
    outlet = world.outlets.get(address)
    if outlet is None or not outlet.there:
        raise TransferBroken("no process listens there")
    if outlet.epoch != epoch:
        raise TransferBroken(f"the sender is at epoch {outlet.epoch}, this engine at {epoch}")
    name = engine.name
    followed: tuple[bytes, str] | None = None
    if name in outlet.done:
        raise TransferBroken(outlet.done[name] or "this engine is through already")
    try:
        yield from _through(world, outlet, engine, deadline)
        outlet.came[name] = 0
        yield from _join(outlet, engine, deadline)
        for bucket in range(len(outlet.tags)):
            yield STEP_S * (0.5 + world.data_rng.random())
            yield from _through(world, outlet, engine, deadline)
            found = outlet.content(bucket, name)
            if wanted is not None and not outlet.collective and found != wanted[bucket]:
                raise TransferBroken(f"bucket {bucket} is not what the table says")  # noqa: TRY301
            yield from engine.call(
                lambda at=bucket, what=found: engine.server.load(at, what, epoch),
                deadline - engine.clock(),
                touches=True,
            )
            outlet.came[name] = bucket + 1
            yield from _in_step(outlet, engine, bucket + 1, deadline)
        if wanted is None:
            followed = yield from _table(world, outlet, engine, deadline)
            loaded = tuple(outlet.content(bucket, name) for bucket in range(len(outlet.tags)))
            if tuple(msgspec.json.decode(followed[0], type=list[str])) != loaded:
                raise TransferBroken("what was loaded is not what the table says")  # noqa: TRY301
    except (TransferBroken, CallFailed) as broken:
        outlet.finish(name, str(broken))
        raise
    outlet.finish(name)
    return not outlet.collective, followed


def _table(world: World, outlet: Outlet, engine: EngineProcess, deadline: float) -> Thread:
    while (told := outlet.told(engine.name)) is None or outlet.trainer.frozen:
        yield 0.1
        yield from _through(world, outlet, engine, deadline)
    return told


def _still(outlet: Outlet, engine: EngineProcess, deadline: float) -> None:
    if engine.cancelled:
        raise TransferBroken("called off")
    if not outlet.there:
        raise TransferBroken("the sender is gone")
    if outlet.done.get(engine.name):
        raise TransferBroken(outlet.done[engine.name])
    if engine.clock() >= deadline:
        raise TransferBroken("too late")


def _through(world: World, outlet: Outlet, engine: EngineProcess, deadline: float) -> Thread:
    """Nothing comes through a cut, and neither end is told: both wait, up to their deadlines."""
    _still(outlet, engine, deadline)
    while engine.name in world.cut_off:
        yield 0.2
        _still(outlet, engine, deadline)


def _join(outlet: Outlet, engine: EngineProcess, deadline: float) -> Thread:
    while (outlet.collective and len(outlet.came) < len(outlet.engines)) or outlet.trainer.frozen:
        yield 0.2
        _still(outlet, engine, deadline)


def _in_step(outlet: Outlet, engine: EngineProcess, count: int, deadline: float) -> Thread:
    while (outlet.collective and min(outlet.came.values()) < count) or outlet.trainer.frozen:
        yield 0.1
        _still(outlet, engine, deadline)
