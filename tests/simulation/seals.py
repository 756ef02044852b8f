"""Keys of the simulated trainers, and the allow-list that knows them. The arithmetic is the real one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from weightbus.control.machine.effects import ANY_CHANNEL
from weightbus.control.protocol.messages import AgentId, Role
from weightbus.control.security.trust import AllowListEntry, signing_key_of


def secret_of(trainer: str) -> str:
    """The same in every life and every run."""
    return f"the secret of {trainer}"


@cache
def _entry(trainer: str) -> AllowListEntry:
    key = trainer.ljust(40, "0")
    return AllowListEntry(
        role=Role.TRAINER, channels=(ANY_CHANNEL,), key=key, signing_key=signing_key_of(secret_of(trainer))
    )


def trust_of(trainers: tuple[str, ...]) -> Mapping[AgentId, AllowListEntry]:
    """What every engine's host has been told."""
    return {AgentId(name): _entry(name) for name in trainers}
