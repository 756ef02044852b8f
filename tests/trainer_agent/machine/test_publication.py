"""The machine of one publication: event in, exact effects out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from weightbus.control.protocol.enums import Code, Outcome, TransportKind
from weightbus.control.protocol.errors import IllegalMove
from weightbus.control.protocol.ids import AgentId, Digest, Version
from weightbus.control.protocol.message_fields import Held, Receiver
from weightbus.trainer_agent.machine import publication as p
from weightbus.trainer_agent.machine.publication import Ending, Publication, State

TABLE = "ab" * 32
RECEIVERS = (Receiver(engine=AgentId("e0"), transport=TransportKind.LOCAL, tp=1),)
LIMITS = p.Limits(acquire_s=10.0, round_s=100.0, abandon_s=5.0, attempts=2, retry_s=0.5)


def held(version: int, table: str = TABLE) -> Held:
    return Held(version=Version(version), manifest=Digest("cd" * 32), table=Digest(table))


def send(epoch: int, version: int = 7) -> p.SendAsked:
    return p.SendAsked(epoch, version, RECEIVERS, 60.0)


def ended(outcome: Outcome = Outcome.COMMITTED, epoch: int = 3, version: int = 7) -> p.Ended:
    return p.Ended(epoch, version, outcome, "because", (), {"total": 1.0})


def brought_to(state: State, limits: p.Limits = LIMITS) -> Publication:
    """A publication of version 7 under lease 3, at time 0, in `state`."""
    machine = Publication(7, limits)
    steps: list[tuple[State, p.AnyEvent]] = [
        (State.DIGESTING, p.LeaseGranted(3)),
        (State.ANNOUNCING, p.Digested(TABLE)),
        (State.WAITING, p.Accepted()),
        (State.SENDING, send(3)),
    ]
    machine.handle(p.Begin(), 0.0)
    for reached, event in steps:
        if machine.state is state:
            break
        machine.handle(event, 0.0)
        assert machine.state is reached
    if state is State.ABANDONING:
        machine.handle(p.Tick(), 100.0)
    assert machine.state is state
    return machine


@pytest.fixture(autouse=True)
def _invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine of every test is checked after every event."""
    plain = Publication.handle

    def checked(self: Publication, event: p.AnyEvent, now: float) -> p.Effects:
        effects = plain(self, event, now)
        self.check()
        return effects

    monkeypatch.setattr(Publication, "handle", checked)


def test_a_plain_round() -> None:
    """Lease, digests, announcement, delivery, report, end: in this order and nothing else."""
    machine = Publication(7, LIMITS)
    assert machine.handle(p.Begin(), 0.0) == (p.AskLease(),)
    assert machine.handle(p.LeaseGranted(3), 0.1) == (p.Assemble(),)
    assert machine.handle(p.Digested(TABLE), 0.2) == (p.Announce(3),)
    assert machine.handle(p.Accepted(), 0.3) == ()
    assert machine.handle(send(3), 0.4) == (p.Deliver(3, RECEIVERS, 60.0),)
    assert machine.handle(p.Delivered(3, {}), 0.5) == (p.ReportSent(3, {}),)
    assert machine.handle(p.Noted(3), 0.5) == ()
    assert machine.handle(ended(), 0.6) == ()
    assert machine.verdict == p.Verdict(Ending.COMMITTED, "because")


def test_a_channel_without_engines_ends_without_a_delivery() -> None:
    """A round may end before anything was asked for."""
    machine = brought_to(State.WAITING)
    assert machine.handle(ended(), 1.0) == ()
    assert machine.verdict is not None
    assert machine.verdict.ending is Ending.COMMITTED


