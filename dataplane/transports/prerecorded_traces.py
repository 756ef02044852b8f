"""Load traces and proofs from before the first version (prerecording.py), for the receiver that takes it.

What a version's tensors are was foreseen; in which order its manifest names them was not. So traces are given out for
another order too: none is made again while a server is paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Final

from ..errors import ManifestError
from ..reshard import LoadTrace, Verification, make_verification
from ..tensors import TensorSpec, tensor_positions

_MOST: Final = 4
"""Models of one server: the one that it serves, and its draft models."""


class PrerecordedTraces:
    """Of one server. Used from one thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[LoadTrace, ...], Verification]] = []

    def keep(self, recordings: Sequence[LoadTrace], proof: Verification) -> None:
        """The recordings of all workers of one model, and what they will report of it."""
        self._kept = [*self._kept, (tuple(recordings), proof)][-_MOST:]

    def recordings(self, tensors: tuple[TensorSpec, ...]) -> dict[str, LoadTrace]:
        """By digest, those of just these tensors in this order."""
        return {each.digest(): each for known, _ in self._kept for each in known if each.tensors == tensors}

    def proof(self, recordings: Sequence[LoadTrace]) -> Verification:
        """What the workers with these recordings report. Raises `NotTraceable`."""
        tensors = recordings[0].tensors
        for known, proof in self._kept:
            if len(known) == len(recordings) and all(map(is_, known, recordings)):
                return proof
            try:
                places = tensor_positions(tensors, known[0].tensors)
            except ManifestError:
                continue
            if len(known) == len(recordings) and all(
                each.renumbered(tensors, places).same(found) for each, found in zip(known, recordings, strict=True)
            ):
                return proof.renumbered(tensors, places)
        return make_verification(recordings)
