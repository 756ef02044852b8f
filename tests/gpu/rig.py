"""What the programs of this folder share: coordinator, servers with sidecars, Megatron-core models, and figures."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""A ``quantization_config``."""
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY = {**QWEN3_8B, **_SMALL}
TINY_MOE = {**QWEN3_30B_A3B, **_SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CUDA_FLAGS = (
    "--skip-tokenizer-init",
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--max-total-tokens=20000",
    "--skip-server-warmup",
)
TP_FLAGS = ("--enforce-disable-flashinfer-allreduce-fusion", "--disable-custom-all-reduce")
"""Without them a server of several GPUs did not come up: it would use NVLink multicast, or wait for it."""
GRAPHS = ("--cuda-graph-max-bs=4", "--disable-prefill-cuda-graph")
"""Decoding as in a deployment. Capturing 58 sizes of prefill would take most of the start."""
FP8_FLAGS = ("--fp8-gemm-backend=triton", "--moe-runner-backend=triton")
"""Kernels that are there without DeepGEMM. The weights lie as they were loaded with any of them on Hopper."""
CPU_FLAGS = ("--skip-tokenizer-init",)
LOADER = "--custom-weight-loader=weightbus.engine_agent.worker_loader.load"
KIT = Path(__file__).resolve().parent.parent / "kit"
MOST_OF_PLAIN = 1.02
"""Of the speed of a plain copy or a bare send of as many bytes. What is faster has moved fewer than were counted."""
_LARGEST = {
    **_SMALL, "num_hidden_layers": 4, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
}  # fmt: skip
"""Largest sizes of a model on a CPU."""


def parser(doc: str | None, *, memory: float, deadline: float, whose: str = "of everything") -> argparse.ArgumentParser:
    """Of a program that starts servers and a trainer: what all of them are told in the same words."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--memory", type=float, default=memory, help="of each server, --mem-fraction-static")
    found.add_argument("--deadline", type=float, default=deadline, help=f"seconds {whose}")
    found.add_argument("--out", help="folder for the JSON files")
    found.add_argument("--trainer-of", help=argparse.SUPPRESS)
    return found


def ask_who_takes_part(found: argparse.ArgumentParser) -> None:
    """Of a program whose sidecars take broadcasts. What was kept is of servers that join themselves."""
    found.add_argument("--hands-on", action="store_true", help="sidecars take part in broadcasts in servers' places")


def ask_for_predictions(found: argparse.ArgumentParser) -> None:
    """Of a program that trains models whose configs may name prediction layers."""
    found.add_argument("--predictions", action="store_true", help="train prediction layers too, and send them")


def takes_part(args: argparse.Namespace) -> tuple[str, ...]:
    """The flags of each sidecar."""
    return () if args.hands_on else ("--no-hands-on",)


def model_of(args: argparse.Namespace, config: str | None = None) -> dict[str, Any]:
    """The config that `config` or ``--config`` names; else that of Qwen3-30B-A3B with ``--layers``, or a tiny one.

    On a CPU a named model is shrunk: it has the same layers, and small ones.
    """
    path = config or getattr(args, "config", None)
    if path:
        found: dict[str, Any] = json.loads(Path(path).read_text())
        return shrunk(found) if args.device == "cpu" else found
    return dict(TINY_MOE) if args.device == "cpu" else {**QWEN3_30B_A3B, "num_hidden_layers": args.layers}


def shrunk(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`hf` with sizes for a CPU; those that are small already stay."""
    found = {key: min(value, _LARGEST[key]) if value and key in _LARGEST else value for key, value in hf.items()}
    if hf["num_attention_heads"] == hf["num_key_value_heads"]:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def too_fast(ratio: float | None, of: str) -> str:
    """The problem with a `ratio` of the speed `of` a plain copy or send; empty where there is none."""
    if ratio is None or ratio <= MOST_OF_PLAIN:
        return ""
    return (
        f"{ratio:.2f} of the speed of {of}, at most {MOST_OF_PLAIN} is possible: fewer bytes were moved than counted;"
        " compare `takes` in the sidecar's /status with the plan"
    )


def write_layout(work: Path, layout: Mapping[str, Any]) -> None:
    """For whoever is started next."""
    (work / "layout.json").write_text(json.dumps(layout))


def write_found(work: Path, found: Mapping[str, Any]) -> None:
    """What a trainer has found so far; whoever reads it finds it whole."""
    (work / "result.new").write_text(json.dumps(found))
    (work / "result.new").rename(work / "result.json")


def write_result(out: str | None, name: str, result: Mapping[str, Any]) -> None:
    """Into the folder of the results, if one was named. Whoever reads it, or cuts us off, finds a whole one."""
    if out:
        new = Path(out) / f"{name}.new"
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.rename(Path(out) / f"{name}.json")


def keep_logs(work: Path, out: str | None, name: str) -> None:
    """Something failed: the ends of all logs to stderr, and more of them into the folder of the results."""
    from weightbus.trainer_agent.demo.child_processes import tail

    logs = sorted(work.glob("*.log"))
    for each in logs:
        log(f"{name} failed; {each.name} ends with\n{tail(each)[-2000:]}")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        whole = (f"\n==== {each.name}\n".encode() + each.read_bytes()[-60_000:] for each in logs)
        (Path(out) / f"{name}-logs.txt").write_bytes(b"".join(whole))


def play_cuda(device: str) -> None:
    """Without a GPU Megatron-core is told that it has one."""
    if device == "cpu":
        from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu

        megatron_cpu.install()


def log(text: str) -> None:
    """To stderr: stdout is for the JSON object."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stderr.flush()


_ports = iter(random.SystemRandom().sample(range(12_000, 30_000), 18_000))


def free_port() -> int:
    """Free a moment ago, and not given to outgoing connections: a server binds it a minute later."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port from 12000 to 29999 is free")


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


