"""A trainer of one plain process on a GPU, to be struck (rank_template.py); struck_ranks.py has two on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e import rank_template  # first: it takes standard output for itself

# isort: split
import msgspec
import torch

from tests.e2e.plain_rank import FlatModule
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

BUCKET_BYTES = 500_000
"""Several of them."""


class Rank:
    """The only one."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder = Path(job["folder"])
        self._module = FlatModule(self._folder / "seed0").to("cuda")
        self._source = HFModuleSource(self._module, model="Qwen3ForCausalLM")
        self._job = job
        self._agent: TrainerAgent | None = None

    def publish(self, asked: dict[str, Any]) -> object:
        """One version."""
        self._module.load(self._folder / f"seed{asked['seed']}")
        torch.cuda.synchronize()
        try:
            return msgspec.to_builtins(self._connected(asked).publish(asked["version"]))
        except Exception as error:  # noqa: BLE001 - whoever asked reads what went wrong
            return {"error": f"{type(error).__name__}: {error}"}

    def hear(self, line: str) -> dict[str, Any]:
        """The next command."""
        asked: dict[str, Any] = json.loads(line)
        return asked

    def _connected(self, asked: dict[str, Any]) -> TrainerAgent:
        if self._agent is not None and asked.get("fresh"):
            self._agent.close()
            self._agent = None
        if self._agent is None:
            self._agent = TrainerAgent.connect(
                self._source,
                channel="e2e",
                coordinator=self._job["coordinator"],
                transport=(asked["transport"],),
                bucket_bytes=BUCKET_BYTES,
                keys=Path(self._job["keys"]),
                environ={},
            )
        return self._agent


if __name__ == "__main__":
    rank_template.serve(Rank)
