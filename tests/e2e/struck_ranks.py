"""Ranks of a real Megatron trainer, to be struck (rank_template.py).

    {"rank": 0, "folder": .., "coordinator": .., "keys": .., "port": .., "socket": .., "log": ..}

Both ranks are tensor-parallel, over gloo.

    {"version": 7, "seed": 3, "transport": "sends"}

A rank that stands or is gone is given up by the others after `RANKS_S`.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e import rank_template  # first: it takes standard output for itself

# isort: split
import torch
import torch.distributed as dist

from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from weightbus.dataplane.transports.sends import sender as sends
from weightbus.trainer_agent.demo import megatron_learner as model, toy_task as task
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

RANKS = 2
RANKS_S = 20.0
SMALL_TURNS = 1 << 14
"""Bytes for a pair of ranks in a turn, so that tiny models take several."""


class Rank(rank_template.ConnectedRank):
    """One of them."""

    bucket_bytes = 50_000
    """Several buckets a version."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        os.environ |= {"RANK": str(job["rank"]), "WORLD_SIZE": str(RANKS)}
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=RANKS_S))
        parallel_state.initialize_model_parallel(RANKS)
        model_parallel_cuda_manual_seed(1)
        self._policy = model.build(task.TINY)
        self._orders = dist.new_group(backend="gloo", timeout=dt.timedelta(days=1))
        """On which ranks wait for the next command."""
        self._source: MegatronSource | None = None

    def load(self, seed: int) -> None:
        model.load(self._policy, task.read_checkpoint(self.folder / f"seed{seed}"), task.TINY)

    def source(self) -> MegatronSource:
        self._source = self._source or MegatronSource(self._policy, hf_config=self.folder / "seed0", timeout_s=RANKS_S)
        return self._source

    def hear(self, line: str) -> dict[str, Any]:
        """The next command, on every rank."""
        said = [line]
        dist.broadcast_object_list(said, src=0, group=self._orders)
        asked: dict[str, Any] = json.loads(said[0])
        return asked


if __name__ == "__main__":
    torch.set_num_threads(1)
    sends.pair_bytes_for = lambda *_: SMALL_TURNS
    rank_template.serve(Rank)
