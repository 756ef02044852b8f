"""The allow-list: one file that names the agents that may connect, in which role, and in which channels.

``trust.toml`` in the folder of keys, written by ``weightbus trust``, may also be edited by hand::

    [agents.e0]
    role = "engine"
    channels = ["policy"]       # "*" is any
    key = "..."                 # both keys of e0.pub: with this one it connects,
    signing_key = "..."         # with this one it would sign what it publishes

The file holds public keys only, so it may be readable by all. Write access to it decides which trainer may publish, so
a file that other users can write is refused. The coordinator looks at it four times a second; an engine agent, which
knows by it the trainers whose versions it may load, at every publication. While the file is invalid, no agent is
trusted.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..log import get_log
from ..machine import ANY_CHANNEL, Principal
from ..protocol import (
    NAME_PATTERN,
    PUBLIC_PATTERN,
    AgentId,
    AgentName,
    Channel,
    ConfigurationError,
    PeerKeyError,
    Role,
    SigningKey,
)

ALLOW_LIST_FILE: Final = "trust.toml"
RELOAD_S: Final = 0.25
"""Seconds between two looks at the file."""
_Z85: Final = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z"
_CHANNEL: Final = r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,63})\Z"
_HEAD: Final = (
    "# Who may connect to the coordinator, as what and where. Written by `weightbus trust`; a restart is not needed.\n"
    "# Public keys only. Keep it writable by its owner alone.\n"
)
_MEND: Final = (
    "no agent is let in until it is right; mend it by hand, or move it away, and then run `weightbus trust add` anew"
    " for each agent, or put back a copy that was right"
)


class AllowListEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Role, channels and keys of one trusted agent."""

    role: Role
    channels: Annotated[tuple[Annotated[str, Meta(pattern=_CHANNEL)], ...], Meta(min_length=1, max_length=64)]
    key: Annotated[str, Meta(pattern=_Z85)]
    """Public CURVE key of the agent, in Z85."""
    signing_key: SigningKey

    def covers(self, channel: str) -> bool:
        """True if the agent may act in `channel`."""
        return ANY_CHANNEL in self.channels or channel in self.channels


class AllowListDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    agents: dict[AgentName, AllowListEntry] = {}

    def principals(self) -> dict[str, Principal]:
        """Principal of each CURVE key. Raises `ValueError` when two agents share a key."""
        found: dict[str, Principal] = {}
        for name, entry in self.agents.items():
            other = found.setdefault(
                entry.key, Principal(AgentId(name), entry.role, tuple(map(Channel, entry.channels)))
            )
            if other.name != name:
                raise ValueError(f"{other.name!r} and {name!r} have the same key")
        return found


