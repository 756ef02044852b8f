"""Rectangles of bytes (copy_nodes.py) as a CUDA graph of memcpy nodes, which the copy engines of a GPU carry out.

Built once for a table; a round is one launch. Nodes stand in branches: within one they follow each other, and branches
run at the same time, so that several engines work and the beginning of a copy hides behind another.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from .copy_nodes import CopyNodes, branches_of
from .errors import NoCopyEngines, TransferFailed

_UNIFIED: Final = 4
"""CU_MEMORYTYPE_UNIFIED: the driver finds out by the address whose memory it is."""
_SIDE: Final = (
    ("x", np.uintp), ("y", np.uintp), ("z", np.uintp), ("level", np.uintp), ("memory", np.uint32), ("host", np.uintp),
    ("device", np.uint64), ("array", np.uintp), ("reserved", np.uintp), ("pitch", np.uintp), ("lines", np.uintp),
)  # fmt: skip
_MEMCPY3D: Final = np.dtype(
    [(f"{side}_{name}", kind) for side in ("source", "target") for name, kind in _SIDE]
    + [("width", np.uintp), ("height", np.uintp), ("depth", np.uintp)],
    align=True,
)
"""CUDA_MEMCPY3D_v2."""


class CopyGraph:
    """One graph, for the context that is current where it is made."""

    def __init__(self, nodes: CopyNodes, branches: int, library: Any = None) -> None:
        """Build it, in as many parallel branches. Raises `NoCopyEngines`, and leaves nothing behind then."""
        self._graph, self._ready = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self._library = library if library is not None else ctypes.CDLL("libcuda.so.1")
            self._build(nodes, branches)
        except (OSError, AttributeError) as error:
            self.close()
            raise NoCopyEngines(f"the CUDA driver has no graphs ({error})") from error
        except NoCopyEngines:
            self.close()
            raise

    def launch(self, stream: int) -> None:
        """Copy everything, in the order of the stream with this handle. Raises `TransferFailed`."""
        if code := self._library.cuGraphLaunch(self._ready, ctypes.c_void_p(stream)):
            raise TransferFailed(
                f"the copy engines could not be started: {self._story(code)}; WEIGHTBUS_WORKER_BRANCHES=0 in the"
                " server's environment leaves all copies to a kernel"
            )

    def close(self) -> None:
        """Let go of it; nothing of it may be under way."""
        if self._ready:
            self._library.cuGraphExecDestroy(self._ready)
        if self._graph:
            self._library.cuGraphDestroy(self._graph)
        self._graph, self._ready = ctypes.c_void_p(), ctypes.c_void_p()

    def _build(self, nodes: CopyNodes, branches: int) -> None:
        context = ctypes.c_void_p()
        self._check("find the current context", self._library.cuCtxGetCurrent(ctypes.byref(context)))
        self._check("make a graph", self._library.cuGraphCreate(ctypes.byref(self._graph), ctypes.c_uint(0)))
        parameters = memcpy_parameters(nodes)
        at, size = int(parameters.ctypes.data), parameters.itemsize
        last: dict[int, ctypes.c_void_p] = {}
        for number, branch in enumerate(branches_of(nodes, branches).tolist()):
            before, node = last.get(branch), ctypes.c_void_p()
            code = self._library.cuGraphAddMemcpyNode(
                ctypes.byref(node), self._graph, ctypes.byref(before) if before is not None else None,
                ctypes.c_size_t(before is not None), ctypes.c_void_p(at + number * size), context,
            )  # fmt: skip
            self._check(f"add copy {number} of {len(nodes)}", code)
            last[branch] = node
        code = self._library.cuGraphInstantiateWithFlags(ctypes.byref(self._ready), self._graph, ctypes.c_ulonglong(0))
        self._check(f"prepare {len(nodes)} copies", code)

    def _check(self, what: str, code: int) -> None:
        if code:
            raise NoCopyEngines(f"the CUDA driver could not {what} ({self._story(code)})")

    def _story(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        return f"{name.value.decode() if name.value else 'CUDA error'}, {code}"


def memcpy_parameters(nodes: CopyNodes) -> np.ndarray[Any, np.dtype[np.void]]:
    """(nodes,) of CUDA_MEMCPY3D_v2."""
    found = np.zeros(len(nodes), _MEMCPY3D)
    sides = (("source", nodes.source, nodes.source_pitch), ("target", nodes.target, nodes.target_pitch))
    for side, address, pitch in sides:
        found[f"{side}_memory"], found[f"{side}_device"] = _UNIFIED, address
        found[f"{side}_pitch"], found[f"{side}_lines"] = pitch, nodes.height
    found["width"], found["height"], found["depth"] = nodes.width, nodes.height, 1
    return found
