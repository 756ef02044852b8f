"""A version that is announced before it is digested: what is said when, and what becomes of it where nothing follows.

The machine's part is in test_publication.py; here a driver carries it out, beside a device that does things late.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch

from weightbus.control import protocol as m
from weightbus.control.protocol.errors import CoordinatorUnreachable, RequestRefused
from weightbus.control.protocol.messages import AgentId, Digest
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.transports.interface import Peer, Tabled
from weightbus.trainer_agent.checkpoints.archive import Archive, ArchivePolicy
from weightbus.trainer_agent.export.memory_export import MemoryExport
from weightbus.trainer_agent.export.topology import topology_of
from weightbus.trainer_agent.machine import OnNonFinite
from weightbus.trainer_agent.machine.events import EndReason
from weightbus.trainer_agent.publish import driver
from weightbus.trainer_agent.publish.bucket_staging import BucketStaging
from weightbus.trainer_agent.publish.delivery import Delivery
from weightbus.trainer_agent.settings import TrainerSettings
from weightbus.trainer_agent.source import AssemblyFailed

from ...dataplane.loopback import CHANNEL, make_manifest, make_session
from ...kit.fake_bus import silence
from ...kit.fake_sender import FakeSender, FakeTablingSender
from .test_in_place_export import DIRECT, Coordinator, Rig

WAIT_S = 30.0


class _Signer:
    """Signs by saying what it was asked to sign."""

    def publication(self, message: m.Publish, previous: m.HeldVersion | None) -> m.Publish:
        del previous
        return message

    def table(self, message: m.Publish, table: Digest) -> bytes:
        return f"{message.version} {message.table or 'open'} {table}".encode()

    def offer(self, offer: m.Endpoint, epoch: int) -> m.Endpoint:
        del epoch
        return offer


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """One that has published version 1, with its table, to engines that copy out of another device."""
    made = Rig(tmp_path, monkeypatch, quantized=False)
    monkeypatch.setattr(driver, "needed_before_offer", lambda _staging, _receivers: False)
    made.publish(1)
    made.trainer.step()
    yield made
    made.device.broken = False
    made.rank_zero.close()


def said(rig: Rig, kind: type[m.Publish | m.Sent]) -> list[str]:
    """The tables of all such messages."""
    return [message.table for message in rig.coordinator.heard if isinstance(message, kind)]


def test_the_offer_is_out_before_anything_is_digested(rig: Rig) -> None:
    """Receivers copy while the device digests, are given the table when it has, and the coordinator with the report."""
    result, happened = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert [each for each in happened if each != "settled"] == [
        *("digest", "Acquire", "Publish", "Offered", "digested", "Sent")
    ]
    (given,) = rig.sender.gave[2]
    assert given.table.tensors == rig.trainer.digests(quantized=False)
    assert said(rig, m.Publish)[1:] == [""]
    assert said(rig, m.Sent)[1:] == [given.table.digest()]
    assert rig.table() == given.table


def test_the_table_is_with_the_coordinator_before_it_is_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit waits for the report. It is given while receivers compare, who are not kept."""
    put, finish, compared = rig.coordinator.put_blob, rig.sender.finish, threading.Event()

    def compare(deadline_s: float) -> None:
        finish(deadline_s)
        rig.device.log.append("compared")
        compared.set()

    def slow(blob: bytes, deadline_s: float = 60.0, digest: str = "") -> Digest:
        assert compared.wait(WAIT_S)
        found = put(blob, deadline_s, digest)
        rig.device.log.append("put")
        return found

    monkeypatch.setattr(rig.sender, "finish", compare)
    monkeypatch.setattr(rig.coordinator, "put_blob", slow)

    result, happened = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert happened[-4:] == ["digested", "compared", "put", "Sent"]


