"""The machine of one publication: event in, exact effects out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from weightbus.control.protocol.errors import IllegalMove
from weightbus.control.protocol.messages import (
    AgentId,
    Digest,
    EngineReport,
    HeldVersion,
    Outcome,
    ReceivingEngine,
    RefusalCode,
    TransportKind,
    Version,
)
from weightbus.trainer_agent.machine import events as ev, publication
from weightbus.trainer_agent.machine.events import EndReason
from weightbus.trainer_agent.machine.publication import Publication, PublicationState

TABLE = "ab" * 32
RECEIVERS = (ReceivingEngine(engine=AgentId("e0"), transport=TransportKind.LOCAL, tp=1),)
LIMITS = publication.PublishLimits(acquire_s=10.0, round_s=100.0, abandon_s=5.0, attempts=2, retry_s=0.5)


def held(version: int, table: str = TABLE) -> HeldVersion:
    return HeldVersion(version=Version(version), manifest=Digest("cd" * 32), table=Digest(table))


def send(epoch: int, version: int = 7) -> ev.SendRequested:
    return ev.SendRequested(epoch, version, RECEIVERS, 60.0)


def ended(outcome: Outcome = Outcome.COMMITTED, epoch: int = 3, version: int = 7) -> ev.RoundDoneReceived:
    return ev.RoundDoneReceived(epoch, version, outcome, "because", (), {"total": 1.0})


def brought_to(state: PublicationState, limits: publication.PublishLimits = LIMITS) -> Publication:
    """A publication of version 7 under lease 3, at time 0, in `state`."""
    machine = Publication(7, limits)
    steps: list[tuple[PublicationState, ev.AnyEvent]] = [
        (PublicationState.DIGESTING, ev.LeaseObtained(3)),
        (PublicationState.ANNOUNCING, ev.DigestsReady(TABLE)),
        (PublicationState.WAITING, ev.RoundAccepted()),
        (PublicationState.SENDING, send(3)),
    ]
    machine.handle(ev.PublishRequested(), 0.0)
    for reached, event in steps:
        if machine.state is state:
            break
        machine.handle(event, 0.0)
        assert machine.state is reached
    if state is PublicationState.ABANDONING:
        machine.handle(ev.Tick(), 100.0)
    if state is PublicationState.GATHERING:
        machine.handle(ev.DeliveryEnded(3, {}), 0.0)
        machine.handle(ended(Outcome.ABORTED), 0.0)
    assert machine.state is state
    return machine


@pytest.fixture(autouse=True)
def _invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine of every test is checked after every event."""
    plain = Publication.handle

    def checked(self: Publication, event: ev.AnyEvent, now: float) -> ev.Effects:
        effects = plain(self, event, now)
        self.check()
        return effects

    monkeypatch.setattr(Publication, "handle", checked)


def test_a_plain_round() -> None:
    """Lease, digests, announcement, delivery, report, end: in this order and nothing else."""
    machine = Publication(7, LIMITS)
    assert machine.handle(ev.PublishRequested(), 0.0) == (ev.RequestLease(),)
    assert machine.handle(ev.LeaseObtained(3), 0.1) == (ev.AssembleBuckets(),)
    assert machine.handle(ev.DigestsReady(TABLE), 0.2) == (ev.AnnounceRound(3),)
    assert machine.handle(ev.RoundAccepted(), 0.3) == ()
    assert machine.handle(send(3), 0.4) == (ev.StartDelivery(3, RECEIVERS, 60.0),)
    assert machine.handle(ev.DeliveryEnded(3, {}), 0.5) == (ev.ReportDelivery(3, {}),)
    assert machine.handle(ev.ReportAcknowledged(3), 0.5) == ()
    assert machine.handle(ended(), 0.6) == ()
    assert machine.result == publication.PublicationResult(EndReason.COMMITTED, "because")


def test_a_channel_without_engines_ends_without_a_delivery() -> None:
    """A round may end before anything was asked for."""
    machine = brought_to(PublicationState.WAITING)
    assert machine.handle(ended(), 1.0) == ()
    assert machine.result is not None
    assert machine.result.ending is EndReason.COMMITTED


def test_a_redrive_sends_everything_again_under_its_epoch() -> None:
    """A second `Send` is served like the first; a repeated one is not served twice."""
    machine = brought_to(PublicationState.SENDING)
    machine.handle(ev.DeliveryEnded(3, {"e0": "died"}), 1.0)
    assert machine.handle(send(3), 1.1) == ()
    assert machine.handle(send(4), 1.2) == (ev.StartDelivery(4, RECEIVERS, 60.0),)
    assert machine.handle(ev.DeliveryEnded(4, {}), 1.3) == (ev.ReportDelivery(4, {}),)
    machine.handle(ended(epoch=3), 1.4)
    assert machine.result is not None
    assert machine.result.ending is EndReason.COMMITTED


