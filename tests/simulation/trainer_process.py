"""A trainer's leader: the real publication machine and bus client; assembly and senders are simulated.

Mirrors `trainer_agent/publish/driver.py`. A life trains on from its newest checkpoint, which may be older than what is
committed; its weights are its own, so that the same version of two lives has two digest tables.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from weightbus.control import protocol as m
from weightbus.control.machine.status import parse
from weightbus.control.protocol.errors import ClientClosed, CoordinatorUnreachable, NotTrusted, RequestRefused
from weightbus.control.protocol.messages import AgentId, Digest, Epoch, Incarnation, RequestId, Version
from weightbus.control.security.trust import sign_digest_table, sign_endpoint, sign_publication
from weightbus.trainer_agent.machine import events as ev, publication

from .client import Client
from .process import Killed, Process, Thread
from .seals import secret_of
from .transfer_model import Outlet

if TYPE_CHECKING:
    from .world import World

REQUEST_S = 5.0
LIMITS = publication.PublishLimits(
    acquire_s=40.0, round_s=120.0, abandon_s=15.0, attempts=3, retry_s=0.5, engines_s=20.0
)


class TrainerProcess(Process):
    """One trainer."""

    def __init__(self, world: World, name: str, drift: float, transports: tuple[m.TransportKind, ...]) -> None:
        super().__init__(world, name, drift)
        self._world, self._transports = world, transports
        self.client: Client | None = None
        self.checkpoint = 0
        self.busy = False
        self.results: list[tuple[int, publication.PublicationResult]] = []

    def born(self) -> None:
        """A new process, from its checkpoint."""
        self._rng = self._world.rng(f"{self.name}-{self.life}")
        self._incarnation = Incarnation(f"{self.name}.{self.life}")
        self._outlets: list[Outlet] = []
        self._told_boot = 0
        self._takes_over = False
        self._committed: m.HeldVersion | None = None
        self._machine: publication.Publication | None = None
        self.busy = False
        self.client = Client(self, self._world.network, self._hello, None, self._topology)
        self.thread(self._train(self.client))

    def gone(self) -> None:
        """The kernel closes its sockets."""
        if self.client is not None:
            self.client.leave()
        self.client = None

    def heard(self) -> None:
        """Something came in on the line."""
        if self.client is not None:
            self.client.turn()

    # -- training

    def _join(self, client: Client) -> Thread:
        while True:
            try:
                return (yield from client.starting(10.0))
            except CoordinatorUnreachable:
                yield 0.5
            except RequestRefused as refused:
                if not refused.retry_after_s:  # ends with an error, as the real one does, and is started again
                    raise Killed(f"it was refused: {refused}") from refused
                yield 0.5

    def _train(self, client: Client) -> Thread:
        welcome = yield from self._join(client)
        self._told_boot, self._hello_answered = welcome.boot, welcome.request
        version, back = self.checkpoint + 1, False
        while True:
            yield self._rng.random() * self._world.scenario.think_s
            while not self._world.may_begin():
                yield 1.0
            self.busy = True
            self._going_back, back = back, False
            result = yield from self._publish(client, version)
            self.busy = False
            table = hashlib.sha256(self._blob(version)).hexdigest()
            lease, hello = self._machine.lease, self._hello_answered
            self._world.judge.publication_over(self.name, version, table, result.ending, lease=lease, hello=hello)
            if self._undigested:
                self._world.judge.begun_anew(self.name, version, result)
            self.results.append((version, result))
            self.loop.note(self.name, f"publication of {version}: {result.ending} {result.reason}")
            if result.ending is ev.EndReason.COMMITTED:
                self.checkpoint = max(self.checkpoint, version - self._rng.randrange(3))
                version += 1
            elif result.code is m.RefusalCode.CHANNEL_TAKEN:
                self._takes_over = self._rng.random() < 0.3
            elif result.code is m.RefusalCode.VERSION_NOT_NEWER:
                back = self._rng.random() < self._world.scenario.rollback
                version = version if back else self._world.committed_version() + 1 + self._rng.randrange(2)
            elif self._rng.random() < 0.3:
                version += 1

    @property
    def says_nothing(self) -> bool:
        """It publishes, and waits for the coordinator to say something, to which it has nothing more to say itself."""
        machine, client = self._machine, self.client
        waits = self.busy and machine is not None and machine.state is publication.PublicationState.WAITING
        return waits and client is not None and not client._session.pending

    # -- one publication: drive.Drive.run

    def _publish(self, client: Client, version: int) -> Thread:
        limits = msgspec.structs.replace(LIMITS, min_engines=self._world.scenario.min_engines)
        machine = self._machine = publication.Publication(version, limits)
        self._undigested = False
        self._keys: dict[int, RequestId] = {}
        self._delivery: _Delivery | None = None
        effects = deque(self._handle(ev.PublishRequested()))
        while effects or machine.result is None:
            if effects:
                event = yield from self._perform(client, version, effects.popleft())
            else:
                event = yield from self._wait(client)
            if event is not None:
                effects.extend(self._handle(event))
        return machine.result

    def _handle(self, event: ev.AnyEvent) -> ev.Effects:
        self._undigested = self._undigested or isinstance(event, ev.DigestsUnavailable)
        effects = self._machine.handle(event, self.clock())
        self._machine.check()
        return effects

    def _wait(self, client: Client) -> Thread:
        deadline = self._machine.deadline
        now = self.clock()
        if deadline is not None and now >= deadline:
            return ev.Tick()
        message = client.take()
        if message is not None:
            return self._event(message)
        delivery = self._delivery
        if delivery is not None:
            if self._machine.digests_deferred and not self._machine.table:
                return (yield from self._await_digests())
            if delivery.over(now):
                self._delivery = None
                return ev.DeliveryEnded(delivery.epoch, delivery.failed(), delivery.spared())
            yield 0.2, client.bell
            return None
        yield min(5.0, deadline - now if deadline is not None else 5.0), client.bell
        return None

    def _event(self, message: m.ToAgent) -> ev.AnyEvent | None:
        match message:
            case m.Send():
                return ev.SendRequested(message.epoch, message.version, message.receivers, message.deadline_s)
            case m.Withdraw():
                return ev.EnginesWithdrawn(message.epoch, message.engines)
            case m.RoundDone():
                return ev.RoundDoneReceived(
                    message.epoch, message.version, message.outcome, message.reason, message.engines, message.seconds
                )
            case m.Welcome():
                restarted, self._told_boot = message.boot != self._told_boot, message.boot
                self._hello_answered = message.request
                return ev.Reconnected(message.committed, restarted)
            case m.Refused():
                refusal = self.client.refusal if self.client else None
                untrusted = refusal is not None and isinstance(refusal[0], NotTrusted)
                return ev.AttemptFailed(ev.EndReason.NOT_TRUSTED, message.reason) if untrusted else None
            case _:
                return None

    def _perform(self, client: Client, version: int, effect: ev.AnyEffect) -> Thread:  # noqa: C901, PLR0911
        match effect:
            case ev.RequestLease():
                return (yield from self._asking(self._acquire(client, version)))
            case ev.AssembleBuckets():
                yield 0.05 + 0.5 * self._rng.random()
                return ev.DigestsReady(hashlib.sha256(self._blob(version)).hexdigest())
            case ev.AnnounceRound():
                return (yield from self._asking(self._announce(client, version, effect)))
            case ev.StartDelivery():
                return (yield from self._asking(self._deliver(client, version, effect)))
            case ev.AwaitDigests():
                return (yield from self._await_digests())
            case ev.ReportDelivery():
                return (yield from self._asking(self._report(client, version, effect)))
            case ev.CountEngines():
                return (yield from self._asking(self._count_engines(client)))
            case ev.DropReceivers():
                if self._delivery is not None:
                    self._delivery.withdraw(effect.engines)
            case ev.StopDelivery():
                self._stop_delivery()
            case ev.AbandonRound():
                reason = effect.reason[:200]
                yield from self._farewell(client, m.Abandon, epoch=Epoch(effect.epoch), reason=reason)
            case ev.ReleaseLease():
                yield from self._farewell(client, m.Release, epoch=Epoch(effect.epoch))
        return None

    def _asking(self, step: Thread) -> Thread:
        try:
            return (yield from step)
        except NotTrusted as refused:
            return ev.AttemptFailed(ev.EndReason.NOT_TRUSTED, str(refused))
        except RequestRefused as refused:
            return ev.RequestDenied(refused.code, refused.reason, refused.retry_after_s)
        except CoordinatorUnreachable as silence:
            return ev.RequestTimedOut(str(silence))

    def _count_engines(self, client: Client) -> Thread:
        _, document = yield from client.asking(m.GetStatus(request=client.new_request()), deadline_s=REQUEST_S)
        return publication.count_engines(parse(document or b"").channels.get(self._world.channel))

    def _acquire(self, client: Client, version: int) -> Thread:
        message = m.Acquire(
            request=client.new_request(),
            channel=self._world.channel,
            version=Version(version),
            rollback=self._going_back,
            run=self.name if self._world.scenario.runs else "",
            takeover=self._takes_over,
        )
        if self._takes_over:
            self._world.judge.takes_over(self.name, version)
        answer, _ = yield from client.asking(message, deadline_s=REQUEST_S)
        assert isinstance(answer, m.Granted)
        self._takes_over = False
        self._committed = answer.committed
        newer = answer.committed is None or version > answer.committed.version
        return ev.LeaseObtained(answer.epoch, answer.committed, answer.may_defer_digests and newer)

    def _announce(self, client: Client, version: int, effect: ev.AnnounceRound) -> Thread:
        epoch, blobs = effect.epoch, (b"the layout", self._blob(version))
        manifest, table = (Digest(hashlib.sha256(blob).hexdigest()) for blob in blobs)
        scenario = self._world.scenario
        message = m.Publish(
            request=self._keys.setdefault(epoch, client.new_request()),
            channel=self._world.channel,
            epoch=Epoch(epoch),
            version=Version(version),
            manifest=manifest,
            table=Digest("") if effect.digests_deferred else table,
            bytes=scenario.buckets,
            buckets=scenario.buckets,
            policy=self._world.policy(),
            rollback=self._going_back,
        )
        if self._world.trust is not None:
            message = sign_publication(message, AgentId(self.name), secret_of(self.name), self._committed)
        self._world.publishes(self.name, epoch, message.request, table, self._blob_tags(version)[0])
        self._announced = message
        yield from client.asking_with(
            message, blobs[:1] if effect.digests_deferred else blobs, REQUEST_S, 6 * REQUEST_S
        )
        return ev.RoundAccepted()

    def _await_digests(self) -> Thread:
        """The rest of the digesting, then the table for the engines of the version; seldom there is none after all."""
        version = self._machine.version
        yield self._world.scenario.digest_s * self._rng.random()
        if self._rng.random() < 0.05:
            return ev.DigestsUnavailable("the ranks cannot digest what they expose any more")
        self._give_table(version)
        return ev.DigestsReady(hashlib.sha256(self._blob(version)).hexdigest())

    def _give_table(self, version: int) -> None:
        blob, signature = self._blob(version), ""
        if self._world.trust is not None:
            table = Digest(hashlib.sha256(blob).hexdigest())
            signature = sign_digest_table(self._announced, table, secret_of(self.name))
        for outlet in self._delivery.outlets if self._delivery is not None else ():
            outlet.table = blob, signature

    def _deliver(self, client: Client, version: int, effect: ev.StartDelivery) -> Thread:
        yield 0.01 + 0.05 * self._rng.random()
        is_open = self._machine.digests_deferred
        unable = [each for each in effect.receivers if is_open and each.transport is not m.TransportKind.DIRECT]
        able = msgspec.structs.replace(effect, receivers=tuple(each for each in effect.receivers if each not in unable))
        self._delivery = delivery = _Delivery(self, able, self._blob_tags(version))
        for outlet in delivery.outlets:
            self._world.opened(outlet)
            if is_open:
                self._world.tabled(outlet)
        tabled: ev.AnyEvent | None = None
        if is_open and self._machine.table:
            self._give_table(version)
        elif is_open and self._rng.random() < 0.3:  # a receiver is on the same device
            tabled = yield from self._await_digests()
            if isinstance(tabled, ev.DigestsUnavailable):
                return tabled
        offers = tuple(m.Endpoint(transport=each.kind, address=self._world.address(each)) for each in delivery.outlets)
        if self._world.trust is not None:
            secret, channel, at = secret_of(self.name), self._world.channel, Epoch(effect.epoch)
            offers = tuple(sign_endpoint(offer, channel, at, secret) for offer in offers)
        offered = m.Offered(
            request=client.new_request(),
            channel=self._world.channel,
            epoch=Epoch(effect.epoch),
            offers=offers,
            failed={each.engine: "the digest table follows in this round" for each in unable},
        )
        try:
            yield from client.asking(offered, deadline_s=REQUEST_S)
        finally:
            delivery.told(self.clock())
        return tabled

    def _report(self, client: Client, version: int, effect: ev.ReportDelivery) -> Thread:
        message = m.Sent(
            request=client.new_request(),
            channel=self._world.channel,
            epoch=Epoch(effect.epoch),
            failed={name: why[:200] for name, why in effect.failed.items()},
            table=Digest(effect.table),
            spared=tuple(AgentId(name) for name in effect.spared),
        )
        if effect.table:
            yield from client.asking_with(message, (self._blob(version),), REQUEST_S, 6 * REQUEST_S)
        else:
            yield from client.asking(message, deadline_s=REQUEST_S)
        return ev.ReportAcknowledged(effect.epoch)

    def _farewell(self, client: Client, kind: Callable[..., m.ToCoordinator], **fields: object) -> Thread:
        message = kind(request=client.new_request(), channel=self._world.channel, **fields)
        try:
            yield from client.asking(message, deadline_s=2.0)
        except (RequestRefused, CoordinatorUnreachable, ClientClosed):
            return

    def _stop_delivery(self) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.close()

    def _blob(self, version: int) -> bytes:
        return msgspec.json.encode(list(self._blob_tags(version)))

    def _blob_tags(self, version: int) -> tuple[str, ...]:
        bits = hashlib.sha256(f"{version} of {self._incarnation}".encode()).hexdigest()[:8]
        return tuple(f"{version}/{bits}" for _ in range(self._world.scenario.buckets))

    def _hello(self) -> m.Hello:
        return m.Hello(
            request=RequestId("filled-in-by-the-client"),
            agent=AgentId(self.name),
            role=m.Role.TRAINER,
            channel=self._world.channel,
            incarnation=self._incarnation,
            trainer=m.TrainerInfo(host="host", device="cpu", ranks=1, transports=self._transports),
        )

    def _topology(self) -> m.Topology:
        return m.Topology(
            request=RequestId("filled-in-by-the-client"),
            files="host/0",
            folder="0",
            supports_deferred_digests=self._world.scenario.open_tables,
        )


class _Delivery:
    """`delivery.Delivery`: one outlet for each transport."""

    def __init__(self, trainer: TrainerProcess, effect: ev.StartDelivery, tags: tuple[str, ...]) -> None:
        self.epoch = effect.epoch
        self._deadline = trainer.clock() + effect.deadline_s
        kinds = tuple(dict.fromkeys(receiver.transport for receiver in effect.receivers))
        self.outlets = [
            Outlet(
                trainer,
                kind,
                effect.epoch,
                tags,
                tuple(each.engine for each in effect.receivers if each.transport is kind),
            )
            for kind in kinds
        ]

    def told(self, now: float) -> None:
        """The coordinator knows of the offers, or may."""
        for outlet in self.outlets:
            outlet.told_at = now

    def over(self, now: float) -> bool:
        """Every outlet is through."""
        states = [outlet.over(now, self._deadline) for outlet in self.outlets]
        over = all(states)
        if over:
            self.close()
        return over

    def failed(self) -> dict[str, str]:
        """Engines that did not get everything."""
        return {engine: why for outlet in self.outlets for engine, why in outlet.failed().items()}

    def spared(self) -> tuple[str, ...]:
        """Those of them that were well, and to which nothing was sent."""
        return tuple(sorted(engine for outlet in self.outlets for engine in outlet.spared))

    def withdraw(self, engines: Mapping[str, str]) -> None:
        """Do not wait for these."""
        for outlet in self.outlets:
            for engine in outlet.engines:  # in this order: that of a set is another in every process
                if engine in engines:
                    outlet.finish(engine, engines[engine])

    def close(self) -> None:
        """Close the senders."""
        for outlet in self.outlets:
            outlet.open = False
