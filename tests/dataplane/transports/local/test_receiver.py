"""What a sidecar asks of its server over the local transport, and how long it waits for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.transports.interface import Peer, SharedBucket
from weightbus.dataplane.transports.local import shared_buckets as module

from ...loopback import CHANNEL, LoopbackServer, Places, make_manifest, make_session, send_all

BUCKETS = 6
PATIENCE_S = 60.0
STILL_S = 0.5


class Stopped(LoopbackServer):
    """Its workers stand still from the second bucket on."""

    def load_shared(self, bucket: SharedBucket, deadline_s: float) -> None:
        """Answer nothing, as long as is waited for it."""
        if self.loads < 1:
            return super().load_shared(bucket, deadline_s)
        self.loads += 1
        time.sleep(deadline_s)
        raise TransferFailed(f"no answer in {deadline_s:.1f} s")


def test_a_server_that_stands_still_in_a_load_is_given_up_long_before_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines of a round stand still for it meanwhile. It is asked for nothing more, and the sender hears of it."""
    asked: list[int] = []
    monkeypatch.setattr(module, "bucket_timeout_s", lambda nbytes: (asked.append(nbytes), STILL_S)[1])
    session, places, server = make_session(1, 1, make_manifest(BUCKETS)), Places(tmp_path), Stopped()
    sender, receiver = places.sender("local"), places.receiver("local")
    pool = BucketBuffers("cpu", 2, session.manifest.largest_bucket, CHANNEL)
    address, began = sender.offer(session, [Peer("e0", 1)]), time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(receiver.receive, session, address, "e0", 0, server, PATIENCE_S)
        sender.ready(PATIENCE_S)
        with pytest.raises(TransferFailed):
            send_all(sender, session, pool, PATIENCE_S)
        assert "no answer in 0.5 s" in str(taken.exception(PATIENCE_S))
    assert STILL_S <= time.monotonic() - began < PATIENCE_S / 4
    assert server.loads == 2
    assert "no answer" in sender.failed["e0"]
    assert asked[0] == session.manifest.buckets[0].nbytes
    sender.close()
    receiver.shutdown()
    pool.close()
