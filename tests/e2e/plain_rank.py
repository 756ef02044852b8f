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

from weightbus.dataplane.transports.direct.sender import DirectSender
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.sources.hf_module import HFModuleSource


class FlatModule(torch.nn.Module):
    """The parameters of a checkpoint under their names."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for name, tensor in load_file(folder / "model.safetensors").items():
            owner: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(tensor))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """A training step: other values in the same memory."""
        for name, tensor in load_file(folder / "model.safetensors").items():
            self.get_parameter(name).copy_(tensor)


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
    source = HFModuleSource(FlatModule(Path(folder) / f"seed{seed}"), model="Qwen3ForCausalLM")
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