def test_receivers_that_are_out_are_dropped_from_the_running_delivery_only() -> None:
    """What is said of an older attempt, or when nothing is sent, changes nothing."""
    out = {"e0": "its connection is gone"}
    machine = brought_to(PublicationState.SENDING)
    machine.handle(send(4), 0.5)
    assert machine.handle(ev.EnginesWithdrawn(3, out), 0.6) == ()
    assert machine.handle(ev.EnginesWithdrawn(4, out), 0.7) == (ev.DropReceivers(out),)
    assert machine.handle(ev.EnginesWithdrawn(4, out), 0.8) == (ev.DropReceivers(out),)
    assert machine.handle(ev.DeliveryEnded(4, out, ("e1",)), 0.9) == (ev.ReportDelivery(4, out, ("e1",)),)
    for state in PublicationState:
        if state not in {PublicationState.ACQUIRING, PublicationState.SENDING, PublicationState.DONE}:
            assert brought_to(state).handle(ev.EnginesWithdrawn(3, out), 1.0) == ()


def test_a_newer_send_breaks_off_the_older_delivery() -> None:
    """The epoch that was given up is not waited for: stop, then deliver."""
    machine = brought_to(PublicationState.SENDING)
    assert machine.handle(send(4), 1.0) == (ev.StopDelivery(), ev.StartDelivery(4, RECEIVERS, 60.0))


@pytest.mark.parametrize("event", [send(2), send(3, version=6), ended(epoch=2), ended(epoch=4), ended(version=6)])
@pytest.mark.parametrize("state", [PublicationState.WAITING, PublicationState.SENDING])
def test_what_is_said_of_another_round_changes_nothing(state: PublicationState, event: ev.AnyEvent) -> None:
    """Older epochs and other versions are ignored by comparison."""
    machine = brought_to(state)
    assert machine.handle(event, 1.0) == ()
    assert machine.state is state


def test_a_busy_lease_is_asked_for_again_until_the_deadline() -> None:
    """The coordinator's own pause is kept; at the deadline the publication ends, holding nothing."""
    machine = brought_to(PublicationState.ACQUIRING)
    assert machine.handle(ev.RequestDenied(RefusalCode.LEASE_HELD, "other", 2.0), 1.0) == ()
    assert machine.deadline == 3.0
    assert machine.handle(ev.Tick(), 2.9) == ()
    assert machine.handle(ev.Tick(), 3.0) == (ev.RequestLease(),)
    machine.handle(ev.RequestDenied(RefusalCode.LEASE_HELD, "other", 2.0), 9.0)
    assert machine.deadline == 10.0
    assert machine.handle(ev.Tick(), 10.0) == ()
    assert machine.result is not None
    assert machine.result.ending is EndReason.LEASE_BUSY


def test_a_coordinator_that_never_answers_is_not_taken_for_a_busy_one() -> None:
    """The same deadline, and the reason that fits."""
    machine = brought_to(PublicationState.ACQUIRING)
    machine.handle(ev.RequestDenied(RefusalCode.LEASE_HELD, "other", 2.0), 1.0)
    machine.handle(ev.Tick(), 3.0)
    machine.handle(ev.RequestTimedOut("no answer from there"), 9.0)
    machine.handle(ev.Tick(), 10.0)
    assert machine.result == publication.PublicationResult(EndReason.COORDINATOR_LOST, "no answer from there")


def test_a_version_that_is_not_newer_is_refused_at_once() -> None:
    """What would be refused again is not asked again."""
    machine = brought_to(PublicationState.ACQUIRING)
    assert machine.handle(ev.RequestDenied(RefusalCode.VERSION_NOT_NEWER, "7 is committed"), 1.0) == ()
    assert machine.result == publication.PublicationResult(
        EndReason.REFUSED, "7 is committed", RefusalCode.VERSION_NOT_NEWER
    )


def test_a_source_that_fails_gives_the_lease_back_unused() -> None:
    """Nothing was announced, so nothing is to be aborted."""
    machine = brought_to(PublicationState.DIGESTING)
    assert machine.handle(ev.AttemptFailed(EndReason.SOURCE_FAILED, "gone"), 1.0) == (ev.ReleaseLease(3),)
    assert machine.result == publication.PublicationResult(EndReason.SOURCE_FAILED, "gone")


def test_a_source_that_fails_while_sending_gives_the_round_up() -> None:
    """The lanes are stopped before the coordinator hears of it."""
    machine = brought_to(PublicationState.SENDING)
    assert machine.handle(ev.AttemptFailed(EndReason.SOURCE_FAILED, "gone"), 1.0) == (
        ev.StopDelivery(),
        ev.AbandonRound(3, "gone"),
    )


