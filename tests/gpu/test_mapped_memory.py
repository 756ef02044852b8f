"""Trainers whose allocator maps its memory itself: what is staged can be opened by others, what is paused is told."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from weightbus.dataplane.memory.cuda_memory import Driver

pytestmark = pytest.mark.gpu

STAGED = """
import torch
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.memory import shared_memory as staging
before = [torch.ones(1 << 26, dtype=torch.uint8, device="cuda") for _ in range(3)]
del before  # free blocks of expandable segments, which a slot must not be made of
pool = staging.BucketBuffers("cuda", 2, 1 << 25, "expandable")
for slot in pool.buffers:
    slot.memory.fill_(7)
    staging.decode_handle(slot.exported)
try:
    staging.export_cuda(torch.ones(1 << 25, dtype=torch.uint8, device="cuda"))
except NotExportable:
    print("the rest is mapped as before")
pool.close()
"""


def test_slots_are_plain_where_segments_are_expandable() -> None:
    """The local transport works for such trainers, and their own memory stays as they want it."""
    environ = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", STAGED]
    done = subprocess.run(command, check=False, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the rest is mapped as before" in done.stdout


def test_addresses_without_memory_are_told_from_memory() -> None:
    """As torch_memory_saver leaves them: reserved, and nothing behind them. Drivers differ in what they answer."""
    memory = torch.ones(1 << 22, dtype=torch.uint8, device="cuda")
    driver, library = Driver(), ctypes.CDLL("libcuda.so.1")
    assert driver.mapped(memory.data_ptr())
    reserved = ctypes.c_uint64()
    size = ctypes.c_size_t(1 << 21)
    code = library.cuMemAddressReserve(
        ctypes.byref(reserved), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)
    )
    assert code == 0
    try:
        assert not driver.mapped(reserved.value), driver._attribute(13, reserved.value)
    finally:
        library.cuMemAddressFree(reserved, size)
