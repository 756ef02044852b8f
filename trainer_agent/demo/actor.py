"""Rank 0's half of the training program: asks the engines, judges who answered, reports rounds.

Rollouts may be asked for ahead: they are then generated and judged on threads of their own, while the ranks train.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import torch

from ..machine import PublishReport
from ..staleness import Lineage, Staleness, StalenessVerdict
from . import round_records as records, toy_task as task
from .program_arguments import RankArguments
from .rollout_client import LAUNCH_LABEL, Response, RolloutClient

WIDTH = task.PROMPT_TOKENS + 2 * task.RESPONSE_TOKENS
"""Columns of a batch: prompt, response, and for each token of the response whether it counts."""
PARTS: Final = 2
"""Of a round whose answers are judged elsewhere: while one is judged, the next one is written."""


class EpisodePart(msgspec.Struct, frozen=True):
    """Answers that were asked for together."""

    responses: list[Response]
    began: float
    ended: float
    """When engines began and ended to write them, in seconds of `time.perf_counter`."""
    judge_s: float = 0.0
    """How long they were judged elsewhere."""


class Batch(msgspec.Struct, frozen=True):
    """The rollouts of one round."""

    number: int
    rows: list[list[int]]
    """Prompt and response, pair by pair."""
    parts: list[EpisodePart]

    @property
    def responses(self) -> list[Response]:
        """In the order of the rows."""
        return [response for part in self.parts for response in part.responses]

    @property
    def seconds(self) -> dict[str, float]:
        """By phase. A part is judged while the next one is written, so they may be more than the round took."""
        judge_s = sum(part.judge_s for part in self.parts)
        written = {"generate": sum(part.ended - part.began for part in self.parts)}
        return written | {"judge": judge_s} if judge_s else written

    def overlap_s(self, began: float, ended: float) -> float:
        """For how long engines wrote it between those two times."""
        return sum(max(0.0, min(ended, part.ended) - max(began, part.began)) for part in self.parts)

    def judge(self, current: int, max_lag: int) -> tuple[list[Lineage], list[StalenessVerdict]]:
        """Which versions wrote it, and what of it may be learned from when `current` is the version in training."""
        policy = Staleness(max_lag=max_lag, launch=True)
        lineages = [Lineage.of(each.meta_info, len(each.output_ids)) for each in self.responses]
        return lineages, [policy.judge(lineage, current) for lineage in lineages]

    def tensor(self, verdicts: Sequence[StalenessVerdict]) -> torch.Tensor:
        """What ranks learn from, `WIDTH` columns, a response a row."""
        return torch.tensor([[*row, *each.mask] for row, each in zip(self.rows, verdicts, strict=True)])


class Actor:
    """One training program's. Close it after use.

    Engines write the parts of rounds in order, one at a time, and the judge looks at them so, too. A part is asked for
    when the judge takes the one before it: earlier it would only be written by older weights.
    """

    def __init__(self, plan: RankArguments, fleet: RolloutClient, patience_s: float) -> None:
        self._plan = plan
        self._fleet = fleet
        self._patience_s = patience_s
        self._engines = ThreadPoolExecutor(1, "generating")
        self._judge = ThreadPoolExecutor(1, "judging")
        self._room = threading.Semaphore(1)
        self._ended_at = time.perf_counter()

    def begin(self) -> None:
        """One rollout that does not count, then the clock of the first round starts."""
        self.rollout(0)
        self._ended_at = time.perf_counter()

    def rollout(self, number: int, version: int = 0) -> Batch:
        """The rollouts of round `number`, once every engine serves `version` or a later one."""
        return self.ahead(number, version).result(self.deadline_s)

    def ahead(self, number: int, version: int) -> Future[Batch]:
        """`rollout`, while the caller does something else. Rounds are asked for in their order."""
        prompts = task.prompts(self._plan.seed, number)
        size = len(prompts) // (PARTS if self._plan.environment_s else 1)
        parts = [
            self._judge.submit(
                self._judged,
                self._engines.submit(self._write, prompts[at : at + size], version),
                self._plan.environment_s * size / len(prompts),
            )
            for at in range(0, len(prompts), size)
        ]
        return self._judge.submit(_together, number, prompts, parts)

    @property
    def deadline_s(self) -> float:
        """Within which rollouts are there, or have failed, the round before them included."""
        return 2 * PARTS * (3 * self._patience_s + self._plan.environment_s)

    def _write(self, prompts: list[list[int]], version: int) -> EpisodePart:
        if not self._room.acquire(timeout=self.deadline_s):
            raise TimeoutError(f"the answers before were not judged in {self.deadline_s:.0f} s")
        ready = self._fleet.wait_ready(self._plan.engines, self._patience_s, version)
        began = time.perf_counter()
        return EpisodePart(self._fleet.generate(ready, prompts), began, time.perf_counter())

    def _judged(self, writing: Future[EpisodePart], judge_s: float) -> EpisodePart:
        """Wait for who judges elsewhere. Rewards are what answers say, so there is nothing to fetch."""
        try:
            part = writing.result(self.deadline_s)
        finally:
            self._room.release()
        began = time.perf_counter()
        time.sleep(judge_s)
        took = time.perf_counter() - began
        return msgspec.structs.replace(part, judge_s=took) if judge_s else part

    def report(
        self,
        batch: Batch,
        current: int,
        max_lag: int,
        seconds: dict[str, float],
        published: PublishReport | None,
        *,
        overlap_s: float = 0.0,
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
            records.DemoRound(
                number=batch.number,
                reward=fmean(task.reward(each.output_ids) for each in batch.responses),
                version=published.version if published else 0,
                responses=len(batch.responses),
                mismatched=sum(each.label not in wanted for each in batch.responses),
                mixed=sum(lineage.mixed for lineage in lineages),
                behind=max(lineage.lag(current) or 0 for lineage in lineages),
                dropped=sum(not verdict.keep for verdict in verdicts),
                lag=lag,
                seconds=batch.seconds | seconds | (published.seconds if published else {}),
                wall_s=took,
                overlap_s=overlap_s,
                nbytes=sum(engine.bytes for engine in published.engines) if published else 0,
                ways={str(each.engine): each.transport.value for each in published.engines if each.transport}
                if published
                else {},
            ),
        )

    def close(self) -> None:
        """Drop the connections."""
        self._engines.shutdown()
        self._judge.shutdown()
        self._fleet.close()


def _together(number: int, prompts: Sequence[list[int]], judged: Sequence[Future[EpisodePart]]) -> Batch:
    """The parts of a round, all of which are judged."""
    parts = [part.result(0) for part in judged]
    responses = (response for part in parts for response in part.responses)
    rows = [prompt + each.output_ids for prompt, each in zip(prompts, responses, strict=True)]
    return Batch(number, rows, parts)
