"""INT4 files in a real server: what a trainer quantizes on its way and saves is what SGLang's kernels serve.

SGLang 0.5.17 repacks INT4 while it loads and cannot load it again, so versions reach such a server as files. For each
model two shards of a trainer are quantized, as a compressed-tensors config says (symmetric, groups of 128), and
written as a checkpoint; compressed-tensors itself unpacks it into a second, plain one. A server started from the first
has to give a prompt the probabilities that a server started from the second gives it: the error beside it, of the
weights as they were before, shows how large a difference is that counts. Where quantizing makes no difference, that is
a problem by itself.

By which kernels SGLang 0.5.17 serves such weights on Hopper, from its source:

    linear layers    Marlin, always: no flag chooses another (CompressedTensorsWNA16). ``gptq_marlin_repack`` runs while
                     weights are loaded, ``gptq_marlin`` from the first prompt on
    experts          Marlin (``moe_wna16_marlin``), or with --moe-runner-backend=triton SGLang's Triton kernel, which
                     takes the packed words as bytes (CompressedTensorsWNA16TritonMoE)

None of Marlin's three is in sgl_kernel: they are compiled on the machine by nvcc at the first use
(sglang/kernels/jit, tvm_ffi.cpp.load_inline), all their instances in one file, and kept in ``$TVM_FFI_CACHE_DIR``
(~/.cache/tvm-ffi). The log does not say so; a server seems to hang, and its watchdog ends it after 300 s. So this
program has them compiled from its first second on, side by side. Meanwhile it writes all checkpoints in a thread, and
takes what needs none of them: the plain server of every model, and both of the model `experts`, whose attention is left
as it is. Servers run one at a time; every 15 s a line says what is waited for.

    python3 tests/gpu/int4.py [experts dense moe]   one CUDA device and nvcc; little memory, beside other programs, too
    python3 tests/gpu/int4.py --device cpu          the same steps, tiny, and the plain one twice

Prints one JSON object; `--out FOLDER` writes int4.json there, after every model. Exits with 1 unless all were equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig

HEAD = ("lm_head", "re:.*mlp.gate$")
"""Not quantized in any model."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is served."""

    wide: dict[str, Any]
    """Its config on a GPU."""
    tiny: dict[str, Any]
    """... and on a CPU."""
    layout: dict[str, int | None]
    """Of the trainer."""
    ignored: tuple[str, ...] = HEAD
    flags: tuple[str, ...] = ()
    """Of the server with INT4."""
    kernels: tuple[str, ...] = ()
    """Of `JIT`, that it needs."""

    @property
    def quantization(self) -> dict[str, Any]:
        """The ``quantization_config``."""
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
            "ignore": [*self.ignored],
        }  # fmt: skip


JIT = {
    "gptq_marlin_repack": ("sglang.kernels.ops.quantization.gptq_marlin_repack", "_jit_gptq_marlin_repack_module", ""),
    "gptq_marlin": ("sglang.kernels.ops.quantization.gptq_marlin", "_jit_gptq_marlin_module", "torch.bfloat16"),
    "moe_wna16_marlin": (
        "sglang.kernels.ops.moe.moe_wna16_marlin", "_jit_moe_wna16_marlin_module", "torch.bfloat16, False, False",
    ),
}  # fmt: skip
"""What SGLang compiles: by its own name the module, the function and the arguments that have it compiled."""
COMPILERS = frozenset({"nvcc", "ninja", "cicc", "ptxas", "cudafe++", "cc1plus", "fatbinary"})
_TINY = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
_MOE = (
    {**rig.QWEN3_30B_A3B, "num_hidden_layers": 2, "vocab_size": 32768},
    {**rig.TINY_MOE, **_TINY, "moe_intermediate_size": 256},
    {"ep": 2, "etp": 1, "dp": 2},
)
MODELS: dict[str, Case] = {
    "experts": Case(*_MOE, ignored=(*HEAD, "re:.*self_attn.*"), flags=("--moe-runner-backend=triton",)),
    "dense": Case(
        {**rig.QWEN3_8B, "num_hidden_layers": 3, "vocab_size": 32768}, {**rig.TINY, **_TINY}, {"tp": 2},
        kernels=("gptq_marlin_repack", "gptq_marlin"),
    ),
    "moe": Case(*_MOE, kernels=("gptq_marlin_repack", "gptq_marlin", "moe_wna16_marlin")),
}  # fmt: skip
BUCKET_BYTES = 256 << 20
PROMPT = 200
"""Tokens."""
PROGRESS_S = 15.0
FEW = 0.25
"""Of the difference that quantizing makes: two servers of the same weights, by other kernels, differ by less."""
CLEAR = {"experts": 0.04, "routers": 0.08}
"""Deviations. Experts weigh as much as attention, and a router's last choices little: they change with the kernel. With
0.02 for all, experts computed in float32 instead of bfloat16 made 0.15 of the difference of quantizing, so 0.04."""


