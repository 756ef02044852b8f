"""The modules of `weightbus` that one steady round passes, counted in the processes of a real one.

    python -m tests.round_trace [--transport local] [--functions]

A coordinator with keys, a light server with our loader, its sidecar and a trainer of two FSDP2 ranks run as processes
of their own. The third version is published with a profile function in every thread of each process; printed are the
modules of which a function was called, and with ``--functions`` the functions in the order of their first call. Code
that runs at import and code that a library generates (constructors of messages) is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/chaos")]

from tests.kit.ports import free_port  # noqa: E402
from tests.kit.waiting import until  # noqa: E402

CHANNEL = "trace"
RANKS = 2
STEADY = 3
"""The version whose round is traced: the first records and plans, the second may still fill caches."""
PROGRAMS = ("trainer-0", "trainer-1", "coordinator", "sidecar", "server")
TRANSPORTS = ("direct", "sends", "local", "distributed", "disk")
_OPTIMIZED = 1
"""``inspect.CO_OPTIMIZED``: set for functions, not for the bodies of modules and classes."""


class Tracer:
    """Notes each function of ours that a thread of this process calls, while the traced round runs."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._calls: dict[CodeType, str] = {}
        self._on = False

    def install(self) -> None:
        """In this thread and in every later one."""
        threading.Thread(target=self._follow, name="tracer", daemon=True).start()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def write(self) -> None:
        """Save what was called, as ``module:qualified name``, in the order of first calls."""
        self._on = False
        file = self._folder / f"{self._name}.json"
        file.with_suffix(".new").write_text(json.dumps(list(self._calls.values())))
        file.with_suffix(".new").replace(file)

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not self._on:
            return
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        if code in self._calls or not module.startswith("weightbus.") or code.co_filename.startswith("<"):
            return
        if code.co_flags & _OPTIMIZED:
            self._calls[code] = f"{module}:{code.co_qualname}"

    def _follow(self) -> None:
        """Begin and end with the file FOLDER/tracing, and say so."""
        sys.setprofile(None)
        while not (self._folder / "tracing").exists():
            time.sleep(0.01)
        self._on = True
        (self._folder / f"{self._name}.traces").touch()
        while (self._folder / "tracing").exists():
            time.sleep(0.01)
        self.write()


# -- the programs of the deployment -----------------------------------------------------------------------------------


def coordinator(job: dict[str, Any]) -> None:
    from weightbus.control.server.coordinator_process import CoordinatorProcess
    from weightbus.control.server.settings import CoordinatorSettings

    folder = Path(job["folder"])
    settings = CoordinatorSettings(
        keys=folder / "keys", router_port=job["bus"], http_port=0, journal=folder / "journal.sqlite"
    )
    CoordinatorProcess(settings).run()


def server(job: dict[str, Any]) -> None:
    from tests.kit.light_engines import Gate, LoadedServer

    folder = Path(job["folder"])
    made = LoadedServer(folder / "checkpoint", Gate(folder / "gate"))
    made.port = job["port"]
    made.start()
    signal.pause()


def sidecar(job: dict[str, Any]) -> None:
    from weightbus.engine_agent.sidecar.driver import EngineAgent
    from weightbus.engine_agent.sidecar.settings import EngineAgentSettings

    folder = Path(job["folder"])
    settings = EngineAgentSettings(
        name="e0",
        channel=CHANNEL,
        server=f"http://127.0.0.1:{job['port']}",
        coordinator=f"tcp://127.0.0.1:{job['bus']}",
        keys=folder / "keys",
        http_port=job["status"],
        state_dir=folder / "state",
        runtime_dir=folder / "run",
    )
    EngineAgent(settings).run()


