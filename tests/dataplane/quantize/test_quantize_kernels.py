"""The GPU kernels give the reference's bits in Triton's interpreter, and compile for the GPUs that serve.

Run on a real one by tests/gpu/quantized.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import msgspec
import numpy as np
import torch
import triton.language as tl

from weightbus.dataplane.quantize import quantize_cuda as quantize_cuda

from weightbus.dataplane.quantize import quantize_tasks as quantize_torch

launch = quantize_cuda.launch
quantize_cuda.launch = lambda kind, table: launch(kind, table, fast=False)  # NumPy has no fused multiply-add
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.tensors.shards import Box
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.quantize.schemes import fp8_block, fp8_channel, fp8_tensor, int4, mxfp8
from weightbus.dataplane.quantize.quantize_tasks import DigestSums, QuantizeTask
from weightbus.dataplane.quantize.quantize_tasks import word_layout

SCHEMES = (
    fp8_block((128, 128)), fp8_block((128, 128), power_of_two=True), fp8_channel(), mxfp8(), mxfp8(compressed=True),
    int4(32, symmetric=True), int4(128, symmetric=False), msgspec.structs.replace(fp8_channel(), scale_dtype="float16"),
    fp8_tensor(), msgspec.structs.replace(fp8_tensor(), scale_dtype="float16", flat=()),
    int4(0, symmetric=True), int4(0, symmetric=False), int4(24, symmetric=False), int4(256, symmetric=True),
)
"""

INTERPRETED = (
    HEAD
    + """
from contextlib import nullcontext
from triton.runtime import interpreter

convert = interpreter._convert_float

def rounded(values, source, target, mode):
    # The interpreter cuts off where the hardware rounds (cvt.rn).
    kinds = {tl.bfloat16: (torch.bfloat16, np.uint16), tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
             tl.float16: (torch.float16, np.uint16)}
    if source != tl.float32 or target not in kinds:
        return convert(values, source, target, mode)
    kind, bits = kinds[target]
    # A NaN comes out without its sign.
    made = torch.from_numpy(np.ascontiguousarray(np.where(np.isnan(values), np.float32("nan"), values))).to(kind)
    return made.view(torch.uint8).numpy().view(bits).reshape(values.shape)

interpreter._convert_float = rounded
torch.cuda.device_of = lambda memory: nullcontext()

def weight(shape, dtype, lost):
    generator = torch.Generator().manual_seed(shape[0])
    spread = torch.exp2(torch.randint(-12, 4, (shape[0], 1), generator=generator))
    values = torch.randn(shape, generator=generator) * spread
    values[: shape[0] // 3, : shape[1] // 2] = 0
    values[-1, -1] = 14.0
    values[1] *= 2.0**-30  # float16 has no number for its scale
    if lost:
        values[2, 5], values[3, 70], values[4, 140] = -float("nan"), float("inf"), -float("inf")
    return values.to(dtype)

def sums_of(elements, at, step):
    # What tensor_digest.py makes of the words that are in memory now.
    words = np.ascontiguousarray(elements.contiguous().view(torch.uint8).numpy()).view(np.uint64)
    places = at + np.arange(words.shape[0])[:, None] * step + np.arange(words.shape[1])
    return integrity.mix_words(words.reshape(-1), places.reshape(-1))

CASES = [((136, 256), torch.bfloat16, False), ((8, 320), torch.float32, False), ((8, 384), torch.bfloat16, True)]
for scheme in SCHEMES:
    for shape, dtype, lost in CASES:
        if scheme.block == (1, 0):  # each row is a program, which takes the interpreter long
            shape = (min(shape[0], 24), shape[1])
        if scheme.objection(shape):  # the last of its groups is shorter
            shape = (shape[0], 3 * scheme.block[1])
        values = weight(shape, dtype, lost)
        parts = [part for part in scheme.parts(TensorSpec("w.weight", "bfloat16", shape)) if part.cell[0]]
        expected = [torch.zeros(part.shape, dtype=getattr(torch, part.dtype)) for part in parts]
        # As in a bucket: rows farther apart than they are long, and what is between them stays.
        wide = [torch.full((*part.shape[:-1], sum(part.shape[-1:]) + 16), 3, dtype=each.dtype)
                for part, each in zip(parts, expected)]
        outs = tuple(each[..., : part.shape[-1]] if part.shape else each[0] for part, each in zip(parts, wide))
        quantize_torch.quantize(scheme, values.bfloat16(), expected)
        for beyond in (8, 3):
            source = torch.zeros(shape[0], shape[1] + beyond, dtype=dtype)[:, : shape[1]].copy_(values)
            for out in outs:
                out.zero_()
            # As a part of a larger tensor, of which another task holds something, too.
            larger = (shape[0] + 256, shape[1] + 512)
            words = word_layout(scheme, Box((128, 256), (128 + shape[0], 256 + shape[1])), larger)
            assert (words is not None) == (scheme.name.startswith("fp8") and scheme.flat is None)
            lanes = torch.full((3, 2), 7)
            sums = None if words is None else DigestSums(lanes, 1, *words)
            first = QuantizeTask(scheme, source, torch.bfloat16, outs, sums)
            again = [part.clone(memory_format=torch.contiguous_format) for part in outs]
            second = QuantizeTask(scheme, source, torch.bfloat16, tuple(again), sums)
            tasks = quantize_cuda.CudaTasks([first, second])
            assert not tasks._rest
            for each in (4 * values, values):  # nothing is left of what was larger
                source.copy_(each)
                tasks.run()
            if sums is not None:
                expected_sums = sums_of(outs[0], *words) + sums_of(again[0], *words)
                assert (lanes[1].numpy().view(np.uint64) == expected_sums).all(), (scheme.name, shape, dtype, beyond)
            assert lanes[0].tolist() == lanes[2].tolist() == [7, 7]
            for part, found, each, around in zip(parts, outs, expected, wide):
                one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (found, each))
                assert torch.equal(one, other), (
                    scheme.name, shape, dtype, beyond, part.suffix)
                assert bool((around[..., sum(part.shape[-1:]) or 1 :].float() == 3).all())
print("equal")
"""
)

