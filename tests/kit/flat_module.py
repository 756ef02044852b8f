"""A module whose parameters have any names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class FlatModule(torch.nn.Module):
    """The parameters are these tensors, in the same memory and under their names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            owner: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Other values in the same memory, as a loader of SGLang's models or a training step brings them."""
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)
