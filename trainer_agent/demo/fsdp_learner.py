"""One policy-gradient step on FSDP2 ranks: a transformers model, sharded, with float32 masters and bfloat16 compute.

Every rank learns from its share of the responses; FSDP averages the gradients. Published weights are bfloat16, cast
from the masters where they are.
"""

# torch and transformers leave much of what they return untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ..sources import FSDPSource
from .toy_task import LEARNING_RATE, PROMPT_TOKENS, token_weights

# A torchvision that was made for CUDA does not import beside a torch for the CPU, and a text model needs none.
sys.modules.setdefault("torchvision", cast("Any", None))


class FSDPLearner:
    """The policy, its optimizer, and this rank's shards of both."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  # after torchvision was dealt with

        policy = cast("nn.Module", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in cast("nn.ModuleList", policy.get_submodule("model.layers")):
            fully_shard(layer, mp_policy=precision)
        fully_shard(policy, mp_policy=precision)
        self.model = policy
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def source(self, timeout_s: float) -> FSDPSource:
        """Source of the policy's live weights. Collective."""
        return FSDPSource(self.model, dtype=torch.bfloat16, timeout_s=timeout_s)

    def learn(self, tokens: torch.Tensor, counts: torch.Tensor) -> float:
        """One step; returns the norm of the gradient before clipping."""
        weights = token_weights(tokens, counts)
        share = slice(dist.get_rank(), None, dist.get_world_size())
        self._optimizer.zero_grad()
        self._loss(tokens[share], weights[share]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        whole = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not isfinite(whole):
            raise ArithmeticError(f"the norm of the gradient is {whole}")
        self._optimizer.step()
        return whole

    def _loss(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """REINFORCE: the weighted surprise (minus the log-probability) of the responses' tokens."""
        logits = cast("torch.Tensor", self.model(tokens[:, :-1]).logits).float()
        surprise = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (weights * surprise[:, PROMPT_TOKENS - 1 :]).mean()
