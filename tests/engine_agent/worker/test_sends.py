"""A trainer's ranks send to toy workers: all halves, real sockets and gloo, no server."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightbus.dataplane.errors import DigestMismatch, ManifestError, PeerLost, StaleSession, TransferFailed
from weightbus.dataplane.processes.connections import Deadline, parse_tcp_address
from weightbus.dataplane.processes.threads import INTERVAL_S
from weightbus.dataplane.reshard.reshard_plan import ReshardPlan, make_plan
from weightbus.dataplane.transports import plan_exchange
from weightbus.dataplane.transports.interface import Group, Peer
from weightbus.dataplane.transports.sends import (
    plan_agreement as agreed_plans,
    rank_sender as rank_sends,
    receiver as sends_receiver,
    sender as sends,
)
from weightbus.dataplane.transports.sends.message_queues import ReceiveQueue, SendQueue
from weightbus.dataplane.transports.sends.receiver import LeadSession, NotReceived, SendsReceiver
from weightbus.dataplane.transports.sends.sender import GREETING_S
from weightbus.dataplane.transports.sends.transport import nixl_is_installed
from weightbus.dataplane.transports.worker_exchange import Workers
from weightbus.engine_agent.worker import loader as worker_loader, receive_thread as taker, worker_state

from ...kit.toy_direct import WAIT_S, holds, state, unchanged
from ...kit.toy_sends import SendingTrainer, SendsWorld
from ...kit.waiting import has_ipv6, until


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    made = SendsWorld(tmp_path / "r", request.param, monkeypatch)
    yield made
    made.close()


def test_a_round_brings_the_live_weights(world: SendsWorld) -> None:
    """From two ranks into one worker or two: as the engine's own loader would have done it."""
    receipt = world.round()

    assert holds(world.server, world.trainer.values)
    assert receipt.checked
    assert world.trainer.sends.failed == {}


def test_from_the_second_round_on_it_is_taken_beside(world: SendsWorld) -> None:
    """The server stands still for the flip only, and holds the new values afterwards."""
    world.round(stage=True)
    assert world.receiver.mode.startswith("paused: the workers know no plan")
    for seed in (1, 2):
        world.trainer.step(seed)
        world.round(stage=True)
        assert world.receiver.mode == "beside"
        assert holds(world.server, world.trainer.values)


