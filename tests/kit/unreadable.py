"""Reads that fail for reasons which say nothing of what is read."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def no_descriptors() -> Generator[None]:
    """This process cannot open another file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def loop_at(path: Path) -> Path:
    """Make `path` a link to itself: opening it fails, for the superuser too, and not because nothing is there."""
    path.symlink_to(path.name)
    return path
