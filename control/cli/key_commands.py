"""The subcommands keygen, which makes keys, and trust, which edits the allow-list."""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bus import check_library, new_keypair, public_of
from ..protocol import AgentId, AgentName, Channel, ConfigurationError, Role
from ..security import (
    AGENT_KEYS_FOLDER,
    ALLOW_LIST_FILE,
    COORDINATOR_KEYS,
    AllowListEntry,
    KeysFolder,
    allow_list_rows,
    edit_allow_list,
    explain_invalid_entry,
    fingerprint,
    keys_folder,
    read_allow_list,
    read_public_key,
    read_signing_key,
    write_key_pair,
)
from .settings import SettingsCommand


class KeygenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus keygen``."""

    keys: KeysFolder = None
    agents: Annotated[tuple[str, ...], Meta(description="agents, the same as NAME...")] = ()
    coordinator: Annotated[bool, Meta(description="make the coordinator's pair and its allow-list too")] = True

    def __post_init__(self) -> None:
        if COORDINATOR_KEYS in self.agents:
            raise ValueError(
                f"no agent may be called {COORDINATOR_KEYS!r}: its key files would be taken for the coordinator's own,"
                " which are made without being named; name the agent otherwise"
            )


class KeygenCommand(SettingsCommand[KeygenSettings]):
    """``weightbus keygen``: makes missing CURVE keys."""

    help: str = "make CURVE keys for the coordinator and for agents; keeps what exists"
    section: str = "keygen"
    kind = KeygenSettings

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Agent names may be positional."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="agents to make keys for")
        super().configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Positional names are the same as --agents."""
        if args.names:
            args.agents = ",".join(args.names)
        return super().run(args)

    def do(self, given: KeygenSettings) -> int:
        """Write the missing key pairs."""
        check_library()
        folder = keys_folder(given.keys)
        wanted = [(folder, COORDINATOR_KEYS)] if given.coordinator else []
        wanted += [(folder / AGENT_KEYS_FOLDER, name) for name in given.agents]
        for where, name in wanted:
            written = write_key_pair(where, name, new_keypair, public_of)
            print(f"{written.value:<9} {where / name}.key {where / name}.pub")  # noqa: T201
        if given.coordinator:
            with edit_allow_list(folder / ALLOW_LIST_FILE):
                pass  # made if it was missing: a coordinator can start with an empty list
        if given.agents:
            print("next: `weightbus trust add NAME --role trainer|engine --channels CHANNEL` where the coordinator is,")  # noqa: T201
            needed = f"agents/NAME.key, {COORDINATOR_KEYS}.pub and, for an engine, {ALLOW_LIST_FILE}"
            print(f"      and to another host {needed}")  # noqa: T201
        return 0


class TrustSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus trust``."""

    keys: KeysFolder = None
    role: Annotated[Role | None, Meta(description="what they may do; needed to add")] = None
    channels: Annotated[
        tuple[str, ...], Meta(description="where, comma-separated; * is everywhere; needed to add")
    ] = ()


class TrustAction(enum.StrEnum):
    """Action of ``weightbus trust``."""

    ADD = "add"
    REMOVE = "remove"
    LIST = "list"


class TrustCommand(SettingsCommand[TrustSettings]):
    """``weightbus trust``: edits the allow-list. A running coordinator follows it at once."""

    help: str = "edit the allow-list: agents that may connect, their role and channels; needs no restart"
    section: str = "trust"
    kind = TrustSettings

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Action and names are positional."""
        parser.add_argument("action", choices=[each.value for each in TrustAction], help="what to do")
        parser.add_argument("names", nargs="*", metavar="NAME", help="agents, by the names their keys were made under")
        super().configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Keep the positional arguments, which are no settings."""
        self._action, self._names = TrustAction(args.action), tuple[str, ...](args.names)
        return super().run(args)

    def do(self, given: TrustSettings) -> int:
        """Edit or print the list. Exit code 1: an agent to be removed was not in it (misspelled, or removed before)."""
        folder = keys_folder(given.keys)
        path = folder / ALLOW_LIST_FILE
        match self._action:
            case TrustAction.LIST:
                _show(read_allow_list(path).agents)
                if (own := folder / f"{COORDINATOR_KEYS}.pub").exists():
                    told = f"the coordinator's own key has the fingerprint {fingerprint(read_public_key(own))}"
                    print(told, file=sys.stderr)  # noqa: T201  # not a row
            case TrustAction.ADD:
                entries = {name: _entry(given, name) for name in self._named()}
                with edit_allow_list(path) as agents:
                    _require_same_roles(agents, entries)
                    outcomes = {name: _outcome(agents.get(name), entry) for name, entry in entries.items()}
                    agents.update(entries)
                for name, outcome in outcomes.items():
                    print(f"{outcome:<9} {name}")  # noqa: T201
            case TrustAction.REMOVE:
                with edit_allow_list(path) as agents:
                    found = {name: agents.pop(name, None) is not None for name in self._named()}
                for name, removed in found.items():
                    print(f"{'removed' if removed else 'not there':<9} {name}")  # noqa: T201
                return 0 if all(found.values()) else 1
        return 0

    def _named(self) -> tuple[str, ...]:
        if not self._names:
            raise ConfigurationError(f"`weightbus trust {self._action.value}` needs the name of an agent")
        return self._names


def _entry(given: TrustSettings, name: str) -> AllowListEntry:
    if given.role is None or not given.channels:
        raise ConfigurationError(
            "`weightbus trust add` needs --role and --channels: a key is trusted with nothing else"
        )
    try:
        agent = msgspec.convert(name, AgentName)
    except msgspec.ValidationError as problem:  # before a file of that name is looked for
        raise ConfigurationError(f"{name!r}: {explain_invalid_entry(problem)}") from problem
    member = AgentKeys(agent, given.role, tuple(map(Channel, given.channels)))
    try:
        return allow_list_entry(keys_folder(given.keys), member)
    except msgspec.ValidationError as problem:
        raise ConfigurationError(
            f"channels = {', '.join(given.channels)}: {explain_invalid_entry(problem)}"
        ) from problem


def _require_same_roles(before: Mapping[str, AllowListEntry], entries: Mapping[str, AllowListEntry]) -> None:
    """Raise `ConfigurationError` for a changed role: it is probably a misspelled name, and would change rights."""
    for name, entry in entries.items():
        if name in before and before[name].role is not entry.role:
            raise ConfigurationError(
                f"{name!r} is trusted as {before[name].role.value}, and nothing was changed: to make it"
                f" {entry.role.value}, first `weightbus trust remove {name}`, which ends its sessions"
            )


def _outcome(before: AllowListEntry | None, entry: AllowListEntry) -> str:
    if before is None:
        return "trusted"
    return "kept" if before == entry else "changed"


def _show(agents: Mapping[AgentId, AllowListEntry]) -> None:
    table = Table("agent", "role", "channels", "key", "fingerprint", box=None, pad_edge=False)
    for row in allow_list_rows(agents):
        table.add_row(*map(Text, (*row, fingerprint(row[-1]))))
    Console(highlight=False, soft_wrap=True, width=160).print(table)  # keys and fingerprints are compared whole


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


keygen = KeygenCommand()
trust = TrustCommand()
