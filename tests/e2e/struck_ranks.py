"""Ranks of a real Megatron trainer, to be struck (rank_template.py).

    {"rank": 0, "folder": .., "coordinator": .., "keys": .., "port": .., "socket": .., "log": ..}

Both ranks are tensor-parallel, over gloo.

    {"version": 7, "seed": 3, "transport": "sends"}

The agent of the last version is used again, and its group, unless the transport is another one or ``"fresh": true`` is
asked for. A rank that stands or is gone is given up by the others after `RANKS_S`.
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
import msgspec
import torch
import torch.distributed as dist

from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from weightbus.dataplane.transports.sends import sender as sends
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.demo import megatron_learner as model, toy_task as task
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

RANKS = 2
RANKS_S = 20.0
SMALL_TURNS = 1 << 14
"""Bytes for a pair of ranks in a turn, so that tiny models take several."""
BUCKET_BYTES = 50_000
"""Several of them, too."""


class Rank:
    """One of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder, self._coordinator, self._keys = Path(job["folder"]), job["coordinator"], job["keys"]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        os.environ |= {"RANK": str(job["rank"]), "WORLD_SIZE": str(RANKS)}
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=RANKS_S))
        parallel_state.initialize_model_parallel(RANKS)
        model_parallel_cuda_manual_seed(1)
        self._policy = model.build(task.TINY)
        self._orders = dist.new_group(backend="gloo", timeout=dt.timedelta(days=1))
        """On which ranks wait for the next command."""
        self._source: MegatronSource | None = None
        self._agent: TrainerAgent | None = None
        self._transport = ""

    def publish(self, asked: dict[str, Any]) -> object:
        """One version."""
        model.load(self._policy, task.read_checkpoint(self._folder / f"seed{asked['seed']}"), task.TINY)
        try:
            return msgspec.to_builtins(self._connected(asked).publish(asked["version"]))
        except Exception as error:  # noqa: BLE001 - whoever asked reads what went wrong
            return {"error": f"{type(error).__name__}: {error}"}

    def hear(self, line: str) -> dict[str, Any]:
        """The next command, on every rank."""
        said = [line]
        dist.broadcast_object_list(said, src=0, group=self._orders)
        asked: dict[str, Any] = json.loads(said[0])
        return asked

    def _connected(self, asked: dict[str, Any]) -> TrainerAgent:
        if self._agent is not None and (asked.get("fresh") or asked["transport"] != self._transport):
            self._agent.close()
            self._agent = None
        if self._source is None:
            self._source = MegatronSource(self._policy, hf_config=self._folder / "seed0", timeout_s=RANKS_S)
        if self._agent is None:
            self._transport = asked["transport"]
            self._agent = TrainerAgent.connect(
                self._source,
                channel="e2e",
                coordinator=self._coordinator,
                transport=(self._transport,),
                bucket_bytes=BUCKET_BYTES,
                keys=Path(self._keys),
                environ={},
            )
        return self._agent


if __name__ == "__main__":
    torch.set_num_threads(1)
    sends.pair_bytes_for = lambda *_: SMALL_TURNS
    rank_template.serve(Rank)
