"""A trainer of one plain process on a GPU, to be struck (rank_template.py); struck_ranks.py has two on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e import rank_template  # first: it takes standard output for itself

# isort: split
import torch

from tests.e2e.plain_rank import read
from tests.kit.flat_module import FlatModule
from weightbus.trainer_agent.sources.hf_module import HFModuleSource


class Rank(rank_template.ConnectedRank):
    """The only one."""

    bucket_bytes = 500_000
    """Several buckets a version."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self._module = FlatModule(read(self.folder, 0)).to("cuda")
        self._source = HFModuleSource(self._module, model="Qwen3ForCausalLM")

    def load(self, seed: int) -> None:
        self._module.load_weights(read(self.folder, seed).items())
        torch.cuda.synchronize()

    def source(self) -> HFModuleSource:
        return self._source

    def hear(self, line: str) -> dict[str, Any]:
        """The next command."""
        asked: dict[str, Any] = json.loads(line)
        return asked


if __name__ == "__main__":
    rank_template.serve(Rank)