def test_a_redrive_sends_everything_again_under_its_epoch() -> None:
    """A second `Send` is served like the first; a repeated one is not served twice."""
    machine = brought_to(State.SENDING)
    machine.handle(p.Delivered(3, {"e0": "died"}), 1.0)
    assert machine.handle(send(3), 1.1) == ()
    assert machine.handle(send(4), 1.2) == (p.Deliver(4, RECEIVERS, 60.0),)
    assert machine.handle(p.Delivered(4, {}), 1.3) == (p.ReportSent(4, {}),)
    machine.handle(ended(epoch=3), 1.4)
    assert machine.verdict is not None
    assert machine.verdict.ending is Ending.COMMITTED


def test_receivers_that_are_out_are_dropped_from_the_running_delivery_only() -> None:
    """What is said of an older attempt, or when nothing is sent, changes nothing."""
    out = {"e0": "its connection is gone"}
    machine = brought_to(State.SENDING)
    machine.handle(send(4), 0.5)
    assert machine.handle(p.Withdrawn(3, out), 0.6) == ()
    assert machine.handle(p.Withdrawn(4, out), 0.7) == (p.DropReceivers(out),)
    assert machine.handle(p.Withdrawn(4, out), 0.8) == (p.DropReceivers(out),)
    assert machine.handle(p.Delivered(4, out, ("e1",)), 0.9) == (p.ReportSent(4, out, ("e1",)),)
    for state in State:
        if state not in {State.ACQUIRING, State.SENDING, State.DONE}:
            assert brought_to(state).handle(p.Withdrawn(3, out), 1.0) == ()


def test_a_newer_send_breaks_off_the_older_delivery() -> None:
    """Nobody waits for the epoch that was given up: stop, then deliver."""
    machine = brought_to(State.SENDING)
    assert machine.handle(send(4), 1.0) == (p.StopDelivery(), p.Deliver(4, RECEIVERS, 60.0))


@pytest.mark.parametrize("event", [send(2), send(3, version=6), ended(epoch=2), ended(epoch=4), ended(version=6)])
@pytest.mark.parametrize("state", [State.WAITING, State.SENDING])
def test_what_is_said_of_another_round_changes_nothing(state: State, event: p.AnyEvent) -> None:
    """Older epochs and other versions are ignored by comparison."""
    machine = brought_to(state)
    assert machine.handle(event, 1.0) == ()
    assert machine.state is state


def test_a_busy_lease_is_asked_for_again_until_the_deadline() -> None:
    """The coordinator's own pause is kept; at the deadline the publication ends, holding nothing."""
    machine = brought_to(State.ACQUIRING)
    assert machine.handle(p.Refusal(Code.LEASE_HELD, "other", 2.0), 1.0) == ()
    assert machine.deadline == 3.0
    assert machine.handle(p.Tick(), 2.9) == ()
    assert machine.handle(p.Tick(), 3.0) == (p.AskLease(),)
    machine.handle(p.Refusal(Code.LEASE_HELD, "other", 2.0), 9.0)
    assert machine.deadline == 10.0
    assert machine.handle(p.Tick(), 10.0) == ()
    assert machine.verdict is not None
    assert machine.verdict.ending is Ending.LEASE_BUSY


def test_a_coordinator_that_never_answers_is_not_taken_for_a_busy_one() -> None:
    """The same deadline, and the reason that fits."""
    machine = brought_to(State.ACQUIRING)
    machine.handle(p.Refusal(Code.LEASE_HELD, "other", 2.0), 1.0)
    machine.handle(p.Tick(), 3.0)
    machine.handle(p.Unreachable("no answer from there"), 9.0)
    machine.handle(p.Tick(), 10.0)
    assert machine.verdict == p.Verdict(Ending.COORDINATOR_LOST, "no answer from there")


def test_a_version_that_is_not_newer_is_refused_at_once() -> None:
    """What would be refused again is not asked again."""
    machine = brought_to(State.ACQUIRING)
    assert machine.handle(p.Refusal(Code.VERSION_NOT_NEWER, "7 is committed"), 1.0) == ()
    assert machine.verdict == p.Verdict(Ending.REFUSED, "7 is committed", Code.VERSION_NOT_NEWER)


