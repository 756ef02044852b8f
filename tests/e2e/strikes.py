"""Named places of a round over a group, in ranks, sidecars and servers' workers, at which deaths.py strikes.

    python -m tests.e2e.strikes NAME FOLDER MODULE ARGUMENTS...

is `python -m MODULE ARGUMENTS...`, which stops and tells at the place that FOLDER/NAME.armed names; ranks and workers
call `watch` themselves. As in tests/chaos/failpoints.py the product knows nothing of it: methods are wrapped.
"""

from __future__ import annotations

import runpy
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.chaos.failpoints import POINTS as CHAOS, Gate, Point, arm, install

_PAIR_GROUP = "weightbus.dataplane.transports.sends.p2p_group:P2PGroup."
_SENDER = "weightbus.dataplane.transports.distributed.sender:DistributedSender."
_HANDING = "weightbus.dataplane.transports.distributed.receiver:SidecarReceiver."
_PEERCRED = struct.Struct("3i")
"""Process, user and group id."""


def _at(program: str, place: str, *, after: bool = False, skip: int = 0) -> Point:
    return Point(program, (place,), lambda _: True, after, skip)


def _asks(path: str, *, skip: int = 0) -> Point:
    return Point("sidecar", CHAOS["resumes"].places, lambda arguments: arguments[2] == path, False, skip)


POINTS = {
    # A rank of the trainer that sends, and the one that broadcasts.
    "rank_forms": _at("rank", _PAIR_GROUP + "form"),
    "rank_begins": _at("rank", "weightbus.dataplane.transports.sends.rank_sender:RankSender._parts_of"),
    "rank_moves": _at("rank", _PAIR_GROUP + "post", skip=1),
    "rank_is_through": _at("rank", "weightbus.dataplane.transports.sends.message_queues:SendQueue.send", after=True),
    "source_forms": _at("rank", _SENDER + "_form"),
    "source_broadcasts": _at("rank", _SENDER + "send"),
    "source_half": _at("rank", _SENDER + "send", skip=2),
    # The thread of a server's worker that receives.
    "worker_forms": _at("worker", _PAIR_GROUP + "form"),
    "worker_begins": _at("worker", "weightbus.engine_agent.worker.receive_thread:ReceiveThread._take"),
    "worker_moves": _at("worker", _PAIR_GROUP + "post", skip=1),
    "worker_flips": _at("worker", "weightbus.engine_agent.worker.receive_thread:ReceiveThread.swap"),
    "worker_flipped": _at("worker", "weightbus.engine_agent.worker.receive_thread:ReceiveThread.swap", after=True),
    # A sidecar.
    "sidecar_begins": _at("sidecar", "weightbus.dataplane.transports.sends.receiver:WorkerReceivers.take"),
    "sidecar_flips": _at("sidecar", "weightbus.dataplane.transports.worker_exchange:Workers.swap"),
    "sidecar_flipped": _at("sidecar", "weightbus.dataplane.transports.worker_exchange:Workers.swap", after=True),
    "sidecar_forms": _at("sidecar", _HANDING + "_form"),
    "sidecar_takes": _at("sidecar", _HANDING + "_take"),
    "sidecar_takes_half": _at("sidecar", _HANDING + "_take", skip=2),
    "sidecar_joins": _asks("/init_weights_update_group"),
    "sidecar_loads": _asks("/update_weights_from_distributed"),
    "sidecar_loads_half": _asks("/update_weights_from_distributed", skip=2),
    "sidecar_proves": _asks("/weights_checker"),
    "sidecar_proved": CHAOS["verified"],
    "sidecar_resumes": CHAOS["resumes"],
}
"""Name -> place."""


class WorkersGate(Gate):
    """Of a server's workers, each of which is NAME-RANK: that is not known yet when the server imports us."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self._folder, self._name = folder, name

    def passes(self, point: str) -> None:
        """As one of them."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        Gate(self._folder, f"{self._name}-{rank}").passes(point)


def watch(name: str, folder: Path, gate: type[Gate] = Gate) -> None:
    """Have this process stop where `name` is armed. Its first word says which of the points concern it."""
    program = name.partition("-")[0]
    install({key: point for key, point in POINTS.items() if point.program == program}, gate(folder, name))


class Strikes:
    """The side that strikes: one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gate = socket.socket(socket.AF_UNIX)
        self._gate.bind(str(folder / "gate"))
        self._gate.listen()

    def arm(self, names: Sequence[str], point: str) -> None:
        """Each of these processes will stop there, once."""
        for name in names:
            arm(self._folder / f"{name}.armed", point, POINTS[point].skip)

    def come(self, point: str, deadline_s: float, many: int = 1) -> tuple[int, Callable[[], None]]:
        """Wait until they stand there: the first one's process id, and what lets all go on. Raises TimeoutError."""
        self._gate.settimeout(deadline_s)
        lines = [self._gate.accept()[0] for _ in range(many)]
        for line in lines:
            told = line.recv(100).decode()
            assert told == point, f"{told} came, {point} was armed"
        pid, _, _ = _PEERCRED.unpack(lines[0].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))

        def let_go() -> None:
            for line in lines:
                line.close()

        return pid, let_go

    def disarm(self) -> None:
        """No process stops any more."""
        for armed in self._folder.glob("*.armed"):
            armed.unlink(missing_ok=True)

    def close(self) -> None:
        self._gate.close()


def main() -> None:
    name, folder, module, *arguments = sys.argv[1:]
    watch(name, Path(folder))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
