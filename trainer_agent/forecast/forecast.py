"""A model's rounds: layouts are worked out once, and every question about the same ones is answered from them."""

from __future__ import annotations

import numpy as np

from .fleet import Engines, Fleet, Ground, Placed, Trainer, Way, place
from .holdings import Holdings, holdings
from .needs import Needs, needs
from .seconds import Round, Volume, round_of
from .tensors import Tensors
from .traffic import Overlaps, Traffic, assembled, by_parts, digested, overlaps


class Forecast:
    """Predicts rounds of one model. Keeps what it worked out."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._held: dict[Trainer, Holdings] = {}
        self._needed: dict[tuple[int, int], Needs] = {}
        self._overlaps: dict[tuple[Trainer, int, int], Overlaps] = {}
        self._traffic: dict[tuple[Trainer, Placed], Traffic] = {}

    def round(self, fleet: Fleet) -> Round:
        """One steady round. Raises `FleetError` for a fleet that cannot be."""
        ground = place(fleet)
        traffic = Traffic.join([self._of(ground, group) for group in ground.groups if group.way.by_parts])
        return round_of(fleet, ground, traffic, self._volume(fleet, ground))

    def traffic(self, fleet: Fleet) -> Traffic:
        """Bytes by pair of a trainer rank and an engine's GPU, of the groups that get their parts."""
        ground = place(fleet)
        return Traffic.join([self._of(ground, group) for group in ground.groups if group.way.by_parts])

    def _of(self, ground: Ground, group: Placed) -> Traffic:
        key = (ground.trainer, group)
        if key not in self._traffic:
            found = self._overlap(ground.trainer, group.engines)
            self._traffic[key] = by_parts(ground, group, self._holdings(ground.trainer), found)
        return self._traffic[key]

    def _holdings(self, trainer: Trainer) -> Holdings:
        if trainer not in self._held:
            self._held[trainer] = holdings(self.tensors, trainer)
        return self._held[trainer]

    def _needs(self, engines: Engines) -> Needs:
        key = (engines.tp, engines.ep)
        if key not in self._needed:
            self._needed[key] = needs(self.tensors, engines)
        return self._needed[key]

    def _overlap(self, trainer: Trainer, engines: Engines) -> Overlaps:
        key = (trainer, engines.tp, engines.ep)
        if key not in self._overlaps:
            self._overlaps[key] = overlaps(self.tensors, self._holdings(trainer), self._needs(engines))
        return self._overlaps[key]

    def _volume(self, fleet: Fleet, ground: Ground) -> Volume:
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
        kept = 0
        for group in ground.groups:
            needed = self._needs(group.engines)
            sizes = needed.boxes.sizes * self.tensors.item[needed.boxes.space]
            kept = max(kept, int(np.bincount(needed.worker, weights=sizes).max()))
        return Volume(
            total=self.tensors.total,
            tensors=len(self.tensors.specs),
            buckets=-(-self.tensors.total // (fleet.bucket_mb * 1024 * 1024)),
            digested=int(digested(self.tensors, held).max()),
            near_parcels=int(near),
            far_parcels=int(far),
            sources=stages,
            kept=kept,
        )
