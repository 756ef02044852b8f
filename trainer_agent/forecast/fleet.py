"""The fleet of a forecast: a trainer's layout, groups of engines and the links between them. Pure data, checked.

GPUs are numbered: the trainer's by rank, host after host, then GPUs of engines alone. A group of engines is on the
trainer's own GPUs, on further GPUs of its hosts, or on hosts of its own.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from weightbus.control.protocol import ConfigurationError

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Rate = Annotated[float, Meta(ge=1e-3, le=1e6)]
"""In GB/s: a link of 1 MB/s carries no model. Infinity is none: it would have no share in any answer."""
MOST_ENGINES: Final = 4096
MOST_GPUS: Final = 1 << 16
"""Of trainer and engines. Engines are calculated one by one, for each change again."""


class FleetError(ConfigurationError):
    """A fleet that cannot be: what was found, what is expected, what to do."""


class EngineLocation(enum.StrEnum):
    """GPUs on which engines run."""

    GPUS = "trainer-gpus"
    HOSTS = "trainer-hosts"
    OTHER = "other-hosts"


class ForecastTransport(enum.StrEnum):
    """Transport of a forecast; transports of weightbus have the same names."""

    DIRECT = "direct"
    SENDS = "sends"
    NEAREST = "nearest"
    """Each part from its nearest holder: copied on a GPU or a host, sent from other hosts. Predicted, not offered."""
    DISTRIBUTED = "distributed"
    LOCAL = "local"
    DISK = "disk"

    @property
    def sends_shards(self) -> bool:
        """True where every worker gets its own shards from the ranks that hold them; False for whole tensors."""
        return self in {ForecastTransport.DIRECT, ForecastTransport.SENDS, ForecastTransport.NEAREST}


class TrainerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer in Megatron's layout; what is left over is data parallelism."""

    gpus: Count = 1
    gpus_per_host: Count = 8
    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    etp: Count | None = None
    """None: as tp, which is Megatron's default."""

    @property
    def expert_tp(self) -> int:
        """Ranks that one expert is cut into."""
        return self.tp if self.etp is None else self.etp

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.gpus // self.pp

    def gpus_on(self, host: int) -> int:
        """How many of its GPUs are on that one of its hosts."""
        return max(0, min(self.gpus_per_host, self.gpus - host * self.gpus_per_host))

    def check(self) -> None:
        """Raise `FleetError` unless the ranks come out even."""
        _divides(self.gpus, self.tp * self.pp, "trainer GPUs", f"tp x pp = {self.tp} x {self.pp}")
        experts = f"ep x etp = {self.ep} x {self.expert_tp}"
        _divides(self.stage, self.ep * self.expert_tp, "ranks of a pipeline stage", experts)
        if self.gpus > self.gpus_per_host:
            _divides(self.gpus, self.gpus_per_host, "trainer GPUs", f"gpus_per_host = {self.gpus_per_host}")


class Engines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of equal engines: number, layout, location and transport."""

    count: Count = 1
    tp: Count = 1
    ep: Count = 1
    location: EngineLocation = msgspec.field(default=EngineLocation.OTHER, name="where")
    transport: ForecastTransport | None = msgspec.field(default=None, name="way")
    """None for the first possible one of direct, sends and nearest."""
    gpus_per_host: Count = 8
    """On hosts of their own; at trainer-hosts, beside the trainer's on each of its hosts, at most."""
    shift: Annotated[int, Meta(ge=0)] = 0
    """Worker w is on the GPU that worker w + shift would have: away from the trainer's part of the same number."""

    @property
    def workers(self) -> int:
        """GPUs of all of them."""
        return self.count * self.tp


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates in GB/s, one way; None: the figure of cost_model.py."""

    device: Rate | None = None
    """Copies within a GPU."""
    nvlink: Rate | None = None
    """One GPU to others of its host."""
    nic: Rate | None = None
    """One NIC."""
    nics_per_host: Count | None = None
    """None: one for each GPU."""
    storage: Rate | None = None
    """What all hosts together read and write."""


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything but the model."""

    trainer: TrainerSpec = TrainerSpec()
    engines: tuple[Engines, ...] = (Engines(),)
    links: Links = Links()
    bucket_mb: Count = 512
    max_paused: Count | None = None
    """Most engines that are paused at a time; None for all at once."""


class PlacedEngines(msgspec.Struct, frozen=True):
    """A group of engines on GPUs, or the part of it that is in one wave."""

    engines: Engines
    transport: ForecastTransport
    gpu: tuple[tuple[int, ...], ...]
    """GPU number of each worker: (engines, tp)."""

    @property
    def gpus(self) -> list[int]:
        """GPU numbers of all workers."""
        return [gpu for row in self.gpu for gpu in row]


class Placement(msgspec.Struct, frozen=True):
    """The GPUs of a fleet, with the engines on them."""

    trainer: TrainerSpec
    host: tuple[int, ...]
    """Host number of each GPU."""
    groups: tuple[PlacedEngines, ...]


