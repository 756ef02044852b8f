"""A kernel that copies by bulk copies of whole kilobytes, through shared memory: for crosswise.py, in CUDA C.

One thread of each block has the hardware fetch the next parts while it writes the present one; what goes over the link
are large requests, and no thread waits for its 16 bytes. Compute capability 9.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from weightbus.dataplane.copy_nodes import CopyNodes

PART = 8192
STAGES = 5
SOURCE = """
typedef unsigned long long u64;
typedef unsigned int u32;
#define PART %(part)d
#define STAGES %(stages)d

__device__ __forceinline__ u32 shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void fetch(u32 into, u64 from, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%%0], %%1;" :: "r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%%0], [%%1], %%2, [%%3];"
                 :: "r"(into), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void await(u32 barrier, u32 phase) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%%0], %%1;"
                 " @!done bra again; }" :: "r"(barrier), "r"(phase) : "memory");
}

extern "C" __global__ void bulk(const u64* tiles, int count) {
    __shared__ __align__(128) unsigned char ring[STAGES * PART];
    __shared__ __align__(8) u64 barriers[STAGES];
    if (threadIdx.x != 0) return;
    for (int stage = 0; stage < STAGES; stage++)
        asm volatile("mbarrier.init.shared::cta.b64 [%%0], 1;" :: "r"(shared(&barriers[stage])) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    int begin = (int)((long long)count * blockIdx.x / gridDim.x);
    int mine = (int)((long long)count * (blockIdx.x + 1) / gridDim.x) - begin;
    tiles += 3 * (u64)begin;
    for (int at = 0; at < mine && at < STAGES - 1; at++)
        fetch(shared(ring + at * PART), tiles[3 * at], (u32)tiles[3 * at + 2], shared(&barriers[at]));
    for (int at = 0; at < mine; at++) {
        int stage = at %% STAGES, next = at + STAGES - 1;
        await(shared(&barriers[stage]), (u32)(at / STAGES) & 1);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
                     :: "l"(tiles[3 * at + 1]), "r"(shared(ring + stage * PART)), "r"((u32)tiles[3 * at + 2])
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (next < mine) {
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // the stage before this one was read out
            stage = next %% STAGES;
            fetch(shared(ring + stage * PART), tiles[3 * (u64)next], (u32)tiles[3 * (u64)next + 2],
                  shared(&barriers[stage]));
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


def source(part: int, stages: int) -> str:
    """CUDA C."""
    return SOURCE % {"part": part, "stages": stages}


def tiles(nodes: CopyNodes, part: int) -> np.ndarray:
    """(tiles, 3): source, target, bytes, of nodes of one line each. Addresses and widths are multiples of 16."""
    parts = -(-nodes.width // part)
    node = np.repeat(np.arange(len(nodes)), parts)
    begin = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * part
    width = np.minimum(nodes.width[node] - begin, part)
    return np.ascontiguousarray(np.stack([nodes.source[node] + begin, nodes.target[node] + begin, width], axis=1))


def compiled(part: int, stages: int) -> Any:
    """The kernel, by torch's own use of NVRTC."""
    return torch.cuda._compile_kernel(source(part, stages), "bulk")
