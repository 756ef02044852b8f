"""The agent's conversation, without sockets or clocks."""

from __future__ import annotations

from typing import Any

import pytest

from weightbus.control.bus.interface import REJECTED_KEY, UNTRUSTED_KEY
from weightbus.control.bus.session import (
    HOLD_S,
    PROMPT_S,
    AckBatcher,
    AgentSession,
    Connect,
    Deliver,
    DescriptionChanged,
    GarbageArrived,
    GiveUp,
    Join,
    MessageArrived,
    Reject,
    RequestSubmitted,
    Resolve,
    SendHeartbeat,
    SendHello,
    SessionEffect,
    SessionEvent,
    SessionPhase,
    SessionTiming,
    Ticked,
    Transmit,
    acknowledges,
)
from weightbus.control.machine.effects import Peer
from weightbus.control.protocol.errors import (
    CoordinatorUnreachable,
    Malformed,
    NotTrusted,
    RequestRefused,
    WrongProtocol,
)
from weightbus.control.protocol.messages import (
    Abort,
    Ack,
    Acquire,
    Alive,
    Channel,
    Commit,
    Digest,
    Endpoint as Bytes,
    EngineHealth,
    Epoch,
    Failed,
    Message,
    Outcome,
    Pause,
    Paused,
    PauseMode,
    Policy,
    Prepare,
    Prepared,
    RefusalCode,
    Refused,
    RequestId,
    RoundDone,
    Serving,
    Step,
    Transfer,
    Transferred,
    TransportKind,
    Verified,
    Version,
    Welcome,
)

KEY = RequestId("r1")
ACQUIRE = Acquire(request=KEY, channel=Channel("c"), version=Version(1))
PREPARED = Prepared(request=KEY, channel=Channel("c"), epoch=Epoch(3), seconds=0.1)
PAUSE = Pause(channel=Channel("c"), epoch=Epoch(3), mode=PauseMode.RETRACT, lease_s=10.0, deadline_s=60.0)
COMMIT = Commit(
    channel=Channel("c"), epoch=Epoch(3), version=Version(1), table=Digest("0" * 64), flush=True, deadline_s=60.0
)


class Conversation:
    """A session and the time."""

    def __init__(self, endpoint: str = "tcp://there:1") -> None:
        self.now = 100.0
        self.session = AgentSession(endpoint, "me", SessionTiming(), self.now)
        self.key = RequestId("")

    def __call__(self, event: SessionEvent) -> tuple[SessionEffect, ...]:
        effects = self.session.handle(event, self.now)
        for each in effects:
            if isinstance(each, SendHello):
                self.key = each.key
        return effects

    def after(self, seconds: float) -> tuple[SessionEffect, ...]:
        self.now += seconds
        return self(Ticked())

    def welcome(self, boot: int = 1) -> tuple[SessionEffect, ...]:
        return self(
            MessageArrived(
                Welcome(request=self.key, boot=boot, epoch=Epoch(0), committed=None, heartbeat_s=1.0, silence_s=10.0)
            )
        )

    def ask(self, deadline_s: float = 30.0) -> tuple[SessionEffect, ...]:
        return self(RequestSubmitted(KEY, ACQUIRE, None, self.now + deadline_s, deadline_s))


@pytest.fixture
def talk() -> Conversation:
    return Conversation()


@pytest.fixture
def joined(talk: Conversation) -> Conversation:
    talk(Ticked())
    talk.welcome()
    return talk


def refusal(code: RefusalCode, key: RequestId = KEY, retry_after_s: float = 0.0) -> MessageArrived:
    return MessageArrived(Refused(request=key, code=code, reason="because", retry_after_s=retry_after_s))


def test_hello_is_repeated_under_one_key_until_welcomed(talk: Conversation) -> None:
    """A lost Hello is said again, more and more slowly; requests wait for the Welcome."""
    assert talk(Ticked()) == (Connect(), SendHello(talk.key))
    first = talk.key
    assert talk.ask() == ()
    assert talk(Ticked()) == ()
    assert talk.after(0.02) == (SendHello(first),)
    assert talk.after(0.03) == ()
    assert talk.after(0.01) == (SendHello(first),)
    effects = talk.welcome()
    assert [type(each) for each in effects] == [Join, Transmit]
    assert talk.welcome() == ()


