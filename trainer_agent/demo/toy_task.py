"""The toy task: emit tokens of the wanted class. The policy before training, prompts, rewards, advantages.

The reward of a response is the share of its tokens with an id below `WANTED`; a policy that has learned nothing earns
`WANTED / VOCABULARY`. Responses to one prompt form a group, and each is judged against its group's mean, as in GRPO.
The same on every rank and in every run of a seed: the policy is a Hugging Face checkpoint, which engines serve and
ranks load.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Final, cast

import msgspec
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  # a bare PathLike

from ..sources.megatron import HFModel, hf_tensors
from .commands import TrainerKind

VOCABULARY: Final = 512
WANTED: Final = 128
"""Token ids below this one are wanted: a quarter of the vocabulary, so an untrained policy earns about 0.25."""

PROMPT_TOKENS: Final = 8
RESPONSE_TOKENS: Final = 16
PROMPTS: Final = 8
"""Groups in one round."""
GROUP: Final = 8
"""Responses to one prompt."""
RESPONSES: Final = PROMPTS * GROUP

LEARNING_RATE: Final = 1e-2
"""Takes the reward from 0.25 to 0.95 in about 16 rounds; half of it needs twice as many, twice of it half."""


def prompts(seed: int, round_number: int) -> list[list[int]]:
    """The prompts of one round, each `GROUP` times: random, new in every round, the same in every run of a seed."""
    source = random.Random(seed * 1_000_003 + round_number)  # noqa: S311 - a repeatable task, not a secret
    drawn = [[source.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    return [prompt for prompt in drawn for _ in range(GROUP)]


def reward(response: Sequence[int]) -> float:
    """The share of wanted tokens; nothing for an empty response."""
    return sum(token < WANTED for token in response) / len(response) if response else 0.0


def advantages(rewards: Sequence[float], group: int = GROUP) -> list[float]:
    """Each reward against its group's mean, in units of the group's spread; zero where there is none."""
    result: list[float] = []
    for first in range(0, len(rewards), group):
        members = rewards[first : first + group]
        mean, spread = fmean(members), pstdev(members)
        result.extend((value - mean) / spread if spread else 0.0 for value in members)
    return result


def token_weights(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """REINFORCE with a group baseline: weights of the responses' tokens, positive where a response beat its group.

    `tokens` holds a prompt and its response in each row, groups together, the same on every rank; `counts` is 1 for
    each token of the responses that is learned from, 0 for the others.
    """
    rewards = [reward(response) for response in cast("list[list[int]]", tokens[:, PROMPT_TOKENS:].tolist())]  # pyright: ignore[reportUnknownMemberType]
    return torch.tensor(advantages(rewards)).unsqueeze(1) * counts


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of the policy, by Megatron's terms."""

    hidden: int = 64
    ffn: int = 128
    layers: int = 2
    heads: int = 4
    kv_groups: int = 2
    head_dim: int = 16
    vocabulary: int = VOCABULARY
    positions: int = 128
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    experts: int = 0
    """Experts of each layer; 0 for an MLP of `ffn` in every layer."""
    experts_per_token: int = 2
    expert_ffn: int = 64


TINY: Final = ModelShape()
TINY_EXPERTS: Final = ModelShape(experts=4)
INITIAL_SPREAD: Final = 0.02
"""Small weights give nearly even odds to every token, so the first reward is the share of wanted tokens."""


def policy_of(trainer: TrainerKind) -> ModelShape:
    """Shape of the policy that `trainer` trains."""
    return TINY_EXPERTS if trainer is TrainerKind.MEGATRON_MOE else TINY


def model_config(shape: ModelShape) -> dict[str, object]:
    """``config.json`` of a Qwen3 of this shape."""
    kind: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if shape.experts:
        kind = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.expert_ffn,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return kind | {
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_groups,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }


def write_checkpoint(folder: Path, seed: int, shape: ModelShape = TINY) -> Path:
    """Write the checkpoint into `folder` and return it. The same seed writes the same bits."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    config = model_config(shape)
    weights = {
        spec.name: torch.ones(spec.shape, dtype=torch.bfloat16)
        if spec.name.endswith("norm.weight")
        else (torch.randn(spec.shape, generator=generator) * INITIAL_SPREAD).to(torch.bfloat16)
        for spec in hf_tensors(HFModel.parse(config), "bfloat16")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "max_new_tokens": RESPONSE_TOKENS + PROMPT_TOKENS}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    return folder


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint in `folder`, by Hugging Face name."""
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return weights
