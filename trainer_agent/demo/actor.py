"""Rank 0's half of the training program: asks the engines, judges who answered, reports rounds.

Rollouts may be asked for ahead: they are then generated on a thread of their own, while the ranks train.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import msgspec
import torch

from ..lineage import Lineage, Staleness, Verdict
from ..report import PublishReport
from . import records, task
from .engines import LAUNCH_LABEL, Fleet, Response
from .program import Plan

WIDTH = task.PROMPT_TOKENS + 2 * task.RESPONSE_TOKENS
"""Columns of a batch: prompt, response, and for each token of the response whether it counts."""


class Batch(msgspec.Struct, frozen=True):
    """The rollouts of one round."""

    number: int
    rows: list[list[int]]
    """Prompt and response, pair by pair."""
    responses: list[Response]
    seconds: float

    def judge(self, current: int, max_lag: int) -> tuple[list[Lineage], list[Verdict]]:
        """Which versions wrote it, and what of it may be learned from when `current` is the version in training."""
        policy = Staleness(max_lag=max_lag, launch=True)
        lineages = [Lineage.of(each.meta_info, len(each.output_ids)) for each in self.responses]
        return lineages, [policy.judge(lineage, current) for lineage in lineages]

    def tensor(self, verdicts: Sequence[Verdict]) -> torch.Tensor:
        """What ranks learn from, `WIDTH` columns, a response a row."""
        return torch.tensor([[*row, *each.mask] for row, each in zip(self.rows, verdicts, strict=True)])


class Actor:
    """One training program's. Close it after use."""

    def __init__(self, plan: Plan, fleet: Fleet, patience_s: float) -> None:
        self._plan = plan
        self._fleet = fleet
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._ended_at = time.perf_counter()

    def begin(self) -> None:
        """One rollout that does not count, then the clock of the first round starts."""
        self.rollout(0)
        self._ended_at = time.perf_counter()

    def rollout(self, number: int, version: int = 0) -> Batch:
        """The rollouts of round `number`, once every engine serves `version` or a later one."""
        prompts = task.prompts(self._plan.seed, number)
        ready = self._fleet.wait_ready(self._plan.engines, self._patience_s, version)
        began = time.perf_counter()
        responses = self._fleet.generate(ready, prompts)
        time.sleep(self._plan.environment_s)
        rows = [prompt + each.output_ids for prompt, each in zip(prompts, responses, strict=True)]
        return Batch(number, rows, responses, time.perf_counter() - began)

    def ahead(self, number: int, version: int) -> Future[Batch]:
        """`rollout`, while the caller does something else."""
        return self._thread.submit(self.rollout, number, version)

    def report(
        self, batch: Batch, current: int, max_lag: int, seconds: dict[str, float], published: PublishReport | None
    ) -> None:
        """Say what became of a round that learned from `batch` when `current` was the version in training."""
        lineages, verdicts = batch.judge(current, max_lag)
        wanted = {LAUNCH_LABEL if current == 0 else str(version) for version in range(current - max_lag, current + 1)}
        if published:
            lag: dict[str, int] = {
                str(engine.engine): published.version - (engine.version or 0) for engine in published.engines
            }
        else:
            lag = {name: engine.lag or 0 for name, engine in self._fleet.state().engines.items()}
        now = time.perf_counter()
        took, self._ended_at = now - self._ended_at, now
        records.append(
            Path(self._plan.progress),
            records.Round(
                number=batch.number,
                reward=fmean(task.reward(each.output_ids) for each in batch.responses),
                version=published.version if published else 0,
                responses=len(batch.responses),
                mismatched=sum(each.label not in wanted for each in batch.responses),
                mixed=sum(lineage.mixed for lineage in lineages),
                behind=max(lineage.lag(current) or 0 for lineage in lineages),
                dropped=sum(not verdict.keep for verdict in verdicts),
                lag=lag,
                seconds={"generate": batch.seconds} | seconds | (published.seconds if published else {}),
                wall_s=took,
                nbytes=sum(engine.bytes for engine in published.engines) if published else 0,
                ways={str(each.engine): each.transport.value for each in published.engines if each.transport}
                if published
                else {},
            ),
        )

    def close(self) -> None:
        """Drop the connections."""
        self._thread.shutdown()
        self._fleet.close()
