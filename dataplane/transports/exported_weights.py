"""The weights that a trainer's ranks export: every rank's shards, and where each lies in exported memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

from ..memory import ExportMap
from ..tensors import Shards
from .interface import Exporting
from .plan_messages import Layout


@dataclass(frozen=True, eq=False)
class ExportedWeights:
    """The memory that all ranks of a trainer export, in one generation."""

    pieces: Shards
    """Of all ranks, in the tensors of the manifest that is published."""
    exports: tuple[ExportMap, ...]
    exporters: tuple[Exporting, ...]

    @cached_property
    def given(self) -> Layout:
        """The part that a receiver keeps from round to round: the same in every generation."""
        return Layout(pieces=self.pieces.encode(), exports=tuple([export.encode() for export in self.exports]))

    @cached_property
    def layout(self) -> str:
        """The digest by which `given` is named on the wire."""
        parts = (self.given.pieces, *self.given.exports)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def again(self, exporters: tuple[Exporting, ...]) -> ExportedWeights:
        """The same layout, in another generation or round."""
        found = replace(self, exporters=exporters)
        vars(found).update(given=self.given, layout=self.layout)  # which take as long as the layout is large
        return found
