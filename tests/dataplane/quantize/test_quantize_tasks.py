"""Every scheme gives the bits of the library that defines its format."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from weightbus.dataplane.quantize.quantize_tasks import QuantizeTask, prepare_tasks
from weightbus.dataplane.quantize.schemes import (
    SCHEMES,
    Element,
    Scheme,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int4,
    mxfp8,
)
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box

SHAPES = st.tuples(st.sampled_from([1, 8, 127, 128, 200]), st.sampled_from([1, 32, 128, 256, 320]))


def weight(seed: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Like a trained weight, with rows and groups of other sizes, zeros among them, and one outlier."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-12, 4, (shape[0], 1), generator=generator)
    )
    values[: shape[0] // 3, : shape[1] // 2] = 0
    values[-1, -1] = 1.75 * 2 ** int(torch.randint(-6, 6, (1,), generator=generator))
    return values.to(dtype)


def quantized(scheme: Scheme, values: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a weight but its shape."""
    spec = TensorSpec("w.weight", str(values.dtype).removeprefix("torch."), tuple(values.shape))
    parts = [part for part in scheme.parts(spec) if part.suffix != "weight_shape"]
    outs = [torch.full(part.shape, 77, dtype=torch.float32).to(getattr(torch, part.dtype)) for part in parts]
    prepare_tasks([QuantizeTask(scheme, values, values.dtype, tuple(outs))], values.device).run()
    return outs


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    one, other = (torch.empty(each.numel(), dtype=each.dtype).copy_(each.reshape(-1)) for each in (found, expected))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture(scope="module")
def library() -> Iterator[None]:
    """compressed-tensors, which imports transformers; a torchvision for CUDA does not import beside torch for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if "torchvision" not in sys.modules:
            patch.setitem(sys.modules, "torchvision", None)
        pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors defines these formats")
        yield


def compressed(args: dict[str, Any], form: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """What compressed-tensors stores of a weight, its scales found by its own min-max rule in float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    rows, columns = values.shape
    match arguments.strategy:
        case "tensor":
            grid = values.reshape(1, 1, -1)
        case "channel":
            grid = values.reshape(rows, 1, columns)
        case "block":
            height, width = arguments.block_structure or [0, 0]
            below, beside = -rows % height, -columns % width
            padded = torch.nn.functional.pad(values, (0, beside, 0, below))
            across = (columns + beside) // width
            grid = padded.view(-1, height, across, width).transpose(1, 2).reshape(-1, across, height * width)
        case _:
            grid = values.reshape(rows, -1, arguments.group_size or 0)
    scale, zero = calculate_qparams(grid.amin(-1), grid.amax(-1), arguments)
    if arguments.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
    return BaseCompressor.get_value_from_registry(form).compress(state, scheme)


COMPRESSED: list[tuple[Scheme, dict[str, Any], str]] = [
    (fp8_tensor(), {"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized"),
    (fp8_channel(), {"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
    (
        fp8_block((128, 128), scale="weight_scale"),
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "float-quantized",
    ),
    (
        mxfp8(compressed=True),
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8,
         "zp_dtype": torch.uint8},
        "mxfp8-quantized",
    ),
    (int4(32, symmetric=True), {"num_bits": 4, "strategy": "group", "group_size": 32}, "pack-quantized"),
    (int4(128, symmetric=True), {"num_bits": 4, "strategy": "group", "group_size": 128}, "pack-quantized"),
    (int4(0, symmetric=True), {"num_bits": 4, "strategy": "channel"}, "pack-quantized"),
    (
        int4(64, symmetric=False),
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        "pack-quantized",
    ),
    (int4(0, symmetric=False), {"num_bits": 4, "strategy": "channel", "symmetric": False}, "pack-quantized"),
]  # fmt: skip


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("scheme", "args", "form"), COMPRESSED, ids=lambda each: getattr(each, "name", ""))
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30), shape=SHAPES)
def test_as_compressed_tensors_stores_it(
    scheme: Scheme, args: dict[str, Any], form: str, seed: int, shape: tuple[int, int]
) -> None:
    """Elements, scales, zero points and packing are those of compressed-tensors, computed in float32."""
    if scheme.objection(shape):
        return
    values = weight(seed, shape, torch.float32)
    oracle = compressed(args, form, values)
    parts = [part for part in scheme.parts(TensorSpec("w.weight", "float32", shape)) if part.suffix != "weight_shape"]
    for part, found in zip(parts, quantized(scheme, values), strict=True):
        assert same(found, oracle.pop(part.suffix)), part.suffix
    oracle.pop("weight_zero_point", None)  # of symmetric schemes: not stored
    assert [tuple(each.tolist()) for each in oracle.values()] in ([], [shape])