class Compiling:
    """Kernels that are compiled in processes of their own, as a server would compile them."""

    def __init__(self, programs: Any, names: Sequence[str]) -> None:
        self._began = time.monotonic()
        self._running = {
            name: programs.start(f"jit-{name}", [sys.executable, "-c", self._code(name)]) for name in names
        }
        self.found: dict[str, Any] = {}
        """By kernel: seconds, or what went wrong."""

    def wait(self, names: Sequence[str], deadline_s: float) -> None:
        """Until they are there. Raises `RuntimeError` for one that cannot be compiled, or not in time."""
        progress = Progress("compiling " + ", ".join(names), [self._running[name].log for name in names])
        while pending := [name for name in names if not self._ended(name)]:
            if time.monotonic() - self._began > deadline_s:
                self.found |= dict.fromkeys(pending, f"not compiled after {deadline_s:.0f} s")
                raise RuntimeError(f"{', '.join(pending)} not compiled after {deadline_s:.0f} s")
            progress()
            time.sleep(0.5)
        failed = [name for name in names if not isinstance(self.found[name], float)]
        if failed:
            raise RuntimeError(f"{failed[0]} was not compiled: {self.found[failed[0]]}")

    def _ended(self, name: str) -> bool:
        program = self._running[name]
        code = program.process.poll()
        if code is None:
            return False
        last = program.log.read_text(errors="replace").strip()
        self.found.setdefault(name, float(last.split()[-1]) if code == 0 and last else last[-1500:] or f"status {code}")
        return True

    @staticmethod
    def _code(name: str) -> str:
        module, function, arguments = JIT[name]
        return (
            f"import time, torch; from {module} import {function} as made; began = time.monotonic();"
            f" made({arguments}); print(time.monotonic() - began)"
        )


class Progress:
    """A line to stderr every `PROGRESS_S`: what is waited for, which compilers run, and how the logs end."""

    def __init__(self, what: str, logs: Sequence[Path]) -> None:
        self._what, self._logs = what, logs
        self._began = self._said = time.monotonic()
        self.compiling_s = 0.0
        """How long a compiler ran, as far as it was looked at."""

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._said < PROGRESS_S:
            return
        compilers = running(COMPILERS)
        self.compiling_s += now - self._said if compilers else 0.0
        self._said = now
        ends = [lines[-1][:160] for log in self._logs if (lines := log.read_text(errors="replace").splitlines())]
        rig.log(
            f"{self._what}: {now - self._began:.0f} s, compilers {' '.join(compilers) or 'none'}; {' | '.join(ends)}"
        )


def running(names: frozenset[str]) -> list[str]:
    """Which of these programs run on this machine, with how many processes each."""
    found: dict[str, int] = {}
    for each in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            name = each.read_text().strip()
            if name in names:
                found[name] = found.get(name, 0) + 1
    return [f"{name}x{count}" for name, count in sorted(found.items())]