def test_request_is_repeated_until_answered_once(joined: Conversation) -> None:
    """The same bytes go again after half a second, then one, then two; a second answer is dropped."""
    sent = (Transmit(ACQUIRE, None),)
    assert joined.ask() == sent
    assert joined.after(0.4) == ()
    assert joined.after(0.1) == sent
    assert joined.after(0.9) == (SendHeartbeat(1),)
    assert joined.after(0.1) == sent
    ack = Ack(request=KEY)
    assert joined(MessageArrived(ack)) == (Resolve(KEY, ack, None),)
    assert joined(MessageArrived(ack)) == ()
    assert joined.session.pending == {}


def test_heartbeats_follow_the_welcome(joined: Conversation) -> None:
    """One every heartbeat_s, counted."""
    assert joined.after(0.9) == ()
    assert joined.after(0.1) == (SendHeartbeat(1),)
    assert joined.after(1.0) == (SendHeartbeat(2),)


def test_an_agent_that_is_answered_together_speaks_together_again(joined: Conversation) -> None:
    """The next heartbeat follows the answer to the last, so that those of a fleet come in groups; or the clock."""
    assert joined.after(1.0) == (SendHeartbeat(1),)
    joined.now += 0.3
    joined(MessageArrived(Alive(seq=1, boot=1, committed=None)))
    assert joined.after(0.9) == ()
    assert joined.after(0.1) == (SendHeartbeat(0),)
    assert joined.after(1.0) == (SendHeartbeat(0),), "by the clock, since nothing was answered"


def test_one_heartbeat_in_three_is_to_be_answered(joined: Conversation) -> None:
    """The first asks, then every third; one that was not answered asks again and again, until it is."""
    assert [joined.after(1.0) for _ in range(3)] == [(SendHeartbeat(1),), (SendHeartbeat(2),), (SendHeartbeat(3),)]
    joined(MessageArrived(Alive(seq=3, boot=1)))
    assert [joined.after(1.0) for _ in range(4)] == [
        (SendHeartbeat(0),),
        (SendHeartbeat(0),),
        (SendHeartbeat(6),),
        (SendHeartbeat(7),),
    ]


@pytest.mark.parametrize(("silence_s", "asked"), [(10.0, 1), (7.0, 1), (5.0, 3), (2.0, 3)])
def test_an_agent_that_must_hear_often_asks_often(talk: Conversation, silence_s: float, asked: int) -> None:
    """Three answers at least are due within the silence after which a connection is given up."""
    talk(Ticked())
    talk(
        MessageArrived(
            Welcome(request=talk.key, boot=1, epoch=Epoch(0), committed=None, heartbeat_s=1.0, silence_s=silence_s)
        )
    )
    beats: list[SessionEffect] = []
    for _ in range(4):
        (beat,) = talk.after(1.0)
        assert isinstance(beat, SendHeartbeat)
        beats.append(beat)
        if beat.seq:
            talk(MessageArrived(Alive(seq=beat.seq, boot=1)))
    assert sum(each.seq > 0 for each in beats[1:]) == asked


def test_a_paused_engine_has_every_heartbeat_answered(joined: Conversation) -> None:
    """It resumes by itself when it hears nothing for its lease, which may be shorter than three heartbeats."""
    joined.after(1.0)
    joined(MessageArrived(Alive(seq=1, boot=1)))
    joined(MessageArrived(PAUSE))
    assert joined.after(1.0) == (SendHeartbeat(2),)
    joined(MessageArrived(Alive(seq=2, boot=1)))
    assert joined.after(1.0) == (SendHeartbeat(3),)
    joined(MessageArrived(Alive(seq=3, boot=1)))
    joined(MessageArrived(COMMIT))
    assert joined.after(1.0) == (SendHeartbeat(0),)


