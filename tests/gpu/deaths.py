"""Deaths over NCCL: every party of a sent round is killed, and stopped, at every point of it; the others must go on.

    python3 tests/gpu/deaths.py                    ranks on the first CUDA device, workers on the second if there is one
    python3 tests/gpu/deaths.py --device cpu       the same over gloo
    python3 tests/gpu/deaths.py --only worker      a rank of the trainer (source), an engine's worker, its sidecar
    python3 tests/gpu/deaths.py --points moving    some of the points (tests/kit/sends_ends.py)
    python3 tests/gpu/deaths.py --beside 3         three cells at a time

For each cell two ranks send to two engines of one toy worker each, all of them processes that NCCL takes for hosts of
their own (sockets; P2P and shared memory off). Epoch 1 goes to both, in epoch 2 the victim is struck, epoch 3 has no
room for it. In epoch 2 everybody else has to know within its deadline, and holds one version or the other; in epoch 3
the survivors take the version, proven. Prints one JSON object, a line for each cell on stderr; `--out FOLDER` writes
deaths.json there after every cell. Exits with 1 unless every cell went well.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig

SOCKETS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_CUMEM_ENABLE": "0",
}  # fmt: skip
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
TURN_S, FORM_S, SILENT_S, END_S = 5.0, 15.0, 5.0, 3.0
"""In place of the 10, 15, 10 and 5 seconds of a deployment, but for the one in which NCCL connects."""
KNOWN_S = 45.0
"""Within this everybody knows how an epoch ended: several of the above, one after another."""
WAIT_S = 60.0


class Cell:
    """One party, one point, one signal."""

    def __init__(self, ends: Any, folder: Path, device: str, struck: tuple[str, str, str]) -> None:
        import torch

        from tests.kit.toy_sends import Remote, SendingTrainer
        from weightbus.dataplane.transports.sends.receiver import SendsReceiver

        folder.mkdir()
        victim, point, how = struck
        self._ends, self._folder, self._victim = ends, folder, victim
        last = torch.cuda.device_count() - 1
        self._near, self._far = ("cpu", "cpu") if device == "cpu" else ("cuda:0", f"cuda:{min(last, 1)}")
        self._struck = {"point": point, "signal": int(SIGNALS[how])}
        self._trainer = SendingTrainer(folder / "r", device=torch.device(self._near), turn_s=TURN_S)
        self._trainer.sends._form_s = FORM_S
        self._pids: list[int] = []
        self._servers, self._sidecars = {}, {}
        for name in ("e", "v"):
            (folder / name).mkdir()
            more = {**self._struck, "at": self._at(point)} if (victim, name) == ("worker", "v") else {}
            self._servers[name] = Remote(ends, folder / name, **self._as(name, self._far), **more)
            self._sidecars[name] = SendsReceiver(folder / "r")
            self._pids.append(self._servers[name].pid)
        self._pool = ThreadPoolExecutor(4)

    def run(self) -> dict[str, Any]:
        """What was seen; `well` says whether it was as promised."""
        first = self._epoch(1, ("e", "v"))
        if any(first["failed"].values()):
            return {"well": False, "problem": f"nobody was struck, and it failed: {first['failed']}"}
        struck = self._epoch(2, ("e", "v"))
        if not self._was_struck(struck["failed"]):
            return {
                "well": False,
                "problem": "the signal was never sent: an ordinary round",
                "struck": struck["failed"],
            }
        last = self._epoch(3, ("e",))
        well = (
            not last["failed"]["e"]
            and struck["known_s"] < KNOWN_S
            and not (struck["touched"] and struck["failed"]["e"])
        )
        return {"well": well, "known_s": struck["known_s"], "struck": struck["failed"], "again_s": last["known_s"],
                "again": last["failed"]}  # fmt: skip

    def _was_struck(self, failed: dict[str, str]) -> bool:
        """In the epoch that was the last one. A sidecar raises what it is struck by."""
        from tests.kit.ends import was_struck

        if self._victim == "sidecar":
            return failed["v"].startswith(Struck.__name__)
        pid = self._pids[-1] if self._victim == "source" else self._servers["v"].pid
        return was_struck(pid, self._struck["signal"])

    def close(self) -> None:
        """End every process of the cell."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in self._sidecars.values():
            each.shutdown()
        self._trainer.close()
        self._pool.shutdown(wait=False)

    @staticmethod
    def _at(point: str) -> int:
        return {"moving": 6}.get(point, 2)

    def _as(self, name: str, device: str) -> dict[str, Any]:
        return {"device": device, "environment": {**SOCKETS, "NCCL_HOSTID": name}}

    def _epoch(self, epoch: int, names: tuple[str, ...]) -> dict[str, Any]:
        from weightbus.dataplane.errors import TransferFailed
        from weightbus.dataplane.transports.interface import Peer

        trainer, began = self._trainer, time.monotonic()
        trainer.step(epoch)
        session = trainer.session(epoch)
        trainer.describe()
        address = trainer.sends.offer(session, [Peer(name, 1) for name in names])
        trainer.summon(address, epoch, ranks=(0,))
        strikes = (epoch, self._victim) == (2, "source")
        more = {**self._struck, "at": 2 if self._struck["point"] == "moving" else 1} if strikes else {}
        self._pids.append(self._ends.start(
            half="rank", root=str(self._folder / "r"), seed=epoch, address=address.address, token=address.token,
            epoch=epoch, **self._as("rank1", self._near), **more,
        ))  # fmt: skip
        dies = (epoch, self._victim) == (2, "sidecar")
        halves = {name: self._pool.submit(self._half, name, session, address, dies=dies and name == "v")
                  for name in names}  # fmt: skip
        with contextlib.suppress(TransferFailed):
            trainer.sends.ready(WAIT_S, KNOWN_S / 3)
            trainer.sends.finish(WAIT_S)
        trainer.sends.close()
        failed = {name: _why(half) for name, half in halves.items()}
        return {"failed": failed, "known_s": time.monotonic() - began, "touched": self._sidecars["e"].touched}

    def _half(self, name: str, session: Any, address: Any, *, dies: bool) -> Any:
        sidecar = self._sidecars[name]
        if dies:
            point, stands = str(self._struck["point"]), self._struck["signal"] == signal.SIGSTOP
            _doom(sidecar, point, self._trainer.sends, name, stands=stands)
        sidecar.stage(session, address, name, WAIT_S)
        return sidecar.receive(session, address, name, 0, self._servers[name], WAIT_S)


