"""One policy-gradient step on real Megatron ranks: forward, backward, gradient reduction, clipping, Adam.

Every rank calls the same methods in the same order with the same tokens; Megatron does the rest. A dense policy is
spread by tensor parallelism. Experts are spread by expert parallelism, and all else is the same on every rank, each of
which learns from its share of the responses. Import after `megatron_cpu.install()`.
"""

# Megatron is typed in part, and generously: what it returns is unknown to a strict reader.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

from ..sources.megatron import MegatronSource
from . import initial_checkpoint as checkpoint
from .initial_checkpoint import TINY, ModelShape
from .megatron_model import build, load
from .toy_task import LEARNING_RATE, PROMPT_TOKENS, advantages, reward


class Learner:
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
        load(policy, checkpoint.read(folder), shape)
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
        """The policy's weights, as they are at any time. Collective."""
        return MegatronSource(self.model, hf_config=self._folder, timeout_s=timeout_s)

    def learn(self, tokens: torch.Tensor, counts: torch.Tensor) -> float:
        """One step of REINFORCE with a group baseline; returns the norm of the gradient before clipping.

        `tokens` holds a prompt and its response in each row, groups together; `counts` says of each token of the
        responses whether it is learned from.
        """
        rewards = [reward(response) for response in tokens[:, PROMPT_TOKENS:].tolist()]
        share = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
        weights = (torch.tensor(advantages(rewards)).unsqueeze(1) * counts)[share]
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


def join(deadline_s: float) -> None:
    """Form the group of all ranks, from the environment that the launcher set."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=deadline_s))


def _forward(
    weights: torch.Tensor, batches: Iterator[torch.Tensor], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    tokens = next(batches)
    positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
    surprise = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return surprise, partial(_policy_loss, weights)


def _policy_loss(weights: torch.Tensor, surprise: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Surprise is minus the log-probability of each token: less of it where a response beat its group.

    `weights` are by token.
    """
    responses = surprise[:, PROMPT_TOKENS - 1 :].float()
    loss = (weights * responses).mean()
    return loss, {"loss": loss.detach()}