def test_a_source_that_fails_gives_the_lease_back_unused() -> None:
    """Nothing was announced, so nothing is to be aborted."""
    machine = brought_to(State.DIGESTING)
    assert machine.handle(p.Broken(Ending.SOURCE_FAILED, "gone"), 1.0) == (p.GiveBack(3),)
    assert machine.verdict == p.Verdict(Ending.SOURCE_FAILED, "gone")


def test_a_source_that_fails_while_sending_gives_the_round_up() -> None:
    """The lanes are stopped before the coordinator hears of it."""
    machine = brought_to(State.SENDING)
    assert machine.handle(p.Broken(Ending.SOURCE_FAILED, "gone"), 1.0) == (p.StopDelivery(), p.GiveUp(3, "gone"))


def test_a_round_that_takes_too_long_is_given_up_and_its_end_awaited() -> None:
    """The report tells how it really ended, even if that was a commit."""
    machine = brought_to(State.SENDING)
    effects = machine.handle(p.Tick(), 100.0)
    assert effects == (p.StopDelivery(), p.GiveUp(3, "the round took more than 100 s"))
    assert machine.deadline == 105.0
    machine.handle(ended(Outcome.ABORTED), 101.0)
    assert machine.verdict == p.Verdict(Ending.ABORTED, "because")


def test_a_coordinator_that_says_nothing_at_the_end_is_lost() -> None:
    """Every wait ends, the last one too."""
    machine = brought_to(State.ABANDONING)
    machine.handle(p.Tick(), 105.0)
    assert machine.verdict is not None
    assert machine.verdict.ending is Ending.COORDINATOR_LOST


@pytest.mark.parametrize("state", [State.WAITING, State.SENDING])
def test_a_restarted_coordinator_is_asked_again_and_the_round_begun_again(state: State) -> None:
    """It forgot the round: the same request is refused, and a new lease is taken. Digests are asked for anew."""
    machine = brought_to(state)
    stop: p.Effects = (p.StopDelivery(),) if state is State.SENDING else ()
    assert machine.handle(p.Reconnected(None, restarted=True), 1.0) == (*stop, p.Announce(3))
    assert machine.handle(p.Refusal(Code.STALE_EPOCH, "epoch 4 is highest"), 1.1) == (p.AskLease(),)
    assert machine.handle(p.LeaseGranted(5), 1.2) == (p.Assemble(),)
    assert machine.handle(p.Digested(TABLE), 1.3) == (p.Announce(5),)
    machine.handle(p.Accepted(), 1.4)
    assert machine.handle(send(5), 1.5) == (p.Deliver(5, RECEIVERS, 60.0),)


def test_rounds_are_not_begun_for_ever() -> None:
    """After the allowed attempts the publication ends as aborted."""
    machine = brought_to(State.WAITING)
    for _ in range(LIMITS.attempts - 1):
        machine.handle(p.Reconnected(None, restarted=True), 1.0)
        machine.handle(p.Refusal(Code.STALE_EPOCH, "gone"), 1.1)
        machine.handle(p.LeaseGranted(machine.lease + 1), 1.2)
        machine.handle(p.Digested(TABLE), 1.3)
        machine.handle(p.Accepted(), 1.4)
    machine.handle(p.Reconnected(None, restarted=True), 2.0)
    assert machine.handle(p.Refusal(Code.STALE_EPOCH, "gone"), 2.1) == ()
    assert machine.verdict == p.Verdict(Ending.ABORTED, "after 2 attempts: gone")


@pytest.mark.parametrize("state", [State.ANNOUNCING, State.WAITING, State.SENDING])
def test_a_commit_that_a_restart_hid_is_recognised(state: State) -> None:
    """The greeting names exactly our bits: the version is committed, whatever became of `RoundDone`."""
    machine = brought_to(state)
    effects = machine.handle(p.Reconnected(held(7), restarted=True), 1.0)
    assert effects == ((p.StopDelivery(),) if state is State.SENDING else ())
    assert machine.verdict is not None
    assert machine.verdict.ending is Ending.COMMITTED


