"""`TrainerAgent` on groups of threads, against a coordinator and senders in memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from weightbus.control import protocol as m
from weightbus.control.protocol.errors import ConfigurationError, NotTrusted, RequestRefused
from weightbus.control.protocol.messages import RequestId, TransportKind
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest
from weightbus.dataplane.transports.sends import transport as sends
from weightbus.trainer_agent.export.memory_export import MemoryExport
from weightbus.trainer_agent.machine import errors
from weightbus.trainer_agent.machine.publication import PublishReport
from weightbus.trainer_agent.publish import agent as module
from weightbus.trainer_agent.publish.agent import RankZero, TrainerAgent, _missing
from weightbus.trainer_agent.publish.bucket_staging import BucketStaging
from weightbus.trainer_agent.publish.driver import Progress, PublisherContext
from weightbus.trainer_agent.publish.rank_commands import CommandedRanks
from weightbus.trainer_agent.settings import SendsOver, TrainerSettings
from weightbus.trainer_agent.source import AssemblyFailed

from ...kit.fake_bus import FakeCoordinator, engine, silence
from ...kit.fake_sender import FakeSender
from ...kit.fake_source import FakeSource, group_of, pack, tiny_qwen3

SMALL = 4096
"""Bytes of a bucket: the tiny model takes several."""


class Rig:
    """One group, its agents, and what they speak to."""

    def __init__(self, ranks: int, coordinator: FakeCoordinator, settings: TrainerSettings) -> None:
        self.weights = tiny_qwen3()
        self.sources = group_of(self.weights, ranks, timeout_s=30.0)
        self.coordinator = coordinator
        self.senders = {kind: FakeSender() for kind in m.TransportKind}
        self.manifest = Manifest.of("Qwen3ForCausalLM", self.sources[0].tensors(), settings.bucket_bytes)
        slots = min(settings.slots, len(self.manifest.buckets))
        self.pool = BucketBuffers("cpu", slots, self.manifest.largest_bucket, "test")
        self.progress: list[Progress] = []
        self.agents = [self._agent(source, settings) for source in self.sources]

    def publish(self, version: int) -> list[PublishReport | errors.TrainerError]:
        """On every rank at once; what was raised stands in the place of the report."""

        def one(agent: TrainerAgent) -> PublishReport | errors.TrainerError:
            try:
                return agent.publish(version)
            except errors.TrainerError as error:
                return error

        with ThreadPoolExecutor(len(self.agents)) as pool:
            return [each.result(timeout=120) for each in [pool.submit(one, agent) for agent in self.agents]]

    def report(self, version: int) -> PublishReport:
        """The report, which is the same on every rank."""
        found = self.publish(version)
        assert all(each == found[0] for each in found)
        assert isinstance(found[0], PublishReport)
        return found[0]

    def failure(self, version: int, kind: type[errors.TrainerError]) -> Sequence[errors.PublishFailed]:
        """What every rank raised."""
        found = self.publish(version)
        assert [type(each) for each in found] == [kind] * len(found)
        return [each for each in found if isinstance(each, errors.PublishFailed)]

    def sent(self, epoch: int, name: str = "e0", kind: m.TransportKind = m.TransportKind.LOCAL) -> bytes:
        """What an engine was sent in an epoch."""
        return b"".join(self.senders[kind].taken[epoch, name])

    def expected(self) -> bytes:
        """What an engine must have got."""
        buckets = range(len(self.manifest.buckets))
        return b"".join(pack(self.manifest, index, self.weights).numpy().tobytes() for index in buckets)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()

    def _agent(self, source: FakeSource, settings: TrainerSettings) -> TrainerAgent:
        if not source.root:
            return TrainerAgent(source, settings, self.manifest, None)
        ranks = CommandedRanks(source)
        context = PublisherContext(
            settings=settings,
            bus=self.coordinator,
            staging=BucketStaging(source, self.manifest, self.pool, ranks),
            make_sender=lambda kind: self.senders[kind],
            senders={},
            boot=self.coordinator.boot,
            progress=self.progress.append,
        )
        return TrainerAgent(source, settings, self.manifest, RankZero(context, self.pool, source))


Build = Callable[..., Rig]


@pytest.fixture
def rig() -> Iterator[Build]:
    """Makes rigs and closes them."""
    made: list[Rig] = []

    def build(ranks: int = 1, coordinator: FakeCoordinator | None = None, **given: object) -> Rig:
        plain = {"channel": "c", "bucket_bytes": SMALL, "request_timeout_s": 1.0, "beat_s": 0.2}
        settings = TrainerSettings(**{**plain, **given})  # type: ignore[arg-type]  # msgspec checks nothing here
        made.append(Rig(ranks, coordinator or FakeCoordinator(), settings))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.mark.parametrize("slots", [1, 2, 3, 64])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_engine_gets_every_byte(rig: Build, ranks: int, slots: int) -> None:
    """Whatever fits the slots: packed buckets in order, the same report on every rank."""
    one = rig(ranks, slots=slots)
    report = one.report(1)
    assert len(one.manifest.buckets) > 3
    assert one.sent(1) == one.expected()
    assert report.outcome is m.Outcome.COMMITTED
    assert report.bytes == one.manifest.nbytes
    assert report.buckets == len(one.manifest.buckets)
    assert {"acquire", "assemble", "digest", "announce", "transfer", "total"} <= report.seconds.keys()
    assert report.seconds["total"] < 30.0, "nobody waited for a rank that did not come"


@pytest.mark.parametrize(("slots", "passes"), [(2, 2), (64, 1)])
def test_a_model_that_fits_its_slots_is_assembled_once(rig: Build, slots: int, passes: int) -> None:
    """Larger ones twice: once for the digests, once to be sent."""
    one = rig(2, slots=slots)
    one.report(1)
    buckets = list(range(len(one.manifest.buckets)))
    assert [source.assembled for source in one.sources] == [buckets * passes] * 2


def test_the_digest_table_names_exactly_what_is_sent(rig: Build) -> None:
    """What was put before the round are the digests of the bytes that travel in it."""
    one = rig()
    report = one.report(1)
    table = DigestTable.decode(one.coordinator.blobs[report.table], one.manifest)
    assert Manifest.decode(one.coordinator.blobs[report.manifest]) == one.manifest
    assert table.version == 1
    for index, bucket in enumerate(one.manifest.buckets):
        packed = pack(one.manifest, index, one.weights)
        assert integrity.digest_tensors(packed, one.manifest.offsets_of(index)) == table.of_bucket(bucket)


def test_a_later_version_carries_the_weights_as_they_are_then(rig: Build) -> None:
    """Parameters are read at every publish; the manifest stays the same blob."""
    one = rig()
    first = one.report(1)
    one.weights["model.norm.weight"].add_(1.0)
    for source in one.sources:
        source.weights = dict(one.weights)
    second = one.report(2)
    assert one.sent(2) == one.expected() != one.sent(1)
    assert first.manifest == second.manifest
    assert first.table != second.table


def test_several_transports_serve_their_own_engines(rig: Build) -> None:
    """One lane for each kind, fed with the same buckets."""
    kinds = (m.TransportKind.LOCAL, m.TransportKind.DISK)
    engines = {kind.value: engine(transports=(kind,)) for kind in kinds}
    one = rig(coordinator=FakeCoordinator(engines))
    one.report(1)
    assert all(one.sent(1, kind.value, kind) == one.expected() for kind in kinds)
    (offered,) = one.coordinator.said(m.Offered)
    assert isinstance(offered, m.Offered)
    assert {offer.transport for offer in offered.offers} == set(kinds)


def test_a_channel_without_engines_still_commits(rig: Build) -> None:
    """Trainers may start before the first engine."""
    one = rig(2, FakeCoordinator({}))
    assert one.report(1).engines == ()


def test_live_digests_are_computed_for_engines_that_report_theirs(rig: Build) -> None:
    """One prediction for each tensor-parallel size among them, none for the others."""
    engines = {"e0": engine(2, "sglang-sha256-8"), "e1": engine(1), "e2": engine(2, "sglang-sha256-8")}
    one = rig(coordinator=FakeCoordinator(engines))
    report = one.report(1)
    table = DigestTable.decode(one.coordinator.blobs[report.table], one.manifest)
    assert [(each.algorithm, each.tp) for each in table.live] == [("sglang-sha256-8", 2)]
    assert len(table.live[0].parameters["model.layers.0.self_attn.qkv_proj.weight"]) == 2


def test_an_engine_that_dies_is_named_and_the_others_are_served(rig: Build) -> None:
    """`Sent` carries the sender's account of it; the round commits without that engine."""
    one = rig(2, FakeCoordinator({"e0": engine(), "e1": engine()}))
    one.senders[m.TransportKind.LOCAL].lose[1, 2] = "e0"
    report = one.report(1)
    assert report.engines_by(m.Outcome.QUARANTINED) == ("e0",)
    assert one.sent(1, "e1") == one.expected()
    (sent,) = one.coordinator.said(m.Sent)
    assert isinstance(sent, m.Sent)
    assert sent.failed == {"e0": "died at bucket 2"}


