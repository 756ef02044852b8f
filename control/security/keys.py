"""CURVE key files, and the settings by which every process finds its keys. Keys are made by libzmq (bus/sockets.py).

One folder, made by ``weightbus keygen``::

    coordinator.key  coordinator.pub      the coordinator's; agents are given the .pub
    agents/NAME.key  agents/NAME.pub      one pair for each agent; its host needs the .key
    trust.toml                            the agents that the coordinator lets in (trust.py)

A file holds comment lines (they contain spaces) and one line of 40 characters, a CURVE key in Z85. A public file has a
second line: ``ed25519:`` and the agent's public signing key (`trust.signing_key_of`). A secret file that other users
can read is refused.

A process has keys unless ``insecure_loopback`` is set, so ``weightbus keygen`` and ``weightbus trust add`` suffice.
Without keys it binds and connects to the loopback only (bus/sockets.py), and only where that setting asks for it.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from ..protocol import NAME_PATTERN, PeerKeyError
from .trust import ALLOW_LIST_FILE, PUBLIC_PATTERN, Z85_PATTERN, signing_key_of

COORDINATOR_KEYS: Final = "coordinator"
AGENT_KEYS_FOLDER: Final = "agents"
_SIGNS: Final = "ed25519:"
_ELSEWHERE: Final = "choose a folder that you may write, with --keys"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, both halves in Z85."""

    public: str
    secret: str


class CurveFiles(msgspec.Struct, frozen=True):
    """Key files by which an agent connects to a coordinator that uses keys."""

    secret: Path
    """Path of the agent's secret key."""
    coordinator: Path
    """Path of the coordinator's public key."""

    @classmethod
    def of(cls, folder: Path, agent: str) -> CurveFiles:
        """The files of `agent` in a folder that ``weightbus keygen`` made."""
        return cls(folder / AGENT_KEYS_FOLDER / f"{agent}.key", folder / f"{COORDINATOR_KEYS}.pub")


class WrittenKeys(enum.Enum):
    """Result of `write_key_pair`."""

    CREATED = "created"
    KEPT = "kept"
    """Both files existed and belong together; neither was touched."""
    COMPLETED = "completed"
    """Only the secret existed; its public half was written beside it."""


def write_key_pair(
    folder: Path, name: str, make: Callable[[], KeyPair], public_of: Callable[[str], str]
) -> WrittenKeys:
    """Write ``NAME.key`` (0600) and ``NAME.pub``; existing files are never overwritten. Raises `PeerKeyError`."""
    if not re.match(NAME_PATTERN, name):
        raise PeerKeyError(folder / name, "not a name", f"names match {NAME_PATTERN}")
    secret_path, public_path = folder / f"{name}.key", folder / f"{name}.pub"
    if secret_path.exists():
        secret = read_secret_key(secret_path)
        public = public_of(secret)
        if not public_path.exists():
            _write_public(public_path, name, KeyPair(public, secret))
            return WrittenKeys.COMPLETED
        check_public_key(public_path, secret_path, public)
        return WrittenKeys.KEPT
    if public_path.exists():
        advice = f"its secret may be on another machine; remove {public_path.name} to make a new pair"
        raise PeerKeyError(secret_path, f"missing, though {public_path.name} exists", advice)
    pair = make()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise PeerKeyError(secret_path, f"its folder cannot be made: {problem.strerror}", _ELSEWHERE) from problem
    comment = f"# weightbus secret key of {name}. Only for that machine; never in an image or an environment variable."
    _write_new(secret_path, f"{comment}\n{pair.secret}\n", 0o600)
    _write_public(public_path, name, pair)
    return WrittenKeys.CREATED


def fingerprint(public: str) -> str:
    """Short form of a public CURVE key, for people to compare: the same on the agent's side and the coordinator's."""
    digest = hashlib.sha256(public.encode("ascii")).hexdigest()
    return "-".join(digest[at : at + 4] for at in range(0, 16, 4))


def check_public_key(path: Path, secret_path: Path, expected: str) -> None:
    """Raise `PeerKeyError` unless `path` holds `expected`, the public half of the key in `secret_path`."""
    if (found := read_public_key(path)) != expected:
        problem = f"does not belong to {secret_path}: found {found}, expected {expected}"
        advice = (
            f"put the secret back that it belongs to, or remove {path.name} and run `weightbus keygen`, which makes it"
        )
        raise PeerKeyError(path, problem, advice)


def read_public_key(path: Path) -> str:
    """Public CURVE key in a ``.pub`` file."""
    return _read(path)


