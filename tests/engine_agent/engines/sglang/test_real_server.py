"""The contract on real SGLang servers, with one rank and with two; and their greedy tokens against transformers'.

``WEIGHTBUS_SGLANG_OVERLAY`` runs it on another release than the installed one: a path list, as in PYTHONPATH, of
folders into which wheels were unpacked. Only the servers see them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from weightbus.engine_agent.engines.sglang import cpu_server

from ....kit import tiny_model
from ....kit.ports import free_port
from .sglang_contract import PROMPT, SGLangBench, SGLangContract

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
START_S = 480.0
OVERLAY = os.environ.get("WEIGHTBUS_SGLANG_OVERLAY", "")
ORACLE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
asked = torch.tensor([json.loads(sys.argv[2])])
options = dict(attention_mask=torch.ones_like(asked), max_new_tokens=8, min_new_tokens=8, do_sample=False)
print(json.dumps(model.generate(asked, eos_token_id=None, **options)[0, asked.shape[1]:].tolist()))
"""


def serve(folder: Path, tp: int, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server and wait until it generates."""
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "weightbus.engine_agent.engines.sglang.cpu_server",
        "--model-path",
        str(folder),
        "--port",
        str(port),
    ]
    path = os.pathsep.join(part for part in (OVERLAY, os.environ.get("PYTHONPATH", "")) if part)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, "--tp-size", str(tp), "--skip-tokenizer-init"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health_generate", timeout=30, trust_env=False).status_code == 200:
                return process, url
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    end(process)
    pytest.fail(f"the server did not start; the end of its log:\n{log.read_text()[-2000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, if it has not ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return tiny_model.write(folder / "a", 1), tiny_model.write(folder / "b", 2)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def bench(
    request: pytest.FixtureRequest, checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangBench]:
    """A real server."""
    folder = tmp_path_factory.mktemp("server")
    process, url = serve(checkpoints[0], request.param, folder / "log")
    made = SGLangBench(url, *checkpoints, folder)
    yield made
    made.close()
    end(process)


class TestRealServer(SGLangContract):
    """The real server keeps the contract."""

    def test_tokens_are_those_of_transformers(self, bench: SGLangBench) -> None:
        """After a load through shared memory the server writes what a plain transformers model writes."""
        shim = Path(cpu_server.__file__).with_name("cpu_shim")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shim), os.environ.get("PYTHONPATH", "")])}
        oracle = subprocess.run(
            [sys.executable, "-c", ORACLE, str(bench.second), json.dumps(PROMPT)],
            env={**env, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=120,
            check=True,
        )
        bench.server.pause("retract")
        bench.load(bench.second)
        bench.server.flush()
        bench.server.resume()
        assert bench.generate().tokens == json.loads(oracle.stdout.splitlines()[-1])
