"""Proof and figures for the stock paths on GPUs: CUDA IPC buckets, an NCCL broadcast group, files. Against real SGLang.

Starts a coordinator, an SGLang server with its sidecar on each of two GPUs, and a Megatron-core trainer with random
weights (tensor parallel over both GPUs). The weights are published to the first server through CUDA IPC and to the
second through NCCL. Then the first server's parameters are overwritten with noise and loaded again from files, SGLang's
own path. The server's own checksum of its live parameters must be the same after all three, and differ after the noise.

    python3 tests/gpu/stock.py                       two CUDA devices, Qwen3-8B shapes, 16.4 GB
    python3 tests/gpu/stock.py --device cpu          the same steps with a tiny model, shared memory and gloo

Prints one JSON object; `--out` writes it too. Exits with 1 unless everything was equal.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = {
    **QWEN3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
CUDA_FLAGS = [
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--mem-fraction-static=0.4",
    "--max-total-tokens=20000",
    "--skip-server-warmup",
    "--disable-cuda-graph",
]
CPU_FLAGS = ["--load-format=dummy", "--skip-tokenizer-init"]
CHANNELS = {"ipc": "local", "nccl": "distributed"}


def log(text: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(what: str, done: Callable[[], bool], deadline_s: float, check: Callable[[], None]) -> None:
    """Poll until `done`; raises what `check` raises, or TimeoutError."""
    until = time.monotonic() + deadline_s
    while True:
        check()
        with contextlib.suppress(httpx.HTTPError):
            if done():
                return
        if time.monotonic() > until:
            raise TimeoutError(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(0.2)


# -- the orchestrating process -----------------------------------------------------------------------------------------


def orchestrate(args: argparse.Namespace) -> int:
    """Start everything, run the trainer's ranks, print what they measured."""
    from weightbus.trainer_agent.demo.processes import Programs

    work = Path(tempfile.mkdtemp(prefix="weightbus-stock-"))
    model = work / "model"
    model.mkdir()
    config = {**(QWEN3_8B if args.device == "cuda" else TINY)}
    if args.layers:
        config["num_hidden_layers"] = args.layers
    (model / "config.json").write_text(json.dumps(config))
    bus, hints, status = free_port(), free_port(), free_port()
    layout: dict[str, Any] = {"bus": bus, "status": status, "engines": {}, "checkpoints": str(work / "checkpoints")}
    with Programs(work) as programs:
        programs.start(
            "coordinator",
            [
                sys.executable,
                "-m",
                "weightbus.control.cli",
                "coordinator",
                f"--router-port={bus}",
                f"--pub-port={hints}",
                f"--http-port={status}",
                f"--journal={work / 'journal.sqlite'}",
                "--insecure-loopback",
            ],
        )
        for gpu, channel in enumerate(CHANNELS):
            layout["engines"][channel] = start_engine(programs, args, work, (channel, gpu), bus)
        (work / "layout.json").write_text(json.dumps(layout))
        ranks = programs.start("ranks", rank_command(args, work, model), env=rank_environment(args))
        wait("the ranks", lambda: ranks.process.poll() is not None, args.deadline, lambda: programs.check([ranks]))
        programs.check([ranks])
        result = json.loads((work / "result.json").read_text())
    result = {**describe(args, config), **result}
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.out:
        Path(args.out).write_text(text + "\n")
    return 0 if result["equal"] else 1


def start_engine(
    programs: Any, args: argparse.Namespace, work: Path, place: tuple[str, int], bus: int
) -> dict[str, int]:
    """One server and its sidecar; `place` is its channel and its GPU."""
    channel, gpu = place
    model = work / "model"
    port, side = free_port(), free_port()
    head = [f"--model-path={model}", f"--port={port}"]
    if args.device == "cuda":
        argv = ["-m", "sglang.launch_server", *head, "--host=127.0.0.1", f"--base-gpu-id={gpu}", *CUDA_FLAGS]
    else:
        argv = ["-m", "weightbus.engine_agent.cpu_server", *head, *CPU_FLAGS]
    programs.start(f"server-{channel}", [sys.executable, *argv], env={"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"})
    programs.start(
        f"sidecar-{channel}",
        [
            sys.executable,
            "-m",
            "weightbus.control.cli",
            "engine-agent",
            f"--name={channel}0",
            f"--channel={channel}",
            f"--server=http://127.0.0.1:{port}",
            f"--coordinator=tcp://127.0.0.1:{bus}",
            f"--http-port={side}",
            f"--state-dir={work / 'state'}",
            "--insecure-loopback",
        ],
    )
    return {"server": port, "sidecar": side}