def test_a_command_acknowledges_what_was_answered_before_it(joined: Conversation) -> None:
    """No engine is paused before its `Prepared` arrived: a `Pause` acknowledges it, and its caller goes on."""
    said = RequestSubmitted(KEY, PREPARED, None, joined.now + 30.0, 30.0)
    assert joined(said) == (Transmit(PREPARED, None),)
    assert joined(MessageArrived(PAUSE)) == (Resolve(KEY, Ack(request=KEY), None), Deliver(PAUSE))
    assert joined.session.pending == {}
    assert joined(MessageArrived(Ack(request=KEY))) == (), "it may come all the same"


def test_a_command_said_again_acknowledges_nothing_that_answers_it(joined: Conversation) -> None:
    """A repeated command means that its answer did not arrive, or crossed with it."""
    paused = Paused(request=KEY, channel=Channel("c"), epoch=Epoch(3), seconds=0.1)
    joined(RequestSubmitted(KEY, paused, None, joined.now + 30.0, 30.0))
    assert joined(MessageArrived(PAUSE)) == (Deliver(PAUSE),)
    assert list(joined.session.pending) == [KEY]


def test_the_committed_version_is_known_from_every_word_that_names_it(joined: Conversation) -> None:
    """The Welcome may be hours old: what `Alive` says counts, unless it is of another boot."""
    assert joined.session.committed is None
    joined(MessageArrived(Alive(seq=1, boot=1, committed=Version(8))))
    assert joined.session.committed == 8
    joined(MessageArrived(Alive(seq=2, boot=0, committed=Version(3))))
    assert joined.session.committed == 8


@pytest.mark.parametrize(
    ("version", "epoch", "outcome", "known"),
    [
        (9, 5, Outcome.COMMITTED, 9),
        (4, 5, Outcome.COMMITTED, 4),
        (9, 5, Outcome.ABORTED, 8),
        (7, 2, Outcome.COMMITTED, 8),
    ],
)
def test_the_end_of_a_round_tells_what_is_committed(
    joined: Conversation, version: int, epoch: int, outcome: Outcome, known: int
) -> None:
    """Upwards or back, at once: not with the next `Alive`. The repeated report of an earlier round changes nothing."""

    def done(version: int, epoch: int, outcome: Outcome) -> RoundDone:
        return RoundDone(
            channel=Channel("c"), epoch=Epoch(epoch), version=Version(version), outcome=outcome, reason="",
            engines=(), seconds={},
        )  # fmt: skip

    joined(MessageArrived(done(8, 3, Outcome.COMMITTED)))
    assert joined.session.committed == 8
    assert joined(MessageArrived(last := done(version, epoch, outcome))) == (Deliver(last),)
    assert joined.session.committed == known


def test_silence_means_a_new_connection(joined: Conversation) -> None:
    """After silence_s without a word: connect, Hello under a new key, and everything unanswered again."""
    joined.ask()
    old = joined.key
    joined.after(5.0)
    joined(MessageArrived(Alive(seq=1, boot=1)))
    assert Connect() not in joined.after(9.9)
    effects = joined.after(0.1)
    assert Connect() in effects
    assert joined.key != old
    assert joined.session.phase is SessionPhase.JOINING
    assert Transmit(ACQUIRE, None) in joined.welcome(boot=2)


def test_forgotten_agent_says_hello_again_once(joined: Conversation) -> None:
    """However many of its messages are refused as a stranger's, one Hello follows."""
    joined.ask()
    effects = joined(refusal(RefusalCode.UNKNOWN_AGENT, RequestId("heartbeat")))
    assert effects == (SendHello(joined.key),)
    assert joined(refusal(RefusalCode.UNKNOWN_AGENT)) == ()
    assert Transmit(ACQUIRE, None) in joined.welcome(boot=2)


