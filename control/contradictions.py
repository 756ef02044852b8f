"""What a round must never be: asked for after every event in tests and simulations. Pure."""

from __future__ import annotations

from .cohort import HOPEFUL, SERVING_ON, Cohort
from .ids import Epoch, Version
from .states import SENDING, EnginePhase, RoundState


def contradictions(
    cohort: Cohort, state: RoundState, epoch: Epoch, version: Version, *, durable: bool
) -> tuple[str, ...]:
    """What is wrong with a round that is in `state`, if anything."""
    wrong = list(cohort.check())
    phases = {member.phase for member in cohort.members.values()}
    if phases & {EnginePhase.RESUMING, EnginePhase.SERVING} and not durable:
        wrong.append(f"an engine was told of version {version} in {state}, before it was durable")
    if state in (RoundState.PREPARING, RoundState.OFFERING) and EnginePhase.TRANSFERRING in phases:
        wrong.append(f"an engine takes weights in {state}")
    if state in SENDING and cohort.invited(*SERVING_ON):
        wrong.append("an engine of the round was told nothing of its transfer")
    if state is RoundState.TRANSFERRING and phases & {EnginePhase.PAUSING, EnginePhase.PAUSED}:
        wrong.append("weights travel, and an engine was neither told to take them nor left out")
    if state is RoundState.RESUMING and phases & set(HOPEFUL) - {EnginePhase.PREPARED}:
        wrong.append("an engine was forgotten at the commit")
    if not cohort.table and (durable or state is RoundState.COMMITTING):
        wrong.append("a version is committed, and its digest table is open")
    if any(member.epoch > epoch for member in cohort.members.values()):
        wrong.append("an engine is ahead of its round's epoch")
    return tuple(wrong)
