"""Which families in which layouts: the whole matrix, and a slice of it that is another one every day."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from family_models import Layout
from tiny_families import FAMILIES


class Case(NamedTuple):
    """One family in one layout."""

    family: str
    layout: Layout

    def __str__(self) -> str:
        """FAMILY:LAYOUT, which `parse` reads."""
        return f"{self.family}:{self.layout}"


_DENSE = {
    2: [Layout(), Layout(tp=2), Layout(pp=2), Layout(pp=2, vpp=2)],
    4: [Layout(tp=2), Layout(tp=2, pp=2), Layout(tp=4), Layout(tp=2, pp=2, vpp=2)],
}
_EXPERTS = {
    2: [*_DENSE[2], Layout(ep=2)],
    4: [
        Layout(tp=2, pp=2, vpp=2),
        Layout(tp=2, ep=2, etp=1),
        Layout(tp=2, ep=2, etp=2),
        Layout(tp=2, ep=4, etp=1),
        Layout(ep=2, etp=2),
        Layout(ep=4),
        Layout(pp=2, ep=2),
        Layout(pp=2, vpp=2, ep=2),
    ],
}


def matrix(world: int, *, core: int) -> Iterator[Case]:
    """Every case of a world, for a minor version of Megatron-core."""
    for family, tiny in FAMILIES.items():
        experts = any(key in tiny.config for key in ("num_experts", "n_routed_experts", "num_local_experts"))
        for layout in (_EXPERTS if experts else _DENSE)[world]:
            for te in (False, True):
                case = Case(family, layout._replace(te=te))
                if tiny.core_from <= core and _possible(case):
                    yield case


def _possible(case: Case) -> bool:
    tiny, layout = FAMILIES[case.family], case.layout
    if tiny.predictions and layout.vpp:
        return False  # Megatron-core wants a layout of its own for it
    # These are built of specs that only exist for Transformer Engine.
    return layout.te or not tiny.core.get("experimental_attention_variant")


ALWAYS = (
    # NVIDIA's own resharding is silently wrong here: experts cut by tensor parallelism, sequential experts on ranks.
    "qwen3_moe:tp2-ep2-etp2-te",
    "qwen3_moe:ep2",
    "deepseek_v3:tp2-ep2-etp1-te",
    "qwen3_2_groups:tp4",
)


def slice_of(world: int, *, core: int, seed: str, count: int) -> list[Case]:
    """`count` cases of the matrix, the same for the same seed; what must never be left out comes first."""
    cases = list(matrix(world, core=core))
    first = [case for case in cases if str(case) in ALWAYS]
    rest = [case for case in cases if str(case) not in ALWAYS]
    random.Random(f"{seed} {world}").shuffle(rest)
    return [*first, *rest][:count]


def parse(text: str) -> Case:
    """Read what `str` of a case wrote."""
    family, _, layout = text.partition(":")
    fields: dict[str, int | bool] = {}
    for part in layout.split("-"):
        if part in {"te", "hybrid"}:
            fields[part] = True
        elif part != "alone":
            fields[part.rstrip("0123456789")] = int(part.lstrip("abcdefghijklmnopqrstuvwxyz"))
    return Case(family, Layout(**fields))  # type: ignore[arg-type]
