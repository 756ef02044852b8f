"""What control/README.md says of several hosts, carried out: coordinator, engine and trainer share only a wire."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.trainer_agent.demo.child_processes import Programs

from .fleet import ROOT, poll
from .hosts import Host, hosts, unavailable

NONE = unavailable()
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(NONE), reason=NONE or "there are namespaces"),
]

CLI = [sys.executable, "-m", "weightbus.control.cli.entry_point"]
LOADER = "weightbus.engine_agent.worker_loader.load"
SERVER_PORT, STATUS_PORT, SIDECAR_PORT, RANKS_PORT = 30000, 5752, 5760, 29500


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Host]]:
    """Three hosts."""
    with hosts("coordinator", "engine", "trainer") as made:
        yield made


@pytest.mark.parametrize("transport", ["distributed", "sends"])
def test_a_version_crosses_from_host_to_host_under_keys(
    places: dict[str, Host], tmp_path: Path, transport: str
) -> None:
    """With CURVE keys on the bus and a gloo group between two hosts, a real server serves what real ranks trained."""
    bus, engine, trainer = places["coordinator"], places["engine"], places["trainer"]
    for seed in (0, 1):
        maker = [sys.executable, str(ROOT / "tests/kit/tiny_model.py"), str(tmp_path / f"seed{seed}"), f"--seed={seed}"]
        subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
    keys, endpoint = tmp_path / "keys", f"tcp://{bus.address}:5750"
    subprocess.run([*CLI, "keygen", f"--keys={keys}", "e0", "trainer"], check=True, stdout=subprocess.DEVNULL)
    for name, role in (("e0", "engine"), ("trainer", "trainer")):
        trust = [*CLI, "trust", f"--keys={keys}", "add", name, f"--role={role}", "--channels=e2e"]
        subprocess.run(trust, check=True, stdout=subprocess.DEVNULL)
    url = f"http://{engine.address}:{SERVER_PORT}"
    server = [
        sys.executable,
        "-m",
        "weightbus.engine_agent.engines.sglang.cpu_server",
        f"--model-path={tmp_path / 'seed0'}",
    ]
    server += [f"--custom-weight-loader={LOADER}"] if transport == "sends" else []
    sidecar = [*CLI, "engine-agent", "--name=e0", "--channel=e2e", f"--server={url}", f"--coordinator={endpoint}"]

    with Programs(tmp_path) as programs:
        programs.start(
            "coordinator",
            bus.argv([*CLI, "coordinator", f"--bind={bus.address}", f"--keys={keys}", f"--journal={tmp_path / 'j'}"]),
        )
        programs.start(
            "server",
            engine.argv([*server, f"--port={SERVER_PORT}", f"--host={engine.address}", "--skip-tokenizer-init"]),
        )
        programs.start(
            "sidecar", engine.argv([*sidecar, f"--url={url}", f"--keys={keys}", f"--state-dir={tmp_path / 'state'}"])
        )
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(RANKS_PORT),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "WEIGHTBUS_TRAINER_KEYS": str(keys),
            "WEIGHTBUS_TRAINER_HOST": trainer.address,
        }
        rank = trainer.argv([sys.executable, str(ROOT / "tests/e2e/trainer_rank.py"), str(tmp_path), endpoint])
        programs.start("rank1", rank, environment | {"RANK": "1"})

        def channel() -> dict[str, object]:
            return bus.request("GET", f"http://127.0.0.1:{STATUS_PORT}/status")["channels"].get("e2e", {})

        poll("the engine to be ready", lambda: channel().get("ready") == [url])
        order = {"seed": 1, "version": 1, "transport": transport, "bucket_bytes": 50_000}
        done = subprocess.run(
            rank,
            input=json.dumps(order) + "\n",
            capture_output=True,
            text=True,
            timeout=480,
            env={**os.environ, **environment, "RANK": "0"},
            check=True,
        )
        report = json.loads(done.stdout.splitlines()[-1])

        assert "error" not in report, report
        outcomes = {one["engine"]: (one["outcome"], one["transport"], one["verified_by"]) for one in report["engines"]}
        assert outcomes == {"e0": ("committed", transport, "live-digest")}
        body = {"input_ids": [5, 17, 33], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4}}
        answer = trainer.request("POST", f"{url}/generate", json=body)
        assert answer["meta_info"]["weight_version"] == "1"
        poll("the engine to be ready again", lambda: channel()["ready"] == [url])
