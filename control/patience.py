"""How long a round waits for slow engines, by the policy that its trainer states for the channel. Pure.

`wait-all` waits for everybody up to the deadline of each step. `quorum` does so until enough engines have come through
the step; the others have `slow_s` from then on. `evict-after` gives everybody `slow_s` for each step, and no more.
Who is late is left out of the round like one that ran into the step's own deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .messages import PauseMode, Policy, Publish, SlowEngines
from .states import EnginePhase, RoundState

THROUGH: Final[Mapping[RoundState, tuple[EnginePhase, ...]]] = {
    RoundState.PREPARING: (EnginePhase.PREPARED,),
    RoundState.PAUSING: (EnginePhase.PAUSED, EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED, EnginePhase.VERIFIED),
    RoundState.TRANSFERRING: (EnginePhase.VERIFIED,),
    RoundState.VERIFYING: (EnginePhase.VERIFIED,),
    RoundState.RESUMING: (EnginePhase.SERVING,),
}
"""The states in which engines are waited for, and the phases of those that have come through."""


def contradicts(publish: Publish, *, is_committed: bool) -> str:
    """Why a round cannot be carried out as it is asked for; empty when it can."""
    policy = publish.policy
    if publish.catch_up and not is_committed:
        return "a catch-up brings what is committed: the version is another one, or the weights have changed since"
    if policy.flush and policy.pause is PauseMode.IN_PLACE:
        return "pause in_place keeps the KV cache: publish with flush off"
    if 0 < policy.max_paused < policy.min_engines:
        found = f"{policy.min_engines} engines are to be verified and at most {policy.max_paused} stand still at a time"
        return f"{found}: raise max_paused, or lower min_engines"
    return ""


def allowed_s(policy: Policy, state: RoundState, wait_s: float) -> float:
    """How long `state` may last, where the coordinator itself would wait `wait_s`."""
    evicts = policy.slow is SlowEngines.EVICT_AFTER and state in THROUGH
    return min(wait_s, policy.slow_s) if evicts else wait_s


def enough(policy: Policy, through: int) -> bool:
    """Whether the quorum has come through a step, so that the rest has only `slow_s` left."""
    return policy.slow is SlowEngines.QUORUM and through >= max(1, policy.quorum)