def test_a_commit_that_went_with_its_journal_is_none() -> None:
    """The coordinator said ours was committed, and came back without it: what it says last holds."""
    machine = brought_to(State.WAITING)
    machine.handle(p.Reconnected(held(7), restarted=False), 1.0)
    machine.handle(p.Reconnected(None, restarted=True), 2.0)
    assert machine.verdict is None


def test_other_bits_under_our_version_are_not_ours() -> None:
    """Another trainer's version 7 does not count as this one."""
    machine = brought_to(State.WAITING)
    assert machine.handle(p.Reconnected(held(7, "00" * 32), restarted=True), 1.0) == (p.Announce(3),)
    machine.handle(p.Refusal(Code.STALE_EPOCH, "gone"), 1.1)
    machine.handle(p.Refusal(Code.VERSION_NOT_NEWER, "7 is committed"), 1.2)
    assert machine.verdict is not None
    assert machine.verdict.ending is Ending.REFUSED


def test_a_lost_connection_does_not_stop_a_transfer() -> None:
    """The same life of the coordinator, greeted again: bytes go on, the report follows."""
    machine = brought_to(State.SENDING)
    assert machine.handle(p.Reconnected(None, restarted=False), 1.0) == ()
    assert machine.handle(p.Delivered(3, {}), 2.0) == (p.ReportSent(3, {}),)


def test_a_report_that_was_not_heard_is_made_again() -> None:
    """Silence after `Sent`: ask how the round stands, then say it again, until it is noted."""
    machine = brought_to(State.SENDING)
    machine.handle(p.Delivered(3, {"e0": "x"}), 1.0)
    assert machine.handle(p.Unreachable("silence"), 2.0) == ()
    assert machine.handle(p.Tick(), 2.5) == (p.Announce(3),)
    assert machine.handle(p.Accepted(), 2.6) == (p.ReportSent(3, {"e0": "x"}),)
    machine.handle(p.Noted(3), 2.7)
    machine.handle(p.Reconnected(None, restarted=False), 3.0)
    assert machine.handle(p.Accepted(), 3.1) == ()


def broken_off(epoch: int = 3, table: str = "") -> p.ReportSent:
    return p.ReportSent(epoch, {"e0": p._BROKEN_OFF}, table=table)


def test_an_offer_that_was_not_heard_is_made_again() -> None:
    """The lanes are closed, and the coordinator's repeated `Send` of the same epoch is served."""
    machine = brought_to(State.SENDING)
    assert machine.handle(p.Unreachable("silence"), 1.0) == (p.StopDelivery(),)
    assert machine.handle(p.Tick(), 1.5) == (p.Announce(3),)
    assert machine.handle(p.Accepted(), 1.6) == (broken_off(),)
    assert machine.handle(p.Refusal(Code.NOT_ALLOWED, "nothing was offered yet"), 1.7) == (p.Announce(3),)
    assert machine.handle(p.Accepted(), 1.8) == ()
    assert machine.handle(send(3), 1.9) == (p.Deliver(3, RECEIVERS, 60.0),)
    assert machine.handle(p.Delivered(3, {}), 2.0) == (p.ReportSent(3, {}),)


def test_an_offer_whose_answer_was_lost_is_reported_as_broken_off() -> None:
    """It may have been heard: then the coordinator asks for nothing any more, and engines stand still for a report."""
    machine = brought_to(State.SENDING)
    machine.handle(p.Unreachable("silence"), 1.0)
    machine.handle(p.Tick(), 1.5)
    assert machine.handle(p.Accepted(), 1.6) == (broken_off(),)
    machine.handle(p.Noted(3), 1.7)
    assert machine.handle(send(4), 1.8) == (p.Deliver(4, RECEIVERS, 60.0),)


