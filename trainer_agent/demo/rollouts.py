"""Rank 0's half of the training program: requests rollouts, judges their versions, reports rounds.

Engines are those that the coordinator lists as ready; every response names the versions that wrote it. Rollouts may be
requested ahead: they are then generated and judged on threads of their own, while the ranks train.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import fmean
from typing import Final

import msgspec
import torch

from ..machine import PublishReport
from ..rollouts import Fleet, Rollout
from ..staleness import Lineage, Staleness, StalenessVerdict
from . import round_records as records, toy_task as task
from .commands import ENGINES, RankArguments
from .toy_task import RESPONSE_TOKENS

WIDTH = task.PROMPT_TOKENS + 2 * task.RESPONSE_TOKENS
"""Columns of a batch: prompt, response, and one flag for each token of the response that is learned from."""
PARTS: Final = 2
"""Parts of a round whose responses are judged elsewhere: one is judged while the next one is generated."""


class EpisodePart(msgspec.Struct, frozen=True):
    """Responses that were requested together."""

    responses: list[Rollout]
    began: float
    ended: float
    """Begin and end of generation, in seconds of `time.perf_counter`."""
    judge_s: float = 0.0
    """Seconds for which they were judged elsewhere."""


class Batch(msgspec.Struct, frozen=True):
    """The rollouts of one round."""

    number: int
    rows: list[list[int]]
    """Token ids of each prompt, followed by its response."""
    parts: list[EpisodePart]

    @property
    def responses(self) -> list[Rollout]:
        """Responses in the order of the rows."""
        return [response for part in self.parts for response in part.responses]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase. Parts overlap, so the sum may be more than the round took."""
        judge_s = sum(part.judge_s for part in self.parts)
        written = {"generate": sum(part.ended - part.began for part in self.parts)}
        return written | {"judge": judge_s} if judge_s else written

    def overlap_s(self, began: float, ended: float) -> float:
        """Seconds of generation between two times of `time.perf_counter`."""
        return sum(max(0.0, min(ended, part.ended) - max(began, part.began)) for part in self.parts)

    def judge(self, current: int, max_lag: int) -> tuple[list[Lineage], list[StalenessVerdict]]:
        """Lineage and staleness verdict of each response when `current` is the version in training."""
        policy = Staleness(max_lag=max_lag, launch=True)
        lineages = [each.lineage for each in self.responses]
        return lineages, [policy.judge(lineage, current) for lineage in lineages]

    def tensor(self, verdicts: Sequence[StalenessVerdict]) -> torch.Tensor:
        """The batch that ranks learn from: one row a response, `WIDTH` columns."""
        return torch.tensor([[*row, *each.mask] for row, each in zip(self.rows, verdicts, strict=True)])


