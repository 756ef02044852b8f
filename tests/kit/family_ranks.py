"""The program of one rank: exports families in layouts and compares with the checkpoints they were loaded from.

    python tests/kit/family_ranks.py RANK WORLD RENDEZVOUS_FILE CHECKPOINTS OUT CASE...

A case is FAMILY:LAYOUT as `str` of it writes it. The root writes ``OUT/<case>.json``: what differs, bit for bit, and
how far the logits of the Megatron ranks are from those of transformers. After ``bits,`` a case is not computed with.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import mcore_on_cpu

mcore_on_cpu.prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from exporting import export  # noqa: E402
from exposing import wrongly_exposed  # noqa: E402
from family_models import build, load, logits, start  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_families import TOKENS, Case, parse, text_of  # noqa: E402

from weightbus.trainer_agent.source import Source  # noqa: E402
from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu  # noqa: E402
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource  # noqa: E402

BITS = "bits,"


def compare(source: Source, expected: dict[str, torch.Tensor], bucket_bytes: int) -> list[str]:
    """Assemble every bucket; on the root, what is missing, unknown or other than expected."""
    found = export(source, bucket_bytes)
    served = {spec.name for spec in source.tensors()}
    odd = [f"unknown {name}" for name in found.keys() - expected.keys()]
    odd += [f"other {name}" for name, tensor in found.items() if not torch.equal(tensor, expected.get(name, tensor))]
    return odd + [f"missing {name}" for name in expected if name not in served]


def run_case(case: Case, checkpoints: Path, *, computed: bool) -> dict[str, Any]:
    """Load one family into one layout, export it, and compute with it."""
    folder = checkpoints / case.family
    hf = json.loads((folder / "config.json").read_text())
    expected = text_of(load_file(folder / "model.safetensors"))
    began = time.perf_counter()
    start(case.layout)
    chunks = build(case.family, hf, case.layout)
    load(case.family, hf, chunks, expected)
    source = MegatronSource(chunks, hf_config=hf, timeout_s=60.0)
    odd = compare(source, expected, random.Random(str(case)).choice([1, 5000, 40_000, 1 << 30]))
    odd += [f"exposed {name}" for name in wrongly_exposed(source, expected)] if computed else []
    source.close()
    verdict: dict[str, Any] = {"odd": odd[:5], "count": len(odd), "tensors": len(expected)}
    if not computed:
        return verdict
    for chunk in chunks:
        chunk.mtp_process, chunk.config.mtp_num_layers = False, None  # it wants labels, and changes no logits
    found = logits(chunks, torch.tensor(TOKENS))
    if dist.get_rank() == dist.get_world_size() - 1:
        reference = load_file(folder / "logits.safetensors")["logits"]
        verdict["difference"] = float((found - reference).abs().max() / reference.abs().max())
    verdict["seconds"] = round(time.perf_counter() - began, 2)
    return verdict


def main() -> None:
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    checkpoints, out = Path(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    megatron_cpu.install()
    mcore_on_cpu.patch()
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=dt.timedelta(seconds=60)
    )
    for given in sys.argv[6:]:
        name = given.removeprefix(BITS)
        verdict = run_case(parse(name), checkpoints, computed=name == given)
        told: list[Any] = [None] * world
        dist.all_gather_object(told, verdict)
        if rank == 0:
            verdict |= {"difference": told[-1].get("difference")}
            (out / f"{name}.json").write_text(json.dumps(verdict))
            print(name, verdict, flush=True)  # noqa: T201  a program's output
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