def ugly(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """Weights as no training leaves them, or only a broken one, but for what is not a number."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    match kind:
        case "zeros":
            values = torch.zeros(shape)
        case "subnormal":
            values *= 1e-40
        case "tiny":
            values *= 1e-6
        case "huge":
            values = values.clamp(-3, 3) * 1e37
        case "outlier":
            values[0, 0] = -3e38
        case "ties":  # quotients and zero points half-way between two integers
            values = (torch.arange(values.numel()) % 31 - 15.0).view(shape) / 2
            values[1::2] = values[1::2].clamp(min=-1.25, max=6.25)
        case "of one sign":
            values = values.abs() + 1
            values[1::2] *= -1
        case _:  # pragma: no cover
            raise AssertionError(kind)
    return values


UGLY = ("zeros", "subnormal", "tiny", "huge", "outlier", "ties", "of one sign")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("scheme", "args", "form"), COMPRESSED, ids=lambda each: getattr(each, "name", ""))
@pytest.mark.parametrize("kind", UGLY)
def test_ugly_weights_are_stored_as_compressed_tensors_does(
    kind: str, scheme: Scheme, args: dict[str, Any], form: str
) -> None:
    """Blocks without a number in them, numbers at both ends of the range, and quotients half-way between two steps."""
    if scheme.name == "mxfp8-ct" and kind in {"zeros", "outlier"}:
        pytest.skip("compressed-tensors takes the logarithm of zero there, or of infinity")
    values = ugly(kind, (136, 384))
    oracle = compressed(args, form, values)
    spec = TensorSpec("w.weight", "float32", tuple(values.shape))
    parts = [part for part in scheme.parts(spec) if part.suffix != "weight_shape"]
    for part, found in zip(parts, quantized(scheme, values), strict=True):
        assert same(found, oracle[part.suffix]), part.suffix


@pytest.mark.parametrize("kind", UGLY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ugly_weights_are_stored_as_sglang_does(kind: str, dtype: torch.dtype) -> None:
    """The same of scales that are powers of two."""
    values = ugly(kind, (136, 384)).to(dtype)
    for scheme, oracle in ((fp8_block((128, 128), power_of_two=True), deepgemm()), (mxfp8(), rounded_up())):
        if scheme.name == "mxfp8" and kind == "subnormal":
            continue  # its power of two is a subnormal number itself there, ours the one above
        for found, expected in zip(quantized(scheme, values), oracle(values), strict=True):
            assert same(found, expected)


SMALL = (fp8_tensor(), fp8_channel(), fp8_block((128, 128)), int4(128, symmetric=True), int4(128, symmetric=False))


@pytest.mark.parametrize("scheme", SMALL, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_no_scale_is_lost_when_it_is_stored(scheme: Scheme, stored: str) -> None:
    """Rows so small that the dtype of the scale has no number for theirs: they are zeros, and not no numbers at all."""
    scheme = msgspec.structs.replace(scheme, scale_dtype=stored)
    values = ugly("subnormal" if stored == "bfloat16" else "tiny", (8, 128)) * 0.01
    values[:, ::2] = 0
    elements, scale = quantized(scheme, values)[:2]
    assert bool((scale.float() > 0).all())
    assert scheme.element is not Element.E4M3 or bool(elements.float().isfinite().all())


@pytest.mark.parametrize("scheme", SMALL[:3], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_elements_are_divided_by_the_scale_that_is_stored(scheme: Scheme, stored: str) -> None:
    """And not by the exact one, which no engine ever sees: checkpoints have scales of FP8 in the model's dtype, too."""
    values = weight(11, (136, 384))
    elements, scale = quantized(msgspec.structs.replace(scheme, scale_dtype=stored), values)
    wide = scale.float() if scheme.flat is None else scale.float().view(1, 1)
    rows, columns = (size or extent for size, extent in zip(scheme.block, values.shape, strict=True))
    step = wide.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:136, :384]
    assert same(elements, (values.float() / step).clamp(-448, 448).to(torch.float8_e4m3fn))