def test_a_welcome_to_an_earlier_hello_lets_no_agent_in(joined: Conversation) -> None:
    """It may have been under way for long: only that to the last `Hello` is from a coordinator that knows the agent."""
    joined.ask()
    before = joined.key
    joined(refusal(RefusalCode.UNKNOWN_AGENT, RequestId("heartbeat")))
    now, joined.key = joined.key, before
    assert joined.welcome(boot=1) == ()
    assert joined.session.phase is SessionPhase.JOINING
    joined.key = now
    effects = joined.welcome(boot=2)
    assert [type(each) for each in effects] == [Join, Transmit]
    assert joined.session.phase is SessionPhase.JOINED


def test_refused_request_raises_for_its_caller_only(joined: Conversation) -> None:
    """The caller gets code, reason and when to try again."""
    joined.ask()
    (effect,) = joined(refusal(RefusalCode.LEASE_HELD, retry_after_s=2.0))
    assert isinstance(effect, Reject)
    assert isinstance(effect.error, RequestRefused)
    assert (effect.error.code, effect.error.retry_after_s) == (RefusalCode.LEASE_HELD, 2.0)
    assert joined.session.phase is SessionPhase.JOINED


def test_unanswered_request_ends_at_its_deadline(talk: Conversation) -> None:
    """A request without a reply raises, and names the endpoint, the time and what was found."""
    talk(Ticked())
    talk.ask(deadline_s=2.0)
    effects = talk.after(2.0)
    (rejected,) = [each for each in effects if isinstance(each, Reject)]
    assert isinstance(rejected.error, CoordinatorUnreachable)
    assert "tcp://there:1" in str(rejected.error)
    assert "2.0 s" in str(rejected.error)
    assert "nothing was heard" in str(rejected.error)


def test_unanswered_by_a_live_coordinator_says_so(joined: Conversation) -> None:
    """The error tells a deaf coordinator from an absent one, and one that fell silent from both."""
    assert "connected, and last heard of" in str(joined.session.unreachable("Acquire", 1.0, joined.now))
    joined.after(10.0)
    assert "connection lost" in str(joined.session.unreachable("Acquire", 1.0, joined.now))


def test_taken_name_is_asked_for_again(talk: Conversation) -> None:
    """A refusal that passes with time is waited out, under a new key; meanwhile it is the error."""
    talk(Ticked())
    first = talk.key
    assert talk(refusal(RefusalCode.NAME_TAKEN, first, retry_after_s=3.0)) == ()
    assert talk.after(2.9) == ()
    error = talk.session.unreachable("Hello", 3.0, talk.now)
    assert isinstance(error, RequestRefused)
    assert error.code is RefusalCode.NAME_TAKEN
    assert talk.after(0.1) == (SendHello(talk.key),)
    assert talk.key != first
    assert isinstance(talk.welcome()[0], Join)
    assert talk.session.refusal is None


@pytest.mark.parametrize("code", [RefusalCode.NOT_ALLOWED, RefusalCode.PROTOCOL_MISMATCH])
def test_final_refusal_ends_everything(talk: Conversation, code: RefusalCode) -> None:
    """What repeating cannot mend ends the session: every request, now and later, raises it."""
    talk(Ticked())
    talk.ask()
    rejected, over = talk(refusal(code, talk.key))
    assert isinstance(rejected, Reject)
    assert isinstance(over, GiveUp)
    assert isinstance(talk.ask()[0], Reject)
    assert talk.after(100.0) == ()
    assert talk.session.next_deadline() == float("inf")
    assert talk.session.unreachable("Hello", 1.0, talk.now) is over.error


HEARD: dict[str, Message] = {
    "an answer": Ack(request=KEY),
    "a command": PAUSE,
    "the answer to a heartbeat": Alive(seq=1, boot=1),
}
NOT_HEARD: dict[str, Message] = {
    **{f"refused: {code.value}": Refused(request=KEY, code=code, reason="") for code in RefusalCode},
    "refused under the key of what cannot be read": Refused(
        request=RequestId("rejected"), code=RefusalCode.NOT_ALLOWED, reason=""
    ),
    "refused for its key": Refused(request=UNTRUSTED_KEY, code=RefusalCode.NOT_ALLOWED, reason=""),
    "a probe": Alive(seq=0, boot=0),
    "the answer of another life": Alive(seq=1, boot=2),
    "a welcome to another hello": Welcome(
        request=RequestId("old"), boot=1, epoch=Epoch(0), committed=None, heartbeat_s=1.0, silence_s=10.0
    ),
}


