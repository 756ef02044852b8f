"""GPU conflicts: engines that cannot be in an NCCL group, because another member is on the same GPU. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ...errors import TransferFailed

_OF_ENGINES: Final = "let the engine take another transport"
_OF_RANKS: Final = "leave sends out of the trainer's setting transport: with it no engine gets anything"


class GpuConflict(NamedTuple):
    """Why an engine is left out."""

    reason: str
    spared: bool
    """Another engine is in its place, and not a rank of the trainer: in a group of its own it does no harm."""


def crowded(ranks: Mapping[int, str], engines: Mapping[str, tuple[str, ...]]) -> dict[str, GpuConflict]:
    """The engines whose GPUs are taken, by the trainer's ranks or by engines before them.

    `ranks` and `engines` say which seat each rank and worker has (device_identity.py); empty for one without. Raises
    `TransferFailed` where two ranks have the same one.
    """
    holders: dict[str, str] = {}
    for rank, seat in ranks.items():
        if seat in holders:
            raise TransferFailed(f"{holders[seat]} and rank {rank} {_on(seat, _OF_RANKS)}")
        holders |= {seat: f"rank {rank} of the trainer"} if seat else {}
    of_ranks = frozenset(holders)
    found: dict[str, GpuConflict] = {}
    for name, told in engines.items():
        seats = [seat for seat in told if seat]
        taken = next((seat for at, seat in enumerate(seats) if seat in holders or seat in seats[:at]), "")
        if not taken:
            holders |= dict.fromkeys(seats, f"a worker of {name}")
            continue
        other = holders.get(taken, "another of its workers")
        spared = taken in holders and taken not in of_ranks
        found[name] = GpuConflict(f"a worker of {name} and {other} {_on(taken, _OF_ENGINES)}", spared)
    return found


def _on(gpu: str, instead: str) -> str:
    return f"are on GPU {gpu}, and NCCL takes no two ranks on one: give each a GPU of its own, or {instead}"
