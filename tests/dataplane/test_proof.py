"""What workers report is compared with the digest table: whatever differs is found, wherever it is held."""

from __future__ import annotations

import numpy as np
import pytest

from weightbus.dataplane import integrity
from weightbus.dataplane.boxes import Boxes
from weightbus.dataplane.copy_table import CopyTable
from weightbus.dataplane.digest_table import BoxTable, Lanes, table_of
from weightbus.dataplane.errors import DigestMismatch
from weightbus.dataplane.manifest import DigestTable, TensorSpec
from weightbus.dataplane.packing import packed
from weightbus.dataplane.pieces import Pieces
from weightbus.dataplane.proof import Proof, RankProof, rows_of

SPECS = tuple(TensorSpec(name, "bfloat16", (8, 16)) for name in ("a", "b", "c", "d"))
NOTHING = Pieces.of(SPECS, [])
NONE = np.zeros(0, np.int64)


def rank(*atoms: int) -> RankProof:
    """A worker that holds these atoms, in this order."""
    table: BoxTable = table_of(NOTHING, NONE, NONE)
    copies: CopyTable = packed(NOTHING, NONE, NONE).copies
    return RankProof(table, np.array(atoms, np.int64), copies, NOTHING, 0)


def proof(halves: tuple[int, ...], *ranks: RankProof) -> Proof:
    """Of tensors that are whole atoms, or two halves of rows if they are among `halves`; the last one is not held."""
    boxes = [
        (tensor, top, bottom)
        for tensor in range(3)
        for top, bottom in (((0, 4), (4, 8)) if tensor in halves else ((0, 8),))
    ]
    space, start, stop = (np.array(column, np.int64) for column in zip(*boxes, strict=True))
    along = np.zeros_like(start)
    atoms = Boxes(space, np.stack([start, along], 1), np.stack([stop, along + 16], 1))
    return Proof(SPECS, atoms, ranks, ())


def sums(count: int) -> Lanes:
    return np.random.default_rng(count).integers(0, 1 << 63, (2, count)).astype(np.uint64) * np.uint64(2)


def table(made: Proof, lanes: Lanes) -> DigestTable:
    """Of these sums of all atoms."""
    totals = np.zeros((2, len(SPECS)), np.uint64)
    for atom, tensor in enumerate(made.atoms.space.tolist()):
        totals[:, tensor] += lanes[:, atom]
    digests = integrity.finish(totals, np.array([spec.nbytes for spec in SPECS], np.int64))
    return DigestTable("m", 1, integrity.ALGORITHM, digests)


CASES = {
    "one worker, whole tensors": proof((), rank(0, 1, 2)),
    "in another order": proof((), rank(2, 0, 1)),
    "halves on two workers": proof((0, 2), rank(0, 2, 3), rank(1, 4)),
    "held several times": proof((1,), rank(0, 1, 2, 3), rank(3, 2, 0), rank(1, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_that_are_the_tables_are_taken(case: str) -> None:
    """Whoever holds what, in whatever order, and a tensor that nobody holds is not asked for."""
    made = CASES[case]
    lanes = sums(len(made.atoms))
    made.check(table(made, lanes), [lanes[:, each.atom] for each in made.ranks], [b""] * len(made.ranks))


@pytest.mark.parametrize("case", CASES)
def test_one_bit_anywhere_is_found(case: str) -> None:
    """On any worker, of any atom and lane, also where another worker holds the same atom rightly."""
    made = CASES[case]
    lanes = sums(len(made.atoms))
    for number, each in enumerate(made.ranks):
        for instance in range(len(each.atom)):
            for lane in (0, 1):
                found = [lanes[:, other.atom].copy() for other in made.ranks]
                found[number][lane, instance] ^= np.uint64(1 << 40)
                tensor = SPECS[int(made.atoms.space[each.atom[instance]])].name
                with pytest.raises(DigestMismatch, match=rf"\b{tensor}\b"):
                    made.check(table(made, lanes), found, [b""] * len(made.ranks))


def test_only_all_rows_in_their_order_are_a_slice() -> None:
    """Another order or a part is the column itself."""
    assert rows_of(np.arange(3), 3) == slice(None)
    for other in ([0, 2, 1], [0, 1], [0, 1, 2, 2]):
        assert rows_of(np.array(other), 3) is not slice(None)
        assert np.array_equal(rows_of(np.array(other), 3), other)