COMPILED = (
    HEAD
    + """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weightbus.dataplane.quantize import quantize_triton as quantize_triton
from weightbus.dataplane.quantize.quantize_cuda import LaunchKind, kernels_of, tile_shape

CASES = [(SCHEMES[at], (2048, 768)) for at in (0, 2, 3, 6)] + [
    (fp8_tensor(), (2048, 768)), (fp8_channel(), (2048, 28672)), (int4(0, symmetric=False), (2048, 4096)),
]
for scheme, shape in CASES:
    for aligned in (True, False):
        dtype = torch.bfloat16
        tile = tile_shape(scheme, shape)
        scale = torch.bfloat16 if scheme.name.startswith("int4") else torch.float32
        kind = LaunchKind(scheme, dtype, torch.bfloat16, scale, aligned, tile)
        block = scheme.name == "fp8-block"
        for fast, summed in ((False, False), (True, False), (True, True)) if block else ((True, False),):
            for name, constants in kernels_of(kind._replace(summed=summed), fast=fast):
                kernel = getattr(quantize_triton, name)
                options = {key: constants.pop(key) for key in ("num_warps", "maxnreg") if key in constants}
                signature = {each: "constexpr" for each in constants} | {"table": "*i64"}
                source = ASTSource(kernel, signature, constexprs=constants)
                made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
                text = made.asm["ptx"]
                assert "ld.local" not in text, f"{scheme.name} spills registers"
                shared = made.metadata.shared
                alone = name in ("fp8_block", "fp8_tensor", "fp8_amax") and aligned and scheme.block != (1, 0)
                assert shared <= 2048 or not alone, f"threads hand each other the tile: {shared} bytes"
                wide = text.count("ld.global.v4") + text.count("ld.global.L1::no_allocate.v4")
                print(name, shape, dtype, fast, summed, "wide loads", wide, "of", text.count("ld.global"), shared)
                narrow = "st.global.b8" in text or "st.global.u8" in text
                assert not (aligned and narrow and alone), "stores less than 16 bytes at a time"
                assert wide or not aligned, f"{scheme.name} loads less than 16 bytes at a time"
print("compiled")
"""
)


def run(program: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_kernels_give_the_bits_of_the_reference(tmp_path: Path) -> None:
    """Every kernel, on whole and cut tiles, from both dtypes and with strides on both sides."""
    pytest.importorskip("triton")
    done = run(INTERPRETED, tmp_path, TRITON_INTERPRET="1")
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    """For Hopper, in 16-byte loads and without spilling; a toolchain without ptxas is a reason to skip."""
    pytest.importorskip("triton")
    done = run(COMPILED, tmp_path)
    if "ptxas" in done.stderr and "not found" in done.stderr.lower():
        pytest.skip("this Triton has no ptxas")
    assert done.stdout.strip().endswith("compiled"), done.stdout + done.stderr[-2000:]