def test_a_repeated_send_goes_before_the_report_of_what_was_broken_off() -> None:
    """The coordinator still waits for an offer: nothing is to be said of the one that it did not hear."""
    machine = brought_to(State.SENDING)
    machine.handle(p.Unreachable("silence"), 1.0)
    assert machine.handle(send(3), 1.1) == (p.Deliver(3, RECEIVERS, 60.0),)
    assert machine.handle(p.Delivered(3, {}), 1.2) == (p.ReportSent(3, {}),)


def test_a_refused_report_asks_how_the_round_stands() -> None:
    """The coordinator moved on to another epoch; it says so, or that it is over, when asked."""
    machine = brought_to(State.SENDING)
    machine.handle(p.Delivered(3, {}), 1.0)
    assert machine.handle(p.Refusal(Code.STALE_EPOCH, "epoch 4"), 1.1) == (p.Announce(3),)
    machine.handle(p.Accepted(), 1.2)
    assert machine.handle(send(4), 1.3) == (p.Deliver(4, RECEIVERS, 60.0),)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.WAITING, p.Begin()),
        (State.WAITING, p.LeaseGranted(9)),
        (State.SENDING, p.Digested(TABLE)),
        (State.SENDING, p.Accepted()),
        (State.WAITING, p.Delivered(3, {})),
        (State.DIGESTING, p.Unreachable("silence")),
        (State.ABANDONING, p.Refusal(Code.STALE_EPOCH, "no")),
    ],
)
def test_an_answer_to_what_was_not_asked_raises_and_changes_nothing(state: State, event: p.AnyEvent) -> None:
    """The driver is ours: such an answer is a bug, and shows as one."""
    machine = brought_to(state)
    before = (machine.state, machine.epoch, machine.deadline)
    with pytest.raises(IllegalMove):
        machine.handle(event, 1.0)
    assert (machine.state, machine.epoch, machine.deadline) == before


NO = st.one_of(
    st.builds(p.Refusal, st.sampled_from(list(Code)), st.just("no"), st.sampled_from([0.0, 1.0])),
    st.just(p.Unreachable("silence")),
)
NEWS = st.one_of(
    st.builds(send, st.integers(1, 9), st.sampled_from([6, 7])),
    st.builds(ended, st.sampled_from([Outcome.COMMITTED, Outcome.ABORTED]), st.integers(1, 9), st.sampled_from([6, 7])),
    st.builds(p.Reconnected, st.sampled_from([None, held(6), held(7)]), st.booleans()),
    st.just(p.Broken(Ending.SOURCE_FAILED, "gone")),
    st.builds(p.Withdrawn, st.integers(1, 9), st.just({"e0": "gone"})),
)


@settings(max_examples=200, deadline=None)
@given(
    news=st.lists(st.tuples(NEWS, st.floats(0.0, 40.0)), max_size=20),
    answers=st.lists(st.one_of(st.none(), st.none(), NO), max_size=40),
)
def test_whatever_happens_it_ends_in_time_and_stops_what_it_started(  # noqa: C901, PLR0912  a driver in small
    news: list[tuple[p.AnyEvent, float]], answers: list[p.AnyEvent | None]
) -> None:
    """Any order of news and refusals: at most one delivery is open, and deadlines alone end every publication."""
    machine = Publication(7, LIMITS)
    now, epoch, open_delivery = 0.0, 0, False
    effects = list(machine.handle(p.Begin(), now))
    for _ in range(1000):
        if effects:
            effect = effects.pop(0)
            answer: p.AnyEvent | None = None
            match effect:
                case p.Deliver():
                    assert not open_delivery
                    open_delivery = True
                    answer = answers.pop() if answers else None
                case p.DropReceivers():
                    assert open_delivery
                case p.StopDelivery():
                    assert open_delivery
                    open_delivery = False
                case p.AskLease():
                    epoch = max(epoch, machine.epoch) + 1
                    answer = (answers.pop() if answers else None) or p.LeaseGranted(epoch)
                case p.Assemble() | p.CloseTable():
                    answer = p.Digested(TABLE)
                case p.Announce():
                    answer = (answers.pop() if answers else None) or p.Accepted()
                case p.ReportSent():
                    answer = (answers.pop() if answers else None) or p.Noted(effect.epoch)
                case _:
                    pass
            if answer is not None:
                effects.extend(machine.handle(answer, now))
        elif machine.verdict is not None:
            break
        elif news:
            event, later = news.pop(0)
            now += later
            effects.extend(machine.handle(event, now))
        else:
            assert machine.deadline is not None
            now = max(now, machine.deadline)
            effects.extend(machine.handle(p.Tick(), now))
    assert machine.verdict is not None
    assert not open_delivery


