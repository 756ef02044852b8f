"""The transport contract, over every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightbus.dataplane import transports
from weightbus.dataplane.errors import Unsupported

from .transport_contract import Halves, TransportContract


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    """The process that forks halves of transfers: one for the module, it imports torch once."""
    halves = Halves()
    yield halves
    halves.close()


class TestLocal(TransportContract):
    """Shared memory of one host."""

    kind = "local"


class TestDistributed(TransportContract):
    """A gloo group; NCCL shares the code and is proven on GPUs."""

    kind = "distributed"
    collective = True
    checked = False


class TestDisk(TransportContract):
    """Checkpoints on a file system."""

    kind = "disk"


def test_unknown_kinds_are_refused() -> None:
    """A wrong name, or a folder that is missing from the settings, is said before anything is opened."""
    with pytest.raises(Unsupported, match="pigeon"):
        transports.sender("pigeon", channel="c")
    with pytest.raises(Unsupported, match="pigeon"):
        transports.receiver("pigeon")
    with pytest.raises(Unsupported, match="checkpoint_dir"):
        transports.sender("disk", channel="c")
