"""Key files: written once, and private."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightbus.control.bus.sockets import new_keypair, public_of
from weightbus.control.protocol.errors import PeerKeyError
from weightbus.control.security.keys import (
    CurveFiles,
    KeyPair,
    WrittenKeys,
    read_public_key,
    read_secret_key,
    write_key_pair,
)


def write(folder: Path, name: str) -> WrittenKeys:
    return write_key_pair(folder, name, new_keypair, public_of)


def test_pair_is_written_and_private(tmp_path: Path) -> None:
    """The secret is for its owner only; both halves belong together."""
    assert write(tmp_path, "e0") is WrittenKeys.CREATED
    secret, public = tmp_path / "e0.key", tmp_path / "e0.pub"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert public_of(read_secret_key(secret)) == read_public_key(public)
    assert read_secret_key(secret) not in public.read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A second run keeps the pair, and completes one whose public half was removed."""
    write(tmp_path, "e0")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert write(tmp_path, "e0") is WrittenKeys.KEPT
    (tmp_path / "e0.pub").unlink()
    assert write(tmp_path, "e0") is WrittenKeys.COMPLETED
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_halves_that_do_not_belong_together(tmp_path: Path) -> None:
    """Neither half is replaced: the message says which file to look at."""
    write(tmp_path, "a")
    write(tmp_path, "b")
    (tmp_path / "a.pub").write_bytes((tmp_path / "b.pub").read_bytes())
    with pytest.raises(PeerKeyError, match=r"a\.pub: does not belong to .*a\.key: found .{40}, expected .{40}; put"):
        write(tmp_path, "a")
    (tmp_path / "a.key").unlink()
    with pytest.raises(PeerKeyError, match="another machine"):
        write(tmp_path, "a")


@pytest.mark.parametrize("name", ["", "../x", "a b", "-x"])
def test_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    """A name never leads out of the folder."""
    with pytest.raises(PeerKeyError, match="not a name"):
        write(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", "#%09az{]")
def test_any_key_character_may_come_first(tmp_path: Path, first: str) -> None:
    """Keys may hold the comment character: a comment is a line with a space in it."""
    pair = KeyPair(first + "a" * 39, first + "b" * 39)
    write_key_pair(tmp_path, "x", lambda: pair, lambda _: pair.public)
    assert read_public_key(tmp_path / "x.pub") == pair.public
    assert read_secret_key(tmp_path / "x.key") == pair.secret


def test_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """And the message says how to mend it (S8)."""
    write(tmp_path, "e0")
    (tmp_path / "e0.key").chmod(0o640)
    with pytest.raises(PeerKeyError, match="chmod 600"):
        read_secret_key(tmp_path / "e0.key")


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 40, b"a" * 40 + b"\n" + b"b" * 40 + b"\n"])
def test_what_is_no_key_file(tmp_path: Path, content: bytes) -> None:
    """Empty, short, binary or two keys: refused with what to do."""
    (tmp_path / "x.pub").write_bytes(content)
    with pytest.raises(PeerKeyError, match="weightbus keygen"):
        read_public_key(tmp_path / "x.pub")


def test_missing_files_are_named(tmp_path: Path) -> None:
    """The error names the file that is looked for."""
    files = CurveFiles.of(tmp_path, "e7")
    for path in (files.secret, files.coordinator):
        with pytest.raises(PeerKeyError, match=path.name):
            read_public_key(path)