def place_engines(fleet: FleetSpec) -> Placement:
    """Number the GPUs and choose transports. Raises `FleetError` for an impossible fleet."""
    trainer = fleet.trainer
    trainer.check()
    if not fleet.engines:
        raise FleetError("a fleet without engines has no round to predict: give at least one group")
    _bound(fleet)
    host = [gpu // trainer.gpus_per_host for gpu in range(trainer.gpus)]
    hosts = host[-1] + 1
    groups: list[PlacedEngines] = []
    taken = 0
    for engines in fleet.engines:
        _divides(engines.tp, engines.ep, "engine tp", f"engine ep = {engines.ep}")
        first = len(host)
        if engines.location is EngineLocation.GPUS:
            first, taken = taken, taken + engines.workers
            if taken > trainer.gpus:
                raise FleetError(
                    f"engines on the trainer's GPUs take {taken} of them, the trainer has {trainer.gpus}: use fewer"
                    " engines, a smaller engine tp, or put some on trainer-hosts or other-hosts"
                )
        elif engines.location is EngineLocation.HOSTS:
            host += [worker * hosts // engines.workers for worker in range(engines.workers)]
            _fits(engines, trainer, host)
        else:
            beyond = max(host[-1] + 1, max(host) + 1)
            host += [beyond + worker // engines.gpus_per_host for worker in range(engines.workers)]
        gpus = [first + (worker + engines.shift) % engines.workers for worker in range(engines.workers)]
        way = _way(engines, trainer, {host[gpu] for gpu in gpus})
        of_each = tuple(tuple(gpus[at : at + engines.tp]) for at in range(0, engines.workers, engines.tp))
        groups.append(PlacedEngines(engines, way, of_each))
    return Placement(trainer, tuple(host), tuple(groups))


def waves(placement: Placement, most: int | None) -> tuple[Placement, ...]:
    """Engines that pause together: in the order of their groups, `most` at a time; None for all at once."""
    engines = [(index, gpus) for index, group in enumerate(placement.groups) for gpus in group.gpu]
    each = len(engines) if most is None else most
    found: list[Placement] = []
    for at in range(0, len(engines), each):
        turn = engines[at : at + each]
        groups = tuple(
            replace(placement.groups[index], gpu=tuple(gpus for owner, gpus in turn if owner == index))
            for index in sorted({index for index, _ in turn})
        )
        found.append(replace(placement, groups=groups))
    return tuple(found)


def _bound(fleet: FleetSpec) -> None:
    engines = sum(group.count for group in fleet.engines)
    gpus = fleet.trainer.gpus + sum(group.workers for group in fleet.engines)
    for found, most, what in ((engines, MOST_ENGINES, "engines"), (gpus, MOST_GPUS, "GPUs of trainer and engines")):
        if found > most:
            raise FleetError(
                f"{found} {what} are more than the {most} that are calculated one by one in a time worth waiting for:"
                " ask for fewer, and see how the round grows with them"
            )


def _fits(engines: Engines, trainer: TrainerSpec, host: list[int]) -> None:
    """Raise `FleetError` when engines take more GPUs of a trainer's host than it has left.

    A host that the trainer fills is taken to have as many further GPUs as a host of engines.
    """
    busiest, found = Counter(each for each in host[trainer.gpus :] if trainer.gpus_on(each)).most_common(1)[0]
    left = trainer.gpus_per_host - trainer.gpus
    most = left if left > 0 else engines.gpus_per_host
    if found > most:
        raise FleetError(
            f"engines take {found} GPUs of host {busiest}, where {trainer.gpus_on(busiest)} are the trainer's: {most}"
            " at most are left to them there. Use fewer engines, a smaller tp, other-hosts, or more gpus_per_host"
        )


def _way(engines: Engines, trainer: TrainerSpec, hosts: set[int]) -> ForecastTransport:
    if engines.transport is not None:
        problem = _objection(engines.transport, engines, trainer, hosts)
        if problem:
            raise FleetError(f"{engines.transport.value} cannot serve engines at {engines.location.value}: {problem}")
        return engines.transport
    order = (ForecastTransport.DIRECT, ForecastTransport.SENDS, ForecastTransport.NEAREST)
    return next(way for way in order if not _objection(way, engines, trainer, hosts))


def _objection(way: ForecastTransport, engines: Engines, trainer: TrainerSpec, hosts: set[int]) -> str:
    """Why `way` is impossible; empty when it is not. Host 0 is that of the trainer's first rank."""
    if way in {ForecastTransport.DIRECT, ForecastTransport.LOCAL} and hosts != {0}:
        return (
            f"it reaches engines on the host of the trainer's first rank, these are on {len(hosts)} host(s), others"
            " among them: use sends, distributed or disk"
        )
    if way is ForecastTransport.DIRECT and trainer.gpus > trainer.gpus_per_host:
        return f"the trainer is on {trainer.gpus // trainer.gpus_per_host} hosts, one is read: use sends or nearest"
    if way in {ForecastTransport.SENDS, ForecastTransport.DISTRIBUTED} and engines.location is EngineLocation.GPUS:
        return "NCCL gives a GPU to one rank, and the trainer's has it: use direct, local, disk or nearest"
    return ""


def _divides(whole: int, part: int, what: str, by: str) -> None:
    if whole % part:
        raise FleetError(f"{whole} {what} are no multiple of {by}: change one of them")