class Check:
    """Three checkpoints of one model, two servers, one prompt. What each step has found is in `found`."""

    def __init__(self, args: argparse.Namespace, name: str, work: Path) -> None:
        self.name, self.case = name, MODELS[name]
        self.found: dict[str, Any] = {"equal": False}
        self._args, self._work = args, work
        self._cuda = args.device == "cuda"
        self._hf = dict(self.case.wide if self._cuda else self.case.tiny)
        self._prompt = random.Random(5).choices(range(self._hf["vocab_size"]), k=PROMPT)
        self._plain: tuple[list[float], list[int]] = [], []

    def write(self) -> dict[str, Any]:
        """The checkpoints. May run in another thread than the steps."""
        began = time.monotonic()
        found = write_checkpoints(self._args, self._hf, self.case, self._work)
        rig.log(f"{self.name}: checkpoints are there")
        return {**found, "written_s": time.monotonic() - began}

    def plain(self) -> None:
        """What a server says of the unpacked weights, and of those before. Raises `RuntimeError` if it is the same."""
        with self._server("plain", "unpacked") as fleet:
            self._plain = fleet.logprobs("plain", self._prompt), fleet.tokens("plain")
            fleet.load("plain", self._work / "before")
            found = difference(self._plain[0], fleet.logprobs("plain", self._prompt))
        self.found["difference_by_quantizing"] = found
        if not found > 0.0:
            raise RuntimeError("the probabilities do not depend on what was quantized: there is nothing to compare")

    def int4(self) -> None:
        """Whether the server with INT4 says the same."""
        # The CPU engine has no INT4: there the plain one is started twice.
        with self._server("int4", "int4" if self._cuda else "unpacked", *(self.case.flags if self._cuda else ())) as it:
            probabilities, tokens = it.logprobs("int4", self._prompt), it.tokens("int4")
        found = difference(probabilities, self._plain[0])
        self.found |= {"difference": found, "tokens_equal": tokens == self._plain[1]}
        self.found["equal"] = found < FEW * self.found["difference_by_quantizing"]

    @contextlib.contextmanager
    def _server(self, place: str, folder: str, *flags: str) -> Iterator[rig.Fleet]:
        """One that has loaded `folder`; it ends with the context."""
        from weightbus.trainer_agent.demo.child_processes import Programs

        args, began = self._args, time.monotonic()
        if self._cuda:
            mine = f"--mem-fraction-static={args.memory}", f"--watchdog-timeout={args.deadline}"
            flags = ("--disable-cuda-graph", *mine, *flags)
        fleet = rig.Fleet({"engines": {}})
        progress = Progress(f"{self.name}, {place}", [self._work / f"server-{place}.log"])
        with Programs(self._work) as programs:

            def check() -> None:
                progress()
                programs.check()

            try:
                engine = rig.Engine(place, 0, 1, flags)
                port, _ = rig.start_server(programs, args.device, self._work / folder, engine, load_format="auto")
                fleet.add(place, port)
                fleet.wait_serving(place, args.deadline, check)
                took = {"seconds": time.monotonic() - began, "compilers_ran_s": progress.compiling_s}
                self.found.setdefault("started", {})[place] = took
                rig.log(f"{self.name}: {place} is there")
                yield fleet
            except Exception:
                rig.keep_logs(self._work, args.out, f"int4-{self.name}")
                raise


