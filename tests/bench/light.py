"""A trainer and engines that move nothing, for programs that kill coordinators: the real client, the real messages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from weightbus.control import protocol as m
from weightbus.control.bus.client import BusClient, BusSettings
from weightbus.control.protocol.errors import RequestRefused, WeightbusError
from weightbus.control.protocol.messages import AgentId, Channel, Epoch, Incarnation, RequestId, Version

CHANNEL = Channel("light")
DEADLINE_S = 30.0
ABANDON_S = 5.0


class Engine:
    """Takes every version at once, on a thread of its own; a refused answer is dropped, as the protocol says."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.name = name
        self.held: m.HeldVersion | None = None
        self.max_epoch = 0
        self.stale: list[str] = []
        """Commands at an epoch below one that was seen before: a former leader's."""
        self.client = BusClient(BusSettings(endpoint=endpoint), self._hello, self._beat)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave."""
        self._over.set()
        self._thread.join(DEADLINE_S)
        self.client.close()

    def _hello(self) -> m.Hello:
        info = m.EngineInfo(
            url=f"http://{self.name}",
            server_version="0",
            tp=1,
            pp=1,
            dp=1,
            device="cpu",
            host="h",
            transports=(m.TransportKind.DISK,),
            held=self.held,
        )
        return _hello(self.name, m.Role.ENGINE, engine=info)

    def _beat(self) -> m.Heartbeat:
        return m.Heartbeat(seq=0, health=m.EngineHealth.CLEAN, held=self.held)

    def _run(self) -> None:
        self.client.start(DEADLINE_S)
        while not self._over.is_set():
            order: Any = self.client.next(0.1)
            if order is None or isinstance(order, m.Welcome):
                continue
            if order.epoch < self.max_epoch:
                self.stale.append(type(order).__name__)
                continue
            self.max_epoch = order.epoch
            for answer in self._answers(order):
                try:
                    self.client.request(answer, deadline_s=DEADLINE_S)
                except WeightbusError:
                    break  # the coordinator that asked is no more

    def _answers(self, order: m.ToAgent) -> Iterator[m.ToCoordinator]:
        key = self.client.new_request
        match order:
            case m.Prepare(epoch=epoch):
                yield m.Prepared(request=key(), channel=CHANNEL, epoch=epoch, seconds=0.0)
            case m.Pause(epoch=epoch):
                yield m.Paused(request=key(), channel=CHANNEL, epoch=epoch, seconds=0.0)
            case m.Transfer(epoch=epoch, version=version, manifest=manifest, table=table):
                self.held = m.HeldVersion(version=version, manifest=manifest, table=table)
                yield m.Transferred(request=key(), channel=CHANNEL, epoch=epoch, bytes=0, buckets=0, seconds=0.0)
                yield m.Verified(
                    request=key(),
                    channel=CHANNEL,
                    epoch=epoch,
                    version=version,
                    table=table,
                    verified_by="live-digest",
                    seconds=0.0,
                )
            case m.Commit(epoch=epoch) | m.Abort(epoch=epoch):
                held = self.held.version if self.held else None
                yield m.Serving(request=key(), channel=CHANNEL, epoch=epoch, version=held, seconds=0.0, paused_s=0.0)
            case _:
                pass


class Trainer:
    """Publishes one version after the other, and notes when each was answered as committed."""

    def __init__(self, endpoint: str) -> None:
        self.client = BusClient(BusSettings(endpoint=endpoint), lambda: _hello("trainer", m.Role.TRAINER, trainer=INFO))
        self.acked: list[tuple[int, float]] = []
        """Versions, and when they were answered as committed."""
        self.refusals: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave."""
        self._over.set()
        self._thread.join(2 * DEADLINE_S)
        self.client.close()

    def _run(self) -> None:
        self.client.start(DEADLINE_S)
        version = 1
        while not self._over.is_set():
            try:
                done = self._publish(Version(version))
            except WeightbusError as error:
                self.refusals.append(str(error)[:120])
                self._over.wait(0.05)
                continue
            if done is not None and done.outcome is m.Outcome.COMMITTED:
                self.acked.append((version, time.monotonic()))
                version += 1

    def _publish(self, version: Version) -> m.RoundDone | None:
        """One attempt; None if it was given up. Raises what the coordinator refused."""
        client, key = self.client, self.client.new_request
        granted = client.request(m.Acquire(request=key(), channel=CHANNEL, version=version), deadline_s=DEADLINE_S)
        assert isinstance(granted, m.Granted)
        blobs = [client.put_blob(b"manifest"), client.put_blob(b"table %d" % version)]
        publish = m.Publish(
            request=key(),
            channel=CHANNEL,
            epoch=granted.epoch,
            version=version,
            manifest=blobs[0],
            table=blobs[1],
            bytes=0,
            buckets=0,
        )
        done = None
        try:
            client.request(publish, deadline_s=DEADLINE_S)
            done = self._see_through(publish)
        finally:
            if done is None:
                self._abandon(granted.epoch)
        return done

    def _see_through(self, publish: m.Publish) -> m.RoundDone | None:
        """Do a trainer's part until the round is over; None if that takes too long."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until and not self._over.is_set():
            match self.client.next(0.1):
                case m.Send(epoch=epoch) if epoch >= publish.epoch:  # of an earlier attempt one may lie unread
                    self._send(epoch)
                case m.RoundDone() as done if done.epoch == publish.epoch:  # likewise
                    return done
                case m.Welcome():
                    self.client.request(publish, deadline_s=DEADLINE_S)
                case _:
                    pass
        return None

    def _send(self, epoch: Epoch) -> None:
        key = self.client.new_request
        offers = (m.Endpoint(transport=m.TransportKind.DISK, address="/nowhere"),)
        try:
            self.client.request(m.Offered(request=key(), channel=CHANNEL, epoch=epoch, offers=offers))
            self.client.request(m.Sent(request=key(), channel=CHANNEL, epoch=epoch))
        except RequestRefused as refused:  # the round has gone on without it: wait for `Send` or `RoundDone`
            if refused.code is not m.RefusalCode.STALE_EPOCH:
                raise

    def _abandon(self, epoch: Epoch) -> None:
        """A round that nobody sees through would wait for its offer, and for a minute nothing else could begin."""
        abandon = m.Abandon(request=self.client.new_request(), channel=CHANNEL, epoch=epoch, reason="given up")
        with contextlib.suppress(WeightbusError):  # it ended with its coordinator, or ends at its deadline
            self.client.request(abandon, deadline_s=ABANDON_S)


INFO = m.TrainerInfo(host="h", device="cpu", ranks=1, transports=(m.TransportKind.DISK,))


def _hello(name: str, role: m.Role, **more: Any) -> m.Hello:
    incarnation = Incarnation(f"{name}-1")
    return m.Hello(
        request=RequestId("x"), agent=AgentId(name), role=role, channel=CHANNEL, incarnation=incarnation, **more
    )
