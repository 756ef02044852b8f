"""One epoch over two transports at once: a trainer's memory is read by one engine, and sent to another.

The lanes of the real `Delivery` drive both senders, side by side; ranks, workers and sidecars are those of the toys.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weightbus.control.protocol.messages import TransportKind
from weightbus.dataplane.transports.direct.receiver import DirectReceiver
from weightbus.dataplane.transports.interface import Address, Peer, Receipt
from weightbus.dataplane.transports.sends import messages as sends_wire, receiver as takers, sender as sends
from weightbus.dataplane.transports.sends.receiver import SendsReceiver
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.trainer_agent.publish.delivery import Delivery

from ...kit.ends import Ends, was_struck
from ...kit.toy_direct import WAIT_S, Server, holds
from ...kit.toy_sends import SendingTrainer
from ..worker.test_sends_failures import PROMPT_S, STILL_S, Remote

DIRECT, SENDS = TransportKind.DIRECT, TransportKind.SENDS


class NoSlot:
    """Nothing is staged: both transports take what lies in the ranks' memory."""

    memory = torch.empty(0, dtype=torch.uint8)
    exported = b""


class Mixed:
    """Engine ``near`` reads, engine ``far`` is sent to."""

    def __init__(self, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = SendingTrainer(runtime)
        self.servers = {name: Server(1, monkeypatch) for name in ("near", "far")}
        monkeypatch.setattr(worker_loader, "_rank", lambda: 0)
        self.receivers = {"near": DirectReceiver(runtime), "far": SendsReceiver(runtime)}
        self.epoch = 0
        self._pool = ThreadPoolExecutor(4)

    def deliver(self, *engines: str) -> Delivery:
        """Offer a new version to `engines`; none comes by itself."""
        self.epoch += 1
        self.trainer.step(self.epoch)
        self.session = self.trainer.session(self.epoch)
        self.trainer.describe()
        senders = {DIRECT: self.trainer.sender, SENDS: self.trainer.sends}
        peers = {kind: [Peer(name, 1)] for kind, name in ((DIRECT, "near"), (SENDS, "far")) if name in engines}
        delivery = Delivery(self.session, senders, peers, (NoSlot(),), WAIT_S)  # type: ignore[arg-type]
        self.offers = {offer.transport: Address(offer.address, token=offer.token) for offer in delivery.open()}
        if SENDS in self.offers:
            self.trainer.summon(self.offers[SENDS], self.epoch)
        delivery.offers_received()
        return delivery

    def come(self, engine: str, server: object = None) -> Future[Receipt]:
        """An engine's half, in a thread of its own."""
        address = self.offers[DIRECT if engine == "near" else SENDS]
        receiver, stands_for = self.receivers[engine], server or self.servers[engine]
        return self._pool.submit(receiver.receive, self.session, address, engine, 0, stands_for, WAIT_S)  # type: ignore[arg-type]

    def served(self, engine: str) -> bool:
        """It holds the version."""
        return holds(self.servers[engine], self.trainer.values)

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.shutdown()
        worker_loader.forget()
        self._pool.shutdown()
        self.trainer.close()


def over(delivery: Delivery) -> None:
    """Wait until every lane has come to its end."""
    until = time.monotonic() + WAIT_S
    while not delivery.over:
        assert time.monotonic() < until
        delivery.wait(0.1)


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mixed]:
    made = Mixed(tmp_path / "r", monkeypatch)
    yield made
    made.close()


def test_two_transports_carry_one_version(mixed: Mixed) -> None:
    """Out of the same memories: both engines hold it, round after round."""
    for _ in range(2):
        delivery = mixed.deliver("near", "far")
        taken = [mixed.come("near"), mixed.come("far")]
        over(delivery)
        assert delivery.failed == {}
        assert all(each.result(WAIT_S).checked for each in taken)
        assert mixed.served("near")
        assert mixed.served("far")


def test_the_slow_one_does_not_keep_the_fast_one_from_beginning(mixed: Mixed) -> None:
    """``near`` has the whole version while ``far`` has not even come."""
    delivery = mixed.deliver("near", "far")
    assert mixed.come("near").result(WAIT_S).checked
    assert mixed.served("near")
    assert not delivery.over
    assert mixed.come("far").result(WAIT_S).checked
    over(delivery)
    assert mixed.served("far")


def test_an_engine_that_dies_in_the_middle_costs_the_other_transport_nothing(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The group breaks, its engine is named, and ``near`` took everything; the next epoch has no room for the dead."""
    monkeypatch.setattr(sends, "pair_bytes_for", lambda *_: 256)
    monkeypatch.setattr(sends_wire, "SILENT_S", 2 * STILL_S)
    monkeypatch.setattr(takers, "_END_S", STILL_S)
    mixed.trainer.sends._chunk_s = mixed.trainer.sends._form_s = STILL_S
    ends = Ends("sends_ends.py")
    victim = Remote(ends, tmp_path, point="moving", signal=int(signal.SIGKILL), at=2)
    delivery = mixed.deliver("near", "far")
    dead, near = mixed.come("far", victim), mixed.come("near")
    began = time.monotonic()
    over(delivery)

    assert time.monotonic() - began < PROMPT_S
    assert near.result(WAIT_S).checked
    assert mixed.served("near")
    assert set(delivery.failed) == {"far"}
    assert dead.exception(WAIT_S) is not None
    assert was_struck(victim.pid, signal.SIGKILL)
    delivery = mixed.deliver("near")
    assert mixed.come("near").result(WAIT_S).checked
    over(delivery)
    assert delivery.failed == {}
    ends.close()
