# pyright: basic, reportArgumentType=false, reportCallIssue=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore,misc,no-any-return"
# ruff: noqa: ANN001, ANN202, N803, PLR0917
# A Triton kernel is not Python that a type checker can follow: the checks are off in this one small file.
"""A kernel that writes the tables of tiles.py on the GPU that will read them. Imported only when needed.

Beside a busy scheduler every call of torch waits for the interpreter: written by torch, the tiles of 31 GB took 0.9 s
there (tests/gpu/joiner.py), and on one core of the host 0.5 s.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["rows", "tiles", "steps", "places", "most"])
def _write(table, records, rows, tiles, steps, places, most, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = tile < tiles
    width = 9 + 5 * (places + 2)
    low, high = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64) + rows
    for _ in range(steps):  # the first row that ends behind this tile
        half = (low + high) // 2
        behind = tl.load(records + half * width, mask=low < high, other=0) <= tile
        low, high = tl.where((low < high) & behind, half + 1, low), tl.where((low < high) & ~behind, half, high)
    record = records + tl.minimum(low, rows - 1) * width
    number = tile - tl.load(record + 1)
    along = tl.load(record + 8)
    part, number = number % along, number // along
    along = tl.load(record + 7)
    last, number = number % along, number // along
    along = tl.load(record + 6)
    middle, first = number % along, number // along
    row = table + tile * (places + 2)
    runs, vectors = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for place in range(places + 2):
        form = record + 9 + 5 * place
        found = tl.load(form) + first * tl.load(form + 1) + middle * tl.load(form + 2)
        found += last * tl.load(form + 3) + part * tl.load(form + 4)
        tl.store(row + place, found, inside)
        runs = tl.where(place == places, found, runs)
        vectors = tl.where(place == places + 1, found, vectors)
    together = tl.minimum(tl.load(record + 2), tl.load(record + 3) - runs)
    wide = tl.minimum(tl.load(record + 4) - vectors, most)
    magic = tl.where(wide > 1, ((1 << 32) + wide - 1) // tl.maximum(wide, 1), 0)
    tl.store(row + places, (together << 32) | wide, inside)
    tl.store(row + places + 1, magic, inside)


def write(table: torch.Tensor, records: torch.Tensor, most: int) -> None:
    """Fill `table`, (tiles, places + 2), from the `records` of the rows (tiles.py), on the current stream."""
    tiles, columns = table.shape
    steps = len(records).bit_length()
    grid = (triton.cdiv(tiles, _BLOCK),)
    with torch.cuda.device(table.device) if table.is_cuda else torch.no_grad():
        _write[grid](table, records, len(records), tiles, steps, columns - 2, most, BLOCK=_BLOCK)