@pytest.mark.parametrize("message", HEARD.values(), ids=HEARD)
def test_a_message_to_a_member_is_a_sign_of_life(joined: Conversation, message: Any) -> None:
    """Whatever the coordinator says to an agent that it counts on (N55)."""
    joined.now += 3.0
    joined(MessageArrived(message))
    assert joined.session.heard_at == joined.now


@pytest.mark.parametrize("message", NOT_HEARD.values(), ids=NOT_HEARD)
def test_a_frame_of_any_other_kind_is_none(joined: Conversation, message: Any) -> None:
    """To be refused is not to hear the coordinator: nothing that waits for it may wait on (N55)."""
    before = joined.session.heard_at
    joined.now += 3.0
    joined(MessageArrived(message))
    assert joined.session.heard_at == before


def untrusted(talk: Conversation) -> tuple[SessionEffect, ...]:
    return talk(MessageArrived(Refused(request=UNTRUSTED_KEY, code=RefusalCode.NOT_ALLOWED, reason="your key 12ab")))


def test_an_agent_whose_key_is_revoked_is_told_so_at_once(joined: Conversation) -> None:
    """Its requests fail with what an operator does about it, and it says Hello until that is done (N55)."""
    joined.ask()
    joined.now += 2.0
    rejected, told, *hello = untrusted(joined)
    assert isinstance(rejected, Reject)
    assert isinstance(rejected.error, NotTrusted)
    assert "your key 12ab" in str(rejected.error)
    assert "allow-list" in str(rejected.error)
    assert isinstance(told, Deliver)
    assert [type(each) for each in hello] == [SendHello]
    assert joined.session.refused_since == joined.now

    joined.ask()
    joined.now += 0.5
    again = untrusted(joined)
    assert [type(each) for each in again] == [Reject], "the agent is told of it once"
    assert joined.session.refused_since == joined.now - 0.5
    assert joined.after(0.9) == ()
    assert joined.after(0.2) == (SendHello(joined.key),)
    assert isinstance(joined.welcome()[0], Join)
    assert (joined.session.refusal, joined.session.refused_since) == (None, None)


@pytest.mark.parametrize("code", [RefusalCode.NOT_ALLOWED, RefusalCode.PROTOCOL_MISMATCH])
def test_a_session_that_was_welcomed_is_never_over(joined: Conversation, code: RefusalCode) -> None:
    """The process behind it has a server to resume: it goes on asking, whatever its Hello is told (N55)."""
    joined(refusal(RefusalCode.UNKNOWN_AGENT))
    first = joined.key
    joined.ask()
    rejected, _told = joined(refusal(code, joined.key))
    assert isinstance(rejected, Reject)
    assert isinstance(rejected.error, NotTrusted) is (code is RefusalCode.NOT_ALLOWED)
    assert joined.session.phase is SessionPhase.JOINING
    assert joined(GarbageArrived(WrongProtocol(2, 1))) == ()
    assert joined.after(1.0) == (SendHello(joined.key),)
    assert joined.key != first
    assert isinstance(joined.welcome()[0], Join)


def test_other_protocol_ends_everything(talk: Conversation) -> None:
    """An answer of another protocol number names both numbers instead of timing out."""
    talk(Ticked())
    (over,) = talk(GarbageArrived(WrongProtocol(2, 1)))
    assert isinstance(over, GiveUp)
    assert isinstance(over.error, WrongProtocol)


def test_garbage_is_told_in_the_error(talk: Conversation) -> None:
    """Noise on the line is not swallowed: it is part of the error that follows."""
    talk(Ticked())
    assert talk(GarbageArrived(Malformed("what a mess"))) == ()
    assert "what a mess" in str(talk.session.unreachable("Hello", 1.0, talk.now))


