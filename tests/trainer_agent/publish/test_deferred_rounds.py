"""Open tables between the two machines that decide: a publication, and the coordinator that runs its round."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightbus.control.machine.effects import MessageReceived
from weightbus.control.protocol.messages import (
    Abandon,
    Ack,
    Acquire,
    Bye,
    Digest,
    Endpoint,
    Epoch,
    Granted,
    Heartbeat,
    Message,
    Offered,
    Publish,
    PutBlob,
    RefusalCode,
    Refused,
    RequestId,
    RoundDone,
    Send,
    Sent,
    ToCoordinator,
    Transfer,
    TransportKind,
    Version,
)
from weightbus.trainer_agent.machine import events as ev, publication
from weightbus.trainer_agent.machine.events import EndReason

from ...control.world import CHANNEL, MANIFEST, Trainer, World, digest, table_of, trainer_info

VERSION = 1
TABLE = digest(table_of(VERSION))


class Publisher(Trainer):
    """Carries out what a publication decides, and tells it what came of that; time passes with its heartbeats."""

    def begin(self, limits: publication.PublishLimits | None = None) -> None:
        self.machine = publication.Publication(VERSION, limits or publication.PublishLimits())
        self.asked: dict[RequestId, ev.Effect] = {}
        self.keys: dict[int, RequestId] = {}
        self.reports_refused: list[ev.RequestDenied] = []
        """What its next reports come to before they are said: their blob finds no room."""
        self.on_grant: Callable[[], None] = lambda: None
        self.feed(ev.PublishRequested())

    def feed(self, event: ev.AnyEvent) -> None:
        effects = self.machine.handle(event, self.world.now)
        self.machine.check()
        for effect in effects:
            self.carry_out(effect)

    def heartbeat(self) -> Heartbeat:
        if self.machine.deadline is not None and self.machine.deadline <= self.world.now:
            self.feed(ev.Tick())
        return super().heartbeat()

    def ask(self, message: ToCoordinator, effect: ev.Effect) -> None:
        self.asked[message.request] = effect  # type: ignore[union-attr]
        self.say(message)

    def put(self, blob: bytes) -> None:
        self.say(PutBlob(request=self.key(), digest=digest(blob), page=0, pages=1), blob)

    def carry_out(self, effect: ev.AnyEffect) -> None:
        match effect:
            case ev.RequestLease():
                self.ask(Acquire(request=self.key(), channel=CHANNEL, version=Version(VERSION)), effect)
            case ev.AssembleBuckets():
                self.feed(ev.DigestsReady(TABLE))
            case ev.AnnounceRound():
                for blob in (MANIFEST,) if effect.digests_deferred else (MANIFEST, table_of(VERSION)):
                    self.put(blob)
                message = Publish(
                    request=self.keys.setdefault(effect.epoch, self.key()),
                    channel=CHANNEL,
                    epoch=Epoch(effect.epoch),
                    version=Version(VERSION),
                    manifest=digest(MANIFEST),
                    table=Digest("") if effect.digests_deferred else TABLE,
                    bytes=1,
                    buckets=1,
                )
                self.ask(message, effect)
            case ev.StartDelivery():
                kinds = dict.fromkeys(each.transport for each in effect.receivers)
                offers = tuple(Endpoint(transport=kind, address="a") for kind in kinds)
                self.ask(Offered(request=self.key(), channel=CHANNEL, epoch=Epoch(effect.epoch), offers=offers), effect)
            case ev.ReportDelivery() if self.reports_refused:
                self.feed(self.reports_refused.pop(0))
            case ev.ReportDelivery():
                if effect.table:
                    self.put(table_of(VERSION))
                report = Sent(
                    request=self.key(), channel=CHANNEL, epoch=Epoch(effect.epoch), table=Digest(effect.table)
                )
                self.ask(report, effect)
            case ev.AbandonRound():
                self.say(Abandon(request=self.key(), channel=CHANNEL, epoch=Epoch(effect.epoch), reason=effect.reason))
            case _:
                pass

    def react(self, message: Message) -> None:
        effect = self.asked.pop(getattr(message, "request", RequestId("")), None)
        match message:
            case Granted() if effect is not None:
                self.on_grant()
                self.feed(ev.LeaseObtained(message.epoch, message.committed, message.may_defer_digests))
            case Refused() if effect is not None:
                self.feed(ev.RequestDenied(message.code, message.reason, message.retry_after_s))
            case Ack() if isinstance(effect, ev.AnnounceRound):
                self.feed(ev.RoundAccepted())
            case Ack() if isinstance(effect, ev.StartDelivery) and not self.machine.digests_deferred:
                self.feed(ev.DeliveryEnded(effect.epoch, {}))
            case Ack() if isinstance(effect, ev.ReportDelivery):
                self.feed(ev.ReportAcknowledged(effect.epoch))
            case Send():
                self.feed(ev.SendRequested(message.epoch, message.version, message.receivers, message.deadline_s))
            case RoundDone():
                self.feed(
                    ev.RoundDoneReceived(
                        message.epoch,
                        message.version,
                        message.outcome,
                        message.reason,
                        message.engines,
                        message.seconds,
                    )
                )
            case _:
                pass


@pytest.fixture
def world() -> World:
    """Two engines that take versions by `direct`, and know tables that follow."""
    made = World()
    for name in ("e0", "e1"):
        made.engine(name, supports_deferred_digests=True, transports=(TransportKind.DIRECT,))
    return made


@pytest.fixture
def trainer(world: World) -> Publisher:
    made = Publisher(world, "trainer", trainer_info(transports=(TransportKind.DIRECT,)))
    world.agents["trainer"] = made
    made.supports_deferred_digests = True
    made.machine, made.asked = publication.Publication(VERSION, publication.PublishLimits()), {}
    made.live()
    world.settle()
    return made


def over(world: World, trainer: Publisher, within_s: float) -> publication.PublicationResult:
    """How it ended, no later than `within_s`."""
    world.advance_until(lambda: trainer.machine.result is not None, within_s)
    assert trainer.machine.result is not None
    return trainer.machine.result


def test_a_table_that_does_not_follow_comes_first_in_another_round(world: World, trainer: Publisher) -> None:
    """While engines still return from the first one, the lease is asked for until they have."""
    for engine in (world.agents["e0"], world.agents["e1"]):
        engine.ignore(Transfer)  # type: ignore[attr-defined]
    trainer.begin()
    world.settle()
    trainer.feed(ev.DigestsUnavailable("two ranks"))
    world.settle()
    assert over(world, trainer, 10.0).ending is EndReason.COMMITTED
    assert trainer.machine.attempt == 2


@pytest.mark.parametrize(
    "refusal",
    [
        ev.RequestDenied(RefusalCode.NOT_ALLOWED, "the store is full", 5.0),
        ev.RequestDenied(RefusalCode.UNKNOWN_BLOB, "gone"),
        None,
    ],
    ids=lambda each: each.code.value if each else "another",
)
def test_engines_do_not_stand_for_a_report_that_was_refused(
    world: World, trainer: Publisher, refusal: ev.RequestDenied | None
) -> None:
    """It is said again, or the round is given up, long before the time of the transfer is over."""
    trainer.begin()
    world.settle()
    trainer.reports_refused = [refusal or ev.RequestDenied(RefusalCode.NOT_ALLOWED, "another table than before")]
    trainer.feed(ev.DigestsReady(TABLE))
    trainer.feed(ev.DeliveryEnded(trainer.machine.epoch, {}))
    world.settle()
    assert over(world, trainer, 20.0).ending is EndReason.COMMITTED
    assert trainer.machine.attempt == (1 if refusal else 2)
    assert sorted(world.ready) == ["e0", "e1"]


def test_the_last_engine_that_leaves_takes_no_attempt_with_it(world: World, trainer: Publisher) -> None:
    """A version without engines is committed by its table, which nobody has asked for yet."""

    def leave() -> None:
        for name in ("e0", "e1"):
            engine = world.agents[name]
            if engine.alive:
                world.handle(MessageReceived(peer=engine.peer, message=Bye(reason="scaled down")))
                engine.die()

    trainer.begin(publication.PublishLimits(attempts=1))
    trainer.on_grant = leave
    assert over(world, trainer, 10.0).ending is EndReason.COMMITTED