# -- open tables -------------------------------------------------------------------------------------------------------


def left_open(state: State) -> Publication:
    """One that was announced without its table, which is not known yet, in `state`."""
    machine = Publication(7, LIMITS)
    machine.handle(p.Begin(), 0.0)
    for event in (p.LeaseGranted(3, open=True), p.Accepted(), send(3)):
        if machine.state is state:
            break
        machine.handle(event, 0.0)
    if state is State.ABANDONING:
        machine.handle(p.Tick(), 100.0)
    assert machine.state is state
    return machine


def test_a_round_whose_table_follows() -> None:
    """Nothing is assembled before the announcement; the table is said with the report, and with no other message."""
    machine = Publication(7, LIMITS)
    machine.handle(p.Begin(), 0.0)
    assert machine.handle(p.LeaseGranted(3, open=True), 0.1) == (p.Announce(3, open=True),)
    machine.handle(p.Accepted(), 0.2)
    machine.handle(send(3), 0.3)
    assert machine.handle(p.Digested(TABLE), 0.4) == ()
    assert machine.handle(p.Delivered(3, {}), 0.5) == (p.ReportSent(3, {}, (), TABLE),)
    machine.handle(p.Noted(3), 0.6)
    machine.handle(send(4), 0.7)
    assert machine.handle(p.Delivered(4, {}), 0.8) == (p.ReportSent(4, {}, (), TABLE),)
    machine.handle(ended(), 0.9)
    assert machine.verdict == p.Verdict(Ending.COMMITTED, "because")


def test_an_open_table_comes_once_and_before_the_end_of_a_delivery() -> None:
    """A driver that says otherwise is broken, and changes nothing."""
    machine = left_open(State.SENDING)
    with pytest.raises(IllegalMove):
        machine.handle(p.Delivered(3, {}), 1.0)
    machine.handle(p.Digested(TABLE), 1.0)
    for again in (p.Digested(TABLE), p.Undigested("no")):
        with pytest.raises(IllegalMove):
            machine.handle(again, 1.0)
    for state in (State.ANNOUNCING, State.WAITING, State.SENDING):
        with pytest.raises(IllegalMove):
            brought_to(state).handle(p.Digested(TABLE), 1.0)


@pytest.mark.parametrize("state", [State.ANNOUNCING, State.WAITING, State.SENDING, State.ABANDONING])
def test_a_table_may_become_known_in_any_state_of_the_round(state: State) -> None:
    """It is kept for the report, and nothing else follows from it."""
    machine = left_open(state)
    assert machine.handle(p.Digested(TABLE), 100.5 if state is State.ABANDONING else 1.0) == ()
    assert (machine.state, machine.table) == (state, TABLE)


