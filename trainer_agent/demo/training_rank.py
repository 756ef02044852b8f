"""The training program of the demo, one process a rank: generate, learn, publish, as an RL loop would.

One after another, or (``asynchronous``) all of it at once, of different rounds. Rank 0 asks the engines and reports;
every rank learns and publishes. Started by `demo_run.py` with torch's usual environment (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT) and a `RankArguments` as its only argument.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch
import torch.distributed as dist

from weightbus.control.protocol import TransportKind

from ..machine import PublishHandle
from ..publish import TrainerAgent
from ..rollouts import Fleet
from ..source import Source
from . import toy_task as task
from .commands import CHANNEL, SAVED, RankArguments, Sync, TrainerKind
from .rollouts import WIDTH, Actor, Batch
from .toy_task import policy_of

TIMEOUT_S: Final = 120.0
"""Seconds that a rank waits for a peer, an engine or a round. A round takes two seconds."""
MAX_LAG: Final = 1
"""`max_lag` of asynchronous rounds."""


class Learner(Protocol):
    """The policy and its optimizer on this rank."""

    def learn(self, tokens: torch.Tensor, counts: torch.Tensor) -> float:
        """One step, as `token_weights` says; returns the norm of the gradient before clipping."""
        ...

    def source(self, timeout_s: float) -> Source:
        """Source of the policy's live weights. Collective."""
        ...


def start(arguments: RankArguments) -> Learner:
    """Join the other ranks and return the learner of the chosen framework, the only one that is imported."""
    deadline = timedelta(seconds=TIMEOUT_S)
    trainer = arguments.settings.trainer
    if trainer is TrainerKind.FSDP2:
        from .fsdp_learner import FSDPLearner  # noqa: PLC0415

        dist.init_process_group("gloo", timeout=deadline)
        return FSDPLearner(arguments.checkpoint)
    from ..sources.megatron import install  # noqa: PLC0415

    logging.getLogger("megatron").setLevel(logging.ERROR)  # it warns of every GPU feature that is off
    install()
    from .megatron_learner import MegatronLearner  # noqa: PLC0415

    dist.init_process_group("gloo", timeout=deadline)
    return MegatronLearner(arguments.checkpoint, arguments.settings.seed, policy_of(trainer))


class RoundStopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: dict[str, tuple[float, float]] = {}
        """Begin and end of the last run of each phase, in seconds of `time.perf_counter`."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time inside to `name`."""
        started = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.spans[name] = (started, ended)
        self.seconds[name] = self.seconds.get(name, 0.0) + ended - started


def train(arguments: RankArguments) -> None:
    """Run all rounds on this rank."""
    learner = start(arguments)
    actor = None
    if dist.get_rank() == 0:
        fleet = Fleet(CHANNEL, url=arguments.status_url, timeout_s=TIMEOUT_S)
        actor = Actor(arguments, fleet, TIMEOUT_S)
    agent = _connect(arguments, learner) if arguments.settings.sync is Sync.ON else None
    if agent and arguments.base:
        agent.publish(arguments.base)
    if actor:
        actor.begin()
    if agent and arguments.asynchronous:
        _asynchronously(arguments, learner, actor, agent)
    else:
        _synchronously(arguments, learner, actor, agent)
    if agent:
        agent.close()
    if actor:
        actor.close()


def _synchronously(arguments: RankArguments, learner: Learner, actor: Actor | None, agent: TrainerAgent | None) -> None:
    """Generate, learn and publish, one after another."""
    for number in range(1, arguments.settings.rounds + 1):
        watch, batch = RoundStopwatch(), None
        current = arguments.base + number - 1 if agent else 0
        if actor:
            batch = actor.rollout(number)
        tokens, counts = _share(batch, current, 0)
        with watch.phase("train"):
            learner.learn(tokens, counts)
        with watch.phase("publish"):
            published = agent.publish(arguments.base + number) if agent else None
        if actor and batch:
            actor.report(batch, current, 0, watch.seconds, published)


def _asynchronously(arguments: RankArguments, learner: Learner, actor: Actor | None, agent: TrainerAgent) -> None:
    """Learn from one batch while the next is generated and judged, and while engines take the version before.

    The rollouts of round n begin when engines serve the version that round n - 2 published, whether or not those of
    round n - 1 are judged by then. So they are one version older than the weights in training, or span two versions.
    """
    upcoming = actor.ahead(1, arguments.base) if actor else None
    ending: Callable[[Batch | None], None] = lambda _: None  # noqa: E731  nothing was published yet
    for number in range(1, arguments.settings.rounds + 1):
        watch, current, asked = RoundStopwatch(), arguments.base + number - 1, upcoming
        if actor and number < arguments.settings.rounds:
            upcoming = actor.ahead(number + 1, current)
        with watch.phase("wait"):
            batch = asked.result(actor.deadline_s) if actor and asked else None
            tokens, counts = _share(batch, current, MAX_LAG)
        with watch.phase("train"):
            learner.learn(tokens, counts)
        with watch.phase("publish"):
            handle = agent.publish(current + 1, mode="snapshot")
        ending(batch)
        ending = partial(_end_round, actor, batch, current, watch=watch, handle=handle)
    ending(None)


def _end_round(
    actor: Actor | None,
    batch: Batch | None,
    current: int,
    following: Batch | None,
    *,
    watch: RoundStopwatch,
    handle: PublishHandle,
) -> None:
    """Wait for the round's publication and report the round. With a lag of one, the next publication has begun."""
    published = handle.wait()
    if actor and batch:
        overlap_s = following.overlap_s(*watch.spans["train"]) if following else 0.0
        actor.report(batch, current, MAX_LAG, watch.seconds | {"stood": handle.stood_s}, published, overlap_s=overlap_s)


def _share(batch: Batch | None, current: int, max_lag: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Broadcast rank 0's tokens, and the flags of tokens that are learned from, to every rank."""
    if batch is None:
        shared = torch.empty(task.RESPONSES, WIDTH, dtype=torch.int64)
    else:
        shared = batch.tensor(batch.judge(current, max_lag)[1])
    dist.broadcast(shared, src=0)
    texts = WIDTH - task.RESPONSE_TOKENS
    return shared[:, :texts], shared[:, texts:].float()


def _connect(arguments: RankArguments, learner: Learner) -> TrainerAgent:
    settings, folder = arguments.settings, Path(arguments.folder)
    return TrainerAgent.connect(
        learner.source(TIMEOUT_S),
        channel=CHANNEL,
        coordinator=arguments.coordinator,
        keys=folder / "keys",
        transport=None if settings.mixed else (settings.transport or TransportKind.LOCAL).value,
        host=arguments.host,
        runtime_dir=folder / "run",
        checkpoint_dir=folder / "run" / "checkpoints",
        hf_config_dir=arguments.checkpoint,
        save_every=settings.save_every,
        save_dir=folder / SAVED if settings.save_every else None,
        round_timeout_s=TIMEOUT_S,
        max_lag=MAX_LAG if arguments.asynchronous else None,
    )


def main(argument: str) -> None:
    """Join the other ranks, train, leave."""
    torch.set_num_threads(1)
    train(msgspec.json.decode(argument, type=RankArguments))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
