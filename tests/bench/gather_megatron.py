"""The tiny model of the benchmark as Megatron-core builds it on gloo ranks: real parameters, and a real source of them.

The GPU figures need 61 GB of weights and take parameters that gather_model.py lays out by hand. This shows that a real
`MegatronSource` finds the very same pieces in the same places, so that what is measured there is what a trainer gets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import mcore_on_cpu

mcore_on_cpu.prepare()

import torch  # noqa: E402
from family_models import build, start  # noqa: E402
from gather_model import Param, Shape, pieces, rule_of  # noqa: E402
from tiny_families import Layout  # noqa: E402

from weightbus.dataplane.tensors.shards import Shard  # noqa: E402
from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu  # noqa: E402
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource  # noqa: E402

FAMILY = "qwen3_moe"


def config(shape: Shape) -> dict[str, Any]:
    """The Hugging Face config of the shape."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


class Trained:
    """One rank's part of the model, tensor and expert parallel over all ranks. Collective."""

    def __init__(self, shape: Shape, rank: int, ranks: int) -> None:
        self._shape, self._rank, self._ranks = shape, rank, ranks
        megatron_cpu.install()
        layout = Layout(tp=ranks, ep=ranks, etp=1, te=True)
        start(layout)
        hf = config(shape)
        (chunk,) = build(FAMILY, hf, layout, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
        # What follows is measured: nothing may stand between it and torch.
        megatron_cpu._active.pop().__exit__(None, None, None)
        self.params = list(_params(chunk, rank * shape.experts // ranks))
        for param in self.params:
            seed = 1 if ".experts." not in param.name and param.data.dim() == 1 else 1000 + rank
            seed = 1 if param.name.endswith("router.weight") else seed
            generator = torch.Generator().manual_seed(seed)
            param.data.copy_(torch.randn(param.data.shape, generator=generator))
        self.source = MegatronSource(chunk, hf_config=json.loads(json.dumps(hf)), timeout_s=120.0)

    def odd(self) -> list[str]:
        """Where this rank's pieces are not those that gather_model.py lays out by hand."""
        own = self.source._local
        names = {param.data.data_ptr(): param.name for param in self.params}
        found = {_placed(own.shards.at(row), names, own.parameters) for row in range(len(own.shards))}
        tensors = [param.data for param in self.params]
        laid_out = {
            _placed(piece, names, tensors) for piece in pieces(self.params, self._shape, self._rank, self._ranks)
        }
        return sorted(map(str, found ^ laid_out))


def _placed(piece: Shard, names: dict[int, str], storages: Any) -> tuple[object, ...]:
    storage = storages[piece.view.storage]
    return piece.tensor, piece.box, piece.dtype, names[storage.data_ptr()], piece.view.offset, piece.view.strides


def _params(chunk: torch.nn.Module, first: int) -> Iterator[Param]:
    """Parameters by their global names: experts are counted from 0 on every rank."""
    for name, parameter in chunk.named_parameters():
        head, expert, number = name.rpartition(".weight") if ".mlp.experts." in name else (name, "", "")
        shown = f"{head}{expert}{first + int(number)}" if number else name
        yield Param(shown, parameter.data, rule_of(shown))
