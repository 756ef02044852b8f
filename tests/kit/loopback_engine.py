"""An engine agent without SGLang: answers the coordinator and takes buckets as the real one does, on one thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from weightbus.control import protocol as m
from weightbus.control.bus.client import BusClient, BusSettings
from weightbus.control.protocol.errors import RequestRefused, WeightbusError
from weightbus.control.protocol.messages import AgentId, Channel, Incarnation, RequestId
from weightbus.dataplane.errors import DataplaneError, TransferFailed
from weightbus.dataplane.processes.host_facts import host_identity
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest
from weightbus.dataplane.transports import registry as transports
from weightbus.dataplane.transports.interface import Address, ReceiverContext, TransferSession

from ..dataplane.loopback import LoopbackServer


class LoopbackEngine:
    """One engine of one channel. `fail` is asked before each load, `before` when it is to come; both may raise."""

    live_digest = ""
    """By which its server reports what it holds, as it says."""

    def __init__(  # noqa: PLR0917  made by one fixture
        self,
        name: str,
        channel: str,
        coordinator: str,
        runtime_dir: Path,
        transport: m.TransportKind = m.TransportKind.LOCAL,
        fail: Callable[[int], None] = lambda _load: None,
    ) -> None:
        self.server = LoopbackServer(1, fail)
        self.before: Callable[[], None] = lambda: None
        self.label: int | None = None
        self.held: m.HeldVersion | None = None
        self.health = m.EngineHealth.CLEAN
        self._heard: set[tuple[type, int]] = set()
        self._name, self._channel, self._transport = AgentId(name), Channel(channel), transport
        self._receiver = transports.by_name(transport).receiver(ReceiverContext(runtime_dir=runtime_dir))
        self._incarnation = Incarnation(f"{name}-{time.monotonic_ns()}")
        self.refuses = ""
        """Why it takes no version, in its answer to `Prepare`."""
        self.where = m.Topology(request=RequestId("-"))
        self._bus = BusClient(
            BusSettings(endpoint=coordinator), self._hello, self._heartbeat, topology=lambda: self.where
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)

    def start(self) -> None:
        self._bus.start()
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        self._receiver.shutdown()
        self._bus.close()

    def say_trouble(self, trouble: str, *, starting: bool = False) -> None:
        """Report that its server can take no version; empty: that it can again."""
        self.where = msgspec.structs.replace(self.where, trouble=trouble, starting=starting)
        self._bus.report_topology()

    def leave(self) -> None:
        """Without another word, from its own thread: its connection is gone."""
        self._over.set()
        self._bus.close()
        raise TransferFailed("it left")

    def _hello(self) -> m.Hello:
        info = m.EngineInfo(
            url=f"http://{self._name}",
            server_version="loopback",
            tp=1,
            pp=1,
            dp=1,
            device="cpu",
            host=host_identity(),
            transports=(self._transport,),
            live_digest=self.live_digest,
            health=self.health,
            held=self.held,
        )
        return m.Hello(
            request=RequestId("hello"),
            agent=self._name,
            role=m.Role.ENGINE,
            channel=self._channel,
            incarnation=self._incarnation,
            engine=info,
        )

    def _heartbeat(self) -> m.Heartbeat:
        return m.Heartbeat(seq=0, health=self.health, held=self.held)

    def _run(self) -> None:
        while not self._over.is_set():
            message = self._bus.next(0.05)
            if message is None:
                continue
            asked = (type(message), getattr(message, "epoch", 0))
            if asked in self._heard:
                continue  # commands are repeated until they are answered; each is carried out once
            if isinstance(message, m.ToEngine):
                self._heard.add(asked)
            with contextlib.suppress(WeightbusError):  # a coordinator that went away asks again when it is back
                self._answer(message)

    def _answer(self, message: m.ToAgent) -> None:
        match message:
            case m.Prepare() if self.refuses:
                self._fail(message, m.Step.PREPARE, self.refuses)
            case m.Prepare():
                self._say(m.Prepared(**self._common(message)))
            case m.Pause():
                self._say(m.Paused(**self._common(message)))
            case m.Transfer():
                self._transfer(message)
            case m.Commit():
                self.label = message.version
                self._say(m.Serving(**self._common(message), version=message.version, paused_s=0.0))
            case m.Abort() if self.health is m.EngineHealth.CLEAN:
                version = self.held.version if self.held else None
                self._say(m.Serving(**self._common(message), version=version, paused_s=0.0))
            case m.Abort():
                self._fail(message, m.Step.TRANSFER, "dirty")
            case _:
                pass

    def _transfer(self, message: m.Transfer) -> None:
        came = False
        try:
            self.before()
            manifest = Manifest.decode(self._bus.get_blob(message.manifest))
            table = DigestTable.decode(self._bus.get_blob(message.table), manifest)
            session = TransferSession(message.channel, message.epoch, message.version, manifest, table)
            offer = message.offer
            address = Address(offer.address, offer.group, offer.backend, offer.world_size, offer.token)
            came = True
            receipt = self._receiver.receive(
                session, address, self._name, message.rank_offset, self.server, message.deadline_s
            )
        except (DataplaneError, RuntimeError) as error:  # torch raises the latter when it cannot map what it was given
            self.health = m.EngineHealth.DIRTY if came and self._receiver.touched else self.health
            self._fail(message, m.Step.TRANSFER, str(error))
            return
        finally:
            self._receiver.close()
        self._say(m.Transferred(**self._common(message), bytes=receipt.bytes, buckets=receipt.buckets))
        self.held = m.HeldVersion(version=message.version, manifest=message.manifest, table=message.table)
        self.health = m.EngineHealth.CLEAN
        self._say(
            m.Verified(
                **self._common(message), version=message.version, table=message.table, verified_by="bucket-digest"
            )
        )

    def _fail(self, message: m.ToEngine, step: m.Step, reason: str) -> None:
        common = self._common(message)
        del common["seconds"]
        self._say(m.Failed(**common, step=step, health=self.health, reason=reason))

    def _common(self, message: m.ToEngine) -> dict[str, object]:
        return {
            "request": self._bus.new_request(),
            "channel": message.channel,
            "epoch": message.epoch,
            "seconds": 0.01,
        }

    def _say(self, message: m.EngineMessage) -> None:
        with contextlib.suppress(RequestRefused):  # the round moved on without this engine
            self._bus.request(message, deadline_s=30.0)