def arguments() -> list[str]:
    """Of this run, but for where its result goes."""
    found: list[str] = []
    words = iter(sys.argv[1:])
    for word in words:
        if word == "--out":
            next(words)
        elif not word.startswith("--out="):
            found.append(word)
    return found


def command(program: str) -> str:
    """How this run is repeated."""
    return " ".join([f"python3 tests/gpu/{program}", *arguments()])


def describe(program: str, device: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, where and how."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": devices() if device == "cuda" else "CPU",
        "command": command(program),
        "software": software(),
        "model": f"{hf['architectures'][0]}, {hf['num_hidden_layers']} layers, hidden {hf['hidden_size']}",
    }


@functools.cache
def devices() -> str:
    """Names of all GPUs."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return ", ".join(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split("\n")[:-1])


def software() -> dict[str, str]:
    """Versions of what was measured with."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for package in ("torch", "sglang", "megatron-core", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def follow(
    programs: Any, trainer: Any, work: Path, *, args: argparse.Namespace, name: str, news: Callable[[], object] = dict
) -> str:
    """Wait until the trainer has ended; `news` is called whenever it has written its result. Returns the problem."""
    from weightbus.trainer_agent.demo.child_processes import ProgramEnded

    measured, known = work / "result.json", 0

    def ended() -> bool:
        nonlocal known
        if measured.exists() and measured.stat().st_mtime_ns != known:
            known = measured.stat().st_mtime_ns
            news()
        return trainer.process.poll() is not None

    try:
        wait("the trainer", ended, args.deadline, lambda: programs.check([trainer]))
        programs.check([trainer])
    except (ProgramEnded, TimeoutError) as error:
        keep_logs(work, args.out, name)
        return f"{error}"
    return ""


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """A server and its sidecar."""

    channel: str
    gpu: int
    tp: int = 1
    flags: tuple[str, ...] = ()
    verify: str = "required"
    name: str = ""
    """Where a channel has several."""
    environment: tuple[tuple[str, str], ...] = ()
    """More of it for the server."""
    model: str = "model"
    """Folder of its checkpoint, as `write_model` made it."""
    sidecar: tuple[str, ...] = ()
    """More flags of that."""
    later: bool = False
    """Its sidecar is started by somebody else."""

    @property
    def place(self) -> str:
        """Its key in the layout."""
        return self.name or self.channel


def start_coordinator(programs: Any, work: Path) -> dict[str, Any]:
    """The layout of what runs, to be completed by `start_engine`."""
    bus, status = free_port(), free_port()
    programs.start(
        "coordinator",
        [
            sys.executable,
            "-m",
            "weightbus.control.cli.entry_point",
            "coordinator",
            f"--router-port={bus}",
            f"--http-port={status}",
            f"--journal={work / 'journal.sqlite'}",
            "--insecure-loopback",
        ],
    )
    return {"bus": bus, "status": status, "engines": {}, "checkpoints": str(work / "checkpoints")}