def rank_command(args: argparse.Namespace, work: Path, model: Path) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.tp}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", __file__, "--rank-of", str(work), "--model", str(model),
        f"--device={args.device}", f"--tp={args.tp}", f"--deadline={args.deadline}", f"--rounds={args.rounds}",
    ]  # fmt: skip


def rank_environment(args: argparse.Namespace) -> dict[str, str]:
    if args.device == "cuda":
        # SGLang sets the same in its workers; one end with and one without hangs in the first broadcast.
        return {"NCCL_CUMEM_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {"OMP_NUM_THREADS": "1"}


def describe(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """What was measured, where and how."""
    device = "CPU"
    if args.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        device = ", ".join(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split("\n")[:2])
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": device,
        "command": "python3 " + " ".join(["tests/gpu/stock.py", *sys.argv[1:]]),
        "model": f"{config['architectures'][0]}, {config['num_hidden_layers']} layers, hidden {config['hidden_size']}",
    }


# -- the trainer's ranks -----------------------------------------------------------------------------------------------


def rank_main(args: argparse.Namespace) -> None:
    """One rank of the trainer: build the model, publish by each way, let the servers say what they hold."""
    import torch
    import torch.distributed as dist

    if args.device == "cpu":
        from weightbus.trainer_agent import megatron_cpu

        megatron_cpu.install()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=dt.timedelta(seconds=args.deadline))
    work, hf = Path(args.rank_of), json.loads((Path(args.model) / "config.json").read_text())
    layout = json.loads((work / "layout.json").read_text())
    from weightbus.trainer_agent.megatron import MegatronSource

    model = build(args, hf)
    source = MegatronSource(model, hf_config=args.model, dtype=torch.bfloat16)
    root = dist.get_rank() == 0
    fleet = Fleet(layout) if root else None
    if fleet:
        fleet.wait_ready(args.deadline)
    dist.barrier()
    result: dict[str, Any] = {}
    versions = range(1, args.rounds + 1)
    for channel, transport in CHANNELS.items():
        result[channel] = publish(source, model, layout, (channel, transport), {each: each for each in versions})
    sums = {channel: fleet.checksum(channel) for channel in CHANNELS} if fleet else {}
    if fleet:
        fleet.overwrite("ipc")
        sums["noise"] = fleet.checksum("ipc")
    result["disk"] = publish(source, model, layout, ("ipc", "disk"), {args.rounds + 1: args.rounds})
    if fleet:
        sums["disk"] = fleet.checksum("ipc")
        (work / "result.json").write_text(json.dumps(summary(result, sums)))
    dist.barrier()
    source.close()
    dist.destroy_process_group()