def test_a_worker_s_thread_gets_the_interpreter_while_it_takes(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler without requests would keep it waiting for seconds; between versions all is as the server has it."""
    usual, seen = sys.getswitchinterval(), []

    def receive(box: ReceiveQueue, *arguments: Any) -> None:
        seen.append(sys.getswitchinterval())
        received(box, *arguments)

    received = ReceiveQueue.receive
    monkeypatch.setattr(ReceiveQueue, "receive", receive)
    for _ in range(2):
        world.round(stage=True)
        until(lambda: isclose(sys.getswitchinterval(), usual), "the usual interval")
    assert seen
    assert all(each == pytest.approx(INTERVAL_S) for each in seen)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_hosts_may_speak_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's port, the group's store and the group itself."""
    world = SendsWorld(tmp_path / "r", 1, monkeypatch, host="::1")
    world.round()
    assert holds(world.server, world.trainer.values)
    world.close()


@pytest.mark.skipif(not nixl_is_installed(), reason="nixl is not installed: weightbus[nixl]")
def test_over_nixl_as_over_gloo(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place and beside, in several turns, the workers read what they store out of the ranks' memory."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setattr(sends, "pair_bytes_for", lambda *_: 256)
    world.trainer.close()
    world.trainer = SendingTrainer(world.runtime, nixl=True)
    for step, mode in enumerate(("paused", "beside", "beside")):
        world.trainer.step(step)
        world.round(stage=True)
        assert world.receiver.mode.startswith(mode)
        assert holds(world.server, world.trainer.values)


def test_an_engine_that_forbids_staging_is_paused_throughout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of the sidecar, and said in its status."""
    world = SendsWorld(tmp_path / "r", 1, monkeypatch, beside=False)
    for seed in (1, 2):
        world.trainer.step(seed)
        world.round(stage=True)
        assert world.receiver.mode == "paused: it is not to be taken beside the weights that are served"
        assert holds(world.server, world.trainer.values)
    world.close()


def test_without_room_it_is_paused(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers say what they need and what is free."""
    world.round()
    monkeypatch.setattr(taker, "free_bytes", lambda _device: 100)
    world.trainer.step(1)
    world.round(stage=True)
    assert "100 free" in world.receiver.mode
    assert holds(world.server, world.trainer.values)


def test_nothing_is_received_into_what_the_scheduler_works_with(world: SendsWorld) -> None:
    """Whatever a sidecar says: parameters are written while the scheduler stands in our loader, and only then."""
    world.round()
    world.receiver.returned(WAIT_S)
    where = Group(store="tcp://127.0.0.1:9", name="g", size=4, rank=2, form_s=1.0, turn_s=1.0)
    leader = LeadSession(beat=lambda: None, over=lambda: "", failed=lambda *_: None)
    with pytest.raises(NotReceived, match="the scheduler is at work") as refused:
        world.receiver._threads.take(where, leader, Deadline(WAIT_S), beside=False)
    assert not refused.value.touched
    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside"])
def test_a_transfer_that_breaks_off_says_whether_weights_are_whole(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """In place they may be a mixture, and must not be served; what was taken beside them changes nothing."""
    world.round(stage=True)
    before = state(world.server)

    def broken(_outbox: SendQueue, group: Any, _turn_s: float) -> None:
        group.abort("enough")
        raise PeerLost("enough")

    monkeypatch.setattr(SendQueue, "send", broken)
    world.trainer.step(1)
    with pytest.raises(TransferFailed):
        world.round(stage=beside)
    assert world.receiver.touched is not beside
    assert not beside or unchanged(world.server, before)


@pytest.mark.parametrize("who", [rank_sends, taker], ids=["rank", "worker"])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_turns_shrink_where_memory_is_short(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, who: Any, kind: type[Exception]
) -> None:
    """A member without room for what it packs or receives costs one attempt: the next is cut into turns of an eighth.

    By what went wrong, and not by how it is worded.
    """
    name = "SendQueue" if who is rank_sends else "ReceiveQueue"
    made, most = getattr(who, name), 2 << 20
    monkeypatch.setattr(sends, "pair_bytes_for", lambda *_: 64 * most)

    def roomy(*arguments: Any, **more: Any) -> Any:
        if world.trainer.sends._pair_bytes > most:
            raise kind("CUDA OutOfMemoryError")
        return made(*arguments, **more)

    monkeypatch.setattr(who, name, roomy)
    tried = []
    for _ in range(2):
        with pytest.raises(TransferFailed):
            world.round()
        tried.append(world.trainer.sends._pair_bytes)
    if kind is RuntimeError:
        assert tried == [64 * most, 64 * most]
        return
    world.round()
    assert [*tried, world.trainer.sends._pair_bytes] == [64 * most, 8 * most, most]
    assert holds(world.server, world.trainer.values)


def test_a_rank_packs_as_before_until_its_memory_is_another(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it packs by is made once for some memory: a steady version asks nothing of its tensors."""
    made, bound = rank_sends.SendQueue, []

    def counted(mail: Any, regions: Any, engine: Any) -> Any:
        bound.append(regions)
        return made(mail, regions, engine)

    monkeypatch.setattr(rank_sends, "SendQueue", counted)
    for seed in (1, 2):
        world.trainer.step(seed)
        world.round(stage=True)
    assert len(bound) == len(world.trainer.sending)
    for shard in world.trainer.shards:
        for name, tensor in shard.items():
            shard[name] = tensor.clone()
    world.trainer.step(3)
    world.round(stage=True)
    assert len(bound) == 2 * len(world.trainer.sending)
    assert holds(world.server, world.trainer.values)


def test_a_trainer_that_began_anew_is_told_the_plans_again(world: SendsWorld) -> None:
    """The engine knows its plan, the trainer does not; nothing is recorded again."""
    world.round()
    world.trainer.close()
    world.trainer = SendingTrainer(world.runtime)
    world.trainer.step(7)
    world.round(stage=True)
    assert world.receiver.mode == "beside"
    assert holds(world.server, world.trainer.values)


def test_a_new_layout_is_read_while_the_server_lets_its_workers_in(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender is read from at once, however long a server takes; and a joiner does not wait for both."""
    read, real = threading.Event(), plan_exchange.read_layout

    def noted(*arguments: Any) -> Any:
        found = real(*arguments)
        read.set()
        return found

    monkeypatch.setattr(plan_exchange, "read_layout", noted)
    in_time: list[bool] = []
    world.server.before_load = lambda: in_time.append(read.wait(WAIT_S / 4))
    world.round()
    assert in_time == [True]
    assert holds(world.server, world.trainer.values)


def test_a_layout_that_cannot_be_read_fails_the_attempt_and_not_the_next(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is, it is found before a worker has a plan."""

    def unreadable(*arguments: Any) -> Any:
        real(*arguments)
        raise ManifestError("it is of other tensors")

    real = plan_exchange.read_layout
    with monkeypatch.context() as patch:
        patch.setattr(plan_exchange, "read_layout", unreadable)
        world.epoch += 1
        session = world.trainer.session(world.epoch)
        taken = world.receive(session, "e", world.offer(session))
        with pytest.raises(TransferFailed, match="ManifestError: it is of other tensors"):
            world.trainer.sends.ready(WAIT_S)
        world.trainer.sends.close()
        with pytest.raises(ManifestError, match="of other tensors"):
            taken.result(WAIT_S)
    assert not world.receiver.touched
    world.round()
    assert holds(world.server, world.trainer.values)


def test_schedules_are_made_while_workers_bind_their_plans(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker binds what it reports, and its sidecar works out what it is sent: neither waits for the other."""
    done: list[str] = []

    def noting(what: str, real: Any) -> Any:
        return lambda *given: (done.append(what), real(*given))[1]

    monkeypatch.setattr(Workers, "ask_to_adopt", noting("told", Workers.ask_to_adopt))
    monkeypatch.setattr(sends_receiver, "make_send_schedule", noting("scheduled", sends_receiver.make_send_schedule))
    monkeypatch.setattr(Workers, "adopted", noting("heard", Workers.adopted))
    world.round()
    assert done == ["told", *["scheduled"] * world.server.tp, "heard"]


def test_plans_of_engines_alike_are_made_once(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of hundreds of engines makes those of one; who joins does not wait for its own.

    Nor for their schedules, nor for the ranks to be told what they send, and to bind what they pack by. That of another
    GPU gives plans and schedules other names.
    """
    made: dict[str, list[object]] = {"plan": [], "schedule": [], "parts": [], "send queue": []}

    def counted(what: str, real: Any) -> Any:
        return lambda *given: (made[what].append(given), real(*given))[1]

    monkeypatch.setattr(agreed_plans, "make_plan", counted("plan", make_plan))
    monkeypatch.setattr(agreed_plans, "make_send_schedule", counted("schedule", agreed_plans.make_send_schedule))
    monkeypatch.setattr(rank_sends._Part, "of", counted("parts", rank_sends._Part.of))
    monkeypatch.setattr(rank_sends, "SendQueue", counted("send queue", rank_sends.SendQueue))
    monkeypatch.setattr(worker_state, "device_name", lambda _: "one")
    monkeypatch.setattr(worker_state, "readable_peers", lambda _: ("cpu",))
    monkeypatch.setattr(worker_state, "nccl_gpu_id_here", lambda _: "")
    world.round()
    known = set(world.trainer.sends._plans.digests)
    before = {what: len(each) for what, each in made.items()}
    workers, ranks = world.server.tp, len(world.trainer.sending)
    assert before == {"plan": workers, "schedule": workers, "parts": workers * ranks, "send queue": ranks}
    for each in worker_loader._states.values():
        each._device_name = "another"
    world.receiver.shutdown()
    world.receiver = SendsReceiver(world.runtime)  # which knows nothing of what was agreed
    world.trainer.step(1)
    world.round()
    assert set(world.trainer.sends._plans.digests) - known
    assert {what: len(each) for what, each in made.items()} == before
    assert holds(world.server, world.trainer.values)


def test_tensors_that_lie_otherwise_are_planned_anew(world: SendsWorld) -> None:
    """What was planned from the same recording, for the same worker, was from where they lay before."""
    world.round()
    for shard in world.trainer.shards:
        shard["up"] = torch.empty_like(shard["up"].t().contiguous()).t()
    world.trainer.step(2)
    world.round()
    assert holds(world.server, world.trainer.values)


def test_a_trainer_that_plans_otherwise_sends_nothing(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides must have made the same plan before a byte moves."""

    def otherwise(*arguments: Any) -> ReshardPlan:
        plan = make_plan(*arguments)
        return replace(plan, copies=plan.copies.take(np.arange(len(plan.copies) - 1)))

    monkeypatch.setattr(agreed_plans, "make_plan", otherwise)
    with pytest.raises(TransferFailed, match="both sides must run one version"):
        world.round()
    assert not world.receiver.touched


def test_an_engine_that_does_not_come_is_left_out_and_the_others_begin(world: SendsWorld) -> None:
    """Before the group begins no engine fails for another."""
    session = world.trainer.session(1)
    address = world.offer(session, [Peer("e", world.server.tp), Peer("absent", 1)])
    taken = world.receive(session, "e", address)
    world.trainer.sends.withdraw("absent", "its agent died")
    world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.finish(WAIT_S)

    assert taken.result(WAIT_S).checked
    assert world.trainer.sends.failed == {"absent": "its agent died"}
    assert holds(world.server, world.trainer.values)


def test_another_epoch_is_refused(world: SendsWorld) -> None:
    """A receiver of an older epoch gets nothing, and its server is not called."""
    address = world.offer(world.trainer.session(5))
    taken = world.receive(world.trainer.session(4), "e", address)
    with ThreadPoolExecutor(1) as waiting:
        ready = waiting.submit(world.trainer.sends.ready, WAIT_S)  # for the one that it expects
        assert isinstance(taken.exception(WAIT_S), StaleSession)
        world.trainer.sends.withdraw("e", "it is of another epoch")
        assert isinstance(ready.exception(WAIT_S), TransferFailed)

    assert world.server.calls == 0
    assert not world.receiver.touched


def test_what_is_not_the_version_is_noticed(world: SendsWorld) -> None:
    """A flipped bit in one rank: the digest table says another thing, and names the tensor."""
    session = world.trainer.session(1)
    world.trainer.shards[0]["up"].view(torch.uint8)[1, 3].bitwise_xor_(4)

    with pytest.raises(DigestMismatch, match="up"):
        world.round(session)
    assert world.receiver.touched
    assert "DigestMismatch" in world.trainer.sends.failed["e"]


def test_an_engine_that_says_nothing_keeps_no_engine_waiting(world: SendsWorld) -> None:
    """Twenty strangers that connect before anybody of the round, and are silent; one that speaks another language."""
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    address = world.trainer.sends.offer(session, [Peer("e", world.server.tp)])
    strangers = [socket.create_connection(parse_tcp_address(address.address)) for _ in range(21)]
    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    began = time.monotonic()
    world.trainer.summon(address, session.epoch)
    taken = world.receive(session, "e", address)
    world.trainer.sends.ready(WAIT_S)
    assert time.monotonic() - began < GREETING_S
    world.trainer.sends.finish(WAIT_S)
    assert taken.result(WAIT_S).checked
    assert holds(world.server, world.trainer.values)
    for stranger in strangers:
        stranger.close()