@pytest.mark.parametrize("state", [State.ANNOUNCING, State.WAITING, State.SENDING])
def test_a_table_that_does_not_come_begins_the_round_anew(state: State) -> None:
    """With the table first, whatever the next grant says: what follows cannot fail in that way twice."""
    machine = left_open(state)
    stop = (p.StopDelivery(),) if state is State.SENDING else ()
    assert machine.handle(p.Undigested("two ranks"), 1.0) == (*stop, p.GiveUp(3, "two ranks"), p.AskLease())
    assert machine.handle(ended(Outcome.ABORTED), 1.1) == ()
    assert machine.handle(p.LeaseGranted(5, open=True), 1.2) == (p.Assemble(),)
    assert machine.handle(p.Digested(TABLE), 1.3) == (p.Announce(5),)


def test_a_coordinator_that_forgot_an_open_round_is_asked_with_the_table() -> None:
    """Whether the version was committed meanwhile is found out by it."""
    machine = left_open(State.SENDING)
    machine.handle(p.Digested(TABLE), 1.0)
    machine.handle(p.Delivered(3, {}), 1.1)
    assert machine.handle(p.Reconnected(None, restarted=True), 1.2) == (p.Announce(3, open=True),)
    assert machine.handle(p.Refusal(Code.STALE_EPOCH, "restarted"), 1.3) == (p.AskLease(),)
    machine.handle(p.LeaseGranted(5, held(7), open=True), 1.4)
    assert machine.handle(p.Digested(TABLE), 1.5) == (p.Announce(5),)


def test_an_open_table_is_waited_for_where_the_answer_to_the_offer_was_lost() -> None:
    """The report needs it, and nobody is being sent to; without one the round is given up."""
    machine = left_open(State.SENDING)
    assert machine.handle(p.Unreachable("silence"), 1.0) == (p.StopDelivery(), p.CloseTable())
    assert machine.handle(p.Digested(TABLE), 1.2) == ()
    assert machine.handle(p.Tick(), 1.5) == (p.Announce(3, open=True),)
    assert machine.handle(p.Accepted(), 1.6) == (broken_off(table=TABLE),)

    machine = left_open(State.SENDING)
    machine.handle(p.Unreachable("silence"), 1.0)
    assert machine.handle(p.Undigested("no table"), 1.2) == (p.GiveUp(3, "no table"), p.AskLease())


def test_an_open_version_that_was_committed_unheard_is_committed() -> None:
    """By version and table, once the table is known; before that nothing can have been committed."""
    machine = left_open(State.SENDING)
    machine.handle(p.Digested(TABLE), 1.0)
    machine.handle(p.Delivered(3, {}), 1.1)
    machine.handle(p.Reconnected(held(7), restarted=True), 1.2)
    assert machine.verdict is not None
    assert machine.verdict.ending is Ending.COMMITTED
    unknown = left_open(State.SENDING)
    assert unknown.handle(p.Reconnected(held(7), restarted=True), 1.2)[-1] == p.Announce(3, open=True)
    assert unknown.verdict is None


def test_a_catch_up_is_never_left_open() -> None:
    """That it is of the committed weights is found out by the table."""
    machine = Publication(7, LIMITS, catch_up=True)
    machine.handle(p.Begin(), 0.0)
    assert machine.handle(p.LeaseGranted(3, held(7), open=True), 0.1) == (p.Assemble(),)


def reported(machine: Publication) -> Publication:
    """`machine`, sending, with its report just said."""
    machine.handle(p.Digested(TABLE), 1.0)
    assert machine.handle(p.Delivered(3, {}), 1.1) == (p.ReportSent(3, {}, (), TABLE),)
    return machine


