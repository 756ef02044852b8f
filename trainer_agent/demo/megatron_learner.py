"""The policy on real Megatron ranks: built, loaded, and trained by one policy-gradient step a round.

Every rank calls the same methods in the same order with the same tokens; Megatron does the rest: forward, backward,
gradient reduction, clipping, Adam. A dense policy is cut by tensor parallelism. Experts are cut by expert parallelism,
and all other parameters are the same on every rank, each of which learns from its share of the responses. Import after
`cpu_emulation.install()`.
"""

# Megatron leaves parts untyped, and much of what it returns is Any to a strict type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.nn import functional

from ..sources.megatron import CONFIG, MegatronSource
from . import toy_task as task
from .toy_task import LEARNING_RATE, PROMPT_TOKENS, TINY, ModelShape, token_weights


def build(shape: ModelShape) -> GPTModel:
    """This rank's part of the policy, bfloat16 and not yet loaded."""
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_groups,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        **cast("dict[str, Any]", {**CONFIG, **(_experts(shape) if shape.experts else {})}),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=cast("ModuleSpec", get_gpt_decoder_block_spec(config, use_transformer_engine=False)),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        share_embeddings_and_output_weights=False,
    )


def _experts(shape: ModelShape) -> dict[str, object]:
    """Fields of a TransformerConfig for experts as modules of their own: grouped experts need a GPU."""
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def load(model: GPTModel, weights: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Fill this rank's parameters from Hugging Face tensors. Raises `KeyError` for one without a counterpart."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    first = cast("int", model.decoder.layers[0].layer_number) - 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = from_hf(_in_model(name, first), weights, shape)
            if getattr(parameter, "tensor_model_parallel", False):
                dim = int(getattr(parameter, "partition_dim", 0))
                parts = [piece.chunk(ranks, dim)[rank] for piece in full]
            else:
                parts = list(full)
            parameter.copy_(torch.cat(parts))


def _in_model(name: str, first: int) -> str:
    """A parameter's name with its layer's number in the whole model, where this stage begins with layer `first`."""
    if not name.startswith("decoder.layers."):
        return name
    decoder, layers, index, local = name.split(".", 3)
    return f"{decoder}.{layers}.{first + int(index)}.{local}"


def from_hf(name: str, weights: Mapping[str, torch.Tensor], shape: ModelShape) -> tuple[torch.Tensor, ...]:
    """The Hugging Face tensors that make up one Megatron parameter, each to be cut by rank and then stacked."""
    if name in _WHOLE:
        return (weights[_WHOLE[name]],)
    _, _, index, local = name.split(".", 3)
    layer = f"model.layers.{index}."
    if local == "self_attention.linear_qkv.weight":
        return (_interleave(weights, layer + "self_attn.", shape),)
    if local in _IN_LAYER:
        return (weights[layer + _IN_LAYER[local]],)
    mlp, _, kind = local.rpartition(".linear_")
    prefix = layer + _hf_mlp(mlp, shape)
    if kind == "fc1.weight":
        return weights[prefix + "gate_proj.weight"], weights[prefix + "up_proj.weight"]
    return (weights[{"fc2.weight": prefix + "down_proj.weight"}[kind]],)


def _hf_mlp(local: str, shape: ModelShape) -> str:
    """Name of a layer's MLP, or of the expert with this rank's local number."""
    outer, _, number = local.partition(".local_experts.")
    if not number:
        return "mlp."
    here = shape.experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{outer}.{parallel_state.get_expert_model_parallel_rank() * here + int(number)}."


def _interleave(weights: Mapping[str, torch.Tensor], prefix: str, shape: ModelShape) -> torch.Tensor:
    """Megatron keeps, group after group, the queries of a group, its key and its value."""
    rows = [weights[f"{prefix}{part}_proj.weight"].view(shape.kv_groups, -1, shape.hidden) for part in "qkv"]
    return torch.cat(rows, dim=1).reshape(-1, shape.hidden)


_WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


class MegatronLearner:
    """The policy, its optimizer and this rank's place in the group."""

    def __init__(self, folder: Path, seed: int, shape: ModelShape = TINY) -> None:
        ranks = dist.get_world_size()
        if shape.experts:
            parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
        else:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        model_parallel_cuda_manual_seed(seed)
        self._folder = folder
        policy = build(shape)
        load(policy, task.read_checkpoint(folder), shape)
        config = policy.config
        plan = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self.model = DistributedDataParallel(config, plan, Float16Module(config, policy))
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=LEARNING_RATE,
                weight_decay=0.0,
                clip_grad=1.0,
                bf16=True,
                params_dtype=torch.bfloat16,
            ),
            [self.model],
        )
        config.finalize_model_grads_func = finalize_model_grads
        self._run = get_forward_backward_func()

    def source(self, timeout_s: float) -> MegatronSource:
        """Source of the policy's live weights. Collective."""
        return MegatronSource(self.model, hf_config=self._folder, timeout_s=timeout_s)

    def learn(self, tokens: torch.Tensor, counts: torch.Tensor) -> float:
        """One step; returns the norm of the gradient before clipping."""
        share = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
        weights = token_weights(tokens, counts)[share]
        tokens = tokens[share]
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(
            forward_step_func=partial(_forward, weights),
            data_iterator=iter([tokens]),
            model=self.model,
            num_microbatches=1,
            seq_length=tokens.shape[1] - 1,
            micro_batch_size=tokens.shape[0],
            forward_only=False,
        )
        outcome = self._optimizer.step()
        applied, norm = (outcome[0], outcome[1]) if outcome else (False, 0.0)
        if not applied:
            raise ArithmeticError("the optimizer skipped its step: the gradient was not finite")
        return float(norm)


def _forward(
    weights: torch.Tensor, batches: Iterator[torch.Tensor], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    tokens = next(batches)
    positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
    surprise = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return surprise, partial(_policy_loss, weights)


def _policy_loss(weights: torch.Tensor, surprise: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """REINFORCE: the weighted surprise (minus the log-probability) of the responses' tokens."""
    responses = surprise[:, PROMPT_TOKENS - 1 :].float()
    loss = (weights * responses).mean()
    return loss, {"loss": loss.detach()}