def test_a_transport_that_cannot_be_opened_is_not_offered_and_the_reason_travels(rig: Build) -> None:
    """`Offered` names the engines that cannot be served and why; the others get their weights."""
    kinds = (m.TransportKind.LOCAL, m.TransportKind.DISK)
    one = rig(2, FakeCoordinator({kind.value: engine(transports=(kind,)) for kind in kinds}))
    one.senders[m.TransportKind.DISK].refusal = "no space left on device"
    report = one.report(1)
    (offered,) = one.coordinator.said(m.Offered)
    assert isinstance(offered, m.Offered)
    assert [offer.transport for offer in offered.offers] == [m.TransportKind.LOCAL]
    assert offered.failed == {"disk": "no space left on device"}
    assert report.engines_by(m.Outcome.QUARANTINED) == ("disk",)
    assert one.sent(1, "local") == one.expected()


@pytest.mark.parametrize("slots", [2, 64])
def test_a_redrive_sends_everything_again(rig: Build, slots: int) -> None:
    """Under the new epoch, from the first bucket on, whether or not the model is staged whole."""
    one = rig(2, slots=slots)
    one.coordinator.redrives = 1
    one.senders[m.TransportKind.LOCAL].lose[1, 1] = "e0"
    report = one.report(1)
    assert report.committed
    assert report.epoch == 2
    assert one.sent(2) == one.expected()