@pytest.mark.usefixtures("library")
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30), rows=st.sampled_from([8, 64]))
def test_scales_are_stored_before_they_divide(seed: int, rows: int) -> None:
    """With scales in bfloat16 elements are divided by what is stored, so that an engine multiplies with the same."""
    from compressed_tensors.compressors import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    values = weight(seed, (rows, 256))
    packed, scale = quantized(int4(128, symmetric=True), values)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
    exact = values.float().view(rows, 2, 128).abs().amax(-1) / 7.5
    assert same(scale, torch.where(exact == 0, torch.finfo(torch.float32).eps, exact).bfloat16())
    zero = torch.zeros(scale.shape, dtype=torch.int8)
    oracle = quantize(values.float(), scale.float(), zero, args, dtype=torch.int8)
    assert same(packed, pack_to_int32(oracle, 4))


@pytest.mark.usefixtures("library")
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30), rows=st.sampled_from([8, 64]))
def test_zero_points_follow_from_the_exact_scale(seed: int, rows: int) -> None:
    """Scales in bfloat16: zero points are those of float32, as elements that are shifted by them are packed."""
    from compressed_tensors.compressors import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    values = weight(seed, (rows, 256)) - 0.125
    packed, scale, points = quantized(int4(128, symmetric=False), values)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128, symmetric=False)
    groups = values.float().view(rows, 2, 128)
    exact, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    assert same(scale, exact.bfloat16())
    assert same(points, pack_to_int32(zero.to(torch.int8), 4, packed_dim=0))
    oracle = quantize(values.float(), scale.float(), zero, args, dtype=torch.int8)
    assert same(packed, pack_to_int32(oracle, 4))


def sglang(path: str, wanted: Sequence[str], names: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
    """Functions of SGLang's source without its imports, which want a GPU; the first one is returned."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("SGLang defines the format")
    source = Path(found.submodule_search_locations[0], path).read_text()
    body = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in body:
        node.returns = None
    scope: dict[str, Any] = {"torch": torch, **names}
    exec(compile(ast.Module(body, []), path, "exec"), scope)
    return scope[wanted[0]]  # type: ignore[no-any-return]


@functools.cache
def deepgemm() -> Callable[[torch.Tensor], Any]:
    return sglang(
        "srt/layers/quantization/fp8_utils.py",
        ("per_block_cast_to_fp8", "ceil_to_ue8m0"),
        {"ceil_align": lambda size, step: -(-size // step) * step},
    )


@functools.cache
def rounded_up() -> Callable[[torch.Tensor], Any]:
    return sglang(
        "kernels/ops/quantization/mxfp8_amd_gfx95.py",
        ("_mxfp8_e4m3_quantize_torch",),
        {"MXFP8_BLOCK_SIZE": 32, "MXFP8_E4M3_MAX": 448.0, "MXFP8_VALUE_DTYPE": torch.float8_e4m3fn},
    )


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), shape=SHAPES, dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_powers_of_two_as_deepgemm(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Blocks with ue8m0 scales are those of SGLang's copy of DeepGEMM."""
    values = weight(seed, shape, dtype)
    expected = deepgemm()(values)
    found = quantized(fp8_block((128, 128), power_of_two=True), values)
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), shape=SHAPES)
def test_mxfp8_as_sglang(seed: int, shape: tuple[int, int]) -> None:
    """Exponents are rounded up, as SGLang's reference does it."""
    if mxfp8().objection(shape):
        return
    values = weight(seed, shape)
    expected = rounded_up()(values)
    found = quantized(mxfp8(), values)
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


