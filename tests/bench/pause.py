"""How long a server stands still for a version beyond copying and proving it: `make bench-pause`.

A coordinator, a sidecar and a light server (tests/kit/fake_sglang.py, here with our loader and a tiny model) are
processes of their own; this one trains and publishes over `direct`. The server notes when each call came and went, so
every hop of the pause is measured where requests feel it: from the moment it stands still to the moment it goes on.
What a real server takes for its part (its step, its scheduler, the copy) is not in it, but for ``--hop-ms``: so long
every call takes to the workers, and its answer back. tests/gpu/direct.py has all of it.

Prints one JSON object: milliseconds, medians over the rounds, and `gap` = from the end of the pause call to the end of
the call that lets it generate.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "chaos")]

import model  # noqa: E402
import torch  # noqa: E402

from tests.kit.fake_sglang import FakeSGLang  # noqa: E402
from tests.kit.flat_module import FlatModule  # noqa: E402
from tests.kit.ports import free_port  # noqa: E402

STEADY_AFTER = 3
"""The first rounds record, plan and warm up."""
START_S = 60.0


# -- the server --------------------------------------------------------------------------------------------------------


class NotingServer(FakeSGLang):
    """Says when each call came and went."""

    def __init__(self, checkpoint: Path, version: str, hop_s: float) -> None:
        super().__init__(checkpoint, version)
        self.hop_s = hop_s
        self.model = FlatModule(model.weights(checkpoint, model.LAUNCH))

    def server_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """It has our loader."""
        from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER

        return {**super().server_info(body), "custom_weight_loader": [LOADER]}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        """Calls the loader, which connects to the sidecar and does what that says."""
        import base64
        import re

        from weightbus.engine_agent.worker_loader import load

        (payload,) = body["serialized_named_tensors"]
        found = re.search(rb"weightbus:[\x20-\x7e]+?\.sock", base64.b64decode(payload))
        assert found
        load(self.model, [(found[0].decode(), torch.empty(0))])
        return {"success": True, "message": "Success."}

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """As the light server."""
        came = time.monotonic()
        try:
            time.sleep(self.hop_s)
            found = super().answer(method, path, body)
            time.sleep(self.hop_s)
            return found
        finally:
            note(path, came)


def note(what: str, came: float) -> None:
    """One line for the process that measures."""
    sys.stdout.write(json.dumps([what, came, time.monotonic()]) + "\n")
    sys.stdout.flush()


def serve(checkpoint: Path, version: str, hop_s: float) -> None:
    """Until killed."""
    from weightbus.engine_agent.worker import loader as worker_loader

    torch.set_num_threads(1)
    obey = worker_loader._obey

    def noting(state: Any, message: Any, called_off: Any) -> Any:
        came = time.monotonic()
        try:
            return obey(state, message, called_off)
        finally:
            note(message.kind, came)

    worker_loader._obey = noting
    server = NotingServer(checkpoint, version, hop_s).start()
    note(f"http://127.0.0.1:{server.port}", 0.0)
    signal.pause()


# -- the rounds --------------------------------------------------------------------------------------------------------


def run(rounds: int, folder: Path, release: str, hop_ms: float) -> dict[str, Any]:
    """Publish `rounds` versions and take the pauses of the steady ones apart."""
    from weightbus.trainer_agent import TrainerAgent
    from weightbus.trainer_agent.sources.hf_module import HFModuleSource

    checkpoint = model.write_checkpoint(folder / "checkpoint")
    (folder / "run").mkdir(mode=0o700)
    bus, status = free_port(), free_port()
    weightbus = [sys.executable, "-m", "weightbus.control.cli.entry_point"]
    children: list[subprocess.Popen[bytes]] = []
    notes = folder / "notes"

    def start(*argv: str, out: Path | None = None) -> None:
        with (out or folder / f"log{len(children)}").open("wb") as log, (folder / "errors").open("ab") as errors:
            children.append(subprocess.Popen(argv, stdout=log, stderr=errors, start_new_session=True))

    try:
        ports = (f"--router-port={bus}", f"--http-port={status}")
        start(*weightbus, "coordinator", "--insecure-loopback", *ports, f"--journal={folder / 'journal.sqlite'}")
        as_told = ("--release", release, "--hop-ms", str(hop_ms))
        start(sys.executable, __file__, "--serve", str(checkpoint), *as_told, out=notes)
        wait("the server", lambda: bool(noted(notes)))
        sidecar = ("--insecure-loopback", "--name=e0", "--channel=bench", f"--server={noted(notes)[0][0]}")
        sidecar += (f"--coordinator=tcp://127.0.0.1:{bus}", f"--http-port={free_port()}", "--verify=available")
        start(
            *weightbus, "engine-agent", *sidecar, f"--state-dir={folder / 'state'}", f"--runtime-dir={folder / 'run'}"
        )
        wait("the engine", lambda: ready(status))
        module = FlatModule(model.weights(checkpoint, 1))
        agent = TrainerAgent.connect(
            HFModuleSource(module, model="Qwen3ForCausalLM"),
            channel="bench", coordinator=f"tcp://127.0.0.1:{bus}", transport=("direct",), insecure_loopback=True,
            pause="in_place", flush=False, runtime_dir=folder / "run",
        )  # fmt: skip
        reports = []
        with agent:
            for version in range(1, rounds + 1):
                reports.append(agent.publish(version))
                time.sleep(0.02)  # what the sidecar has yet to write is no part of the next round
    finally:
        for child in children:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    pauses = taken_apart(noted(notes))[STEADY_AFTER:]
    assert len(pauses) == rounds - STEADY_AFTER, (folder / "errors").read_text()[-2000:]
    assert all(report.engines[0].outcome == "committed" for report in reports)
    found = {hop: milliseconds(pause[hop] for pause in pauses) for hop in pauses[0]}
    steps = {key: milliseconds(report.seconds[key] for report in reports[STEADY_AFTER:]) for key in reports[-1].seconds}
    return {"rounds": len(pauses), "hops_ms": found, "round_ms": steps}


def taken_apart(notes: list[tuple[str, float, float]]) -> list[dict[str, float]]:
    """Each round's pause, hop by hop, as the server saw it."""
    pauses: list[dict[str, float]] = []
    at: dict[str, tuple[float, float]] = {}
    for what, came, went in notes:
        at[what] = (came, went)
        if what != "/continue_generation" or "Replay" not in at:
            continue
        pause, update, replay = at["/pause_generation"], at["/update_weights_from_tensor"], at["Replay"]
        label, resume = at["/update_weight_version"], at["/continue_generation"]
        pauses.append(
            {
                "gap": resume[1] - pause[1],
                "gap_less_replay": resume[1] - pause[1] - (replay[1] - replay[0]),
                "paused_to_loader_called": update[0] - pause[1],
                "loader_called_to_copy": replay[0] - update[0],
                "copy_and_digest": replay[1] - replay[0],
                "copied_to_loader_left": update[1] - replay[1],
                "loader_left_to_resume_called": max(resume[0] - update[1], 0.0),
                "resume_call": resume[1] - resume[0],
                "of_it_label_call": label[1] - label[0],
                "pause_call": pause[1] - pause[0],
            }
        )
        at = {}
    return pauses