def test_commands_are_delivered(joined: Conversation) -> None:
    """What is no answer goes to the agent."""
    abort = Abort(channel=Channel("c"), epoch=Epoch(1), reason="", deadline_s=1.0)
    assert joined(MessageArrived(abort)) == (Deliver(abort),)


def test_late_refusals_change_nothing(joined: Conversation) -> None:
    """A refusal of what is not waited for, or of a Hello long welcomed, is dropped."""
    assert joined(refusal(RefusalCode.LEASE_HELD)) == ()
    assert joined(refusal(RefusalCode.NAME_TAKEN, joined.key)) == ()
    assert joined.session.phase is SessionPhase.JOINED


def test_refusal_of_an_unreadable_message_does_not_end_a_hello(talk: Conversation) -> None:
    """Without a key the refused message is unknown: Hello goes on."""
    talk(Ticked())
    assert talk(refusal(RefusalCode.NOT_ALLOWED, RequestId("rejected"))) == ()
    assert talk.session.phase is SessionPhase.JOINING


def test_deadlines_name_the_next_duty(joined: Conversation) -> None:
    """The driver may sleep until `next_deadline`: nothing is due before, something is due then."""
    joined.ask(deadline_s=100.0)
    for _ in range(50):
        due = joined.session.next_deadline()
        assert due > joined.now
        assert joined.after((due - joined.now) * 0.5) == ()
        joined.now = due
        assert joined(Ticked()) != ()


# -- several coordinators ----------------------------------------------------------------------------------------------


@pytest.fixture
def three() -> Conversation:
    talk = Conversation("tcp://a:1, tcp://b:1,tcp://c:1")
    assert Connect(0) in talk(Ticked())
    return talk


def not_leader(talk: Conversation, leader: str = "") -> MessageArrived:
    refused = Refused(
        request=talk.key, code=RefusalCode.NOT_LEADER, reason="stands by", retry_after_s=0.5, leader=leader
    )
    return MessageArrived(refused)


def test_goes_to_the_leader_it_is_told_of(three: Conversation) -> None:
    """A coordinator that stands by names the leader: the agent goes there at once, and says Hello anew."""
    before = three.key
    assert three(not_leader(three, "tcp://c:1")) == (Connect(2), SendHello(three.key))
    assert three.key != before
    assert any(isinstance(each, Join) for each in three.welcome())


def test_goes_nowhere_it_was_not_told_of_by_its_settings(three: Conversation) -> None:
    """An endpoint that a stranger names is not believed: the agent asks the next one of its own, after a while."""
    assert three(not_leader(three, "tcp://evil:1")) == (Connect(1),)
    assert not three.after(0.4)
    assert three.after(0.2) == (SendHello(three.key),)
    assert three(not_leader(three, "tcp://evil:1")) == (Connect(2),), "wherever it was: the next one, and not at once"
    assert not three.after(0.4)
    assert three.after(0.2) == (SendHello(three.key),)


def test_a_leader_that_is_deposed_loses_its_agents(three: Conversation) -> None:
    """Requests without a reply are sent again to the next leader."""
    three.welcome()
    three.ask()
    refused = Refused(
        request=RequestId("heartbeat"), code=RefusalCode.NOT_LEADER, reason="stands by", leader="tcp://b:1"
    )
    assert three(MessageArrived(refused)) == (Connect(1), SendHello(three.key))
    assert three(MessageArrived(refused)) == (), "there may be one for every message that was under way"
    assert Transmit(ACQUIRE, None) in three.welcome(boot=2)


def test_looks_elsewhere_after_three_heartbeats(three: Conversation) -> None:
    """With others to ask, a silent coordinator is left long before it would be taken for dead."""
    three.welcome()
    assert not any(isinstance(each, Connect) for each in three.after(2.9))
    assert Connect(1) in three.after(0.2)
    assert Connect(2) in three.after(2.0), "one that does not even answer Hello is left sooner"
    assert Connect(0) in three.after(2.0)


def test_one_coordinator_that_stands_by_is_asked_again(talk: Conversation) -> None:
    """With one coordinator alone, the agent waits until it is elected, and says why if it gives up."""
    talk(Ticked())
    talk.ask(3.0)
    assert talk(not_leader(talk, "tcp://unknown:1")) == (Connect(0),)
    (rejected,) = [each for each in talk.after(3.0) if isinstance(each, Reject)]
    assert "stands by" in str(rejected.error)