class Actor:
    """Generates, judges and reports the rollouts of one training program. Close it after use.

    Engines generate the parts of rounds in order, one at a time, and the judge takes them in the same order. A part is
    requested when the judge takes the one before it: an earlier request would only be answered by older weights.
    """

    def __init__(self, arguments: RankArguments, fleet: Fleet, timeout_s: float) -> None:
        self._arguments = arguments
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._engines = ThreadPoolExecutor(1, "generating")
        self._judge = ThreadPoolExecutor(1, "judging")
        self._room = threading.Semaphore(1)
        self._ended_at = time.perf_counter()

    def begin(self) -> None:
        """Generate one rollout as a warm-up, then start the clock of the first round."""
        self.rollout(0)
        self._ended_at = time.perf_counter()

    def rollout(self, number: int, version: int = 0) -> Batch:
        """The rollouts of round `number`, once every engine serves `version` or a later one."""
        return self.ahead(number, version).result(self.deadline_s)

    def ahead(self, number: int, version: int) -> Future[Batch]:
        """`rollout` in the background. Rounds are requested in order."""
        prompts = task.prompts(self._arguments.settings.seed, number)
        size = len(prompts) // (PARTS if self._arguments.environment_s else 1)
        parts = [
            self._judge.submit(
                self._judged,
                self._engines.submit(self._write, prompts[at : at + size], version),
                self._arguments.environment_s * size / len(prompts),
            )
            for at in range(0, len(prompts), size)
        ]
        return self._judge.submit(_together, number, prompts, parts)

    @property
    def deadline_s(self) -> float:
        """Seconds within which a rollout is complete or has failed, the round before it included."""
        return 2 * PARTS * (3 * self._timeout_s + self._arguments.environment_s)

    def _write(self, prompts: list[list[int]], version: int) -> EpisodePart:
        if not self._room.acquire(timeout=self.deadline_s):
            raise TimeoutError(f"the answers before were not judged in {self.deadline_s:.0f} s")
        least = version or None  # 0: the weights of the launch will do
        self._fleet.wait_ready(ENGINES, min_version=least, timeout_s=self._timeout_s)
        began = time.perf_counter()
        found = self._fleet.generate_batch(prompts, _SAMPLING, min_version=least)
        for each in found:
            if len(each.output_ids) != RESPONSE_TOKENS:
                wrote = f"{each.engine} wrote {len(each.output_ids)} tokens"
                raise BadRollout(f"{wrote}, {RESPONSE_TOKENS} were asked for")
        return EpisodePart(found, began, time.perf_counter())

    def _judged(self, writing: Future[EpisodePart], judge_s: float) -> EpisodePart:
        """Wait as long as a judge elsewhere would take. Rewards follow from the responses: nothing is fetched."""
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
        """Record a round that learned from `batch` when `current` was the version in training."""
        lineages, verdicts = batch.judge(current, max_lag)
        spanning = [lineage for lineage in lineages if lineage.mixed]
        allowed = sum(lag is not None and lag <= max_lag for lag in (lineage.lag(current) for lineage in spanning))
        wanted = {LAUNCH_LABEL if current == 0 else str(version) for version in range(current - max_lag, current + 1)}
        if published:
            lag: dict[str, int] = {
                str(engine.engine): published.version - (engine.version or 0) for engine in published.engines
            }
        else:
            lag = {each.name: (self._fleet.committed or 0) - (each.version or 0) for each in self._fleet.ready()}
        now = time.perf_counter()
        took, self._ended_at = now - self._ended_at, now
        records.append(
            self._arguments.progress,
            records.DemoRound(
                number=batch.number,
                reward=fmean(task.reward(each.output_ids) for each in batch.responses),
                version=published.version if published else 0,
                responses=len(batch.responses),
                mismatched=sum(each.meta_info.get("weight_version") not in wanted for each in batch.responses),
                mixed=len(spanning) - allowed,
                spanning_versions=allowed,
                token_lag=max(lineage.lag(current) or 0 for lineage in lineages),
                dropped=sum(not verdict.keep for verdict in verdicts),
                lag=lag,
                seconds=batch.seconds | seconds | (published.seconds if published else {}),
                wall_s=took,
                overlap_s=overlap_s,
                nbytes=sum(engine.bytes for engine in published.engines) if published else 0,
                transports={str(each.engine): each.transport.value for each in published.engines if each.transport}
                if published
                else {},
            ),
        )

    def close(self) -> None:
        """End the threads and drop the connections."""
        self._engines.shutdown()
        self._judge.shutdown()
        self._fleet.close()


def _together(number: int, prompts: Sequence[list[int]], judged: Sequence[Future[EpisodePart]]) -> Batch:
    """The batch of a round, from its judged parts."""
    parts = [part.result(0) for part in judged]
    responses = (response for part in parts for response in part.responses)
    rows = [prompt + each.output_ids for prompt, each in zip(prompts, responses, strict=True)]
    return Batch(number, rows, parts)


LAUNCH_LABEL: Final = "default"
"""SGLang's label of the weights that it was started with."""
_SAMPLING: Final = {"temperature": 1.0, "max_new_tokens": RESPONSE_TOKENS, "ignore_eos": True}


class BadRollout(Exception):
    """An engine answered something that is not a rollout."""