def test_a_round_in_which_no_engine_is_left_is_aborted_on_every_rank(rig: Build) -> None:
    """The error carries the report; the agent may publish again."""
    one = rig(3)
    one.senders[m.TransportKind.LOCAL].lose[1, 1] = "e0"
    found = one.failure(1, errors.RoundAborted)
    assert {each.report.reason for each in found} == {"no engine took the version"}
    one.report(2)


def test_a_refused_version_is_refused_on_every_rank(rig: Build) -> None:
    """The coordinator's code reaches the training loop, typed, and nothing was assembled."""
    one = rig(2)
    one.coordinator.refusals[m.Acquire] = deque([RequestRefused(m.RefusalCode.VERSION_NOT_NEWER, "9 is committed")])
    found = one.failure(1, errors.PublishRefused)
    assert {each.code for each in found} == {m.RefusalCode.VERSION_NOT_NEWER}
    assert one.sources[1].assembled == []


def test_a_busy_channel_is_waited_for(rig: Build) -> None:
    """The lease is asked for again after the pause that the coordinator names; ranks hear beats meanwhile."""
    one = rig(2, beat_s=0.01)
    busy = RequestRefused(m.RefusalCode.LEASE_HELD, "other has it", 0.5)
    one.coordinator.refusals[m.Acquire] = deque([busy, busy])
    assert one.report(1).committed
    assert len(one.coordinator.said(m.Acquire)) == 3
    assert one.sources[1].agreed > len(one.sources[1].assembled) + 5


def test_a_channel_that_stays_busy_ends_the_publication_on_every_rank(rig: Build) -> None:
    """The deadline is the trainer's own."""
    one = rig(2, acquire_timeout_s=0.3)
    one.coordinator.refusals[m.Acquire] = deque([RequestRefused(m.RefusalCode.LEASE_HELD, "other", 0.05)] * 100)
    one.failure(1, errors.LeaseBusy)


def test_a_trainer_names_its_run_and_takes_the_channel_once(rig: Build) -> None:
    """Its name, unless another is set; a later run that takes the channel is not undone by a flag in a script (N60)."""
    one = rig(2, takeover=True)
    one.publish(1)
    one.publish(2)
    asked = [(each.run, each.takeover) for each in one.coordinator.said(m.Acquire)]
    assert asked == [("trainer", True), ("trainer", False)]
    taken = RequestRefused(m.RefusalCode.CHANNEL_TAKEN, "channel 'c' belongs to run 'exp-2'")
    one.coordinator.refusals[m.Acquire] = deque([taken])
    failed = one.failure(3, errors.ChannelTaken)
    assert all("exp-2" in str(each) for each in failed)
    one.publish(4)