def milliseconds(values: Any) -> float:
    """The median."""
    return round(1000 * statistics.median(values), 3)


def noted(path: Path) -> list[tuple[str, float, float]]:
    """Whole lines."""
    return [tuple(json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def ready(port: int) -> bool:
    """The coordinator lists the engine."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as page:
            channels = json.load(page)["channels"]
    except OSError:
        return False
    return "bench" in channels and len(channels["bench"]["engines"]) == 1


def wait(what: str, done: Callable[[], bool]) -> None:
    """Poll."""
    until = time.monotonic() + START_S
    while not done():
        if time.monotonic() >= until:
            raise TimeoutError(f"waited {START_S:.0f} s for {what}")
        time.sleep(0.05)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=40, help="versions to publish")
    parser.add_argument("--disk", help="folder for journal and records: what their fsyncs take is in the figures")
    parser.add_argument(
        "--release", default="0.5.23", help="of SGLang, whose calls the server takes; 0.5.17: no sessions"
    )
    parser.add_argument("--hop-ms", type=float, default=0.0, help="of every call to the workers, and of its answer")
    given = parser.parse_args()
    if given.serve:
        return serve(given.serve, given.release, given.hop_ms / 1000)
    with tempfile.TemporaryDirectory(prefix="wbp", dir=given.disk) as folder:
        sys.stdout.write(json.dumps(run(given.rounds, Path(folder), given.release, given.hop_ms), indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