def read_allow_list(path: Path) -> AllowListDocument:
    """Read and check the file at `path`. Raises `PeerKeyError` if it is unreadable, invalid or writable by others."""
    try:
        with path.open("rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            trust = msgspec.convert(tomllib.load(file), AllowListDocument)
        trust.principals()
    except FileNotFoundError as problem:
        raise PeerKeyError(path, "is not there", "make it with `weightbus trust add NAME --role ROLE ...`") from problem
    except OSError as problem:
        raise PeerKeyError(path, f"cannot be read: {problem.strerror}", _MEND) from problem
    except ValueError as problem:  # not TOML, not UTF-8, or not what we know
        raise PeerKeyError(path, explain_invalid_entry(problem), _MEND) from problem
    return trust


_ALLOWED: Final[Mapping[str, str]] = {
    _CHANNEL: 'expected a channel: up to 64 of A-Z, a-z, 0-9, ".", "_" and "-", not beginning with a mark; or "*", any',
    NAME_PATTERN: 'expected a name: up to 64 of A-Z, a-z, 0-9, ".", "_" and "-", not beginning with a mark',
    _Z85: "expected the key in the agent's .pub: 40 characters",
    PUBLIC_PATTERN: 'expected what follows "ed25519:" in the agent\'s .pub: 64 of 0-9 and a-f',
}


def explain_invalid_entry(problem: Exception) -> str:
    """`problem` with an entry as text: regular expressions become words, and an unknown role lists the valid ones."""
    text = str(problem)
    for pattern, words in _ALLOWED.items():
        text = text.replace(f"Expected `str` matching regex {pattern!r}", words)
    return f"{text}; expected one of {', '.join(Role)}" if "Invalid enum value" in text else text


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in {0, os.geteuid()}:
        problem = f"belongs to user {found.st_uid}, expected {os.geteuid()} or root"
        raise PeerKeyError(path, problem, f"run: chown {os.geteuid()} {path}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others may write it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise PeerKeyError(path, problem, f"run: chmod go-w {path}")


@contextmanager
def edit_allow_list(path: Path) -> Generator[dict[str, AllowListEntry]]:
    """Context in which the entries, by name, may be changed; the file is replaced atomically if they were.

    A lock file serializes concurrent edits. Raises `ConfigurationError`, and changes nothing, if the result would be
    invalid.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_allow_list(path).agents if path.exists() else {}
        agents = {str(name): entry for name, entry in before.items()}
        yield agents
        if agents != before or not path.exists():
            _replace(path, _usable(path, render_allow_list(agents)))
    finally:
        os.close(lock)


def render_allow_list(agents: Mapping[str, AllowListEntry]) -> str:
    """The file with these entries. Nothing in an entry needs escaping: patterns bound all fields."""
    return _HEAD + ("".join(_block(name, agents[name]) for name in sorted(agents)) or "\n[agents]\n")


def _usable(path: Path, text: str) -> str:
    """`text`, if it is valid: an invalid file would end every session."""
    try:
        msgspec.convert(tomllib.loads(text), AllowListDocument).principals()
    except ValueError as problem:
        raise ConfigurationError(f"{path} stays as it was: {explain_invalid_entry(problem)}") from problem
    return text


def _block(name: str, entry: AllowListEntry) -> str:
    channels = ", ".join(f'"{channel}"' for channel in entry.channels)
    lines = [f'[agents."{name}"]', f'role = "{entry.role.value}"', f"channels = [{channels}]"]
    return "\n".join(["", *lines, f'key = "{entry.key}"', f'signing_key = "{entry.signing_key}"', ""])


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: the coordinator may read, and the host may stop, at any moment."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class AllowList:
    """The file as it is now, re-read when it changes. Thread-safe. Raises nothing: an error is in `problem`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.problem = ""
        """Reason for which no agent is trusted; empty while the file is valid."""
        self._clock = clock
        self._lock = threading.Lock()
        self._trust = AllowListDocument()
        self._principals: Mapping[str, Principal] = {}
        self._stamp: tuple[int, ...] | None = None
        self._looked_at = clock()
        self._follow()

    def principals(self, *, fresh: bool = False) -> Mapping[str, Principal]:
        """Trusted principals by CURVE key; the same object until the file changes. `fresh` looks at the file now."""
        with self._lock:
            now = self._clock()
            if fresh or now >= self._looked_at + RELOAD_S:
                self._looked_at = now
                self._follow()
            return self._principals

    def agents(self) -> Mapping[AgentId, AllowListEntry]:
        """Entries by agent name, as the file is now."""
        self.principals(fresh=True)
        return self._trust.agents

    def expire(self) -> None:
        """Read the file at the next query, even if unchanged. Takes no lock: safe in a signal handler."""
        self._looked_at, self._stamp = float("-inf"), None

    def _follow(self) -> None:
        stamp = _stamp(self.path)
        if stamp is not None and stamp == self._stamp:
            return
        self._stamp, before = stamp, self.problem
        try:
            self._trust, self.problem = read_allow_list(self.path), ""
        except PeerKeyError as error:
            self._trust, self.problem = AllowListDocument(), str(error)
        known, self._principals = self._principals, self._trust.principals()
        kept = {key: known[key] for key, each in self._principals.items() if known.get(key) == each}
        self._principals = {**self._principals, **kept}  # an unchanged principal stays the same object
        if self.problem and self.problem != before:
            get_log(__name__).error("nobody_is_trusted", reason=self.problem)
        elif before and not self.problem:
            get_log(__name__).info("trusted_again", agents=len(self._principals))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Identity of the file's content by its metadata; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


def allow_list_rows(agents: Mapping[AgentId, AllowListEntry]) -> list[tuple[str, str, str, str]]:
    """Rows for a table: name, role, channels, CURVE key."""
    return [(name, entry.role.value, ", ".join(entry.channels), entry.key) for name, entry in sorted(agents.items())]
