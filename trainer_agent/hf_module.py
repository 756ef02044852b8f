"""A `Source` over a plain Hugging Face module on one process: what a single-GPU trainer has, and what tests need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weightbus.dataplane.boxes import Box
from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.dataplane.pieces import Piece, Pieces, View

from .assembly import Assembler, check_manifest
from .parcels import plan
from .source import UnsupportedModel


class HFModuleSource:
    """The live weights of one module whose parameter names are those of its checkpoint. Satisfies `Source`."""

    def __init__(self, module: nn.Module, *, model: str | None = None, dtype: torch.dtype | None = None) -> None:
        """`model` is the architecture, by default the module's class; `dtype` what is served, by default as it is.

        Raises `UnsupportedModel` for fused experts, which checkpoints name otherwise than modules do.
        """
        self._model = model or type(module).__name__
        named = _unshared(module)
        self._tensors = tuple(
            TensorSpec(name, str(dtype or tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in named
        )
        self._parameters = [tensor for _, tensor in named]
        self._planned: tuple[Manifest, Assembler] | None = None

    @property
    def model(self) -> str:
        """Architecture as the checkpoint's config names it."""
        return self._model

    @property
    def root(self) -> bool:
        """One process: it is the root."""
        return True

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._parameters[0].device

    def tensors(self) -> Sequence[TensorSpec]:
        """What is served, in the module's order."""
        return self._tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out`."""
        if out is None:
            raise ValueError("the root gives a buffer")
        if self._planned is None or self._planned[0] is not manifest:
            check_manifest(manifest, self._tensors)
            self._planned = (
                manifest,
                Assembler(plan(manifest, self.local(self._tensors)[1], rank=0), self._parameters, 0, 0, None),
            )
        self._planned[1].run(index, out, self.device)

    def local(self, tensors: Sequence[TensorSpec]) -> tuple[Sequence[torch.Tensor], Pieces]:
        """The module's tensors, and all of each of `tensors`, where it lies."""
        numbers = {spec.name: number for number, spec in enumerate(self._tensors)}
        rows: list[Piece] = []
        for spec in tensors:
            number = numbers[spec.name]
            live = self._parameters[number]
            view = View(number, 0, tuple(int(stride) for stride in live.stride()))
            rows.append(Piece(spec.name, Box.whole(spec.shape), str(live.dtype).removeprefix("torch."), view))
        return self._parameters, Pieces.of(tensors, rows)

    def agree(self, blob: bytes | None) -> bytes:
        """Return `blob`: there is nobody else."""
        if blob is None:
            raise ValueError("the root gives what is agreed")
        return blob


def _unshared(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers; of two names for one tensor (tied embeddings) the first, as checkpoints do."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if "experts." in name and name.endswith(("gate_up_proj", "down_proj")) and tensor.dim() == 3:
            raise UnsupportedModel(f"{name!r} holds all experts in one tensor, checkpoints name each: not served yet")
        named.setdefault(id(tensor), (name, tensor))
    return list(named.values())