@torch.no_grad()
def trainer(job: dict[str, Any]) -> None:
    import model
    import torch.distributed as dist
    from trainer import build, fill, shard

    from weightbus.trainer_agent import TrainerAgent
    from weightbus.trainer_agent.sources.hf_module import FSDPSource

    folder, rank = Path(job["folder"]), job["rank"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    module = shard(build(model.weights(folder / "checkpoint", 0)))
    agent = TrainerAgent.connect(
        FSDPSource(module, model="Qwen3ForCausalLM"),
        channel=CHANNEL,
        coordinator=f"tcp://127.0.0.1:{job['bus']}",
        transport=(job["transport"],),
        keys=folder / "keys",
        runtime_dir=folder / "run",
        bucket_bytes=64 << 10,
        environ={},
    )
    for version in range(1, STEADY + 1):
        fill(module, model.weights(folder / "checkpoint", version))
        if version == STEADY:
            dist.barrier()
            if not rank:
                (folder / "tracing").touch()
            until(lambda: len(list(folder.glob("*.traces"))) == len(PROGRAMS), "all programs to trace")
        report = agent.publish(version)
    dist.barrier()
    if not rank:
        (folder / "tracing").unlink()
        (folder / "report.json").write_text(json.dumps([[each.outcome, each.transport] for each in report.engines]))
    until((folder / f"{job['name']}.json").exists, "the tracer")
    dist.barrier()
    agent.close()


# -- the deployment ---------------------------------------------------------------------------------------------------


def trace(transport: str, root: Path) -> dict[str, list[str]]:
    """Run three rounds; returns what each program called in the last, by program."""
    import model

    from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
    from weightbus.control.protocol.messages import AgentId, Channel, Role

    model.write_checkpoint(root / "checkpoint")
    channels = (Channel(CHANNEL),)
    owners = [AgentKeys(AgentId("e0"), Role.ENGINE, channels), AgentKeys(AgentId("trainer"), Role.TRAINER, channels)]
    make_deployment_keys(root / "keys", owners)
    ports = {name: free_port() for name in ("bus", "port", "status")}
    running = []
    try:
        for name in ("coordinator", "server", "sidecar", "trainer-0", "trainer-1"):
            kind, _, rank = name.partition("-")
            job = {"name": name, "kind": kind, "rank": int(rank or 0), "folder": str(root), "transport": transport}
            command = [sys.executable, "-m", "tests.round_trace", "--program", json.dumps(job | ports)]
            with (root / f"{name}.log").open("wb") as log:
                running.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        until(lambda: all((root / f"{name}.json").exists() for name in PROGRAMS) or _ended(running), "the round", 240.0)
        if not (root / "report.json").exists():
            raise RuntimeError("\n".join((root / f"{name}.log").read_text()[-3000:] for name in PROGRAMS))
        outcomes = json.loads((root / "report.json").read_text())
        if outcomes != [["committed", transport]]:
            raise RuntimeError(f"the traced round ended as {outcomes}")
    finally:
        for process in running:
            process.kill()
            process.wait()
    return {name: json.loads((root / f"{name}.json").read_text()) for name in PROGRAMS}


def _ended(running: list[subprocess.Popen[bytes]]) -> bool:
    """Whether a program failed: none of them ends before the traced round."""
    return any(process.poll() for process in running)


def modules(calls: list[str]) -> list[str]:
    """The modules of `calls`, sorted."""
    return sorted({call.partition(":")[0].removeprefix("weightbus.") for call in calls})


def main() -> None:
    """Trace one round and print what it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=TRANSPORTS, default="local")
    parser.add_argument("--functions", action="store_true", help="print functions in the order of first calls")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program:
        job = json.loads(given.program)
        Tracer(Path(job["folder"]), job["name"]).install()
        {"coordinator": coordinator, "server": server, "sidecar": sidecar, "trainer": trainer}[job["kind"]](job)
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="wb-") as root:
        found = trace(given.transport, Path(root))
    for name, calls in found.items():
        passed = modules(calls)
        say(f"{name}: {len(passed)} modules", *(f"    {each}" for each in (calls if given.functions else passed)))
    every = modules([call for calls in found.values() for call in calls])
    say(f"transport={given.transport} modules={len(every)}")


def say(*lines: str) -> None:
    """Print lines."""
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
