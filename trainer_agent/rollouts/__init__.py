"""Rollouts: requests to the engines of a channel that are ready, by version. No torch."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .dispatch import (
        FleetError as FleetError,
        NoEngineReady as NoEngineReady,
        ReadyEngine as ReadyEngine,
        RolloutRefused as RolloutRefused,
    )
    from .fleet import Fleet as Fleet, Rollout as Rollout
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
