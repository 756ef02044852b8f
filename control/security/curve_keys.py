"""CURVE key files: how they are written, read and looked up. Nothing here makes keys; router.py does (libzmq).

One folder, made by ``weightbus keygen``::

    coordinator.key  coordinator.pub      the coordinator's; agents are given the .pub
    agents/NAME.key  agents/NAME.pub      one pair for each agent; its host needs the .key
    trust.toml                            whom the coordinator lets in (allow_list.py)

A file is comment lines (they hold spaces) and one line of 40 characters, a CURVE key in Z85. A public file has a second
line: ``ed25519:`` and the key that the same agent signs with (signatures.py). Secret files that others can read are
refused.
"""

from __future__ import annotations

import enum
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ..protocol import NAME_PATTERN, PUBLIC_PATTERN, PeerKeyError, signing_key_of

COORDINATOR_KEYS: Final = "coordinator"
AGENT_KEYS_FOLDER: Final = "agents"
_SIGNS: Final = "ed25519:"
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ELSEWHERE: Final = "choose a folder that you may write, with --keys"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, both halves in Z85."""

    public: str
    secret: str


class CurveFiles(msgspec.Struct, frozen=True):
    """What an agent needs to speak to a coordinator that uses keys."""

    secret: Path
    """Its own secret key."""
    coordinator: Path
    """The coordinator's public key."""

    @classmethod
    def of(cls, folder: Path, agent: str) -> CurveFiles:
        """The files of `agent` in a folder that ``weightbus keygen`` made."""
        return cls(folder / AGENT_KEYS_FOLDER / f"{agent}.key", folder / f"{COORDINATOR_KEYS}.pub")


class WrittenKeys(enum.Enum):
    """What `write_key_pair` found to do."""

    CREATED = "created"
    KEPT = "kept"
    """Both files were there and belong together; neither was touched."""
    COMPLETED = "completed"
    """Only the secret was there; its public half was written beside it."""


def write_key_pair(
    folder: Path, name: str, make: Callable[[], KeyPair], public_of: Callable[[str], str]
) -> WrittenKeys:
    """Write ``NAME.key`` (0600) and ``NAME.pub``. Nothing that exists is ever overwritten."""
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


def check_public_key(path: Path, secret_path: Path, expected: str) -> None:
    """Raise `PeerKeyError` unless `path` holds `expected`, the public half of what is in `secret_path`."""
    if (found := read_public_key(path)) != expected:
        problem = f"does not belong to {secret_path}: found {found}, expected {expected}"
        advice = (
            f"put the secret back that it belongs to, or remove {path.name} and run `weightbus keygen`, which makes it"
        )
        raise PeerKeyError(path, problem, advice)


def read_public_key(path: Path) -> str:
    """The key in a .pub file."""
    return _read(path)


def read_signing_key(path: Path) -> str:
    """The key in a .pub file that its agent signs with."""
    found = [line.removeprefix(_SIGNS) for line in _read_lines(path) if line.startswith(_SIGNS)]
    if len(found) != 1 or not re.match(PUBLIC_PATTERN, found[0]):
        raise PeerKeyError(path, "names no key to sign with", "remove it and run `weightbus keygen` again")
    return found[0]


def read_secret_key(path: Path) -> str:
    """The key in a .key file, which nobody else may be able to read."""
    key = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PeerKeyError(path, f"others may read it (mode {mode:04o})", f"run: chmod 600 {path}, or make a new pair")
    return key


def _read(path: Path) -> str:
    keys = [line for line in _read_lines(path) if not line.startswith(_SIGNS)]
    if len(keys) != 1 or not _Z85.fullmatch(keys[0]):
        raise PeerKeyError(path, "does not hold one key of 40 characters", "make a new pair with `weightbus keygen`")
    return keys[0]


def _read_lines(path: Path) -> list[str]:
    """All lines but comments."""
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