def read_back(scheme: Scheme, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What an engine makes of the stored numbers, and the step around each of them."""
    if scheme.element is Element.INT4:
        packed, scale = quantized(scheme, values)[:2]
        shifts = torch.arange(0, 32, 4)
        elements = ((packed.long()[:, :, None] >> shifts) & 15).view(values.shape).float() - 8
        zero = quantized(scheme, values)[2] if not scheme.symmetric else None
        if zero is not None:
            points = ((zero.long()[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, zero.shape[1]).float() - 8
            elements = elements - points.repeat_interleave(values.shape[1] // points.shape[1], 1)
        step = scale.float().repeat_interleave(values.shape[1] // scale.shape[1], 1)
        return elements * step, step
    elements, scale = quantized(scheme, values)
    wide = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    wide = wide.view(1, 1) if scheme.flat is not None else wide
    rows, columns = (size or extent for size, extent in zip(scheme.block, values.shape, strict=True))
    step = wide.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: values.shape[0], : values.shape[1]]
    return elements.float() * step, step


def error(scheme: Scheme, values: torch.Tensor) -> torch.Tensor:
    """How far the stored numbers are from the weight, in the largest step around them."""
    found, step = read_back(scheme, values)
    if scheme.element is Element.INT4:
        return ((found - values.float()) / step).abs().max()
    return ((found - values.float()).abs() / (step * 2**-6).maximum(values.float().abs())).max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_what_is_stored_is_the_weight(scheme: Scheme) -> None:
    """Read back, every number is as near as the format allows: half of a step of INT4, one part in 16 of FP8."""
    bound = 1.01 if scheme.element is Element.INT4 else 1 / 15.9
    assert error(scheme, weight(3, (256, 256))) <= bound


@pytest.mark.parametrize("lost", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_what_was_lost_is_served_as_lost(scheme: Scheme, lost: float) -> None:
    """A NaN or an infinity makes NaN of all that shares its scale, always in the same bits, and of nothing else."""
    sound = weight(4, (256, 256))
    values = sound.clone()
    values[130, 70] = lost
    rows, columns = (size or 256 for size in scheme.block)
    shared = torch.zeros(256, 256, dtype=torch.bool)
    shared[
        130 // rows * rows : 130 // rows * rows + rows, 70 // columns * columns : 70 // columns * columns + columns
    ] = True

    assert torch.equal(read_back(scheme, values)[0].isnan(), shared)
    assert torch.equal(read_back(scheme, values)[0][~shared], read_back(scheme, sound)[0][~shared])
    values[130, 71] = -lost
    for one, other in zip(
        quantized(scheme, values), quantized(scheme, values.where(~shared, float("nan"))), strict=True
    ):
        assert same(one, other)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_shards_on_the_grain_are_shards_of_the_result(scheme: Scheme, data: st.DataObject) -> None:
    """A rank that holds a box on the grain quantizes it alone, and gets the same part of every tensor."""
    scheme = msgspec.structs.replace(scheme, block=tuple(min(each, 32) for each in scheme.block))
    values = weight(data.draw(st.integers(0, 1 << 30)), (96, 160))
    grain = scheme.grain(values.shape)
    edges = []
    for extent, step in zip(values.shape, grain, strict=True):
        cuts = st.sampled_from(sorted({*range(0, extent, step), extent}))
        edges.append(sorted(data.draw(st.lists(cuts, min_size=2, max_size=2, unique=True))))
    box = Box((edges[0][0], edges[1][0]), (edges[0][1], edges[1][1]))
    assert scheme.alone(box, values.shape)
    spec = TensorSpec("w.weight", "bfloat16", (96, 160))
    whole = quantized(scheme, values)
    mine = quantized(scheme, values[box.start[0] : box.stop[0], box.start[1] : box.stop[1]])
    for part, full, found in zip(scheme.parts(spec), whole, mine, strict=False):
        at = part.box(box)
        cut = full[tuple(slice(a, b) for a, b in zip(at.start, at.stop, strict=True))]
        assert same(found, cut), part.suffix


def test_across_the_grain_no_rank_is_alone() -> None:
    """A shard that ends inside of a block, a word or a group has to be gathered; the last one may end anywhere."""
    block = fp8_block((128, 128))
    assert block.alone(Box((128, 0), (200, 256)), (200, 256))
    assert not block.alone(Box((0, 0), (64, 256)), (200, 256))
    assert not block.alone(Box((0, 64), (128, 256)), (200, 256))
    assert not fp8_tensor().alone(Box((0, 0), (128, 256)), (200, 256))
    assert not fp8_channel().alone(Box((0, 0), (3, 128)), (200, 256))
    assert int4(32, symmetric=True).alone(Box((3, 32), (4, 96)), (200, 256))
    assert not int4(32, symmetric=False).alone(Box((3, 32), (8, 96)), (200, 256))


@example(shape=(8, 12), scheme=int4(4, symmetric=True))
@example(shape=(8, 40), scheme=int4(32, symmetric=True))
@example(shape=(7, 32), scheme=int4(32, symmetric=False))
@example(shape=(7, 40), scheme=mxfp8())
@example(shape=(4, 4, 4), scheme=fp8_block((128, 128)))
@example(shape=(0, 128), scheme=fp8_block((128, 128)))
@example(shape=(128, 0), scheme=fp8_channel())
@example(shape=(128, 0), scheme=int4(128, symmetric=True))
@given(shape=st.just((3,)), scheme=st.just(fp8_tensor()))
@settings(max_examples=1)
def test_what_the_format_cannot_hold_is_said(shape: tuple[int, ...], scheme: Scheme) -> None:
    """A short last group, half a word, what is empty and what is no matrix have a reason each."""
    assert scheme.objection(shape)