class Struck(BaseException):
    """Stands for the end of the sidecar's process."""


def _doom(sidecar: Any, point: str, sender: Any, name: str, *, stands: bool) -> None:
    """At its point the sidecar's connections break; or it does nothing until the coordinator has given it up."""
    from weightbus.dataplane.transports.sends import receiver as takers

    owner, method = {
        "begun": (sidecar._threads, "take"),
        "moving": (takers._Transfer, "_look"),
        "flip": (sidecar._exchange.workers, "swap"),
    }[point]
    plain, mine = getattr(owner, method), threading.get_ident()

    def strike(*arguments: Any, **more: Any) -> Any:
        if threading.get_ident() != mine:
            return plain(*arguments, **more)
        setattr(owner, method, plain)
        if stands:
            threading.Timer(SILENT_S, lambda: sender.withdraw(name, "its agent is silent")).start()
            time.sleep(3 * SILENT_S)
        sidecar.shutdown()
        raise Struck("the sidecar was struck")

    setattr(owner, method, strike)


def _why(half: Future[Any]) -> str:
    error = half.exception(WAIT_S)
    return "" if error is None else f"{type(error).__name__}: {error}"[:200]


def cells(only: str, points: str) -> list[tuple[str, str, str]]:
    """(victim, point, signal)."""
    from tests.kit.sends_ends import OF_WORKERS, POINTS

    table = {"source": POINTS, "worker": OF_WORKERS, "sidecar": ("begun", "moving", "flip")}
    return [(victim, point, how) for victim, its in table.items() for point in its for how in SIGNALS
            if only in ("", victim) and (not points or point in points.split(","))]  # fmt: skip


