"""What is asked of the disk, in order: a recording stand-in for `os.fsync` and `os.replace`.

No test can cut the power; that a file survives it rests on the order of these calls.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


class DiskCalls:
    """Every fsync and rename from now on, still carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        """What was done, and to the file or folder of which name."""
        self.synced: dict[str, bytes] = {}
        """What each file held when it was synced."""
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self._record_fsync)
        monkeypatch.setattr(os, "replace", self._record_replace)

    def _record_fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.calls.append(("sync folder", path.name))
        else:
            self.calls.append(("sync file", path.name))
            self.synced[path.name] = path.read_bytes()
        self._fsync(descriptor)

    def _record_replace(self, source: str | Path, target: str | Path) -> None:
        self.calls.append(("rename to", Path(target).name))
        self._replace(source, target)