def difference(one: list[float], other: list[float]) -> float:
    """Of logarithms of probabilities, in the mean."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def write_checkpoints(args: argparse.Namespace, hf: dict[str, Any], case: Case, work: Path) -> dict[str, Any]:
    """``before`` quantizing; ``int4``; ``unpacked``, as compressed-tensors reads the second one."""
    import torch
    from compressed_tensors.compressors import unpack_from_int32
    from shards import LayoutShards

    from weightbus.dataplane.tensors.manifest import Manifest
    from weightbus.trainer_agent.quantized.quantized_source import quantized

    rig.play_cuda(args.device)
    source = LayoutShards(
        hf, torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu"), 2, **case.layout
    )
    source.refill(1, **CLEAR)
    packing = quantized(source, {**hf, "quantization_config": case.quantization})
    plain = Manifest.of(source.model, source.tensors(), BUCKET_BYTES)
    packed = Manifest.of(source.model, packing.tensors(), BUCKET_BYTES)
    save(work / "before", plain, hf, source.device, lambda index, out: source.assemble(plain, index, out))
    whole: dict[str, Any] = {}

    def keep(index: int, out: torch.Tensor) -> None:
        packing.assemble(packed, index, out)
        for spec, at in zip(packed.tensors_of(index), packed.offsets_of(index), strict=False):
            typed = out[at : at + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            whole[spec.name] = typed.cpu()

    save(work / "int4", packed, {**hf, "quantization_config": case.quantization}, source.device, keep)
    weights = [name.removesuffix("_packed") for name in whole if name.endswith(".weight_packed")]
    for name in weights:
        number, scale = whole.pop(f"{name}_packed"), whole.pop(f"{name}_scale")
        shape = torch.Size(whole.pop(f"{name}_shape").tolist())
        values = unpack_from_int32(number, 4, shape).to(scale.dtype)
        whole[name] = (values.unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2).bfloat16()

    def fill(index: int, out: torch.Tensor) -> None:
        for spec, at in zip(plain.tensors_of(index), plain.offsets_of(index), strict=False):
            out[at : at + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape).copy_(whole[spec.name])

    save(work / "unpacked", plain, hf, source.device, fill)
    source.close()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return {"bytes": plain.nbytes, "bytes_quantized": packed.nbytes, "weights": len(weights)}


def save(target: Path, manifest: Any, config: dict[str, Any], device: Any, fill: Callable[[int, Any], None]) -> None:
    """A checkpoint, bucket by bucket, as a trainer writes it."""
    import torch

    from weightbus.dataplane.transports.disk.checkpoint_files import CheckpointWriter, Notes

    beside = {"config.json": json.dumps(config).encode()}
    writer = CheckpointWriter(target, manifest, None)
    writer.begin()
    for index, bucket in enumerate(manifest.buckets):
        memory = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device)
        fill(index, memory)
        writer.add(index, memory)
    writer.finish(Notes(channel="int4", epoch=1, version=1, manifest=manifest.digest(), table=""), beside)


def steps(checks: Sequence[Check]) -> Iterator[tuple[Check, str]]:
    """In the order that leaves the compilers most time: what needs no kernel of theirs, then what needs fewest."""
    for check in checks:
        yield check, "plain"
        if not check.case.kernels:
            yield check, "int4"
    for check in sorted(checks, key=lambda each: len(each.case.kernels)):
        if check.case.kernels:
            yield check, "int4"


def main() -> int:
    from weightbus.trainer_agent.demo.child_processes import Programs

    parser = rig.parser(
        __doc__, memory=0.3, deadline=420.0, whose="for a server to come, and for kernels to be compiled"
    )
    parser.add_argument("model", nargs="*", choices=[[], *MODELS], default=[])
    args = parser.parse_args()
    args.deadline = int(args.deadline)
    names = list(dict.fromkeys(args.model or MODELS))
    work = Path(tempfile.mkdtemp(prefix="wb-int4-"))
    found: dict[str, Any] = {
        **rig.describe("int4.py", args.device, MODELS[names[0]].wide), "equal": False, "compiled_s": {}, "models": {},
    }  # fmt: skip
    kernels = sorted({kernel for name in names for kernel in MODELS[name].kernels}) if args.device == "cuda" else []
    checks = [Check(args, name, work / name) for name in names]
    found["models"] = {check.name: check.found for check in checks}
    with Programs(work) as programs, contextlib.ExitStack() as stack:
        compiling = Compiling(programs, kernels) if kernels else None
        writer = ThreadPoolExecutor(1)
        stack.callback(writer.shutdown, cancel_futures=True)
        for name in names:
            (work / name).mkdir()
        written = {check.name: writer.submit(check.write) for check in checks}
        for check, step in steps(checks):
            if "problem" in check.found:
                continue
            try:
                check.found |= written[check.name].result()
                if compiling is not None and step == "int4" and check.case.kernels:
                    compiling.wait(check.case.kernels, args.deadline)
                getattr(check, step)()
            except Exception as error:  # noqa: BLE001  one model is not all of them
                check.found |= {"equal": False, "problem": f"{type(error).__name__}: {error}"}
                rig.log(f"{check.name}, {step}: {check.found['problem']}")
            found["compiled_s"] = compiling.found if compiling else {}
            found["equal"] = all(each.found["equal"] for each in checks)
            rig.write_result(args.out, "int4", found)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
