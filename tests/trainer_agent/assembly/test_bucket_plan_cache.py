"""Plans of buckets: made when the manifest or the roots are new, and found again without reading either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.trainer_agent.assembly.assembler import BucketPlanCache

ONE, SAME, OTHER = (Manifest.of("toy", [TensorSpec("t", "bfloat16", (size,))]) for size in (1, 1, 2))


class Counted(tuple[int, ...]):  # noqa: SLOT001  it counts
    """Roots that know how often they are read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()


@pytest.fixture
def made() -> list[tuple[Manifest, Sequence[int] | None]]:
    return []


def test_roots_are_read_once_in_a_pass(made: list[tuple[Manifest, Sequence[int] | None]]) -> None:
    """There is one for each bucket: read for every bucket they would be read as often as there are pairs of them."""
    planned, roots = BucketPlanCache[int](), Counted((0, 1, 0))
    for _ in range(3):
        assert planned.of(ONE, roots, lambda *of: made.append(of) or len(made)) == 1
    assert roots.reads == 1


def test_what_is_new_is_planned_anew(made: list[tuple[Manifest, Sequence[int] | None]]) -> None:
    """Another manifest, other roots, or a list of roots that became others; what is equal is not."""
    planned, roots = BucketPlanCache[int](), [0, 1]

    def of(manifest: Manifest, roots: Sequence[int] | None) -> int:
        return planned.of(manifest, roots, lambda *new: made.append(new) or len(made))

    assert [of(ONE, None), of(SAME, None), of(ONE, (0,)), of(ONE, None), of(SAME, (0,))] == [1, 1, 2, 1, 2]
    assert [of(OTHER, None), of(OTHER, None), of(ONE, None)] == [3, 3, 4]
    assert of(ONE, roots) == 5
    roots[0] = 1
    assert [of(ONE, roots), of(ONE, (0, 1))] == [6, 5]


def test_what_cannot_be_planned_is_not_kept(made: list[tuple[Manifest, Sequence[int] | None]]) -> None:
    """A second call is answered again."""
    planned = BucketPlanCache[int]()

    def fail(*_: object) -> int:
        raise ValueError("no plan")

    for _ in range(2):
        with pytest.raises(ValueError, match="no plan"):
            planned.of(ONE, None, fail)
    assert planned.of(ONE, None, lambda *of: made.append(of) or len(made)) == 1