def build(args: argparse.Namespace, hf: dict[str, Any]) -> Any:
    """This rank's part of a GPTModel with random weights."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    model_parallel_cuda_manual_seed(1234)
    extra: dict[str, Any] = {}
    if args.device == "cpu":
        from weightbus.trainer_agent import megatron_cpu

        extra = dict(megatron_cpu.CONFIG)
    config = TransformerConfig(**{
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "tensor_model_parallel_size": args.tp,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        **extra,
    })  # fmt: skip
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(hf["rope_theta"]),
    ).to(torch.bfloat16)
    return model.cuda() if args.device == "cuda" else model


def publish(
    source: Any, model: Any, layout: dict[str, Any], way: tuple[str, str], seeds: dict[int, int]
) -> list[dict[str, Any]]:
    """Publish versions on a channel by a transport, each with the weights of its seed; the reports."""
    import torch

    from weightbus.trainer_agent import TrainerAgent

    channel, transport = way
    agent = TrainerAgent.connect(
        source, channel=channel, name=f"trainer-{channel}", coordinator=f"tcp://127.0.0.1:{layout['bus']}",
        transport=(transport,), checkpoint_dir=Path(layout["checkpoints"]), insecure_loopback=True,
    )  # fmt: skip
    reports = []
    with agent:
        for version, seed in seeds.items():
            refill(model, seed)
            if source.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            report = agent.publish(version)
            took = time.perf_counter() - began
            log(f"{channel} by {transport}: version {version} in {took:.2f} s, {report.seconds}")
            engine = report.engines[0]
            reports.append(
                {
                    "total_s": took,
                    "bytes": report.bytes,
                    "buckets": report.buckets,
                    "outcome": str(report.outcome),
                    "seconds": report.seconds,
                    "engine_seconds": engine.seconds,
                    "engine": str(engine.outcome),
                    "verified_by": engine.verified_by,
                    "reason": engine.reason,
                }
            )
    return reports


def refill(model: Any, seed: int) -> None:
    """New weights, other on every rank and for every seed."""
    import torch
    import torch.distributed as dist

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1000 * seed + dist.get_rank())
    whole = torch.Generator(device).manual_seed(1000 * seed + 999)  # norms are on every rank alike
    with torch.no_grad():
        for parameter in model.parameters():
            cut = getattr(parameter, "tensor_model_parallel", False)
            parameter.normal_(0.0 if cut else 1.0, 0.02, generator=generator if cut else whole)


class Fleet:
    """The servers, asked directly: only to check what they hold."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self._layout = layout
        self._http = httpx.Client(timeout=120, trust_env=False)

    def wait_ready(self, deadline_s: float) -> None:
        """Until every sidecar says ready."""
        for channel, ports in self._layout["engines"].items():
            url = f"http://127.0.0.1:{ports['sidecar']}/readyz"
            wait(f"engine {channel}", lambda url=url: self._http.get(url).status_code == 200, deadline_s, lambda: None)
            health = f"http://127.0.0.1:{ports['server']}/health_generate"  # its first answer compiles kernels
            wait(
                f"server {channel}", lambda url=health: self._http.get(url).status_code == 200, deadline_s, lambda: None
            )
            log(f"engine {channel} is ready")

    def checksum(self, channel: str) -> dict[str, str]:
        """Digest of every live parameter, by the server itself."""
        found = self._ask(channel, {"action": "checksum"})
        sums = list(dig(found, "checksums"))
        if len(sums) != 1:
            raise RuntimeError(f"expected one rank's checksums, found {len(sums)} in {str(found)[:300]}")
        return dict(sums[0])

    def overwrite(self, channel: str) -> None:
        """Replace every live parameter by noise."""
        self._ask(channel, {"action": "reset_tensors"})

    def _ask(self, channel: str, body: dict[str, str]) -> Any:
        url = f"http://127.0.0.1:{self._layout['engines'][channel]['server']}/weights_checker"
        return self._http.post(url, json=body).raise_for_status().json()


def dig(value: Any, key: str) -> Iterator[Any]:
    """Every value under `key`, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            else:
                yield from dig(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from dig(inner, key)


def summary(result: dict[str, Any], sums: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The figures, and whether all ways led to the same parameters."""
    reference = sums["disk"]
    parameters = [name for name in reference if sums["noise"].get(name) != reference[name]]
    committed = all(round_["outcome"] == round_["engine"] == "committed" for way in result.values() for round_ in way)
    return {
        "bytes": result["ipc"][-1]["bytes"],
        "buckets": result["ipc"][-1]["buckets"],
        "ipc_bucket_s": result["ipc"][-1]["engine_seconds"].get("transfer"),
        "nccl_broadcast_s": result["nccl"][-1]["engine_seconds"].get("transfer"),
        "disk_s": result["disk"][-1]["engine_seconds"].get("transfer"),
        "equal": bool(committed and parameters and sums["ipc"] == sums["nccl"] == reference),
        "parameters_compared": len(reference),
        "parameters_changed_by_noise": len(parameters),
        "rounds": result,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has")
    parser.add_argument("--tp", type=int, default=2, help="ranks of the trainer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds by each way; the last one counts")
    parser.add_argument("--deadline", type=float, default=400.0, help="seconds that any one wait may take")
    parser.add_argument("--out", help="write the JSON here too")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args)
        return 0
    return orchestrate(args)


if __name__ == "__main__":
    sys.exit(main())
