"""Writes a tiny random checkpoint with a tokenizer, without a network: `python tests/kit/tiny_model.py OUT --seed 1`.

140,000 parameters, 300 kB. The initial spread is wide so that two seeds give two different greedy answers. The files
are written by hand: transformers takes nine seconds to import, and not beside a torchvision made for CUDA.
"""

import argparse
import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Architecture = Literal["qwen3", "llama"]

VOCABULARY = 512
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
_SPREAD = 0.2


def write(
    out: Path,
    seed: int = 0,
    *,
    architecture: Architecture = "qwen3",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = VOCABULARY,
    tied: bool = False,
) -> Path:
    """Write config, weights and tokenizer into `out` and return it. Equal arguments give equal bits."""
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM" if architecture == "qwen3" else "LlamaForCausalLM"],
        "model_type": architecture,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": _SPREAD,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}) + "\n")
    save_file(tensors(config, seed), out / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(out)
    return out


def tensors(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """The weights of `config` by Hugging Face name, drawn from `seed`, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator) * _SPREAD
        weights[name] = (1 + noise / 4 if "norm" in name else noise).to(torch.bfloat16)
    return weights


def shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a dense Qwen3 or Llama model."""
    hidden, inner, vocabulary = (int(str(config[k])) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    head, heads, kv_heads = (int(str(config[k])) for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(int(str(config["num_hidden_layers"]))):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            found |= {f"{at}.self_attn.q_norm.weight": (head,), f"{at}.self_attn.k_norm.weight": (head,)}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def write_tokenizer(out: Path) -> None:
    """A byte-level tokenizer of `VOCABULARY` entries: 3 special tokens, 256 bytes, the rest filler."""
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"tok{index}" for index in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Write one checkpoint from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--architecture", choices=("qwen3", "llama"), default="qwen3")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    known = parser.parse_args()
    write(known.out, known.seed, architecture=known.architecture, layers=known.layers, tied=known.tied)
    print(known.out)  # noqa: T201 - the one thing a caller of the command wants


if __name__ == "__main__":
    main()
