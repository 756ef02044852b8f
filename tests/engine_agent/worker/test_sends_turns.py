"""Turns over a link that does not carry them in their time become smaller, and larger again where it carries them.

The link is made up, and loses what it does not carry in a turn's time: whoever receives runs out of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.transports.interface import Peer
from weightbus.dataplane.transports.sends import (
    receiver as takers,
    sender as sends,
)
from weightbus.dataplane.transports.sends.p2p_group import P2PChunk, P2PGroup, Posted
from weightbus.dataplane.transports.sends.sender import LESS, ChunkLimit

from ...kit.ends import Ends, was_struck
from ...kit.toy_direct import WAIT_S, holds
from ...kit.toy_sends import SendsWorld

MOST, LEAST = 1024, 16
"""Bytes of a pair in a turn."""
TURN_S = 4.0
"""Where one is to run out."""


class Lost:
    """A turn of a rank that waits for nothing but the end of the group, for longer than whoever receives."""

    def __init__(self, posted: Posted) -> None:
        self._posted = posted

    def wait(self, deadline: Deadline) -> None:
        """As `Posted.wait`."""
        del deadline
        self._posted.wait(Deadline(WAIT_S))


class Link:
    """From the ranks to the workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.carries = MOST
        """Bytes of a rank in a turn's time."""
        post = P2PGroup.post

        def through(group: P2PGroup, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> Posted:
            if sum(each.memory.numel() for each in sends) <= self.carries:
                return post(group, sends, receives)
            return Lost(post(group, (), [P2PChunk(torch.zeros(1, dtype=torch.uint8), sends[0].peer)]))

        monkeypatch.setattr(P2PGroup, "post", through)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    """An engine of one worker that has taken a version: from now on it takes them beside."""
    monkeypatch.setattr(sends, "pair_bytes_for", lambda *_: MOST)
    monkeypatch.setattr(sends, "MIN_PAIR_BYTES", LEAST)
    monkeypatch.setattr(takers, "_END_S", TURN_S)
    made = SendsWorld(tmp_path / "r", 1, monkeypatch)
    made.round(stage=True)
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends("sends_ends.py")
    yield made
    made.close()


@pytest.fixture
def link(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> Link:
    del world  # its first version went another way
    return Link(monkeypatch)


def too_much(world: SendsWorld) -> str:
    """An attempt in which a turn runs out, and how; nothing that is served was changed by it."""
    before = dict(world.trainer.values)
    world.trainer.sends._chunk_s = TURN_S
    world.trainer.step(world.epoch)
    with pytest.raises(TransferFailed) as late:
        world.round(stage=True)
    if not world.receiver.touched:
        assert holds(world.server, before)
    world.trainer.sends.close()
    world.trainer.sends._chunk_s = WAIT_S  # all else must move, however busy the machine
    return str(late.value)


def passes(world: SendsWorld) -> tuple[int, str]:
    """The size of the turns in which a version went through, and how it was taken."""
    world.trainer.step(world.epoch)
    world.round(stage=True)
    assert holds(world.server, world.trainer.values)
    return world.trainer.sends._pair_bytes, world.receiver.mode


def test_turns_shrink_until_the_link_carries_them(world: SendsWorld, link: Link) -> None:
    """To an eighth in each attempt, which may be of the same version; then every version comes through."""
    link.carries = MOST // LESS**2
    for size in (MOST, MOST // LESS):
        said = too_much(world)
        assert world.trainer.sends._pair_bytes == size
        assert said.startswith("worker 0: ChunkTimeout: waited 4.0 s for a peer")
    assert set(world.trainer.sends.failed) == {"e"}
    assert passes(world) == (MOST // LESS**2, "paused: the schedules are new")
    assert passes(world) == (MOST // LESS**2, "beside")


def test_turns_grow_back_where_it_was_not_the_link(world: SendsWorld, link: Link) -> None:
    """As after a peer that was stopped and looked like it. What failed again is not tried again as soon."""
    world.trainer.sends._ceiling = ChunkLimit(first=2)
    link.carries = 0
    too_much(world)
    link.carries = MOST
    sizes = [passes(world)[0] for _ in range(3)]
    assert sizes == [MOST // LESS, MOST // LESS, MOST]
    link.carries = MOST // LESS
    too_much(world)
    assert [passes(world)[0] for _ in range(4)] == [MOST // LESS] * 4


def test_turns_stay_as_large_where_a_rank_is_stopped(world: SendsWorld, ends: Ends) -> None:
    """Its messages would be late in turns of any size, and the leader has not heard of it for most of one."""
    trainer = world.trainer
    trainer.sends._chunk_s = TURN_S
    trainer.step(5)
    session = trainer.session(2)
    trainer.describe()
    address = trainer.sends.offer(session, [Peer("e", 1)])
    trainer.summon(address, 2, ranks=(0,))
    pid = ends.start(
        half="rank", root=str(world.runtime), seed=5, address=address.address, token=address.token, epoch=2,
        point="moving", signal=int(signal.SIGSTOP), at=1,
    )  # fmt: skip
    taken = world.receive(session, "e", address, stage=True)
    trainer.sends.ready(WAIT_S)
    trainer.sends.finish(WAIT_S)
    assert "ChunkTimeout" in str(taken.exception(WAIT_S))
    assert was_struck(pid, signal.SIGSTOP)
    trainer.sends.close()
    trainer.sends._chunk_s = WAIT_S
    os.kill(pid, signal.SIGKILL)
    world.epoch = 2
    assert passes(world) == (MOST, "beside")
