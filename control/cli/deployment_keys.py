"""Makes all keys and the allow-list of a deployment on one host in one call, as `keygen` and `trust add` do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..bus import new_keypair, public_of
from ..protocol import AgentId, Channel, Role
from ..security import (
    AGENT_KEYS_FOLDER,
    ALLOW_LIST_FILE,
    COORDINATOR_KEYS,
    AllowListEntry,
    edit_allow_list,
    read_public_key,
    read_signing_key,
    write_key_pair,
)


class AgentKeys(msgspec.Struct, frozen=True):
    """One agent whose keys are made, with the role and channels that it is trusted with."""

    name: AgentId
    role: Role
    channels: tuple[Channel, ...]


def make_deployment_keys(folder: Path, members: Iterable[AgentKeys]) -> None:
    """Make missing key pairs in `folder` and add `members` to its allow-list. Idempotent."""
    write_key_pair(folder, COORDINATOR_KEYS, new_keypair, public_of)
    with edit_allow_list(folder / ALLOW_LIST_FILE) as agents:
        for member in members:
            write_key_pair(folder / AGENT_KEYS_FOLDER, member.name, new_keypair, public_of)
            agents[member.name] = allow_list_entry(folder, member)


def allow_list_entry(folder: Path, member: AgentKeys) -> AllowListEntry:
    """Allow-list entry of `member`, with its keys in `folder`. Raises `PeerKeyError`, `ValidationError`."""
    fields = {
        "role": member.role,
        "channels": member.channels,
        "key": read_public_key(folder / AGENT_KEYS_FOLDER / f"{member.name}.pub"),
        "signing_key": read_signing_key(folder / AGENT_KEYS_FOLDER / f"{member.name}.pub"),
    }
    return msgspec.convert(fields, AllowListEntry)