def test_a_round_that_takes_too_long_is_given_up_and_its_end_awaited() -> None:
    """The report tells how it really ended, even if that was a commit."""
    machine = brought_to(PublicationState.SENDING)
    effects = machine.handle(ev.Tick(), 100.0)
    assert effects == (ev.StopDelivery(), ev.AbandonRound(3, "the round took more than 100 s"))
    assert machine.deadline == 105.0
    machine.handle(ended(Outcome.ABORTED), 101.0)
    assert machine.result == publication.PublicationResult(EndReason.ABORTED, "because")


def test_a_coordinator_that_says_nothing_at_the_end_is_lost() -> None:
    """Every wait ends, the last one too."""
    machine = brought_to(PublicationState.ABANDONING)
    machine.handle(ev.Tick(), 105.0)
    assert machine.result is not None
    assert machine.result.ending is EndReason.COORDINATOR_LOST


@pytest.mark.parametrize("state", [PublicationState.WAITING, PublicationState.SENDING])
def test_a_restarted_coordinator_is_asked_again_and_the_round_begun_again(state: PublicationState) -> None:
    """It forgot the round: the same request is refused, and a new lease is taken. Digests are asked for anew."""
    machine = brought_to(state)
    stop: ev.Effects = (ev.StopDelivery(),) if state is PublicationState.SENDING else ()
    assert machine.handle(ev.Reconnected(None, restarted=True), 1.0) == (*stop, ev.AnnounceRound(3))
    assert machine.handle(ev.RequestDenied(RefusalCode.STALE_EPOCH, "epoch 4 is highest"), 1.1) == (ev.RequestLease(),)
    assert machine.handle(ev.LeaseObtained(5), 1.2) == (ev.AssembleBuckets(),)
    assert machine.handle(ev.DigestsReady(TABLE), 1.3) == (ev.AnnounceRound(5),)
    machine.handle(ev.RoundAccepted(), 1.4)
    assert machine.handle(send(5), 1.5) == (ev.StartDelivery(5, RECEIVERS, 60.0),)


def test_rounds_are_not_begun_for_ever() -> None:
    """After the allowed attempts the publication ends as aborted."""
    machine = brought_to(PublicationState.WAITING)
    for _ in range(LIMITS.attempts - 1):
        machine.handle(ev.Reconnected(None, restarted=True), 1.0)
        machine.handle(ev.RequestDenied(RefusalCode.STALE_EPOCH, "gone"), 1.1)
        machine.handle(ev.LeaseObtained(machine.lease + 1), 1.2)
        machine.handle(ev.DigestsReady(TABLE), 1.3)
        machine.handle(ev.RoundAccepted(), 1.4)
    machine.handle(ev.Reconnected(None, restarted=True), 2.0)
    assert machine.handle(ev.RequestDenied(RefusalCode.STALE_EPOCH, "gone"), 2.1) == ()
    assert machine.result == publication.PublicationResult(EndReason.ABORTED, "after 2 attempts: gone")


@pytest.mark.parametrize("state", [PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING])
def test_a_commit_that_a_restart_hid_is_recognized(state: PublicationState) -> None:
    """The greeting names exactly our bits: the version is committed, whatever became of `RoundDone`."""
    machine = brought_to(state)
    effects = machine.handle(ev.Reconnected(held(7), restarted=True), 1.0)
    assert effects == ((ev.StopDelivery(),) if state is PublicationState.SENDING else ())
    assert machine.result is not None
    assert machine.result.ending is EndReason.COMMITTED


def test_a_commit_that_went_with_its_journal_is_none() -> None:
    """The coordinator said ours was committed, and came back without it: what it says last holds."""
    machine = brought_to(PublicationState.WAITING)
    machine.handle(ev.Reconnected(held(7), restarted=False), 1.0)
    machine.handle(ev.Reconnected(None, restarted=True), 2.0)
    assert machine.result is None


def test_other_bits_under_our_version_are_not_ours() -> None:
    """Another trainer's version 7 does not count as this one."""
    machine = brought_to(PublicationState.WAITING)
    assert machine.handle(ev.Reconnected(held(7, "00" * 32), restarted=True), 1.0) == (ev.AnnounceRound(3),)
    machine.handle(ev.RequestDenied(RefusalCode.STALE_EPOCH, "gone"), 1.1)
    machine.handle(ev.RequestDenied(RefusalCode.VERSION_NOT_NEWER, "7 is committed"), 1.2)
    assert machine.result is not None
    assert machine.result.ending is EndReason.REFUSED


