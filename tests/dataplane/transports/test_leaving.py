"""How a server leaves its groups: in bounded time, however many there are, and nobody is asked to do it once more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.transports.distributed import receiver as joining_receiver
from weightbus.dataplane.transports.interface import Peer, Receipt

from ..loopback import Places, make_manifest, make_session, send_all
from ..transport_contract import PROMPT_S, Engine

LEAVE_S = 0.5


def test_groups_that_a_sidecar_has_left_are_left_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stand-in is told so when it ends. All of them are left within the time of one, by a server that is slow."""
    places, manifest = Places(tmp_path), make_manifest(6)
    pool = BucketBuffers("cpu", 2, manifest.largest_bucket, "leaves")
    sender, engine = places.sender("stages"), Engine("e", places.receiver("stages"))
    session = make_session(1, 11, manifest)
    engine.start(session, sender.offer(session, [Peer("e", 1)]), 1)
    sender.ready(PROMPT_S)
    send_all(sender, session, pool, PROMPT_S)
    assert isinstance(engine.join(), Receipt)
    sender.close()
    groups, used = engine.server.watched
    assert len(groups) > 1
    assert not used

    leave, asked = engine.server.leave_group, list[float]()

    def slow(group: str, deadline_s: float) -> None:
        asked.append(deadline_s)
        leave(group, deadline_s)
        time.sleep(0.6 * LEAVE_S)

    monkeypatch.setattr(joining_receiver, "_LEAVE_S", LEAVE_S)
    engine.server.leave_group = slow  # type: ignore[method-assign]
    engine.receiver._server_member._held *= 3  # type: ignore[attr-defined]  # as if it had more stages
    engine.receiver.shutdown()
    assert engine.server.watched == ((), False)
    assert len(asked) == 2
    assert asked[0] > asked[1]
    assert asked[1] < LEAVE_S / 2
    pool.close()
