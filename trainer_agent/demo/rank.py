"""The training program of the demo, one process a rank: generate, learn, publish, as an RL loop would.

Rank 0 asks the engines and reports; every rank learns and publishes. Started by `run.py` with torch's usual environment
(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and a `Plan` as its only argument.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Final, Protocol

import msgspec
import torch
import torch.distributed as dist

from ..agent import TrainerAgent
from ..report import PublishReport
from ..source import Source
from . import records, task
from .checkpoint import policy_of
from .engines import LAUNCH_LABEL, Fleet, Response
from .settings import Trainer

PATIENCE_S: Final = 120.0
"""How long any rank waits for anything. A round takes two seconds."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo tells its training program."""

    checkpoint: str
    progress: str
    rounds: int
    trainer: Trainer
    seed: int
    publish: bool
    channel: str
    coordinator: str
    status_url: str
    engines: int
    transport: str
    """Empty: whatever suits each engine."""
    host: str
    """At which engines elsewhere reach the ranks."""
    runtime_dir: str
    keys: str
    save_every: int = 0
    save_dir: str = ""


class Learner(Protocol):
    """The policy and its optimizer on this rank."""

    def learn(self, tokens: torch.Tensor) -> float:
        """One step; returns the norm of the gradient before clipping."""
        ...

    def source(self, timeout_s: float) -> Source:
        """The policy's weights, as they are at any time. Collective."""
        ...


def start(plan: Plan) -> Learner:
    """The learner of the wanted framework: only that one is imported. Joins the other ranks."""
    deadline = timedelta(seconds=PATIENCE_S)
    if plan.trainer is Trainer.FSDP2:
        from .fsdp_learner import FSDPLearner  # noqa: PLC0415

        dist.init_process_group("gloo", timeout=deadline)
        return FSDPLearner(Path(plan.checkpoint))
    from ..megatron_cpu import install  # noqa: PLC0415

    logging.getLogger("megatron").setLevel(logging.ERROR)  # it warns of every GPU feature that is off
    install()
    from .learner import Learner as MegatronLearner  # noqa: PLC0415

    dist.init_process_group("gloo", timeout=deadline)
    return MegatronLearner(Path(plan.checkpoint), plan.seed, policy_of(plan.trainer))


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time inside to `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class Actor:
    """Rank 0's half: asks the engines, checks who answered, reports the round."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._fleet = Fleet(plan.status_url, plan.channel, PATIENCE_S)
        self._expected = LAUNCH_LABEL
        self._responses: list[Response] = []

    def rollout(self, number: int) -> torch.Tensor:
        """Prompts and responses of round `number`, one pair a row."""
        prompts = task.prompts(self._plan.seed, number)
        ready = self._fleet.wait_ready(self._plan.engines, PATIENCE_S)
        self._responses = self._fleet.generate(ready, prompts)
        rows = [prompt + each.output_ids for prompt, each in zip(prompts, self._responses, strict=True)]
        return torch.tensor(rows)

    def report(self, number: int, seconds: dict[str, float], published: PublishReport | None) -> None:
        """Say what became of round `number`; from now on its version is the expected one."""
        if published:
            lag: dict[str, int] = {
                str(engine.engine): published.version - (engine.version or 0) for engine in published.engines
            }
        else:
            lag = {name: engine.lag or 0 for name, engine in self._fleet.state().engines.items()}
        records.append(
            Path(self._plan.progress),
            records.Round(
                number=number,
                reward=fmean(task.reward(each.output_ids) for each in self._responses),
                version=published.version if published else 0,
                responses=len(self._responses),
                mismatched=sum(each.meta_info.weight_version != self._expected for each in self._responses),
                mixed=sum(each.mixed for each in self._responses),
                lag=lag,
                seconds=seconds | (published.seconds if published else {}),
                nbytes=sum(engine.bytes for engine in published.engines) if published else 0,
                ways={str(each.engine): each.transport.value for each in published.engines if each.transport}
                if published
                else {},
            ),
        )
        if published:
            self._expected = str(published.version)

    def close(self) -> None:
        """Drop the connections."""
        self._fleet.close()


def train(plan: Plan) -> None:
    """All rounds, on this rank."""
    learner = start(plan)
    actor = Actor(plan) if dist.get_rank() == 0 else None
    agent = _connect(plan, learner) if plan.publish else None
    for number in range(1, plan.rounds + 1):
        watch = Stopwatch()
        with watch.phase("generate"):
            tokens = _share(actor.rollout(number) if actor else None)
        with watch.phase("train"):
            learner.learn(tokens)
        with watch.phase("publish"):
            published = agent.publish(number) if agent else None
        if actor:
            actor.report(number, watch.seconds, published)
    if agent:
        agent.close()
    if actor:
        actor.close()


def _share(tokens: torch.Tensor | None) -> torch.Tensor:
    """Rank 0's tokens, on every rank."""
    if tokens is None:
        tokens = torch.empty(task.RESPONSES, task.PROMPT_TOKENS + task.RESPONSE_TOKENS, dtype=torch.int64)
    dist.broadcast(tokens, src=0)
    return tokens


def _connect(plan: Plan, learner: Learner) -> TrainerAgent:
    return TrainerAgent.connect(
        learner.source(PATIENCE_S),
        channel=plan.channel,
        coordinator=plan.coordinator,
        keys=Path(plan.keys),
        transport=plan.transport or None,
        host=plan.host,
        runtime_dir=Path(plan.runtime_dir),
        checkpoint_dir=Path(plan.runtime_dir) / "checkpoints",
        hf_config_dir=Path(plan.checkpoint),
        save_every=plan.save_every,
        save_dir=Path(plan.save_dir) if plan.save_every else None,
        round_timeout_s=PATIENCE_S,
    )


def main(argument: str) -> None:
    """Join the other ranks, train, leave."""
    torch.set_num_threads(1)
    train(msgspec.json.decode(argument, type=Plan))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