def test_a_lost_connection_does_not_stop_a_transfer() -> None:
    """The same life of the coordinator, greeted again: bytes go on, the report follows."""
    machine = brought_to(PublicationState.SENDING)
    assert machine.handle(ev.Reconnected(None, restarted=False), 1.0) == ()
    assert machine.handle(ev.DeliveryEnded(3, {}), 2.0) == (ev.ReportDelivery(3, {}),)


def test_a_report_that_was_not_heard_is_made_again() -> None:
    """Silence after `Sent`: ask how the round stands, then say it again, until it is noted."""
    machine = brought_to(PublicationState.SENDING)
    machine.handle(ev.DeliveryEnded(3, {"e0": "x"}), 1.0)
    assert machine.handle(ev.RequestTimedOut("silence"), 2.0) == ()
    assert machine.handle(ev.Tick(), 2.5) == (ev.AnnounceRound(3),)
    assert machine.handle(ev.RoundAccepted(), 2.6) == (ev.ReportDelivery(3, {"e0": "x"}),)
    machine.handle(ev.ReportAcknowledged(3), 2.7)
    machine.handle(ev.Reconnected(None, restarted=False), 3.0)
    assert machine.handle(ev.RoundAccepted(), 3.1) == ()


def broken_off(epoch: int = 3, table: str = "") -> ev.ReportDelivery:
    return ev.ReportDelivery(epoch, {"e0": publication._BROKEN_OFF}, table=table)


def test_an_offer_that_was_not_heard_is_made_again() -> None:
    """The lanes are closed, and the coordinator's repeated `Send` of the same epoch is served."""
    machine = brought_to(PublicationState.SENDING)
    assert machine.handle(ev.RequestTimedOut("silence"), 1.0) == (ev.StopDelivery(),)
    assert machine.handle(ev.Tick(), 1.5) == (ev.AnnounceRound(3),)
    assert machine.handle(ev.RoundAccepted(), 1.6) == (broken_off(),)
    assert machine.handle(ev.RequestDenied(RefusalCode.NOT_ALLOWED, "nothing was offered yet"), 1.7) == (
        ev.AnnounceRound(3),
    )
    assert machine.handle(ev.RoundAccepted(), 1.8) == ()
    assert machine.handle(send(3), 1.9) == (ev.StartDelivery(3, RECEIVERS, 60.0),)
    assert machine.handle(ev.DeliveryEnded(3, {}), 2.0) == (ev.ReportDelivery(3, {}),)


def test_an_offer_whose_answer_was_lost_is_reported_as_broken_off() -> None:
    """It may have been heard: then the coordinator asks for nothing any more, and engines stand still for a report.

    (N41, F26)
    """
    machine = brought_to(PublicationState.SENDING)
    machine.handle(ev.RequestTimedOut("silence"), 1.0)
    machine.handle(ev.Tick(), 1.5)
    assert machine.handle(ev.RoundAccepted(), 1.6) == (broken_off(),)
    machine.handle(ev.ReportAcknowledged(3), 1.7)
    assert machine.handle(send(4), 1.8) == (ev.StartDelivery(4, RECEIVERS, 60.0),)


def test_a_repeated_send_goes_before_the_report_of_what_was_broken_off() -> None:
    """The coordinator still waits for an offer: nothing is to be said of the one that it did not hear."""
    machine = brought_to(PublicationState.SENDING)
    machine.handle(ev.RequestTimedOut("silence"), 1.0)
    assert machine.handle(send(3), 1.1) == (ev.StartDelivery(3, RECEIVERS, 60.0),)
    assert machine.handle(ev.DeliveryEnded(3, {}), 1.2) == (ev.ReportDelivery(3, {}),)


def test_a_refused_report_asks_how_the_round_stands() -> None:
    """The coordinator moved on to another epoch; it says so, or that it is over, when asked."""
    machine = brought_to(PublicationState.SENDING)
    machine.handle(ev.DeliveryEnded(3, {}), 1.0)
    assert machine.handle(ev.RequestDenied(RefusalCode.STALE_EPOCH, "epoch 4"), 1.1) == (ev.AnnounceRound(3),)
    machine.handle(ev.RoundAccepted(), 1.2)
    assert machine.handle(send(4), 1.3) == (ev.StartDelivery(4, RECEIVERS, 60.0),)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (PublicationState.WAITING, ev.PublishRequested()),
        (PublicationState.WAITING, ev.LeaseObtained(9)),
        (PublicationState.SENDING, ev.DigestsReady(TABLE)),
        (PublicationState.SENDING, ev.RoundAccepted()),
        (PublicationState.WAITING, ev.DeliveryEnded(3, {})),
        (PublicationState.DIGESTING, ev.RequestTimedOut("silence")),
        (PublicationState.ABANDONING, ev.RequestDenied(RefusalCode.STALE_EPOCH, "no")),
    ],
)
def test_an_answer_to_what_was_not_asked_raises_and_changes_nothing(
    state: PublicationState, event: ev.AnyEvent
) -> None:
    """The driver is ours: such an answer is a bug, and shows as one."""
    machine = brought_to(state)
    before = (machine.state, machine.epoch, machine.deadline)
    with pytest.raises(IllegalMove):
        machine.handle(event, 1.0)
    assert (machine.state, machine.epoch, machine.deadline) == before


