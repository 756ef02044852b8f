"""A model's rounds: layouts are worked out once, and every question about the same ones is answered from them."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from .cost_model import RoundCost, Volume, Wave, joining_s, round_of
from .engine_shards import EngineShards, needs
from .fleet import Engines, FleetSpec, Ground, Placed, TrainerSpec, Way, place, waves
from .tensor_blocks import Tensors
from .traffic import Overlaps, Traffic, assembled, by_parts, digested, overlaps
from .trainer_shards import TrainerShards, holdings


class Forecast:
    """Predicts rounds of one model. Keeps what it worked out."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._held: dict[TrainerSpec, TrainerShards] = {}
        self._needed: dict[tuple[int, int], EngineShards] = {}
        self._overlaps: dict[tuple[TrainerSpec, int, int], Overlaps] = {}
        self._traffic: dict[tuple[TrainerSpec, Placed], tuple[Traffic, ...]] = {}
        self._kept: dict[tuple[int, int], int] = {}

    def round(self, fleet: FleetSpec) -> RoundCost:
        """One steady round. Raises `FleetError` for a fleet that cannot be."""
        ground = place(fleet)
        return round_of(fleet, ground, self._waves(fleet, ground), self._volume(fleet, ground))

    def joining_s(self, fleet: FleetSpec) -> float | None:
        """How long one more engine, like the slowest of these, is brought the version; None unless all go by sends."""
        ground = place(fleet)
        if any(group.way is not Way.SENDS for group in ground.groups):
            return None  # measured of no other way
        volume = self._volume(fleet, ground)
        alone = (replace(ground, groups=(replace(group, gpu=group.gpu[:1]),)) for group in ground.groups)
        return max(joining_s(fleet, wave, volume) for one in alone for wave in self._waves(fleet, one))

    def traffic(self, fleet: FleetSpec) -> Traffic:
        """Bytes by pair of a trainer rank and an engine's GPU, of the groups that get their parts."""
        ground = place(fleet)
        return self._waves(replace(fleet, max_paused=None), ground)[0].traffic

    def _waves(self, fleet: FleetSpec, ground: Ground) -> tuple[Wave, ...]:
        parts: dict[tuple[int, ...], Traffic] = {}
        for group in ground.groups:
            if group.way.by_parts:
                parts.update(zip(group.gpu, self._of(ground, group), strict=True))
        return tuple(
            Wave(
                each,
                Traffic.join([parts[gpus] for group in each.groups if group.way.by_parts for gpus in group.gpu]),
                max(self._kept_by(group.engines) for group in each.groups),
            )
            for each in waves(ground, fleet.max_paused)
        )

    def _of(self, ground: Ground, group: Placed) -> tuple[Traffic, ...]:
        key = (ground.trainer, group)
        if key not in self._traffic:
            found = self._overlap(ground.trainer, group.engines)
            self._traffic[key] = by_parts(ground, group, self._holdings(ground.trainer), found)
        return self._traffic[key]

    def _holdings(self, trainer: TrainerSpec) -> TrainerShards:
        if trainer not in self._held:
            self._held[trainer] = holdings(self.tensors, trainer)
        return self._held[trainer]

    def _needs(self, engines: Engines) -> EngineShards:
        key = (engines.tp, engines.ep)
        if key not in self._needed:
            self._needed[key] = needs(self.tensors, engines)
        return self._needed[key]

    def _overlap(self, trainer: TrainerSpec, engines: Engines) -> Overlaps:
        key = (trainer, engines.tp, engines.ep)
        if key not in self._overlaps:
            self._overlaps[key] = overlaps(self.tensors, self._holdings(trainer), self._needs(engines))
        return self._overlaps[key]

    def _kept_by(self, engines: Engines) -> int:
        key = (engines.tp, engines.ep)
        if key not in self._kept:
            needed = self._needs(engines)
            sizes = needed.boxes.sizes * self.tensors.item[needed.boxes.space]
            self._kept[key] = int(np.bincount(needed.worker, weights=sizes).max())
        return self._kept[key]

    def _volume(self, fleet: FleetSpec, ground: Ground) -> Volume:
        held, trainer = self._holdings(fleet.trainer), fleet.trainer
        parcels = np.zeros(trainer.gpus, np.int64)
        found = assembled(self.tensors, held)
        parcels[: len(found)] = found
        # Stages that broadcast gather their own, beside each other; whoever wants files or buckets has one rank do it.
        staged = {group.way for group in ground.groups if not group.way.by_parts} == {Way.DISTRIBUTED}
        stages = trainer.pp if staged else 1
        roots = np.arange(trainer.gpus) // (trainer.gpus // stages) * (trainer.gpus // stages)
        ranks = np.arange(trainer.gpus)
        beside = (ranks // trainer.gpus_per_host == roots // trainer.gpus_per_host) & (ranks != roots)
        beyond = ranks // trainer.gpus_per_host != roots // trainer.gpus_per_host
        near, far = (np.bincount(roots, weights=parcels * chosen).max() for chosen in (beside, beyond))
        return Volume(
            total=self.tensors.total,
            tensors=len(self.tensors.specs),
            buckets=-(-self.tensors.total // (fleet.bucket_mb * 1024 * 1024)),
            digested=int(digested(self.tensors, held).max()),
            near_parcels=int(near),
            far_parcels=int(far),
            sources=stages,
        )
