"""A trainer of two ranks that send, and engines of toy workers: all halves of a round without a server.

Ranks and workers are threads of this process; sockets, groups and everything else are what runs in production.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.exports import LocalMemory
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Shards
from weightbus.dataplane.transports.interface import Address, ExportedWeights, Peer, Receipt, TransferSession
from weightbus.dataplane.transports.sends.p2p_group import P2PGroup
from weightbus.dataplane.transports.sends.rank_sender import RankSender
from weightbus.dataplane.transports.sends.receiver import SendsReceiver
from weightbus.dataplane.transports.sends.sender import SendsSender
from weightbus.engine_agent.worker import loader as worker_loader

from .ends import Ends
from .toy_direct import CPU, SPECS, WAIT_S, Server, ToyShard, Trainer


class SendingTrainer(Trainer):
    """As the other toy trainer holds its model, and sends it."""

    def __init__(
        self,
        runtime: Path,
        specs: tuple[TensorSpec, ...] = SPECS,
        host: str = "127.0.0.1",
        turn_s: float = WAIT_S,
        *,
        nixl: bool = False,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(runtime, specs, device)
        self.memories = [LocalMemory(rank) for rank in range(2)]
        self.sending = [RankSender("c", rank) for rank in range(2)]
        self.sends = SendsSender(host, "c", device, self.describe, turn_s=turn_s, nixl=nixl)

    def describe(self) -> ExportedWeights:
        maps = tuple(
            memory.describe(list(shard.values())) for memory, shard in zip(self.memories, self.shards, strict=True)
        )
        return ExportedWeights(Shards.join([self.pieces(rank) for rank in range(2)]), maps, ())

    def summon(self, address: Address, epoch: int, ranks: Sequence[int] = (0, 1)) -> None:
        """What the leader's order makes every rank do."""
        for rank in ranks:
            self.sending[rank].begin(address, epoch, self.memories[rank].regions, WAIT_S)

    def close(self) -> None:
        self.sends.close()
        for each in self.sending:
            each.close()
        super().close()


class SendsWorld:
    """A trainer and an engine, and rounds between them."""

    def __init__(
        self, runtime: Path, tp: int, monkeypatch: pytest.MonkeyPatch, host: str = "127.0.0.1", *, beside: bool = True
    ) -> None:
        self.runtime = runtime
        self.trainer = SendingTrainer(runtime, host=host)
        self.server = Server(tp, monkeypatch, ToyShard)
        self.receiver = SendsReceiver(runtime, beside=beside)
        self.epoch = 0
        self.pool = ThreadPoolExecutor(4)

    def offer(self, session: TransferSession, peers: Sequence[Peer] = ()) -> Address:
        """Open the sender for the engine, or `peers`, and call the trainer's ranks."""
        address = self.trainer.sends.offer(session, peers or [Peer("e", self.server.tp)])
        self.trainer.summon(address, session.epoch)
        return address

    def round(self, session: TransferSession | None = None, *, stage: bool = False) -> Receipt:
        """One transfer; raises what the receiver raises."""
        self.epoch += 1
        sent = session or self.trainer.session(self.epoch)
        taken = self.receive(sent, "e", self.offer(sent), stage=stage)
        self.trainer.sends.ready(WAIT_S)
        self.trainer.sends.finish(WAIT_S)
        return taken.result(WAIT_S)

    def receive(
        self, session: TransferSession, engine: str, address: Address, *, stage: bool = False
    ) -> Future[Receipt]:
        """The engine's half, in a thread of its own."""

        def both() -> Receipt:
            if stage:
                self.receiver.stage(session, address, engine, WAIT_S)
            return self.receiver.receive(session, address, engine, 0, self.server, WAIT_S)  # type: ignore[arg-type]

        return self.pool.submit(both)

    def close(self) -> None:
        self.receiver.shutdown()
        worker_loader.forget()
        self.pool.shutdown()
        self.trainer.close()


def formed_groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of groups that form from now on, once for each member that has joined one."""
    names: list[str] = []
    form = P2PGroup.form.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, store: Any, name: str, *arguments: Any, **more: Any) -> Any:
        found = form(kind, store, name, *arguments, **more)
        names.append(name)
        return found

    monkeypatch.setattr(P2PGroup, "form", classmethod(counted))
    return names


class Remote:
    """A server that is a process; when it dies or stands still, the call of the loader fails, as HTTP would."""

    tp, drafts = 1, False

    def __init__(self, ends: Ends, folder: Path, patience_s: float = 15.0, **job: Any) -> None:
        self._socket, self._patience_s = str(folder / "call.sock"), patience_s
        self.pid = ends.start(half="server", socket=self._socket, **job)
        assert ends.answer() == {"listening": True}

    def load_direct(self, path: str, deadline_s: float) -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(min(deadline_s, self._patience_s))
            try:
                caller.connect(self._socket)
                caller.sendall(path.encode())
                if caller.recv(64) != b"returned":
                    raise TransferFailed("the server is gone")
            except OSError as error:
                raise TransferFailed(f"the server is gone: {error}") from error


def token() -> str:
    """A secret."""
    return secrets.token_hex(16)