NO = st.one_of(
    st.builds(ev.RequestDenied, st.sampled_from(list(RefusalCode)), st.just("no"), st.sampled_from([0.0, 1.0])),
    st.just(ev.RequestTimedOut("silence")),
)
NEWS = st.one_of(
    st.builds(send, st.integers(1, 9), st.sampled_from([6, 7])),
    st.builds(ended, st.sampled_from([Outcome.COMMITTED, Outcome.ABORTED]), st.integers(1, 9), st.sampled_from([6, 7])),
    st.builds(ev.Reconnected, st.sampled_from([None, held(6), held(7)]), st.booleans()),
    st.just(ev.AttemptFailed(EndReason.SOURCE_FAILED, "gone")),
    st.builds(ev.EnginesWithdrawn, st.integers(1, 9), st.just({"e0": "gone"})),
)


@settings(max_examples=200, deadline=None)
@given(
    news=st.lists(st.tuples(NEWS, st.floats(0.0, 40.0)), max_size=20),
    answers=st.lists(st.one_of(st.none(), st.none(), NO), max_size=40),
)
def test_whatever_happens_it_ends_in_time_and_stops_what_it_started(  # noqa: C901, PLR0912  a driver in small
    news: list[tuple[ev.AnyEvent, float]], answers: list[ev.AnyEvent | None]
) -> None:
    """Any order of news and refusals: at most one delivery is open, and deadlines alone end every publication."""
    machine = Publication(7, LIMITS)
    now, epoch, open_delivery = 0.0, 0, False
    effects = list(machine.handle(ev.PublishRequested(), now))
    for _ in range(1000):
        if effects:
            effect = effects.pop(0)
            answer: ev.AnyEvent | None = None
            match effect:
                case ev.StartDelivery():
                    assert not open_delivery
                    open_delivery = True
                    answer = answers.pop() if answers else None
                case ev.DropReceivers():
                    assert open_delivery
                case ev.StopDelivery():
                    assert open_delivery
                    open_delivery = False
                case ev.RequestLease():
                    epoch = max(epoch, machine.epoch) + 1
                    answer = (answers.pop() if answers else None) or ev.LeaseObtained(epoch)
                case ev.AssembleBuckets() | ev.AwaitDigests():
                    answer = ev.DigestsReady(TABLE)
                case ev.AnnounceRound():
                    answer = (answers.pop() if answers else None) or ev.RoundAccepted()
                case ev.ReportDelivery():
                    answer = (answers.pop() if answers else None) or ev.ReportAcknowledged(effect.epoch)
                case _:
                    pass
            if answer is not None:
                effects.extend(machine.handle(answer, now))
        elif machine.result is not None:
            break
        elif news:
            event, later = news.pop(0)
            now += later
            effects.extend(machine.handle(event, now))
        else:
            assert machine.deadline is not None
            now = max(now, machine.deadline)
            effects.extend(machine.handle(ev.Tick(), now))
    assert machine.result is not None
    assert not open_delivery


# -- deferred digests ------------------------------------------------------------------------------------------------


def left_open(state: PublicationState) -> Publication:
    """One that was announced without its table, which is not known yet, in `state`."""
    machine = Publication(7, LIMITS)
    machine.handle(ev.PublishRequested(), 0.0)
    for event in (ev.LeaseObtained(3, may_defer_digests=True), ev.RoundAccepted(), send(3)):
        if machine.state is state:
            break
        machine.handle(event, 0.0)
    if state is PublicationState.ABANDONING:
        machine.handle(ev.Tick(), 100.0)
    assert machine.state is state
    return machine


def test_a_round_whose_table_follows() -> None:
    """Nothing is assembled before the announcement; the table is said with the report, and with no other message."""
    machine = Publication(7, LIMITS)
    machine.handle(ev.PublishRequested(), 0.0)
    assert machine.handle(ev.LeaseObtained(3, may_defer_digests=True), 0.1) == (
        ev.AnnounceRound(3, digests_deferred=True),
    )
    machine.handle(ev.RoundAccepted(), 0.2)
    machine.handle(send(3), 0.3)
    assert machine.handle(ev.DigestsReady(TABLE), 0.4) == ()
    assert machine.handle(ev.DeliveryEnded(3, {}), 0.5) == (ev.ReportDelivery(3, {}, (), TABLE),)
    machine.handle(ev.ReportAcknowledged(3), 0.6)
    machine.handle(send(4), 0.7)
    assert machine.handle(ev.DeliveryEnded(4, {}), 0.8) == (ev.ReportDelivery(4, {}, (), TABLE),)
    machine.handle(ended(), 0.9)
    assert machine.result == publication.PublicationResult(EndReason.COMMITTED, "because")


