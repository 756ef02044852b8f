"""A trainer of one plain process, to be killed: `python plain_rank.py FOLDER COORDINATOR KEYS VERSION SEED [hold]`.

It lends the memory that the checkpoint of SEED lies in, as VERSION. With ``hold`` it prints ``held`` and stands
still when its memory is on offer, before it answers any engine that comes for it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.flat_module import FlatModule
from weightbus.dataplane.transports.direct.sender import DirectSender
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.sources.hf_module import HFModuleSource


def read(folder: Path, seed: int | str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    return load_file(folder / f"seed{seed}" / "model.safetensors")


def hold(*_: object) -> None:
    """Stand still until somebody ends this process."""
    sys.stdout.write("held\n")
    sys.stdout.flush()
    signal.pause()


def main() -> None:
    folder, coordinator, keys, version, seed, *how = sys.argv[1:]
    torch.set_num_threads(1)
    if how:
        DirectSender.ready = hold  # type: ignore[method-assign]
    source = HFModuleSource(FlatModule(read(Path(folder), seed)), model="Qwen3ForCausalLM")
    with TrainerAgent.connect(
        source,
        channel="e2e",
        coordinator=coordinator,
        transport=("direct",),
        keys=Path(keys),
        environ={},
    ) as agent:
        agent.publish(int(version))


if __name__ == "__main__":
    main()