@pytest.mark.parametrize(
    ("refusal", "wait_s"),
    [
        (p.Refusal(Code.UNKNOWN_BLOB, "put it first"), LIMITS.retry_s),
        (p.Refusal(Code.NOT_ALLOWED, "the store is full", 5.0), 5.0),
        (p.Refusal(Code.READ_ONLY, "disk full", 2.0), 2.0),
    ],
    ids=lambda each: each.code.value if isinstance(each, p.Refusal) else "",
)
def test_the_only_word_on_a_table_is_said_until_it_is_taken(refusal: p.Refusal, wait_s: float) -> None:
    """Engines stand still until it is. What is in its way may pass."""
    machine = reported(left_open(State.SENDING))
    assert machine.handle(refusal, 2.0) == ()
    assert machine.deadline == 2.0 + wait_s
    for _ in range(3):
        assert machine.handle(p.Tick(), machine.deadline) == (p.Announce(3, open=True),)
        assert machine.handle(p.Accepted(), machine.deadline or 0.0) == (p.ReportSent(3, {}, (), TABLE),)
        assert machine.handle(refusal, 9.0) == ()
    machine.handle(p.Tick(), machine.deadline or 0.0)
    machine.handle(p.Accepted(), 20.0)
    assert machine.handle(p.Noted(3), 20.1) == ()
    machine.handle(ended(), 20.2)
    assert machine.verdict == p.Verdict(Ending.COMMITTED, "because")


@pytest.mark.parametrize("code", [Code.NOT_ALLOWED, Code.BAD_BLOB])
def test_a_table_that_is_not_taken_ends_its_round_at_once(code: Code) -> None:
    """Nobody can commit it any more: engines go on, and the version is announced again with its table."""
    machine = reported(left_open(State.SENDING))
    assert machine.handle(p.Refusal(code, "no"), 2.0) == (p.GiveUp(3, "no"), p.AskLease())
    assert machine.handle(p.LeaseGranted(5, open=True), 2.1) == (p.Assemble(),)


def test_a_report_of_an_attempt_that_is_over_is_not_insisted_on() -> None:
    """The round has gone on, and how it stands is learnt by announcing it once more; so it is without an open table."""
    refused = p.Refusal(Code.STALE_EPOCH, "late")
    assert reported(left_open(State.SENDING)).handle(refused, 2.0) == (p.Announce(3, open=True),)
    machine = brought_to(State.SENDING)
    machine.handle(p.Delivered(3, {}), 1.0)
    assert machine.handle(p.Refusal(Code.NOT_ALLOWED, "no"), 2.0) == (p.Announce(3),)


def test_an_open_attempt_takes_none_of_the_others_away() -> None:
    """What only an open table can be refused for does not end a publication that would have gone well without."""
    once = p.Limits(acquire_s=10.0, round_s=100.0, abandon_s=5.0, attempts=1, retry_s=0.5)
    for refused in (p.Refusal(Code.NOT_ALLOWED, "no engine is here"), p.Undigested("two ranks")):
        machine = Publication(7, once)
        machine.handle(p.Begin(), 0.0)
        machine.handle(p.LeaseGranted(3, open=True), 0.1)
        assert machine.handle(refused, 0.2)[-1] == p.AskLease()
        assert machine.handle(p.LeaseGranted(5, open=True), 0.3) == (p.Assemble(),)
        machine.handle(p.Digested(TABLE), 0.4)
        machine.handle(p.Refusal(Code.NOT_ALLOWED, "still"), 0.5)
        assert machine.verdict == p.Verdict(Ending.ABORTED, "after 2 attempts: still")


def test_a_farewell_that_was_not_heard_is_said_again() -> None:
    """The channel is not free before it was; whoever gave up nothing is refused for good."""
    machine = left_open(State.WAITING)
    machine.handle(p.Undigested("two ranks"), 1.0)
    running = p.Refusal(Code.NOT_ALLOWED, "your round at epoch 3 is running")
    assert machine.handle(running, 1.5) == (p.GiveUp(3, "two ranks"),)
    assert machine.deadline == 2.0
    assert machine.handle(p.Tick(), 2.0) == (p.AskLease(),)
    assert machine.handle(p.LeaseGranted(5), 2.5) == (p.Assemble(),)
    plain = Publication(7, LIMITS)
    plain.handle(p.Begin(), 0.0)
    plain.handle(running, 0.1)
    assert plain.verdict is not None
    assert plain.verdict.ending is Ending.REFUSED