def carry_out(args: argparse.Namespace, struck: list[tuple[str, str, str]], tell: Callable[[str, Any], None]) -> None:
    """One cell after another; `tell` is told what was found in each."""
    # Asked whether there is a GPU, torch would begin to use it: processes forked from that one could not.
    os.environ.update({**SOCKETS, "NCCL_HOSTID": "rank0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    import torch

    from tests.kit.ends import Ends
    from weightbus.dataplane.processes.process_groups import process_group_backend
    from weightbus.dataplane.transports.sends import messages as sends_wire, receiver as takers, sender as sends

    process_group_backend(torch.device("cuda"))  # raises where the environment would make NCCL hang: in a dry run, too
    sends.pair_bytes_for = lambda *_: 256
    sends_wire.SILENT_S, takers._END_S = SILENT_S, END_S  # type: ignore[misc]
    ends, work, until = (
        Ends("sends_ends.py"),
        Path(tempfile.mkdtemp(prefix="wb-d-")),
        time.monotonic() + args.budget,
    )
    for number, each in enumerate(struck):
        if time.monotonic() > until:
            tell(name_of(each), {"well": False, "problem": "no time was left"})
            continue
        cell = None
        try:
            cell = Cell(ends, work / str(number), args.device, each)
            found = cell.run()
        except Exception as error:  # noqa: BLE001  one cell is not all of them
            found = {"well": False, "problem": f"{type(error).__name__}: {error}"}
        finally:
            if cell is not None:
                cell.close()
        tell(name_of(each), found)


def name_of(struck: tuple[str, str, str]) -> str:
    """Of a cell."""
    return "{0} {2} at {1}".format(*struck)


class Shares:
    """The cells dealt out to several processes of this program, and what was found in them."""

    def __init__(self, args: argparse.Namespace, names: Sequence[str]) -> None:
        self._work, self._names = Path(tempfile.mkdtemp(prefix="wb-ds-")), names
        self._until = time.monotonic() + args.budget + 2 * WAIT_S
        more = [f"--device={args.device}", f"--only={args.only}", f"--points={args.points}", f"--budget={args.budget}"]
        self._processes = []
        for share in range(args.beside):
            (self._work / f"{share}").mkdir()
            command = [
                sys.executable,
                __file__,
                *more,
                f"--share={share}/{args.beside}",
                f"--out={self._work / f'{share}'}",
            ]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def under_way(self) -> bool:
        """Until all have ended, or are ended."""
        if time.monotonic() > self._until:
            for each in self._processes:
                each.kill()
        time.sleep(1.0)
        return any(each.poll() is None for each in self._processes)

    def found(self) -> dict[str, Any]:
        """By cell, in their order; one that nobody came to went badly."""
        known: dict[str, Any] = {}
        for file in self._work.glob("*/deaths.json"):
            known |= json.loads(file.read_text())["cells"]
        return {name: known.get(name, {"well": False, "problem": "not carried out"}) for name in self._names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("", "source", "worker", "sidecar"), default="", help="one of the victims")
    parser.add_argument("--points", default="", help="some of them")
    parser.add_argument("--beside", type=int, default=1, help="cells at a time")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--out", help="folder for the JSON file")
    args = parser.parse_args()
    wanted = cells(args.only, args.points)
    found: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": rig.devices() if args.device == "cuda" else "CPU",
        "command": rig.command("deaths.py"),
        "software": rig.software(),
        "well": False,
        "cells": {},
    }

    def write(cells: dict[str, Any]) -> None:
        known = [each["known_s"] for each in cells.values() if "known_s" in each]
        found.update(cells=cells, well=len(cells) == len(wanted) > 0 and all(each["well"] for each in cells.values()))
        found.update(longest_known_s=max(known, default=None))
        rig.write_result(args.out, "deaths", found)

    def tell(name: str, cell: dict[str, Any]) -> None:
        sys.stderr.write(f"{name}: {json.dumps(cell)}\n")
        write({**found["cells"], name: cell})

    if args.beside > 1:
        shares = Shares(args, [name_of(each) for each in wanted])
        while shares.under_way():
            write(shares.found())
        write(shares.found())
    else:
        share, of = map(int, (args.share or "0/1").split("/"))
        wanted = wanted[share::of]
        carry_out(args, wanted, tell)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0 if found["well"] else 1)  # threads of struck sidecars may still wait


if __name__ == "__main__":
    sys.exit(main())
