"""Predicts rounds of one model; layouts are computed once and reused for every fleet."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from .cost_model import RoundCost, RoundVolume, Wave, joining_s, round_cost
from .engine_shards import EngineShards, engine_shards
from .fleet import Engines, FleetSpec, ForecastTransport, PlacedEngines, Placement, TrainerSpec, place_engines, waves
from .tensor_blocks import Tensors
from .traffic import Overlaps, Traffic, digested_bytes, gathered_bytes, overlaps, shard_traffic
from .trainer_shards import TrainerShards, trainer_shards


class Forecast:
    """Predicts rounds of one model, and caches layouts and traffic."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._trainer: dict[TrainerSpec, TrainerShards] = {}
        self._engine: dict[tuple[int, int], EngineShards] = {}
        self._overlaps: dict[tuple[TrainerSpec, int, int], Overlaps] = {}
        self._traffic: dict[tuple[TrainerSpec, PlacedEngines], tuple[Traffic, ...]] = {}
        self._kept: dict[tuple[int, int], int] = {}

    def round(self, fleet: FleetSpec) -> RoundCost:
        """One steady round. Raises `FleetError` for a fleet that cannot be."""
        placement = place_engines(fleet)
        return round_cost(fleet, placement, self._waves(fleet, placement), self._volume(fleet, placement))

    def joining_s(self, fleet: FleetSpec) -> float | None:
        """Seconds to bring the version to one more engine like the slowest of these; None unless all use sends."""
        placement = place_engines(fleet)
        if any(group.transport is not ForecastTransport.SENDS for group in placement.groups):
            return None  # measured of no other transport
        volume = self._volume(fleet, placement)
        alone = (replace(placement, groups=(replace(group, gpu=group.gpu[:1]),)) for group in placement.groups)
        return max(joining_s(fleet, wave, volume) for one in alone for wave in self._waves(fleet, one))

    def traffic(self, fleet: FleetSpec) -> Traffic:
        """Bytes by pair of a trainer rank and an engine's GPU, of the groups that get their parts."""
        placement = place_engines(fleet)
        return self._waves(replace(fleet, max_paused=None), placement)[0].traffic

    def _waves(self, fleet: FleetSpec, placement: Placement) -> tuple[Wave, ...]:
        parts: dict[tuple[int, ...], Traffic] = {}
        for group in placement.groups:
            if group.transport.sends_shards:
                parts.update(zip(group.gpu, self._of(placement, group), strict=True))
        return tuple(
            Wave(
                each,
                Traffic.join(
                    [parts[gpus] for group in each.groups if group.transport.sends_shards for gpus in group.gpu]
                ),
                max(self._engine_bytes(group.engines) for group in each.groups),
            )
            for each in waves(placement, fleet.max_paused)
        )

    def _of(self, placement: Placement, group: PlacedEngines) -> tuple[Traffic, ...]:
        key = (placement.trainer, group)
        if key not in self._traffic:
            found = self._overlap(placement.trainer, group.engines)
            self._traffic[key] = shard_traffic(placement, group, self._trainer_shards(placement.trainer), found)
        return self._traffic[key]

    def _trainer_shards(self, trainer: TrainerSpec) -> TrainerShards:
        if trainer not in self._trainer:
            self._trainer[trainer] = trainer_shards(self.tensors, trainer)
        return self._trainer[trainer]

    def _engine_shards(self, engines: Engines) -> EngineShards:
        key = (engines.tp, engines.ep)
        if key not in self._engine:
            self._engine[key] = engine_shards(self.tensors, engines)
        return self._engine[key]

    def _overlap(self, trainer: TrainerSpec, engines: Engines) -> Overlaps:
        key = (trainer, engines.tp, engines.ep)
        if key not in self._overlaps:
            self._overlaps[key] = overlaps(self.tensors, self._trainer_shards(trainer), self._engine_shards(engines))
        return self._overlaps[key]

    def _engine_bytes(self, engines: Engines) -> int:
        key = (engines.tp, engines.ep)
        if key not in self._kept:
            needed = self._engine_shards(engines)
            sizes = needed.boxes.sizes * self.tensors.item[needed.boxes.space]
            self._kept[key] = int(np.bincount(needed.worker, weights=sizes).max())
        return self._kept[key]

    def _volume(self, fleet: FleetSpec, placement: Placement) -> RoundVolume:
        held, trainer = self._trainer_shards(fleet.trainer), fleet.trainer
        parcels = np.zeros(trainer.gpus, np.int64)
        found = gathered_bytes(self.tensors, held)
        parcels[: len(found)] = found
        # Stages that broadcast gather their own tensors in parallel; for files and buckets rank 0 gathers all of them.
        staged = {group.transport for group in placement.groups if not group.transport.sends_shards} == {
            ForecastTransport.DISTRIBUTED
        }
        stages = trainer.pp if staged else 1
        roots = np.arange(trainer.gpus) // (trainer.gpus // stages) * (trainer.gpus // stages)
        ranks = np.arange(trainer.gpus)
        beside = (ranks // trainer.gpus_per_host == roots // trainer.gpus_per_host) & (ranks != roots)
        beyond = ranks // trainer.gpus_per_host != roots // trainer.gpus_per_host
        near, far = (np.bincount(roots, weights=parcels * chosen).max() for chosen in (beside, beyond))
        return RoundVolume(
            total=self.tensors.total,
            tensors=len(self.tensors.specs),
            buckets=-(-self.tensors.total // (fleet.bucket_mb * 1024 * 1024)),
            digested=int(digested_bytes(self.tensors, held).max()),
            near_gather=int(near),
            far_gather=int(far),
            roots=stages,
        )