def start_engine(programs: Any, device: str, work: Path, engine: Engine, layout: dict[str, Any]) -> None:
    """One server and its sidecar, named after itself or its channel."""
    (port, process), side = start_server(programs, device, work / engine.model, engine), free_port()
    sidecar = [
        sys.executable,
        "-m",
        "weightbus.control.cli.entry_point",
        "engine-agent",
        f"--name={engine.place}0",
        f"--channel={engine.channel}",
        f"--server=http://127.0.0.1:{port}",
        f"--coordinator=tcp://127.0.0.1:{layout['bus']}",
        f"--http-port={side}",
        f"--state-dir={work / 'state'}",
        "--insecure-loopback",
        f"--verify={engine.verify}",
        *engine.sidecar,
    ]
    pid = 0 if engine.later else programs.start(f"sidecar-{engine.place}", sidecar).process.pid
    layout["engines"][engine.place] = {
        "server": port, "sidecar": side, "server_group": process, "sidecar_group": pid, "start": sidecar,
        "channel": engine.channel,
    }  # fmt: skip


def start_server(
    programs: Any, device: str, checkpoint: Path, engine: Engine, load_format: str = "dummy"
) -> tuple[int, int]:
    """A server of `checkpoint` alone: its port and its process. ``auto`` has it load the files, ``dummy`` nothing."""
    port = free_port()
    head = [f"--model-path={checkpoint}", f"--port={port}", f"--tp-size={engine.tp}", *engine.flags]
    if device == "cuda":
        more = TP_FLAGS if engine.tp > 1 else ()
        argv = ["-m", "sglang.launch_server", "--host=127.0.0.1", f"--base-gpu-id={engine.gpu}", *CUDA_FLAGS, *more]
    else:
        argv = ["-m", "weightbus.engine_agent.engines.sglang.cpu_server", *CPU_FLAGS]
    argv = [sys.executable, *argv, f"--load-format={load_format}", *head]
    environment = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0", **dict(engine.environment)}
    return port, programs.start(f"server-{engine.place}", argv, env=environment).process.pid