# Which acknowledgements are owed, and which a command makes needless.


ONE, TWO = Peer(b"one"), Peer(b"two")
TABLE = "0" * 64


def command(kind: type[Message], epoch: int = 5) -> Message:
    common: dict[str, Any] = {"channel": "c", "epoch": epoch, "deadline_s": 1.0}
    version: dict[str, Any] = {"version": 1, "manifest": TABLE, "table": TABLE}
    match kind.__name__:
        case "Prepare":
            return Prepare(**common, **version, transport=TransportKind.DISK, policy=Policy())
        case "Pause":
            return Pause(**common, mode=PauseMode.RETRACT, lease_s=1.0)
        case "Transfer":
            return Transfer(
                **common, **version, offer=Bytes(transport=TransportKind.DISK, address="/nowhere"), rank_offset=0
            )
        case "Commit":
            return Commit(**common, version=version["version"], table=version["table"], flush=True)
        case _:
            return Abort(**common, reason="r")


def answer(kind: type[Message], epoch: int = 5, request: str = "k") -> Any:
    common: dict[str, Any] = {"request": request, "channel": "c", "epoch": epoch}
    match kind.__name__:
        case "Prepared" | "Paused":
            return kind(**common, seconds=0.1)
        case "Transferred":
            return Transferred(**common, bytes=0, buckets=0, seconds=0.1)
        case "Verified":
            return Verified(**common, version=1, table=TABLE, verified_by="x", seconds=0.1)  # type: ignore[arg-type]
        case "Serving":
            return Serving(**common, version=1, seconds=0.1, paused_s=0.1)  # type: ignore[arg-type]
        case _:
            return Failed(**common, step=Step.TRANSFER, health=EngineHealth.CLEAN, reason="r")


def owing(*answers: Any) -> AckBatcher:
    acks = AckBatcher()
    acks.add([(ONE, each) for each in answers], 0.0)
    return acks


COMMANDS = (Prepare, Pause, Transfer, Commit, Abort)
ANSWERS = (Prepared, Paused, Transferred, Verified, Serving, Failed)


@pytest.mark.parametrize("answered", ANSWERS)
@pytest.mark.parametrize("told", COMMANDS)
def test_a_command_covers_only_what_it_could_not_be_given_without(told: type[Message], answered: type[Message]) -> None:
    """By the order of a round; the answer to the command itself, a failure and the answer to an abort are never it."""
    before = {Pause: (Prepared,), Transfer: (Prepared,), Commit: (Prepared, Paused, Transferred, Verified)}
    assert acknowledges(command(told), answer(answered)) is (answered in before.get(told, ()))


@pytest.mark.parametrize("answered", ANSWERS)
@pytest.mark.parametrize("told", COMMANDS)
def test_nothing_is_covered_by_what_was_said_before_its_epoch(told: type[Message], answered: type[Message]) -> None:
    """A command that comes late says nothing about a round that it does not know."""
    assert not acknowledges(command(told, epoch=4), answer(answered, epoch=5))


def test_what_a_command_covers_is_never_said() -> None:
    """Two messages for each engine and step, and not three."""
    acks = owing(answer(Prepared))
    assert acks.take_before((ONE,), command(Pause)) == []
    assert list(acks.take_due(1e9, quiet=True)) == []


@pytest.mark.parametrize("answered", [Paused, Transferred])
def test_what_a_command_covers_need_not_be_said_before_it(answered: type[Message]) -> None:
    """What was to be said at once, and was not yet, is said by the command, if it is of this epoch."""
    acks = owing(answer(answered))
    assert acks.take_before((ONE,), command(Commit)) == []
    assert not acks
    acks = owing(answer(answered))
    assert len(acks.take_before((ONE,), command(Commit, epoch=4))) == 1


