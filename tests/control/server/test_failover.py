"""Two coordinators as real processes, and a real etcd: the leader dies, or sleeps; no committed version is lost."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.etcd_member import BINARY, MISSING

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from failover import Pair, wait

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as undo:
        yield Pair(tmp_path_factory.mktemp("ha"), undo, leader_s=4.0, engines=2)


def test_the_standby_takes_over_from_a_dead_leader(pair: Pair) -> None:
    """SIGKILL: within the lease the other leads, agents find it, versions go on, and none that was answered is lost."""
    took = pair.cycle(signal.SIGKILL)
    assert took["leader_s"] < 30.0
    assert pair.lost == 0
    assert pair.orderly


def test_a_leader_that_slept_changes_nothing(pair: Pair) -> None:
    """SIGSTOP beyond the lease, then SIGCONT: the old leader stands by, and no engine takes an order of its epochs."""
    pair.cycle(signal.SIGSTOP)
    pair.wait_commits(3)
    assert pair.lost == 0
    assert pair.orderly
    assert not any(engine.stale for engine in pair.engines)


def test_a_stop_hands_over_at_once(pair: Pair) -> None:
    """SIGTERM: the leader resigns, and the other need not wait for the lease to run out."""
    old, new = pair.roles()
    acked = pair.trainer.acked[-1][0]
    old.signal(signal.SIGTERM)
    wait("a new leader", lambda: new.leads)
    assert new.committed >= acked
    pair.wait_commits(2)