def test_an_older_coordinator_is_told_no_run(rig: Build) -> None:
    """It cannot read the message that names one, and says so: the version is published all the same (N44, N60)."""
    one = rig(1, run="exp-1", request_timeout_s=0.5, acquire_timeout_s=20.0)
    coordinator = one.coordinator
    usual = coordinator._answer

    def older(message: m.ToCoordinator) -> m.ToAgent:
        if isinstance(message, m.Acquire) and message.run:
            coordinator.unread_at = time.monotonic()
            raise silence()
        return usual(message)

    coordinator._answer = older  # type: ignore[method-assign]
    one.publish(1)
    one.publish(2)
    assert [each.run for each in coordinator.said(m.Acquire)] == ["exp-1", "", ""]


@pytest.mark.parametrize("at", [m.Acquire, m.Publish, m.Offered, m.Sent])
def test_a_trainer_whose_key_is_revoked_is_told_so_by_its_next_request(rig: Build, at: type[m.Message]) -> None:
    """On every rank, with the command that mends it, in whatever step of the round (N55)."""
    one = rig(2)
    refused = NotTrusted("key 12ab is not trusted here", "run `weightbus trust add trainer`")
    one.coordinator.refusals[at] = deque([refused])
    failed = one.failure(1, errors.TrainerNotTrusted)
    assert all("weightbus trust add trainer" in str(each) for each in failed)
    assert failed[0].__cause__ is refused


def test_a_trainer_whose_key_is_revoked_is_told_so_while_it_waits_for_the_round(rig: Build) -> None:
    """No request is under way, and none would be before the deadline of the round (N55)."""
    one = rig(2, round_timeout_s=30.0)
    coordinator = one.coordinator
    coordinator.send = lambda _publish: None  # type: ignore[method-assign]
    told = m.Refused(request=RequestId("untrusted"), code=m.RefusalCode.NOT_ALLOWED, reason="key 12ab")
    coordinator.say(told)  # of a time before this publication: passed by now

    def revoke() -> None:
        coordinator.refusal = (NotTrusted("key 12ab", "run `weightbus trust add trainer`"), time.monotonic())
        coordinator.say(told)

    coordinator.after[m.Publish] = deque([revoke])
    begun = time.monotonic()
    failed = one.failure(1, errors.TrainerNotTrusted)
    assert "weightbus trust add trainer" in str(failed[0])
    assert time.monotonic() - begun < 10.0


@pytest.mark.parametrize("asks", [True, False])
def test_a_trainer_that_lost_its_connection_with_its_trust_is_told_so(rig: Build, asks: bool) -> None:
    """Its new connections are refused in the handshake: no message comes, and no coordinator is lost (N55)."""
    one = rig(2, round_timeout_s=30.0)
    coordinator = one.coordinator
    coordinator.send = lambda _publish: None  # type: ignore[method-assign]

    def revoke() -> None:
        coordinator.untrusted = NotTrusted("its key is not trusted", "run `weightbus trust add trainer`")
        if asks:
            raise silence()

    coordinator.after[m.Acquire if asks else m.Publish] = deque([revoke])
    begun = time.monotonic()
    failed = one.failure(1, errors.TrainerNotTrusted)
    assert "weightbus trust add trainer" in str(failed[0])
    assert time.monotonic() - begun < 10.0


@pytest.mark.parametrize("ended_in", [m.Publish, m.Abandon])
def test_a_session_that_has_ended_ends_the_publication_with_its_reason(rig: Build, ended_in: type[m.Message]) -> None:
    """In whatever state: no later event can come, and a refusal of the session is no answer to a request."""
    one = rig(1, round_timeout_s=0.5, acquire_timeout_s=2.0)
    coordinator = one.coordinator
    ended = RequestRefused(m.RefusalCode.NOT_ALLOWED, "the key is not trusted any more")
    coordinator.send = lambda _publish: None  # type: ignore[method-assign]

    def end() -> None:
        coordinator.next = refuse  # type: ignore[method-assign]

    def refuse(_timeout_s: float) -> m.ToAgent:
        raise ended

    coordinator.after[ended_in] = deque([end])
    failed = one.failure(1, errors.PublishFailed)
    assert "the key is not trusted any more" in str(failed[0])
    assert not coordinator.said(m.Acquire)[2:]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 3])
def test_a_rank_that_cannot_assemble_fails_all_of_them_soon(rig: Build, rank: int, after: int) -> None:
    """In the first pass, wherever it happens: the lease goes back, nobody hangs, the agent is of no more use."""
    one = rig(3)

    def fail(done: int) -> None:
        if done == after:
            raise AssemblyFailed("a parameter is gone")

    one.sources[rank].before_assembly = fail
    one.failure(1, errors.SourceFailed)
    assert len(one.coordinator.said(m.Release)) == 1
    assert {type(each) for each in one.publish(2)} == {errors.AgentClosed}