def test_a_table_that_could_not_be_given_early_is_given_with_its_report(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would have been without."""

    def silent(*_: object) -> Digest:
        raise CoordinatorUnreachable("tcp://nowhere", 1.0, "PutBlob", "silence")

    monkeypatch.setattr(rig.coordinator, "put_blob", silent)

    result, _ = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert said(rig, m.Sent)[-1] in rig.coordinator.blobs


def test_where_a_receiver_is_on_the_same_device_the_table_comes_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy would wait there for what is still made, and so would its clients."""
    monkeypatch.setattr(
        driver, "needed_before_offer", lambda _staging, receivers: any(each.shares for each in receivers)
    )
    monkeypatch.setattr(
        m, "ReceivingEngine", lambda **fields: msgspec.structs.replace(_Receiver(**fields), shares=True)
    )

    result, happened = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert happened.index("Publish") < happened.index("digested") < happened.index("Offered")
    assert len(rig.sender.gave[2]) == 1


_Receiver = m.ReceivingEngine


@pytest.mark.parametrize(
    ("shares", "device", "waits"), [(True, "cuda", True), (False, "cuda", False), (False, "cpu", True)]
)
def test_what_is_on_the_device_that_makes_the_table_waits_for_it(*, shares: bool, device: str, waits: bool) -> None:
    """One receiver there is enough; without a device of its own the trainer makes it first."""
    engines = {"e0": False, "e1": shares}
    receivers = [_Receiver(engine=AgentId(name), transport=DIRECT, tp=1, shares=each) for name, each in engines.items()]
    memory = SimpleNamespace(device=torch.device(device))
    staging = cast(BucketStaging, SimpleNamespace(buffers=[SimpleNamespace(memory=memory)]))

    assert driver.needed_before_offer(staging, receivers) is waits


def test_the_table_that_follows_is_signed(rig: Rig) -> None:
    """For the publication that left it open."""
    rig.rank_zero._context.signer = _Signer()

    rig.publish(2)

    (given,) = rig.sender.gave[2]
    assert given.seal.decode() == f"2 open {given.table.digest()}"


def test_a_second_attempt_is_given_the_same_table(rig: Rig) -> None:
    """At once, over its own session: it is known by then, and nothing is digested twice."""
    rig.coordinator.redrives = 1
    rig.sender.lose_at_finish = {2: "e0"}

    result, happened = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert happened.count("digested") == 1
    first, second = rig.sender.gave[2], rig.sender.gave[3]
    assert first == second
    assert set(said(rig, m.Sent)[1:]) == {first[0].table.digest()}


def test_what_cannot_be_digested_in_place_any_more_begins_anew(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is given up, its successor has a table of buckets, and the next version is not left open either."""
    with monkeypatch.context() as broken:
        broken.setattr(MemoryExport, "digests", lambda _memory_export: None)
        broken.setattr(rig.memory_export, "undigestible", "a word of it lies on two ranks")
        rig.source.assemble = lambda _manifest, _index, out: out.zero_() if out is not None else None  # type: ignore[method-assign]
        second, happened = rig.publish(2)
        third, _ = rig.publish(3)

    assert second.ending is third.ending is EndReason.COMMITTED
    assert [each for each in happened if each[0].isupper()] == [
        *("Acquire", "Publish", "Offered", "Abandon"),
        *("Acquire", "Publish", "Offered", "Sent"),
    ]
    tables = said(rig, m.Publish)
    assert [bool(table) for table in tables] == [True, False, True, True]


def test_a_source_that_fails_meanwhile_ends_the_round(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No table is told; receivers are let go."""

    def fail(_memory_export: MemoryExport) -> bytes:
        raise AssemblyFailed("a rank is gone")

    monkeypatch.setattr(MemoryExport, "digests", fail)
    result, happened = rig.publish(2)

    assert (result.ending, result.reason) == (EndReason.SOURCE_FAILED, "a rank is gone")
    assert happened[-3:] == ["Offered", "Abandon", "waited for"]
    assert 2 not in rig.sender.gave


def test_what_reads_the_weights_has_ended_when_a_round_that_was_refused_is_over(rig: Rig) -> None:
    """They may be stepped then, whatever became of the version."""
    rig.coordinator.refusals[m.Publish] = deque([RequestRefused(m.RefusalCode.VERSION_NOT_NEWER, "it is not")])

    refused, _ = rig.publish(2)

    assert refused.ending is EndReason.REFUSED
    again, happened = rig.publish(3)
    assert again.ending is EndReason.COMMITTED
    assert happened.count("digested") == 1


def test_an_attempt_that_the_coordinator_forgot_is_repeated_with_its_table(rig: Rig) -> None:
    """By then it is known, and a version that was committed meanwhile is known by it."""
    rig.coordinator.after[m.Offered] = deque([rig.coordinator.restart])

    result, happened = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert happened.count("digested") == 1
    assert [bool(table) for table in said(rig, m.Publish)][-1]
    assert said(rig, m.Sent)[-1] == ""


def _lose() -> None:
    raise silence()


def test_where_the_answer_to_the_announcement_is_lost_engines_read_what_is_of_this_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Send` comes all the same, and says as much: what is offered was exposed for it, and its table follows."""
    rig.coordinator.after[m.Publish] = deque([_lose])
    exported: list[bool] = []
    plain = Delivery.open

    def opening(delivery: Delivery) -> tuple[m.Endpoint, ...]:
        exported.append(rig.memory_export.digesting and rig.memory_export._prepared is None)
        return plain(delivery)

    monkeypatch.setattr(Delivery, "open", opening)

    result, happened = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert exported == [True]
    assert "Abandon" not in happened
    assert rig.table().tensors == rig.trainer.digests(quantized=False)


def test_where_the_answer_to_the_offer_is_lost_the_report_has_the_table(rig: Rig) -> None:
    """The attempt is broken off, digesting ends, and the next attempt is given the same table."""
    rig.coordinator.after[m.Offered] = deque([_lose])
    rig.coordinator.redrives = 1

    result, happened = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    assert happened.count("digested") == 1
    assert set(said(rig, m.Sent)[1:]) == {rig.table().digest()}
    first = [message for message in rig.coordinator.heard if isinstance(message, m.Sent)][1]
    assert list(first.failed) == ["e0"]


def test_engines_that_came_since_the_lease_and_cannot_wait_are_not_offered_anything(rig: Rig) -> None:
    """They are told why, and the others take the version."""

    class Late(Coordinator):
        def send(self, publish: m.Publish) -> None:
            self.engines["e1"] = self.info(m.TransportKind.LOCAL)
            super().send(publish)

    rig.coordinator.__class__ = Late
    others = FakeSender()
    make = rig.rank_zero._context.make_sender
    rig.rank_zero._context.make_sender = lambda kind: make(kind) if kind is DIRECT else others

    result, _ = rig.publish(2)

    assert result.ending is EndReason.COMMITTED
    offered = [message for message in rig.coordinator.heard if isinstance(message, m.Offered)][-1]
    assert [offer.transport for offer in offered.offers] == [DIRECT]
    assert "local cannot wait for it" in offered.failed["e1"]
    assert others.calls == []


@pytest.mark.parametrize(
    "why", ["switched off", "refuse", "another transport", "committed already", "catch-up", "kept"]
)
def test_the_table_comes_first(rig: Rig, why: str, tmp_path: Path) -> None:
    """Where somebody takes buckets, where it decides what is answered or sent at all, and where that is wanted."""
    context, version = rig.rank_zero._context, 2
    match why:
        case "switched off":
            context.settings = msgspec.structs.replace(context.settings, open_tables=False)
        case "refuse":
            context.settings = msgspec.structs.replace(context.settings, nonfinite=OnNonFinite.REFUSE)
        case "another transport":
            rig.coordinator.engines["e1"] = Coordinator.info(m.TransportKind.LOCAL)
            rig.source.assemble = lambda _manifest, _index, out: out.zero_() if out is not None else None  # type: ignore[method-assign]
            context.make_sender = lambda kind: rig.sender if kind is DIRECT else FakeSender()
        case "committed already":
            version = 1
        case "kept":
            rig.source.assemble = lambda _manifest, _index, out: out.zero_() if out is not None else None  # type: ignore[method-assign]
            (tmp_path / "config.json").write_text("{}")
            context.archive = Archive(tmp_path / "kept", "c", ArchivePolicy(1, 1, 0), tmp_path)
    rig.rank_zero.publish(version, catch_up=why == "catch-up")

    assert all(said(rig, m.Publish))


def test_the_name_of_a_table_is_that_of_its_blob(rig: Rig) -> None:
    """The coordinator is put what it is told of."""
    rig.publish(2)

    name = said(rig, m.Sent)[-1]
    assert hashlib.sha256(rig.coordinator.blobs[Digest(name)]).hexdigest() == name


@pytest.mark.parametrize("switched_off", [False, True])
def test_the_coordinator_is_told_which_agents_support_deferred_digests(switched_off: bool, tmp_path: Path) -> None:
    """Only such a trainer is allowed to; one that is older than the word would not understand the permission."""
    settings = TrainerSettings(channel="c", open_tables=not switched_off)
    told = topology_of(settings, (DIRECT,), (), runtime_dir=tmp_path, refusals={})
    assert told.supports_deferred_digests is not switched_off


def test_a_table_that_is_given_twice_counts_once() -> None:
    """With the announcement and with the report: engines that have it already are not failed for it."""
    sender, session = FakeTablingSender(), make_session(1, 10, make_manifest())
    tabled = Tabled(session.known)
    begun = msgspec.structs.replace(session, table=None)
    pool, kind = BucketBuffers("cpu", 1, session.manifest.largest_bucket, CHANNEL), m.TransportKind.DIRECT
    delivery = Delivery(begun, {kind: sender}, {kind: [Peer("e0", 1)]}, pool.buffers, 60.0)
    delivery.open()
    delivery.send_digest_table(tabled)
    delivery.send_digest_table(tabled)
    delivery.stop()
    pool.close()
    assert sender.gave == {1: [tabled]}
    assert not any(call.startswith("withdraw") for call in sender.calls)
