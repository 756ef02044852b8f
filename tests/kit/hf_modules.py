"""What transformers itself saves of tiny models, beside what sources make of them: `python hf_modules.py OUT`.

Writes ``OUT/told.json``: for every model the names that differ, from memory and from a torch DCP checkpoint.
transformers takes seconds to import, and needs the CPU shim where torchvision was built for CUDA.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from exporting import differing, export
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import save
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from weightbus.trainer_agent.checkpoints.checkpoint_folder import CheckpointSource
from weightbus.trainer_agent.checkpoints.dcp_files import DcpFiles
from weightbus.trainer_agent.machine.errors import BadCheckpoint, UnfinishedCheckpoint
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 4,
}
DELTA = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 4,
}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}

MAMBA: dict[str, Any] = {
    **MOE,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 8,
}


def models() -> dict[str, nn.Module]:
    """One of each kind of checkpoint: dense, tied, fused experts under several names, buffers, latent attention."""
    torch.manual_seed(3)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "qwen3 tied": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "qwen3 moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE, num_experts=4)),
        "mixtral": MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
        "deepseek v3": DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **MOE, **LATENT}, n_routed_experts=4)),
        "glm4 moe": Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **MOE, n_routed_experts=4)),
        "minimax m2": MiniMaxM2ForCausalLM(MiniMaxM2Config(**SIZES, num_local_experts=4)),
        "qwen3 next": Qwen3NextForCausalLM(
            Qwen3NextConfig(**SIZES, **MOE, shared_expert_intermediate_size=8, num_experts=4)
        ),
        "llama 4": Llama4ForCausalLM(
            Llama4TextConfig(**SIZES, intermediate_size_mlp=32, num_local_experts=4, interleave_moe_layer_step=2)
        ),
        "nemotron h": NemotronHForCausalLM(
            NemotronHConfig(**{name: size for name, size in SIZES.items() if name != "num_hidden_layers"}, **MAMBA)
        ),
        "olmo": OlmoForCausalLM(OlmoConfig(**{name: size for name, size in SIZES.items() if name != "head_dim"})),
        "qwen2 moe": Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**SIZES, **MOE, num_experts=4, shared_expert_intermediate_size=8, qkv_bias=False)
        ),
        "deepseek v3.2": DeepseekV32ForCausalLM(
            DeepseekV32Config(
                **{**SIZES, **MOE, **LATENT},
                n_routed_experts=4,
                index_n_heads=2,
                index_head_dim=8,
                mlp_layer_types=["sparse", "dense"],
            )
        ),
        "qwen3.5": Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **DELTA)),
        "qwen3.5 with vision": Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config={**SIZES, **DELTA}, vision_config=VISION)
        ),
        "qwen3.5 moe": Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(**SIZES, **MOE, **DELTA, shared_expert_intermediate_size=8, num_experts=4)
        ),
        "gpt oss": GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    }


def as_saved(module: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes."""
    module.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def from_memory(module: nn.Module, saved: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As it is, and in bfloat16, which buffers and what the model keeps in float32 are not."""
    source = HFModuleSource(module)
    found = export(HFModuleSource(module, dtype=torch.bfloat16), 3000)
    kept = sorted(name for name, tensor in found.items() if tensor.dtype != torch.bfloat16)
    cast = {name: tensor if name in kept else tensor.bfloat16() for name, tensor in saved.items()}
    return {
        "model": source.model,
        "differs": differing(export(source, 3000), saved),
        "differs in bfloat16": differing(found, cast),
        "kept": kept,
    }


def from_dcp(module: nn.Module, saved: dict[str, torch.Tensor], folder: Path) -> list[str]:
    """As FSDP trainers save it: by names in memory, below a prefix, beside an optimizer."""
    state = {"model": dict(module.state_dict()), "optimizer": {"step": torch.tensor(3)}, "step": 7}
    save(state, checkpoint_id=folder, no_dist=True)
    config = {**module.config.to_dict(), "dtype": "float32"}
    source = CheckpointSource(DcpFiles(folder, "M", config), torch.device("cpu"))
    differs = differing(export(source, 3000), saved)
    assert not source._checkpoint._loaded, "a tensor was loaded and never let go of"
    return differs


def refusals(module: nn.Module, folder: Path) -> dict[str, str]:
    """What is said of DCP folders that are half, or of another model."""
    config = module.config.to_dict()
    told: dict[str, str] = {}

    def attempt(what: str, config: dict[str, Any]) -> None:
        try:
            DcpFiles(folder, "M", config)
        except UnfinishedCheckpoint as error:
            told[what] = f"unfinished: {error.reason}"
        except BadCheckpoint as error:
            told[what] = f"bad: {error.reason}"

    attempt("another width", {**config, "intermediate_size": 48})
    attempt("another depth", {**config, "num_hidden_layers": 3})
    attempt("fewer layers", {**config, "num_hidden_layers": 1})
    attempt("no heads", {**config, "num_attention_heads": 0, "head_dim": None})
    attempt("unknown", {"model_type": "no-such-model"})
    data = next(folder.glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    attempt("a file that is still written", config)
    data.write_bytes(content)
    (folder / ".metadata").write_bytes(b"nonsense")
    attempt("metadata that is none", config)
    (folder / ".metadata").unlink()
    attempt("no metadata", config)
    return told


def main(out: Path) -> None:
    """Every model, then what is refused."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for name, module in models().items():
        saved = as_saved(module, out / name)
        told[name] = from_memory(module, saved)
        if name in {"llama", "qwen3 tied", "qwen3 moe", "deepseek v3"}:
            told[name]["differs from dcp"] = from_dcp(module, saved, out / f"{name} dcp")
    llama = models()["llama"]
    told["refusals"] = refusals(llama, out / "llama dcp")
    (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