def test_an_open_table_comes_once_and_before_the_end_of_a_delivery() -> None:
    """A driver that says otherwise is broken, and changes nothing."""
    machine = left_open(PublicationState.SENDING)
    with pytest.raises(IllegalMove):
        machine.handle(ev.DeliveryEnded(3, {}), 1.0)
    machine.handle(ev.DigestsReady(TABLE), 1.0)
    for again in (ev.DigestsReady(TABLE), ev.DigestsUnavailable("no")):
        with pytest.raises(IllegalMove):
            machine.handle(again, 1.0)
    for state in (PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING):
        with pytest.raises(IllegalMove):
            brought_to(state).handle(ev.DigestsReady(TABLE), 1.0)


@pytest.mark.parametrize(
    "state",
    [PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING, PublicationState.ABANDONING],
)
def test_a_table_may_become_known_in_any_state_of_the_round(state: PublicationState) -> None:
    """It is kept for the report, and nothing else follows from it."""
    machine = left_open(state)
    assert machine.handle(ev.DigestsReady(TABLE), 100.5 if state is PublicationState.ABANDONING else 1.0) == ()
    assert (machine.state, machine.table) == (state, TABLE)


@pytest.mark.parametrize("state", [PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING])
def test_a_table_that_does_not_come_begins_the_round_anew(state: PublicationState) -> None:
    """With the table first, whatever the next grant says: what follows cannot fail in that way twice."""
    machine = left_open(state)
    stop = (ev.StopDelivery(),) if state is PublicationState.SENDING else ()
    assert machine.handle(ev.DigestsUnavailable("two ranks"), 1.0) == (
        *stop,
        ev.AbandonRound(3, "two ranks"),
        ev.RequestLease(),
    )
    assert machine.handle(ended(Outcome.ABORTED), 1.1) == ()
    assert machine.handle(ev.LeaseObtained(5, may_defer_digests=True), 1.2) == (ev.AssembleBuckets(),)
    assert machine.handle(ev.DigestsReady(TABLE), 1.3) == (ev.AnnounceRound(5),)


def test_a_coordinator_that_forgot_an_open_round_is_asked_with_the_table() -> None:
    """Whether the version was committed meanwhile is found out by it."""
    machine = left_open(PublicationState.SENDING)
    machine.handle(ev.DigestsReady(TABLE), 1.0)
    machine.handle(ev.DeliveryEnded(3, {}), 1.1)
    assert machine.handle(ev.Reconnected(None, restarted=True), 1.2) == (ev.AnnounceRound(3, digests_deferred=True),)
    assert machine.handle(ev.RequestDenied(RefusalCode.STALE_EPOCH, "restarted"), 1.3) == (ev.RequestLease(),)
    machine.handle(ev.LeaseObtained(5, held(7), may_defer_digests=True), 1.4)
    assert machine.handle(ev.DigestsReady(TABLE), 1.5) == (ev.AnnounceRound(5),)


def test_an_open_table_is_waited_for_where_the_answer_to_the_offer_was_lost() -> None:
    """The report needs it, and nobody is being sent to; without one the round is given up."""
    machine = left_open(PublicationState.SENDING)
    assert machine.handle(ev.RequestTimedOut("silence"), 1.0) == (ev.StopDelivery(), ev.AwaitDigests())
    assert machine.handle(ev.DigestsReady(TABLE), 1.2) == ()
    assert machine.handle(ev.Tick(), 1.5) == (ev.AnnounceRound(3, digests_deferred=True),)
    assert machine.handle(ev.RoundAccepted(), 1.6) == (broken_off(table=TABLE),)

    machine = left_open(PublicationState.SENDING)
    machine.handle(ev.RequestTimedOut("silence"), 1.0)
    assert machine.handle(ev.DigestsUnavailable("no table"), 1.2) == (ev.AbandonRound(3, "no table"), ev.RequestLease())


def test_an_open_version_that_was_committed_unheard_is_committed() -> None:
    """By version and table, once the table is known; before that nothing can have been committed."""
    machine = left_open(PublicationState.SENDING)
    machine.handle(ev.DigestsReady(TABLE), 1.0)
    machine.handle(ev.DeliveryEnded(3, {}), 1.1)
    machine.handle(ev.Reconnected(held(7), restarted=True), 1.2)
    assert machine.result is not None
    assert machine.result.ending is EndReason.COMMITTED
    unknown = left_open(PublicationState.SENDING)
    assert unknown.handle(ev.Reconnected(held(7), restarted=True), 1.2)[-1] == ev.AnnounceRound(
        3, digests_deferred=True
    )
    assert unknown.result is None