def test_a_rank_that_fails_while_sending_ends_the_round(rig: Build) -> None:
    """In the second pass the coordinator is told, and the senders are closed."""
    one = rig(2, slots=2)
    passes = len(one.manifest.buckets)

    def fail(done: int) -> None:
        if done == passes + 1:
            raise AssemblyFailed("a parameter is gone")

    one.sources[1].before_assembly = fail
    one.failure(1, errors.SourceFailed)
    assert len(one.coordinator.said(m.Abandon)) == 1
    assert one.senders[m.TransportKind.LOCAL].calls[-1] == "close"


def test_weights_that_change_between_the_passes_are_noticed(rig: Build) -> None:
    """The second pass is compared with the first: nothing but the digested bits is ever sent whole."""
    one = rig(2, slots=2)
    passes = len(one.manifest.buckets)

    def step(done: int) -> None:
        if done == passes:
            one.sources[0].weights["model.embed_tokens.weight"].add_(1.0)

    one.sources[0].before_assembly = step
    found = one.failure(1, errors.WeightsChanged)
    assert all("model.embed_tokens.weight" in each.result.reason for each in found)
    one.sources[0].before_assembly = lambda _done: None
    one.report(2)


@pytest.mark.parametrize("moment", [m.Publish, m.Offered, m.Sent])
def test_a_coordinator_that_restarts_in_a_round_is_served_again(rig: Build, moment: type[m.Message]) -> None:
    """Killed after any of our messages: the round is begun again under a new lease, and commits. Read only once."""
    one = rig(2, slots=64)
    coordinator = one.coordinator
    if moment is m.Sent:
        coordinator.refusals[m.Sent] = deque([silence()])
        coordinator.after[m.Offered] = deque([coordinator.restart])
    else:
        coordinator.after[moment] = deque([coordinator.restart])
    report = one.report(1)
    assert report.committed
    assert report.attempts == 2
    assert one.sent(report.epoch) == one.expected()
    assert one.sources[1].assembled == list(range(len(one.manifest.buckets)))


def test_a_commit_that_the_restart_hid_is_reported_as_one(rig: Build) -> None:
    """Killed between the commit and `RoundDone`: the greeting of its next life tells."""
    one = rig(2)
    coordinator = one.coordinator

    def commit_and_die() -> None:
        (publish,) = coordinator.said(m.Publish)
        assert isinstance(publish, m.Publish)
        while coordinator.next(0.0):
            pass
        coordinator.restart(
            committed=m.HeldVersion(version=publish.version, manifest=publish.manifest, table=publish.table)
        )

    coordinator.after[m.Sent] = deque([commit_and_die])
    assert one.report(1).committed


def test_a_coordinator_that_stays_silent_ends_the_publication(rig: Build) -> None:
    """Every rank learns it, after the round's own deadline."""
    one = rig(2, round_timeout_s=0.5, abandon_timeout_s=0.2)
    one.coordinator.refusals[m.Publish] = deque([silence()] * 1000)
    one.coordinator.refusals[m.Abandon] = deque([silence()] * 1000)
    one.failure(1, errors.CoordinatorLost)
    assert len(one.coordinator.said(m.Abandon)) == 1


def test_an_unforeseen_failure_of_rank_zero_reaches_every_rank(rig: Build) -> None:
    """A bug on the root is an error on all ranks, never a hang; the round is given up."""
    one = rig(3)

    one.senders.clear()
    found = one.failure(1, errors.PublishFailed)
    assert all("KeyError" in each.result.reason for each in found)
    assert isinstance(found[0].__cause__, KeyError)
    assert len(one.coordinator.said(m.Abandon)) == 1


def test_a_round_ended_by_the_coordinator_stops_the_senders(rig: Build) -> None:
    """While receivers are waited for: the lanes are closed at once, not at their deadline."""
    one = rig(2)
    sender = one.senders[m.TransportKind.LOCAL]
    sender.blocking = True

    def abort() -> None:
        (publish,) = one.coordinator.said(m.Publish)
        assert isinstance(publish, m.Publish)
        one.coordinator.finish(publish, m.Outcome.ABORTED, "engines left")

    one.coordinator.after[m.Offered] = deque([abort])
    one.failure(1, errors.RoundAborted)
    assert "close" in sender.calls