def test_what_no_command_covers_is_said_after_a_while() -> None:
    """The next step may be long in coming, and an agent that hears nothing repeats itself."""
    acks = owing(answer(Verified))
    assert list(acks.take_due(HOLD_S / 2, quiet=True)) == []
    assert acks.next_deadline() == HOLD_S
    assert list(acks.take_due(HOLD_S, quiet=False)) == [(ONE, Ack(request="k"))]  # type: ignore[arg-type]
    assert acks.next_deadline() is None


def test_a_serving_engine_is_acknowledged_before_the_next_round_begins() -> None:
    """Nothing follows from `Serving`, so its `Ack` may wait; but its engine says nothing more before it came."""
    acks = owing(answer(Serving))
    assert not acks.urgent
    assert acks.take_before((ONE,), command(Prepare, epoch=6)) == [(ONE, Ack(request="k"))]  # type: ignore[arg-type]
    assert not acks


def test_an_abort_covers_nothing() -> None:
    """It leaves nothing unsaid: what is owed stays owed."""
    acks = owing(answer(Prepared))
    assert acks.take_before((ONE,), command(Abort)) == []
    assert len(list(acks.take_due(HOLD_S, quiet=False))) == 1


@pytest.mark.parametrize("answered", [Paused, Transferred, Failed])
def test_what_holds_up_its_engine_is_said_at_once(answered: type[Message]) -> None:
    """An engine says one thing after the other: `Verified` waits until `Transferred` was acknowledged."""
    acks = owing(answer(answered))
    assert acks.urgent
    assert [peer for peer, _ in acks.take_due(0.0, quiet=True)] == [ONE]


def test_what_is_owed_waits_while_there_is_much_to_read_but_not_for_long() -> None:
    """No engine goes on because of it at once; every one does in the end."""
    acks = owing(answer(Paused))
    assert list(acks.take_due(PROMPT_S / 2, quiet=False)) == []
    assert len(list(acks.take_due(PROMPT_S, quiet=False))) == 1


def test_an_agent_that_is_told_something_else_is_told_what_it_is_owed_first() -> None:
    """One packet for both, in this order, and none of another engine."""
    acks = owing(answer(Paused))
    acks.add([(TWO, answer(Paused, request="other"))], 0.0)
    assert acks.take_before((ONE,), command(Abort)) == [(ONE, Ack(request="k"))]  # type: ignore[arg-type]
    assert [peer for peer, _ in acks.take_due(0.0, quiet=True)] == [TWO]


def test_a_changed_agent_says_hello_again_on_its_connection(joined: Conversation) -> None:
    """Its server was launched again: requests wait for the Welcome, and are kept (N47)."""
    joined.ask()
    first = joined.session.pending
    (hello,) = joined(DescriptionChanged())
    assert hello == SendHello(joined.key)
    assert joined.session.pending == first
    effects = joined.welcome()
    assert [type(each) for each in effects] == [Join, Transmit]


def test_an_older_coordinator_is_told_only_what_it_knows(talk: Conversation) -> None:
    """It refuses the whole message, and names no request; a coordinator on the next connection may be newer (N44)."""
    talk(Ticked())
    reason = "cannot be decoded: Object contains unknown field `generation` - at `$.engine`"
    rejected = MessageArrived(Refused(request=REJECTED_KEY, code=RefusalCode.NOT_ALLOWED, reason=reason))
    (again,) = talk(rejected)
    assert again == SendHello(talk.key, plain=True)
    assert talk(rejected) == ()
    assert [type(each) for each in talk.welcome()] == [Join]
    effects = talk.after(60.0)
    assert effects[:1] == (Connect(),)
    assert effects[1] == SendHello(talk.key)


def test_an_untrusted_agent_goes_on_as_it_was(talk: Conversation) -> None:
    """Its Hello is rejected for another reason, which may pass (N45)."""
    talk(Ticked())
    reason = "this connection's key is not trusted any more"
    assert talk(MessageArrived(Refused(request=REJECTED_KEY, code=RefusalCode.NOT_ALLOWED, reason=reason))) == ()
    assert talk.after(0.05) == (SendHello(talk.key),)
