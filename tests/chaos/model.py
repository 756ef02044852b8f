"""The policy of the campaign: a version's weights follow from its number, and tokens tell which weights made them.

A light server's token is a digest of all weights. For a real server's, a forward pass of the version's weights in
float32 gives each token's log probability; the server's own differs from it by rounding, and from that of weights with
one other tensor by far more, since here also norms differ much between versions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as f

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.kit import tiny_model  # noqa: E402
from tests.kit.fake_weights import FakeWeights  # noqa: E402

LAUNCH = 0
"""The version that a server holds when it was just launched: those of its checkpoint."""
NORMS = 8.0
"""How much wider norms spread than those of `tiny_model`, whose norms are too alike to be told by tokens."""
ROUNDING = 0.2
"""Log probabilities of bfloat16 kernels deviate by less: by 0.07 at most in 480 tokens, by 4 between two versions."""


def write_checkpoint(folder: Path) -> Path:
    """The checkpoint that servers are launched with."""
    tiny_model.write(folder, LAUNCH, layers=2)
    save_file(weights(folder, LAUNCH), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights(checkpoint: Path, version: int) -> dict[str, torch.Tensor]:
    """What `version` consists of."""
    drawn = tiny_model.tensors(json.loads((checkpoint / "config.json").read_text()), version)
    return {name: 1 + (each - 1) * NORMS if "norm" in name else each for name, each in drawn.items()}


@functools.lru_cache(maxsize=4096)
def digest(checkpoint: Path, version: int) -> bytes:
    """What a light server's tokens are made of under `version`."""
    whole = FakeWeights(checkpoint, 1)
    whole.load(list(weights(checkpoint, version).items()))
    return whole.digest()


def token(made_of: bytes, prompt: list[int], before: list[int]) -> int:
    """The token that a light server with these weights says next (tests/kit/fake_sglang.py)."""
    seen = json.dumps([prompt, before]).encode()
    return int.from_bytes(hashlib.sha256(made_of + seen).digest()[:4], "big") % 512


Makes = Callable[[int], Sequence[bool]]
"""Version -> for each token of an answer, whether the complete weights of that version make it."""


def light_maker(checkpoint: Path, prompt: list[int], tokens: list[int]) -> Makes:
    """Of an answer of a light server, by equality."""

    def makes(version: int) -> list[bool]:
        made_of = digest(checkpoint, version)
        return [each == token(made_of, prompt, tokens[:at]) for at, each in enumerate(tokens)]

    return makes


def real_maker(checkpoint: Path, prompt: list[int], tokens: list[int], told: Sequence[float]) -> Makes:
    """Of an answer of a real server, by the log probabilities `told` with it."""
    config = json.loads((checkpoint / "config.json").read_text())

    def makes(version: int) -> list[bool]:
        expected = log_probabilities(config, _floats(checkpoint, version), prompt + tokens)[len(prompt) - 1 : -1]
        mine = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return ((mine - torch.tensor(told)).abs() < ROUNDING).tolist()

    return makes


@functools.lru_cache(maxsize=64)
def _floats(checkpoint: Path, version: int) -> dict[str, torch.Tensor]:
    return {name: each.float() for name, each in weights(checkpoint, version).items()}


@torch.no_grad()
def log_probabilities(config: dict[str, int], w: dict[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Of every token after each prefix of `tokens`: a forward pass of Qwen3, without a cache or kernels of others."""
    n, inverse = len(tokens), config["rope_theta"] ** -(torch.arange(0, config["head_dim"], 2) / config["head_dim"])
    angles = torch.outer(torch.arange(n).float(), inverse).repeat(1, 2)
    hidden = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        entered = _norm(hidden, w[f"{at}input_layernorm.weight"])
        q, k, v = (
            (entered @ w[f"{at}self_attn.{part}_proj.weight"].T).view(n, -1, config["head_dim"]) for part in "qkv"
        )
        q, k = (_norm(each, w[f"{at}self_attn.{part}_norm.weight"]) for each, part in ((q, "q"), (k, "k")))
        q, k = (_turned(each.transpose(0, 1), angles) for each in (q, k))
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        k, v = (each.repeat_interleave(groups, 0) for each in (k, v.transpose(0, 1)))
        seen = f.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)
        hidden = hidden + seen.reshape(n, -1) @ w[f"{at}self_attn.o_proj.weight"].T
        entered = _norm(hidden, w[f"{at}post_attention_layernorm.weight"])
        gated = f.silu(entered @ w[f"{at}mlp.gate_proj.weight"].T) * (entered @ w[f"{at}mlp.up_proj.weight"].T)
        hidden = hidden + gated @ w[f"{at}mlp.down_proj.weight"].T
    return torch.log_softmax(_norm(hidden, w["model.norm.weight"]) @ w["lm_head.weight"].T, -1)


def _norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def maker_of(makes: Makes, span: range, candidates: Iterable[int]) -> int | None:
    """The first of `candidates` whose complete weights made every token of `span`; None if no such version did."""
    return next((each for each in candidates if all(makes(each)[at] for at in span)), None)
