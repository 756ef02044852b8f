"""A peer that dies in a group of ours over NCCL: the group is broken off at once, and torch ends nobody for it.

The process has a default group that torch watches as ever, as trainers and servers have. One GPU is enough: the two
ends are hosts of their own to NCCL, which goes over sockets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEARTBEAT_S = 8
"""In place of torch's 480: the monitor of the first group ends a process so long after an error was dumped."""
PROGRAM = """
import os, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
from weightbus.dataplane.transports.distributed.broadcast_group import BroadcastGroup
from weightbus.dataplane.processes.process_groups import join_store, serve_store
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.processes.process_groups import connect_store

device, wait = torch.device("cuda", 0), Deadline(60)
torch.cuda.set_device(device)
memory = torch.ones(1 << 28, dtype=torch.uint8, device=device)
if len(sys.argv) > 1:
    os.environ["NCCL_HOSTID"] = "peer"
    store = connect_store(sys.argv[1], wait)
    group = BroadcastGroup.form(store, "g", "127.0.0.1", device, 2, wait, rank=1, connect=True)
    print("formed", flush=True)
    time.sleep(300)
os.environ |= {"NCCL_HOSTID": "own", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
one = torch.ones(1, device=device)
dist.all_reduce(one)
store = serve_store("127.0.0.1")
command = [sys.executable, __file__, f"tcp://127.0.0.1:{store.port}"]
peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
group = BroadcastGroup.form(join_store(store), "g", "127.0.0.1", device, 2, wait, connect=True)
peer.stdout.readline()
os.kill(peer.pid, signal.SIGKILL)
peer.wait()
broken = []


def send():
    try:
        group.broadcast(memory, wait)
    except Exception as error:
        broken.append(f"{type(error).__name__}: {error}")


sends = threading.Thread(target=send)
sends.start()
time.sleep(3)  # torch looks at works every second
began = time.monotonic()
group.abort()
took = time.monotonic() - began
sends.join(30)
assert broken and not sends.is_alive()
print(f"aborted after {took:.2f}", flush=True)
assert took < 4
end = time.monotonic() + float(os.environ["LIVES_S"])
while time.monotonic() < end:
    time.sleep(1)
    dist.all_reduce(one)
    torch.cuda.synchronize()
print("lives", flush=True)
os._exit(0)
"""


@pytest.mark.gpu
def test_a_peer_that_dies_ends_no_rank(tmp_path: Path) -> None:
    """Neither at once, nor when the monitor of the first group would, which hears of errors of all groups."""
    program = tmp_path / "ends.py"
    program.write_text(PROGRAM)
    settings = {
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_CUMEM_ENABLE": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT_S),
        "LIVES_S": str(3 * HEARTBEAT_S),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, **settings}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "lives"