def test_progress_is_told_on_the_root(rig: Build) -> None:
    """States in order, and buckets while they are sent."""
    one = rig(slots=2)
    one.report(1)
    states = [each.state for each in one.progress]
    assert states[0] == "digesting"
    assert states[-1] == "done"
    assert max(each.buckets_sent for each in one.progress) == len(one.manifest.buckets)


@pytest.mark.parametrize("version", [-5, "7", 7.0, True, None, 2**53 + 1])
def test_what_is_no_version_is_refused_before_any_engine_hears_of_it(rig: Build, version: Any) -> None:
    """On every rank alike, with what is expected: the agent goes on."""
    made = rig(ranks=2)
    for agent in made.agents:
        for call in (agent.publish, agent.catch_up):
            with pytest.raises(ValueError, match=r"a whole number from 0 to 2\*\*53 is expected"):
                call(version)
    assert made.report(7).committed


def test_a_closed_agent_publishes_nothing(rig: Build) -> None:
    """And may be closed twice; its memory and connection are given back."""
    one = rig()
    with one.agents[0] as agent:
        pass
    agent.close()
    assert one.coordinator.closed
    assert one.pool.buffers == []
    with pytest.raises(errors.AgentClosed, match="was closed"):
        agent.publish(1)


def test_settings_come_from_arguments_then_environment(tmp_path: Path) -> None:
    """What is given by name wins; an unknown name is an error before anything is connected."""
    source = FakeSource({"a": torch.zeros(4)})
    environ = {"WEIGHTBUS_TRAINER_CHANNEL": "from-env", "WEIGHTBUS_TRAINER_SLOTS": "0"}
    with pytest.raises(ConfigurationError, match="slots"):
        TrainerAgent.connect(source, environ=environ)
    with pytest.raises(ConfigurationError, match="bucket_bites"):
        TrainerAgent.connect(source, channel="c", environ={}, bucket_bites=1, checkpoint_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="channel is needed"):
        TrainerAgent.connect(source, environ={})


# What rank 0 finds out when it starts, before a round would.


BY_NIXL = TrainerSettings(sends_over=SendsOver.NIXL, channel="policy", insecure_loopback=True)


def test_sends_over_nixl_are_not_offered_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines would be routed to them, and fail in every round."""
    monkeypatch.setattr(sends, "NIXL_MODULES", ("nixl_of_no_version",))
    assert "install weightbus[nixl]" in _missing(BY_NIXL, "cpu")[TransportKind.SENDS]
    assert not _missing(TrainerSettings(channel="policy", insecure_loopback=True), "cpu")
    only_local = TrainerSettings(
        sends_over=SendsOver.NIXL, channel="policy", insecure_loopback=True, transport=(TransportKind.LOCAL,)
    )
    assert not _missing(only_local, "cpu")
    monkeypatch.setattr(sends, "NIXL_MODULES", ("nixl_of_no_version", "msgspec"))
    assert not _missing(BY_NIXL, "cpu")


def test_memory_that_no_engine_can_read_is_found_out_when_the_trainer_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still sent."""
    monkeypatch.setattr(module, "CommandedRanks", Mock())
    memory_export = Mock(MemoryExport, unreadable="")
    assert module._first_export(memory_export, Mock(), BY_NIXL)[1] == {}
    memory_export.unreadable = "a rank is on another host"
    assert module._first_export(memory_export, Mock(), BY_NIXL)[1].keys() == {TransportKind.DIRECT}


def test_a_host_in_brackets_is_refused_when_settings_are_read() -> None:
    """They belong to addresses with a port; sockets know no such name."""
    with pytest.raises(ValueError, match="without brackets"):
        TrainerSettings(channel="policy", insecure_loopback=True, host="[::1]")


def test_waves_without_a_lag_limit_are_warned_of_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that a version that breaks servers does not reach would get no requests."""
    monkeypatch.setattr(module, "BackgroundPublisher", Mock())
    rolling = TrainerSettings(channel="policy", insecure_loopback=True, max_paused=1)
    with capture_logs() as lines:
        RankZero(Mock(settings=rolling), Mock(), Mock(), None)
    assert [(line["event"], "max_lag = 1" in line["reason"]) for line in lines] == [("settings_doubted", True)]
    for well in (BY_NIXL, TrainerSettings(channel="policy", insecure_loopback=True, max_paused=1, max_lag=1)):
        assert not well.doubt()
