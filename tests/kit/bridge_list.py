"""What becomes of each family that Megatron-Bridge lists: loaded by it, exported by `MegatronSource`, compared.

    python tests/kit/bridge_list.py OUT [architecture ...]

Needs Megatron-Bridge, the server's CPU shim and tests/kit/te_stub on PYTHONPATH. ``OUT/bridge_list.json`` says of each
architecture ``table`` or ``bridge``, by which `MegatronSource` exported every tensor bit for bit, or else why not. A
family of tiny_families.py has its tiny model, any other one the sizes below in its own transformers config.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import bridge_ranks
import torch
import torch.distributed as dist
import transformers
from family_ranks import compare
from hf_checkpoints import make
from safetensors.torch import load_file
from tiny_families import FAMILIES, Layout, text_of

from weightbus.trainer_agent.sources.megatron.bridge_mode import BridgedSource
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 64,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOST = 30_000_000
"""Parameters of a model that is built."""
MEMORY = 24_000_000_000
"""Bytes of address space: a tower whose size no config says must not take the machine."""


class NotSmallError(Exception):
    """The reason why a family has no small model here."""


def small(kind: Any) -> Any:
    """A small config of a transformers class."""
    usual = kind().to_dict()
    fields = {name: size for name, size in SMALL.items() if usual.get(name) is not None}
    if "head_dim" in usual:
        fields["head_dim"] = SMALL["head_dim"]
    for section, inner in getattr(kind, "sub_configs", {}).items():
        if inner.__name__ != "AutoConfig":
            fields[section] = small(inner).to_dict()
    return kind(**fields)


def written(architecture: str, out: Path) -> tuple[Path, int]:
    """A checkpoint of the family, and the number of its prediction layers. Raises where transformers has no class."""
    for name, tiny in FAMILIES.items():
        if tiny.architecture == architecture:
            make(name, tiny, out / name)
            return out / name, tiny.predictions
    if not hasattr(transformers, architecture):
        raise NotSmallError("transformers has no class of it: code comes with the checkpoint")
    kind = getattr(transformers, architecture)
    config = small(kind.config_class)
    with torch.device("meta"):
        size = sum(each.numel() for each in kind(config).parameters())
    if size > MOST:
        raise NotSmallError("a small config of it is not known here")
    torch.manual_seed(0)
    kind(config).float().save_pretrained(out / architecture)
    return out / architecture, 0


def outcome(architecture: str, out: Path) -> str:
    """``table``, ``bridge`` or a reason."""
    try:
        folder, predictions = written(architecture, out)
        _, chunks = bridge_ranks.loaded(folder, Layout(te=True), predictions=predictions)
    except NotSmallError as error:
        return f"not built: {error}"
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the list says
        return f"not built: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    try:
        source = MegatronSource(chunks, hf_config=folder, timeout_s=60.0)
        full = load_file(folder / "model.safetensors")
        bridged = isinstance(source, BridgedSource)
        odd = compare(source, full if bridged else text_of(full), 1 << 30)
        source.close()
    except Exception as error:  # noqa: BLE001  as above
        return f"refused: {type(error).__name__}: {' '.join(str(error).split())[:240]}"
    return f"differs: {odd[:3]}" if odd else ("bridge" if bridged else "table")


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    bridge_ranks.ready()
    from megatron.bridge import AutoBridge

    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
    outcomes: dict[str, str] = {}
    for architecture in sys.argv[2:] or AutoBridge.list_supported_models():
        outcomes[architecture] = outcome(architecture, out)
        print(architecture, outcomes[architecture], flush=True)  # noqa: T201  a program's output
        (out / "bridge_list.json").write_text(json.dumps(outcomes, indent=1, sort_keys=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
