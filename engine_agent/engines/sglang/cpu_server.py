"""Runs the unmodified SGLang HTTP server on a machine without a GPU.

Started as ``python -m weightbus.engine_agent.engines.sglang.cpu_server``.

For demos and tests: bf16 models (Qwen3, Llama; Qwen3-MoE with SGLang 0.5.23). This process becomes the server (exec),
so its process id is the server's; start it in a process group of its own and end the group, because the server's
workers are children that rename themselves. When it leads its group, the group ends with it, however it ends. Ready
when ``GET /health_generate`` answers 200, 20 to 60 seconds later.
"""

import argparse
import contextlib
import importlib.metadata
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SHIM = Path(__file__).with_name("cpu_shim")

_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    # The cache is bounded by the tokens. The fraction must only be generous: what other processes take of the machine's
    # memory while the server starts counts against it, and a small one ends the start ("no GPU memory left").
    "--mem-fraction-static=0.5",
    "--max-total-tokens=4096",
    "--sleep-on-idle",  # otherwise an idle server keeps one core busy
)
_NO_GRAPHS = ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled")
_NO_GRAPHS_0_5_11 = ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")


def command(model_path: str, port: int, tp: int, extra: Sequence[str], release: str) -> list[str]:
    """The command line of a server of that release; a flag in `extra` overrides ours, as the last one given counts."""
    flags = [flag for flag in _FLAGS if flag != "--sleep-on-idle" or "--no-sleep-on-idle" not in extra]
    rest = [flag for flag in extra if flag != "--no-sleep-on-idle"]
    head = [sys.executable, "-m", "sglang.launch_server", "--model-path", model_path, "--host=127.0.0.1"]
    graphs = _NO_GRAPHS_0_5_11 if release == "0.5.11" else _NO_GRAPHS
    return [*head, f"--port={port}", f"--tp-size={tp}", *flags, *graphs, *rest]


def environment(environ: Mapping[str, str], workers: int, cores: Sequence[int]) -> dict[str, str]:
    """`environ` plus what a CPU server needs. `cores` are shared out among the `workers` of all replicas."""
    path = [str(_SHIM), environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": _binding(workers, cores),
        **environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }


def _binding(tp: int, cores: Sequence[int]) -> str:
    """One list of cores for each worker, split by ``|``. More workers than cores share them in turn."""
    if tp >= len(cores):
        return "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    share = len(cores) // tp
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(tp))


def end_group_with(leader: int) -> None:
    """Leave a process behind that waits for `leader`, this process, to end, and then kills what is left of its group.

    SGLang's workers ask the kernel to end with their parent, but only once they have started, which takes seconds.
    """
    if child := os.fork():
        os.waitpid(child, 0)  # not ours any more when we have become the server: its own child has no parent here
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        with contextlib.suppress(ProcessLookupError):  # it, or all of them, ended already
            ended = select.poll()  # select() refuses descriptors above 1023
            ended.register(os.pidfd_open(leader), select.POLLIN)
            ended.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Become the server. Flags that are not ours go to SGLang as they are."""
    parser = argparse.ArgumentParser(prog="weightbus.engine_agent.engines.sglang.cpu_server", description=__doc__)
    parser.add_argument("--model-path", required=True, help="checkpoint folder in Hugging Face form")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", "--tp", type=int, default=1, help="tensor-parallel workers")
    parser.add_argument("--dp-size", "--dp", type=int, default=1, help="plain replicas, each of so many workers")
    known, extra = parser.parse_known_args(argv)
    env = environment(os.environ, known.tp_size * known.dp_size, sorted(os.sched_getaffinity(0)))
    extra = [*extra, f"--dp-size={known.dp_size}"] if known.dp_size > 1 else extra
    if os.getpgrp() == os.getpid():
        end_group_with(os.getpid())
    release = importlib.metadata.version("sglang")  # of the first one on the path, as the server's
    os.execve(sys.executable, command(known.model_path, known.port, known.tp_size, extra, release), env)  # noqa: S606


if __name__ == "__main__":
    main()
