"""How weights are quantized: which tensors one weight becomes, and which of its elements go into which. Pure, no torch.

A `Scheme` is a row of a table. Its arithmetic is elsewhere (quantize_tasks.py, quantize_triton.py), and so is the
choice of scheme (hf_quantization_config.py). A weight of (rows, columns) becomes *parts*, each with a cell: the
elements of the weight behind one element of the part.

    scheme          parts                                             cell of the scale       defined by
    fp8-block       weight e4m3, weight_scale_inv float32             128 x 128, as set       DeepSeek-V3
    fp8-block-ue8m0 the same, every scale a power of two              128 x 128               DeepGEMM
    fp8-tensor      weight e4m3, weight_scale float32                 everything              compressed-tensors
    fp8-channel     weight e4m3, weight_scale                         a row                   compressed-tensors
    mxfp8           weight e4m3, weight_scale_inv uint8 exponents     1 x 32                  OCP MX, as SGLang rounds
    mxfp8-ct        weight e4m3, weight_scale uint8 exponents         1 x 32                  compressed-tensors
    int4            weight_packed int32, weight_scale, weight_shape   1 x group               compressed-tensors
    int4-asymmetric the same and weight_zero_point int32              1 x group               compressed-tensors

Values are quantized in the dtype in which the weight would be served otherwise: bfloat16 for a master in float32. So
the result does not depend on the rank that quantizes.

Where a NaN or an infinity is among the elements that share a scale, that scale is NaN (255 as an exponent), and an
engine makes NaN of all of them: lost weights are served as lost, as unquantized ones would be, and never as numbers.
Their elements are NaN where the format has one, and zero, with a zero point of zero, in four bits.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from math import lcm
from typing import Final

import msgspec

from ..errors import DataplaneError
from ..tensors import Box, TensorSpec

PACKED: Final = 8
"""Elements of four bits in an int32, the first in the lowest bits."""


class UnknownScheme(DataplaneError):
    """The served checkpoint asks for an unsupported quantization: says what was found, what is known, what to do."""


class Element(enum.Enum):
    """The type of a quantized element."""

    E4M3 = "float8_e4m3fn"
    INT4 = "int4"


class Scaling(enum.Enum):
    """How a scale follows from the largest magnitude of its elements."""

    EXACT = "exact"
    """That magnitude becomes the largest number of the format, but for rounding."""
    UP = "power of two, rounded up"
    """The smallest power of two with which nothing saturates."""
    NEAREST = "power of two, as compressed-tensors rounds"
    """The same but where the magnitude is 1.75 times a power of two: there one more."""


class QuantizedPart(msgspec.Struct, frozen=True):
    """One of the tensors that a weight becomes."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, int]
    """(rows, columns) of the weight behind one element; (0, 0) where no element of the weight matters."""

    def box(self, box: Box) -> Box:
        """The elements of this part that follow from `box` of the weight, which lies on the scheme's grain."""
        if not self.cell[0]:
            return Box.whole(self.shape)
        start = tuple(at // step for at, step in zip(box.start, self.cell, strict=True))
        stop = tuple(-(-at // step) for at, step in zip(box.stop, self.cell, strict=True))
        return Box(start, stop) if len(self.shape) == len(start) else Box.whole(self.shape)


class Scheme(msgspec.Struct, frozen=True):
    """A row of the module's table."""

    name: str
    element: Element
    weight: str
    """Suffix of the quantized elements; so `scale`."""
    scale: str
    block: tuple[int, int]
    """(rows, columns) that share a scale; 0 stands for all of them."""
    scale_dtype: str = ""
    """Empty for that of the weight."""
    scaling: Scaling = Scaling.EXACT
    symmetric: bool = True
    """False: with a zero point for each scale."""
    flat: tuple[int, ...] | None = None
    """The shape of the one scale, (1,) or (), of a scheme that has no more."""

    def objection(self, shape: Sequence[int]) -> str:
        """Why a weight of `shape` cannot be quantized so; empty if it can."""
        if len(shape) != 2:
            return f"it has {len(shape)} axes, a matrix is expected"
        if not all(shape):
            return "it is empty"
        columns = self._block(shape)[1]
        if self.element is Element.INT4 and columns % PACKED:
            return f"its groups of {columns} columns do not fill words of {PACKED}"
        if self._divides and shape[1] % columns:
            return f"its {shape[1]} columns are not a multiple of the group of {columns}"
        if not self.symmetric and shape[0] % PACKED:
            return f"its {shape[0]} rows do not fill words of {PACKED} zero points"
        return ""

    def parts(self, spec: TensorSpec) -> tuple[QuantizedPart, ...]:
        """What the weight `spec` becomes, in the order in which `quantize` gives it: elements, scales, the rest."""
        rows, columns = self._block(spec.shape)
        grid = (-(-spec.shape[0] // rows), -(-spec.shape[1] // columns))
        scale = QuantizedPart(
            self.scale, self.scale_dtype or spec.dtype, grid if self.flat is None else self.flat, (rows, columns)
        )
        if self.element is Element.E4M3:
            return (QuantizedPart(self.weight, Element.E4M3.value, spec.shape, (1, 1)), scale)
        packed = QuantizedPart(self.weight, "int32", (spec.shape[0], spec.shape[1] // PACKED), (1, PACKED))
        shape = QuantizedPart("weight_shape", "int64", (2,), (0, 0))
        if self.symmetric:
            return (packed, scale, shape)
        zero = QuantizedPart("weight_zero_point", "int32", (grid[0] // PACKED, grid[1]), (PACKED * rows, columns))
        return (packed, scale, zero, shape)

    def grain(self, shape: Sequence[int]) -> tuple[int, int]:
        """(rows, columns) whose multiples can be quantized independently: no part crosses such a border."""
        rows, columns = self._block(shape)
        if self.element is Element.INT4:
            return rows if self.symmetric else rows * PACKED, lcm(columns, PACKED)
        return rows, columns

    def alone(self, box: Box, shape: Sequence[int]) -> bool:
        """True when the rank that holds `box` of a weight can quantize it without other ranks' values."""
        return all(
            start % step == 0 and (stop % step == 0 or stop == extent)
            for start, stop, step, extent in zip(box.start, box.stop, self.grain(shape), shape, strict=True)
        )

    @property
    def _divides(self) -> bool:
        """The format knows no last group that is shorter."""
        return self.element is Element.INT4 or self.scaling is Scaling.NEAREST or self.scale_dtype == "uint8"

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        return (self.block[0] or shape[0], self.block[1] or shape[1])


def fp8_block(block: tuple[int, int], *, power_of_two: bool = False, scale: str = "weight_scale_inv") -> Scheme:
    """FP8 in blocks, as DeepSeek-V3 and Qwen3 are stored; `power_of_two` for ``scale_fmt: ue8m0``."""
    return Scheme(
        "fp8-block-ue8m0" if power_of_two else "fp8-block",
        Element.E4M3,
        "weight",
        scale,
        block,
        "float32",
        Scaling.UP if power_of_two else Scaling.EXACT,
    )


def fp8_tensor() -> Scheme:
    """FP8 with one scale."""
    return Scheme("fp8-tensor", Element.E4M3, "weight", "weight_scale", (0, 0), "float32", flat=(1,))


def fp8_channel() -> Scheme:
    """FP8 with a scale for each row."""
    return Scheme("fp8-channel", Element.E4M3, "weight", "weight_scale", (1, 0), "float32")


def mxfp8(*, compressed: bool = False) -> Scheme:
    """FP8 by 32 columns with exponents as scales; `compressed` as compressed-tensors names and rounds them."""
    if compressed:
        return Scheme("mxfp8-ct", Element.E4M3, "weight", "weight_scale", (1, 32), "uint8", Scaling.NEAREST)
    return Scheme("mxfp8", Element.E4M3, "weight", "weight_scale_inv", (1, 32), "uint8", Scaling.UP)


def int4(group: int, *, symmetric: bool) -> Scheme:
    """Packed integers of four bits; `group` columns share a scale, 0 for a row."""
    name = "int4" if symmetric else "int4-asymmetric"
    return Scheme(name, Element.INT4, "weight_packed", "weight_scale", (1, group), symmetric=symmetric)


SCHEMES: Final[tuple[Scheme, ...]] = (
    fp8_block((128, 128)),
    fp8_block((128, 128), power_of_two=True),
    fp8_tensor(),
    fp8_channel(),
    mxfp8(),
    mxfp8(compressed=True),
    int4(128, symmetric=True),
    int4(128, symmetric=False),
)
"""One of each kind: what tests go through, and messages name."""