def test_a_catch_up_is_never_left_open() -> None:
    """That it is of the committed weights is found out by the table."""
    machine = Publication(7, LIMITS, catch_up=True)
    machine.handle(ev.PublishRequested(), 0.0)
    assert machine.handle(ev.LeaseObtained(3, held(7), may_defer_digests=True), 0.1) == (ev.AssembleBuckets(),)


def reported(machine: Publication) -> Publication:
    """`machine`, sending, with its report just said."""
    machine.handle(ev.DigestsReady(TABLE), 1.0)
    assert machine.handle(ev.DeliveryEnded(3, {}), 1.1) == (ev.ReportDelivery(3, {}, (), TABLE),)
    return machine


@pytest.mark.parametrize(
    ("refusal", "wait_s"),
    [
        (ev.RequestDenied(RefusalCode.UNKNOWN_BLOB, "put it first"), LIMITS.retry_s),
        (ev.RequestDenied(RefusalCode.NOT_ALLOWED, "the store is full", 5.0), 5.0),
        (ev.RequestDenied(RefusalCode.READ_ONLY, "disk full", 2.0), 2.0),
    ],
    ids=lambda each: each.code.value if isinstance(each, ev.RequestDenied) else "",
)
def test_the_only_word_on_a_table_is_said_until_it_is_taken(refusal: ev.RequestDenied, wait_s: float) -> None:
    """Engines stand still until it is. What is in its way may pass."""
    machine = reported(left_open(PublicationState.SENDING))
    assert machine.handle(refusal, 2.0) == ()
    assert machine.deadline == 2.0 + wait_s
    for _ in range(3):
        assert machine.handle(ev.Tick(), machine.deadline) == (ev.AnnounceRound(3, digests_deferred=True),)
        assert machine.handle(ev.RoundAccepted(), machine.deadline or 0.0) == (ev.ReportDelivery(3, {}, (), TABLE),)
        assert machine.handle(refusal, 9.0) == ()
    machine.handle(ev.Tick(), machine.deadline or 0.0)
    machine.handle(ev.RoundAccepted(), 20.0)
    assert machine.handle(ev.ReportAcknowledged(3), 20.1) == ()
    machine.handle(ended(), 20.2)
    assert machine.result == publication.PublicationResult(EndReason.COMMITTED, "because")


@pytest.mark.parametrize("code", [RefusalCode.NOT_ALLOWED, RefusalCode.BAD_BLOB])
def test_a_table_that_is_not_taken_ends_its_round_at_once(code: RefusalCode) -> None:
    """It cannot be committed any more: engines go on, and the version is announced again with its table."""
    machine = reported(left_open(PublicationState.SENDING))
    assert machine.handle(ev.RequestDenied(code, "no"), 2.0) == (ev.AbandonRound(3, "no"), ev.RequestLease())
    assert machine.handle(ev.LeaseObtained(5, may_defer_digests=True), 2.1) == (ev.AssembleBuckets(),)


def test_a_report_of_an_attempt_that_is_over_is_not_insisted_on() -> None:
    """The round has gone on; how it stands is learned by announcing it once more, also without deferred digests."""
    refused = ev.RequestDenied(RefusalCode.STALE_EPOCH, "late")
    assert reported(left_open(PublicationState.SENDING)).handle(refused, 2.0) == (
        ev.AnnounceRound(3, digests_deferred=True),
    )
    machine = brought_to(PublicationState.SENDING)
    machine.handle(ev.DeliveryEnded(3, {}), 1.0)
    assert machine.handle(ev.RequestDenied(RefusalCode.NOT_ALLOWED, "no"), 2.0) == (ev.AnnounceRound(3),)


def test_an_open_attempt_takes_none_of_the_others_away() -> None:
    """A refusal that only deferred digests cause does not end a publication that would have gone well without."""
    once = publication.PublishLimits(acquire_s=10.0, round_s=100.0, abandon_s=5.0, attempts=1, retry_s=0.5)
    for refused in (ev.RequestDenied(RefusalCode.NOT_ALLOWED, "no engine is here"), ev.DigestsUnavailable("two ranks")):
        machine = Publication(7, once)
        machine.handle(ev.PublishRequested(), 0.0)
        machine.handle(ev.LeaseObtained(3, may_defer_digests=True), 0.1)
        assert machine.handle(refused, 0.2)[-1] == ev.RequestLease()
        assert machine.handle(ev.LeaseObtained(5, may_defer_digests=True), 0.3) == (ev.AssembleBuckets(),)
        machine.handle(ev.DigestsReady(TABLE), 0.4)
        machine.handle(ev.RequestDenied(RefusalCode.NOT_ALLOWED, "still"), 0.5)
        assert machine.result == publication.PublicationResult(EndReason.ABORTED, "after 2 attempts: still")


