"""The program of one rank: Megatron-Bridge loads a checkpoint into a layout, and we export it again.

    python tests/kit/bridge_ranks.py RANK WORLD RENDEZVOUS_FILE CHECKPOINTS OUT CASE...

Neither names nor arithmetic of ours take part in the loading. The root writes ``OUT/<case>.json``: what differs from
the checkpoint, bit for bit, in our export and in Megatron-Bridge's own, which comes through `ExportedSource`.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import mcore_on_cpu

mcore_on_cpu.prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_models import start  # noqa: E402
from family_ranks import compare  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_families import FAMILIES, Case, Layout, parse, text_of  # noqa: E402

from weightbus.trainer_agent.sources.exported import ExportedSource, bridge_exporter  # noqa: E402
from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu  # noqa: E402
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource  # noqa: E402

ON_CPU = {
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": None,
}


class _TorchOnCpu:
    """torch as one module of the bridge sees it: `torch.device` is a class, which no function mode can answer for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: object) -> torch.device:
        return torch.device("cpu")


def loaded(folder: Path, layout: Layout, *, predictions: int) -> tuple[Any, list[Any]]:
    """An `AutoBridge` and this rank's chunks, with the weights of a checkpoint."""
    from megatron.bridge import AutoBridge
    from megatron.core.transformer.enums import AttnBackend

    start(layout)
    bridge = AutoBridge.from_hf_pretrained(str(folder), dtype=torch.float32, trust_remote_code=False)
    provider = bridge.to_megatron_provider(load_weights=False)
    fields = {
        **ON_CPU,
        "attention_backend": AttnBackend.auto,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or layout.tp,
        "sequence_parallel": layout.tp > 1,
        "mtp_num_layers": predictions or None,
    }
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.load_hf_weights(chunks, str(folder))
    return bridge, chunks


def run_case(case: Case, checkpoints: Path) -> dict[str, Any]:
    """Load through Megatron-Bridge, export twice."""
    folder, tiny = checkpoints / case.family, FAMILIES[case.family]
    bridge, chunks = loaded(folder, case.layout, predictions=tiny.predictions)
    full = load_file(folder / "model.safetensors")
    expected = text_of(full)
    hf = json.loads((folder / "config.json").read_text())
    source = MegatronSource(chunks, hf_config=hf, timeout_s=60.0)
    chance = random.Random(str(case))
    odd = compare(source, expected, chance.choice([1, 5000, 1 << 30]))
    source.close()
    exported = ExportedSource(bridge_exporter(bridge, chunks), model=tiny.architecture, timeout_s=60.0)
    also = compare(exported, full, chance.choice([1, 5000, 1 << 30]))
    exported.close()
    return {"odd": odd[:5], "count": len(odd), "bridge": also[:5], "tensors": len(expected)}


def ready() -> None:
    """Patch Megatron and its bridge, once."""
    megatron_cpu.install()
    mcore_on_cpu.patch()
    logging.disable(logging.ERROR)
    from megatron.bridge.models.minimax_m2 import minimax_m2_bridge

    minimax_m2_bridge.torch = _TorchOnCpu()


def main() -> None:
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    checkpoints, out = Path(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    ready()
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=dt.timedelta(seconds=60)
    )
    for name in sys.argv[6:]:
        try:
            verdict = run_case(parse(name), checkpoints)
        except Exception as error:  # noqa: BLE001  a case that fails must not hide the others
            verdict = {"error": f"{type(error).__name__}: {error}"}
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(verdict))
            print(name, verdict, flush=True)  # noqa: T201  a program's output
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
