"""A `Source` over a plain Hugging Face module on one process: what a single-GPU trainer has, and what tests need."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

from weightbus.dataplane import pieces as boxed
from weightbus.dataplane.boxes import Box
from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.dataplane.pieces import Pieces, View

from .assembly import Assembler, check_manifest, plan
from .pieces import Piece
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
        self._parameters = [_rows(tensor) for _, tensor in named]
        self._live = [tensor for _, tensor in named]
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
            pieces = [(number, _whole(spec)) for number, spec in enumerate(self._tensors)]
            self._planned = (manifest, Assembler(plan(manifest, {0: pieces}), self._parameters, 0, 0, None))
        self._planned[1].run(index, out, self.device)

    def local(self, tensors: Sequence[TensorSpec]) -> tuple[Sequence[torch.Tensor], Pieces]:
        """The module's tensors, and all of each of `tensors`, where it lies."""
        numbers = {spec.name: number for number, spec in enumerate(self._tensors)}
        whole: list[boxed.Piece] = []
        for spec in tensors:
            number = numbers[spec.name]
            live = self._live[number]
            view = View(number, 0, tuple(int(stride) for stride in live.stride()))
            dtype = str(live.dtype).removeprefix("torch.")
            whole.append(boxed.Piece(spec.name, Box.whole(spec.shape), dtype, view))
        return self._live, Pieces.of(tensors, whole)

    def agree(self, blob: bytes | None) -> bytes:
        """Return `blob`: there is nobody else."""
        if blob is None:
            raise ValueError("the root gives what is agreed")
        return blob


def _whole(spec: TensorSpec) -> Piece:
    """All of a tensor, as rows of whatever the other dimensions hold."""
    rows = spec.shape[0] if spec.shape else 1
    return Piece(spec.name, 0, 0, rows, prod(spec.shape[1:]))


def _unshared(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers; of two names for one tensor (tied embeddings) the first, as checkpoints do."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if "experts." in name and name.endswith(("gate_up_proj", "down_proj")) and tensor.dim() == 3:
            raise UnsupportedModel(f"{name!r} holds all experts in one tensor, checkpoints name each: not served yet")
        named.setdefault(id(tensor), (name, tensor.detach()))
    return list(named.values())


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A view of one or two dimensions: pieces have rows and columns."""
    return tensor if tensor.dim() in {1, 2} else tensor.view(tensor.shape[0] if tensor.dim() else 1, -1)