def ranks_command(program: str, ranks: int, arguments: list[str]) -> list[str]:
    """`program` on every rank."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", program, *arguments,
    ]  # fmt: skip


def ranks_environment(device: str) -> dict[str, str]:
    """What trainer ranks want to find."""
    if device == "cuda":
        # SGLang sets the same in its workers; one end with and one without hangs in the first broadcast.
        return {"NCCL_CUMEM_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {"OMP_NUM_THREADS": "1"}


def write_model(folder: Path, hf: dict[str, Any]) -> None:
    """A checkpoint that says what the model is made of, and holds nothing: its tensors are a hole in the file.

    Servers are started with random weights; sidecars want to know which tensors make up a complete version.
    """
    from weightbus.dataplane.quantize.schemes import quantized_tensors, read_quantization_config
    from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    header: dict[str, Any] = {}
    end = 0
    quantization = read_quantization_config(hf)
    specs = []
    for spec in hf_tensors(HFModel.parse(hf), "bfloat16"):
        scheme = quantization.scheme_of(spec) if quantization else None
        specs += quantized_tensors(spec, scheme) if scheme else [spec]
    for spec in specs:
        dtype = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}[spec.dtype]
        header[spec.name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)


class Fleet:
    """The servers, asked directly: only to check what they hold, and to measure."""

    def __init__(self, layout: dict[str, Any], context: int = 512) -> None:
        self.context = context
        """Tokens that a request may have."""
        self._layout = layout
        self._http = httpx.Client(timeout=120, trust_env=False)

    def url(self, channel: str, which: str = "server") -> str:
        """Of a server or a sidecar."""
        return f"http://127.0.0.1:{self._layout['engines'][channel][which]}"

    def wait_ready(self, deadline_s: float, *places: str) -> None:
        """Until every sidecar says ready, and every server has generated something."""
        for channel in places or self._layout["engines"]:
            for url in (self.url(channel, "sidecar") + "/readyz", self.url(channel) + "/health_generate"):
                wait(url, lambda url=url: self._http.get(url).status_code == 200, deadline_s, lambda: None)
            log(f"engine {channel} is ready")

    def add(self, place: str, port: int) -> None:
        """A server without a sidecar."""
        self._layout["engines"][place] = {"server": port}

    def wait_serving(self, place: str, deadline_s: float, check: Callable[[], None]) -> None:
        """Until it has generated something; raises what `check` raises."""
        url = self.url(place) + "/health_generate"
        wait(url, lambda: self._http.get(url).status_code == 200, deadline_s, check)

    def checksum(self, channel: str) -> list[dict[str, str]]:
        """Digest of every live parameter on every rank, by the server itself."""
        sums = [dict(each) for each in dig(self._ask(channel, {"action": "checksum"}), "checksums")]
        if not sums:
            raise RuntimeError(f"the server of {channel} reports no checksums")
        return sums

    def overwrite(self, channel: str) -> None:
        """Replace every live parameter by noise."""
        self._ask(channel, {"action": "reset_tensors"})

    def load(self, channel: str, folder: Path) -> None:
        """Have the server load a checkpoint by itself, as nobody of ours does it."""
        body = {"model_path": os.fspath(folder), "load_format": "auto"}
        answer = self._http.post(self.url(channel) + "/update_weights_from_disk", json=body)
        if answer.is_error:
            raise RuntimeError(f"the server of {channel} did not load {folder}: {answer.text[:300]}")

    def memory(self, channel: str, action: str, tags: Sequence[str]) -> None:
        """``release`` or ``resume`` the memory of these tags. A server that is not idle would end by it."""
        url = f"{self.url(channel)}/{action}_memory_occupation"
        self._http.post(url, json={"tags": list(tags)}).raise_for_status()

    def give_back(self, channel: str) -> None:
        """Ask the sidecar to have its server give its memory back."""
        answer = self._http.post(self.url(channel, "sidecar") + "/give-back")
        if answer.is_error:
            raise RuntimeError(f"{channel} gave nothing back: {answer.text}")

    def tokens(self, channel: str, count: int = 24) -> list[int]:
        """What it generates greedily, with nothing in its caches."""
        flush = self.url(channel) + "/flush_cache"  # refused until requests that were broken off have ended
        wait("an idle server", lambda: self._http.post(flush).status_code == 200, 30, lambda: None)
        sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0.0}
        body = {"input_ids": [5, 17, 33, 64, 99, 3], "sampling_params": sampling}
        answer = self._http.post(self.url(channel) + "/generate", json=body).raise_for_status().json()
        return [int(token) for token in answer["output_ids"]]

    def logprobs(self, channel: str, prompt: Sequence[int]) -> list[float]:
        """Logarithm of the probability that it gives to each token of `prompt` but the first."""
        body = {
            "input_ids": list(prompt), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": 0,
        }  # fmt: skip
        answer = self._http.post(self.url(channel) + "/generate", json=body).raise_for_status().json()
        return [float(each[0]) for each in answer["meta_info"]["input_token_logprobs"][1:]]

    def takes(self, channel: str, transport: str) -> int:
        """Bytes of a round that the worker with most of them takes, by the plan of the last one."""
        status = self._http.get(self.url(channel, "sidecar") + "/status").raise_for_status().json()
        taken = int(status["takes"].get(transport, 0))
        if not taken:
            raise RuntimeError(f"the sidecar of {channel} has no plan for {transport}: {status['takes']}")
        return taken

    def seconds(self, channel: str) -> dict[str, float]:
        """What the sidecar has counted so far: seconds by step and by call, ``step:copy`` and ``call:..``."""
        found: dict[str, float] = {}
        for line in self._http.get(self.url(channel, "sidecar") + "/metrics").text.splitlines():
            for kind in ("step", "call"):
                head = f"weightbus_sidecar_{kind}_seconds_"
                if line.startswith((head + "sum{", head + "count{")):
                    key, value = line.rsplit(" ", 1)
                    name = key.split(f'{kind}="')[1].split('"')[0]
                    suffix = "#" if line.startswith(head + "count{") else ""
                    found[f"{kind}:{name}{suffix}"] = float(value)
        return found

    def _ask(self, channel: str, body: dict[str, str]) -> Any:
        return self._http.post(self.url(channel) + "/weights_checker", json=body).raise_for_status().json()


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


# -- trainers ----------------------------------------------------------------------------------------------------------


def prepare(hf: Mapping[str, Any], device: str) -> None:
    """Before Megatron-core is imported: what it needs to build a model of `hf` here.

    A stand-in for Transformer Engine where only that has the model's layers: their parameters are wanted, and nothing
    is computed. Without a GPU Megatron-core is told that it has one.
    """
    of_engine = _of_engine(hf)
    if device == "cpu" or of_engine:
        sys.path.insert(0, os.fspath(KIT / "te_stub"))
    import mcore_on_cpu

    mcore_on_cpu.prepare()
    play_cuda(device)


def _of_engine(hf: Mapping[str, Any]) -> bool:
    """Whether only Transformer Engine has its layers."""
    return bool(_family(hf).core.get("layernorm_zero_centered_gamma"))


def _family(hf: Mapping[str, Any]) -> Any:
    if os.fspath(KIT) not in sys.path:
        sys.path.insert(0, os.fspath(KIT))
    from tiny_families import FAMILIES

    return next(each for each in FAMILIES.values() if each.architecture == hf["architectures"][0])


def build(hf: Mapping[str, Any], device: str, *, predictions: bool = True, **layout: int | None) -> list[Any]:
    """This rank's part of a Megatron-core model with parameters of any content; `layout` as tiny_families.Layout.

    With its prediction layers, where `hf` names some, unless `predictions` is false.
    """
    import torch

    tiny = _family(hf)
    import family_models
    import mcore_on_cpu
    from tiny_families import FAMILIES, Layout

    from weightbus.trainer_agent.sources.megatron.hf_model import HFModel

    mcore_on_cpu.patch()
    model = HFModel.parse(hf)
    family = next(name for name, each in FAMILIES.items() if each is tiny)
    family_models.PADDED_VOCABULARY = hf["vocab_size"]
    shape = Layout(**layout, te=_of_engine(hf))  # type: ignore[arg-type]
    family_models.start(shape)
    more: dict[str, Any] = {"mtp_num_layers": (model.predictions if predictions else 0) or None}
    if any(each.experts for each in model.layers):
        more["moe_layer_freq"] = [int(each.experts) for each in model.layers]
    # The stand-in makes its parameters on the default device.
    with torch.device(device) if shape.te else contextlib.nullcontext():
        chunks = family_models.build(
            family, hf, shape, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bf16=True,
            use_cpu_initialization=device == "cpu", perform_initialization=False, **more,
        )  # fmt: skip
    for chunk in chunks:
        mark_cut(chunk)
    return [chunk.to(torch.bfloat16).to(device) for chunk in chunks]


def mark_cut(chunk: Any) -> None:
    """Say which weights are parts of a larger one. Megatron-core says it while it initializes them, which is left out.

    Unless that is said, `refill` gives all ranks the same weights, and no comparison finds out which rank's came.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            whole = module.output_size, module.input_size
        elif isinstance(module, VocabParallelEmbedding):
            whole = module.num_embeddings, module.embedding_dim
        else:
            continue
        if module.weight is not None and tuple(module.weight.shape) != whole:
            module.weight.tensor_model_parallel = True


def refill(parameters: Any, seed: int) -> None:
    """New weights, other for every seed: cut parameters are other on every rank that has a part, replicas alike.

    Norms are about 1, all else about 0: a matrix of mean 1 would make outputs depend on little else.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    rank = dist.get_rank() if dist.is_initialized() else 0
    shard = parallel_state.get_tensor_model_parallel_rank() if parallel_state.is_initialized() else 0
    device = next(iter(parameters)).device
    experts, cut, whole = (torch.Generator(device).manual_seed(1000 * seed + n) for n in (rank, 500 + shard, 999))
    with torch.no_grad():
        for parameter in parameters:
            expert = not getattr(parameter, "allreduce", True)
            if expert or getattr(parameter, "tensor_model_parallel", False):
                parameter.normal_(0.0, 0.02, generator=experts if expert else cut)
            else:
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02, generator=whole)


def read_layout(work: Path) -> dict[str, Any]:
    """What `orchestrate` has written."""
    found: dict[str, Any] = json.loads((work / "layout.json").read_text())
    return found


def read_config(work: Path, model: str = "model") -> dict[str, Any]:
    """Of the model that is served."""
    found: dict[str, Any] = json.loads((work / model / "config.json").read_text())
    return found
