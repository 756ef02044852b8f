"""Files that are whole after a power cut: written beside, synced, and put in place."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Replace the file `path` in one step: when this returns, a crash of the machine does not undo it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_fresh(path, content).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_fresh(path: Path, content: bytes) -> Path:
    """Write `content` beside `path`, synced; returns where it lies until it is put in place."""
    fresh = path.parent / f"{path.name}.new"  # another one for each file: they are written by several threads
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return fresh