def test_an_abandoned_round_that_was_not_heard_of_is_reported_again() -> None:
    """The channel is not free before it was; whoever gave up nothing is refused for good."""
    machine = left_open(PublicationState.WAITING)
    machine.handle(ev.DigestsUnavailable("two ranks"), 1.0)
    running = ev.RequestDenied(RefusalCode.NOT_ALLOWED, "your round at epoch 3 is running")
    assert machine.handle(running, 1.5) == (ev.AbandonRound(3, "two ranks"),)
    assert machine.deadline == 2.0
    assert machine.handle(ev.Tick(), 2.0) == (ev.RequestLease(),)
    assert machine.handle(ev.LeaseObtained(5), 2.5) == (ev.AssembleBuckets(),)
    plain = Publication(7, LIMITS)
    plain.handle(ev.PublishRequested(), 0.0)
    plain.handle(running, 0.1)
    assert plain.result is not None
    assert plain.result.ending is EndReason.REFUSED


def aborted(paused_s: float = 0.0) -> ev.RoundDoneReceived:
    report = EngineReport(engine=AgentId("e0"), outcome=Outcome.ABORTED, seconds={"resume": 0.1, "paused": paused_s})
    return ev.RoundDoneReceived(3, 7, Outcome.ABORTED, "too few", (report,), {"total": 1.0})


GATHERS = publication.PublishLimits(engines_s=60.0, min_engines=2, count_s=1.0)


def test_a_round_without_enough_engines_begins_again_once_they_are_there() -> None:
    """The lease is free meanwhile; the attempt does not count, and the limit holds for all waits together."""
    machine = brought_to(PublicationState.WAITING, GATHERS)
    assert machine.handle(aborted(), 5.0) == (ev.CountEngines(),)
    assert machine.state is PublicationState.GATHERING
    assert machine.handle(ev.EnginesCounted((), {}), 5.1) == ()
    assert machine.handle(ev.Tick(), 6.0) == ()
    assert machine.handle(ev.Tick(), 6.1) == (ev.CountEngines(),)
    assert machine.handle(ev.RequestTimedOut("silence"), 7.0) == ()
    assert machine.handle(ev.Tick(), 7.5) == (ev.CountEngines(),)
    assert machine.handle(ev.EnginesCounted(("e0", "e1"), {}), 8.0) == (ev.RequestLease(),)
    machine.handle(ev.LeaseObtained(9), 8.1)
    machine.handle(ev.DigestsReady(TABLE), 8.2)
    machine.handle(ev.RoundAccepted(), 8.3)
    again = aborted()
    machine.handle(ev.RoundDoneReceived(9, 7, again.outcome, again.reason, again.engines, again.seconds), 9.0)
    machine.handle(ev.EnginesCounted(("e0",), {"e1": "starting: has answered nothing for 3 s"}), 9.1)
    machine.handle(ev.Tick(), 65.0)
    assert machine.result is not None
    assert machine.result.ending is EndReason.ABORTED
    assert "waited 60 s for engines (e1: starting: has answered nothing" in machine.result.reason


@pytest.mark.parametrize(
    ("least", "counted", "waits"),
    [
        (0, ev.EnginesCounted((), {"e0": "starting: ..."}, starting=True), True),
        (0, ev.EnginesCounted(("e1",), {"e0": "starting: ..."}, starting=True), False),
        (0, ev.EnginesCounted((), {"e0": "no connection"}), False),
        (0, ev.EnginesCounted((), {}), False),
        (2, ev.EnginesCounted((), {}, known=False), False),
        (2, ev.EnginesCounted(("e0",), {"e1": "no connection"}), True),
        (2, ev.EnginesCounted(("e0", "e1"), {}), False),
    ],
)
def test_what_is_waited_for(least: int, counted: ev.EnginesCounted, waits: bool) -> None:
    """`min_engines`; without it only servers that start, where no other engine could take the version."""
    machine = brought_to(PublicationState.WAITING, publication.PublishLimits(min_engines=least))
    machine.handle(aborted(), 5.0)
    assert machine.handle(counted, 5.1) == ()
    assert (machine.result is None) is waits
    if not waits:
        assert machine.result == publication.PublicationResult(EndReason.ABORTED, "too few")


def test_a_round_that_paused_engines_is_not_begun_again() -> None:
    """It did not end for lack of engines."""
    machine = brought_to(PublicationState.WAITING, GATHERS)
    assert machine.handle(aborted(paused_s=0.2), 5.0) == ()
    assert machine.result == publication.PublicationResult(EndReason.ABORTED, "too few")
