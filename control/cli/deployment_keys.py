"""All keys of a deployment on one host, made in one call: what `keygen` and `trust` do by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..bus import new_keypair, public_of
from ..protocol import AgentId, Channel, Role
from ..security import AGENTS, COORDINATOR, TRUST_FILE, TrustEntry, edited, read_public, read_signing_key, write_pair


class KeyOwner(msgspec.Struct, frozen=True):
    """One agent, and what it is to be trusted with."""

    name: AgentId
    role: Role
    channels: tuple[Channel, ...]


def provision(folder: Path, members: Iterable[KeyOwner]) -> None:
    """Make the pairs that are missing in `folder`, and trust `members`. Twice is the same as once."""
    write_pair(folder, COORDINATOR, new_keypair, public_of)
    with edited(folder / TRUST_FILE) as agents:
        for member in members:
            write_pair(folder / AGENTS, member.name, new_keypair, public_of)
            agents[member.name] = entry_of(folder, member)


def entry_of(folder: Path, member: KeyOwner) -> TrustEntry:
    """What the allow-list says of `member`, with the key in `folder`. Raises `PeerKeyError`, `ValidationError`."""
    fields = {
        "role": member.role,
        "channels": member.channels,
        "key": read_public(folder / AGENTS / f"{member.name}.pub"),
        "signing_key": read_signing_key(folder / AGENTS / f"{member.name}.pub"),
    }
    return msgspec.convert(fields, TrustEntry)
