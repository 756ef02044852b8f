"""Ctrl-C, and what torchrun makes of it, in the middle of a publication of real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import model
from weightbus.control import protocol as m
from weightbus.control.bus import BusClient, BusSettings

from ..kit.ports import free_port
from ..kit.waiting import until

RANK = Path(__file__).with_name("interrupted_rank.py")
ENDS_S = 5.0
CHANNEL = m.Channel("c")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The endpoint of a coordinator, of whose channel another trainer has the lease."""
    bus, http = free_port(), free_port()
    flags = ["--insecure-loopback", f"--router-port={bus}", f"--http-port={http}", f"--journal={tmp_path / 'j'}"]
    process = subprocess.Popen([sys.executable, "-m", "weightbus.control", "coordinator", *flags])
    endpoint = f"tcp://127.0.0.1:{bus}"
    with BusClient(BusSettings(endpoint=endpoint), hello) as other:
        other.start(60.0)
        other.request(m.Acquire(request=other.new_request(), channel=CHANNEL, version=m.Version(1)))
        yield endpoint
    process.terminate()
    process.wait(20)


def hello() -> m.Hello:
    return m.Hello(
        request=m.RequestId("filled-in-by-the-client"),
        agent=m.AgentId("other"),
        role=m.Role.TRAINER,
        channel=CHANNEL,
        incarnation=m.Incarnation("other.1"),
        trainer=m.TrainerInfo(host="h", device="cpu", ranks=1, transports=()),
    )


def children(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in listed.stdout.split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.real
@pytest.mark.parametrize("how", ["SIGINT to all", "SIGTERM to torchrun", "SIGINT to rank 0"])
def test_all_ranks_of_a_job_end_at_once(tmp_path: Path, coordinator: str, how: str) -> None:
    """No rank hangs in a collective or in a thread that is joined (G4)."""
    checkpoint = model.write_checkpoint(tmp_path / "checkpoint")
    said = tmp_path / "said"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    with said.open("wb") as out:
        job = subprocess.Popen(
            [sys.executable, *torchrun, "--master-addr=127.0.0.1", str(RANK), coordinator, str(checkpoint)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    try:
        until(lambda: said.read_text().count('{"rank"') == 2, "both ranks to publish", deadline_s=120.0)
        time.sleep(1.0)  # into the wait for the lease, of which no line tells
        ranks = children(job.pid)
        assert len(ranks) == 2
        begun = time.monotonic()
        match how:
            case "SIGINT to all":
                os.killpg(job.pid, signal.SIGINT)
            case "SIGTERM to torchrun":
                job.terminate()
            case _:
                os.kill(ranks[int(how[-1])], signal.SIGINT)
        until(lambda: not any(map(lives, ranks)), "all ranks to end", deadline_s=60.0)
        assert time.monotonic() - begun < ENDS_S, said.read_text()
    finally:
        for pid in (job.pid, *children(job.pid)):
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait(20)