def read_signing_key(path: Path) -> str:
    """Public signing key in a ``.pub`` file."""
    found = [line.removeprefix(_SIGNS) for line in _read_lines(path) if line.startswith(_SIGNS)]
    if len(found) != 1 or not re.match(PUBLIC_PATTERN, found[0]):
        raise PeerKeyError(path, "names no key to sign with", "remove it and run `weightbus keygen` again")
    return found[0]


def read_secret_key(path: Path) -> str:
    """Secret key in a ``.key`` file. Raises `PeerKeyError` if other users can read it."""
    key = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PeerKeyError(path, f"others may read it (mode {mode:04o})", f"run: chmod 600 {path}, or make a new pair")
    return key


def _read(path: Path) -> str:
    keys = [line for line in _read_lines(path) if not line.startswith(_SIGNS)]
    if len(keys) != 1 or not re.match(Z85_PATTERN, keys[0]):
        raise PeerKeyError(path, "does not hold one key of 40 characters", "make a new pair with `weightbus keygen`")
    return keys[0]


def _read_lines(path: Path) -> list[str]:
    """All lines except comments."""
    try:
        text = path.read_text(encoding="ascii")
    except OSError as problem:
        advice = (
            "make it with `weightbus keygen`, or copy it from where it was made, or name its folder with --keys;"
            " on a machine that is yours alone --insecure-loopback does without keys"
        )
        raise PeerKeyError(path, f"cannot be read: {problem.strerror}", advice) from problem
    except ValueError as problem:
        raise PeerKeyError(path, "is not text", "make a new pair with `weightbus keygen`") from problem
    return [line for line in text.splitlines() if line and " " not in line]


def _write_public(path: Path, name: str, pair: KeyPair) -> None:
    signs = _SIGNS + signing_key_of(pair.secret)
    _write_new(path, f"# weightbus public keys of {name}.\n{pair.public}\n{signs}\n", 0o644)


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as problem:
        raise PeerKeyError(path, f"cannot be written: {problem.strerror}", _ELSEWHERE) from problem
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


InsecureLoopback = Annotated[
    bool, Meta(description="no keys: any process of this machine may publish weights; loopback only")
]


def state_folder() -> Path:
    """Folder of this user's persistent state, the same from any working directory."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():  # the specification of XDG wants others ignored
        return given / "weightbus"
    try:
        return Path.home() / ".local/state/weightbus"
    except RuntimeError:  # a user without a home, as in some containers
        return Path("/var/lib/weightbus")


def keys_folder(keys: Path | None) -> Path:
    """`keys`, or the default folder of keys for None."""
    return state_folder() / "keys" if keys is None else keys


def _keys_in_use(settings: object) -> str:
    """Folder of keys that `settings` without `keys` use; empty with ``insecure_loopback``."""
    return "" if getattr(settings, "insecure_loopback", False) else str(keys_folder(None))


KeysFolder = Annotated[
    Path | None,
    Meta(
        description="folder of the keys; none: `keys` in the folder where this user's state is kept",
        extra={"in_use": _keys_in_use},
    ),
]


def check_endpoints(setting: str, text: str) -> None:
    """Raise `ValueError` unless `text` is one bus endpoint, or several between commas."""
    for each in text.split(","):
        check_endpoint(setting, each.strip())


def check_endpoint(setting: str, text: str) -> None:
    """Raise `ValueError` unless `text` is one bus endpoint."""
    found = urlsplit(text)
    if found.scheme != "tcp" or not found.hostname or not _port(found) or found.path:
        raise ValueError(f"{setting} = {text!r}: expected tcp://HOST:PORT")


def check_url(setting: str, text: str) -> None:
    """Raise `ValueError` unless `text` is the address of an HTTP server."""
    found = urlsplit(text)
    if found.scheme not in {"http", "https"} or not found.hostname or _port(found) == 0:
        raise ValueError(f"{setting} = {text!r}: expected http://HOST:PORT")


def _port(found: SplitResult) -> int | None:
    try:
        return found.port
    except ValueError:
        return 0


def check_key_settings(keys: Path | None, *, insecure_loopback: bool) -> None:
    """Raise `ValueError` if both a folder of keys and ``insecure_loopback`` are set."""
    if insecure_loopback and keys is not None:
        raise ValueError(f"insecure_loopback = true, but keys = {keys} as well: choose one")


def allow_list_path(keys: Path | None) -> Path:
    """Path of the allow-list: the coordinator's, and a copy of it at every engine agent."""
    return keys_folder(keys) / ALLOW_LIST_FILE


def agent_key_files(keys: Path | None, agent: str, *, insecure_loopback: bool) -> CurveFiles | None:
    """Key files of `agent`; None with ``insecure_loopback``."""
    return None if insecure_loopback else CurveFiles.of(keys_folder(keys), agent)
