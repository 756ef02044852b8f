"""CUDA graphs of memcpy nodes on a host's memory: the contract that copy_graph.py has with libcuda.

The struct is written down here a second time, field by field as cuda.h of CUDA 13.0 has it, and what a driver refuses
is refused. Nodes are carried out one branch after another, last branch first: nobody may rely on an order between them.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT = 1, 2, 201


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_ = (
        ("srcXInBytes", _SIZE), ("srcY", _SIZE), ("srcZ", _SIZE), ("srcLOD", _SIZE),
        ("srcMemoryType", ctypes.c_int), ("srcHost", _POINTER), ("srcDevice", ctypes.c_ulonglong),
        ("srcArray", _POINTER), ("reserved0", _POINTER), ("srcPitch", _SIZE), ("srcHeight", _SIZE),
        ("dstXInBytes", _SIZE), ("dstY", _SIZE), ("dstZ", _SIZE), ("dstLOD", _SIZE),
        ("dstMemoryType", ctypes.c_int), ("dstHost", _POINTER), ("dstDevice", ctypes.c_ulonglong),
        ("dstArray", _POINTER), ("reserved1", _POINTER), ("dstPitch", _SIZE), ("dstHeight", _SIZE),
        ("WidthInBytes", _SIZE), ("Height", _SIZE), ("Depth", _SIZE),
    )  # fmt: skip


@dataclass
class _Graph:
    nodes: dict[int, tuple[Memcpy3D, int | None]] = field(default_factory=dict)
    """By handle: what is copied, and after which node."""


class FakeGraphs:
    """Stands in for ctypes.CDLL("libcuda.so.1")."""

    CONTEXT = 0xC0

    def __init__(self) -> None:
        self.graphs: dict[int, _Graph] = {}
        self.ready: dict[int, _Graph] = {}
        self.launched: list[int] = []
        """Streams."""
        self.fails: dict[str, int] = {}
        """What a function of this name returns, without doing anything."""
        self.roots = 0
        """Branches of the graph that was launched last."""
        self._handles = itertools.count(0x7000_0000_0000, 0x100)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and (code := object.__getattribute__(self, "fails").get(name)):
            return lambda *_: code
        return object.__getattribute__(self, name)

    def cuGetErrorName(self, code: ctypes.c_int, name: Any) -> int:  # noqa: N802
        known = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}
        name._obj.value = known.get(code.value)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.CONTEXT
        return 0

    def cuGraphCreate(self, graph: Any, flags: ctypes.c_uint) -> int:  # noqa: N802
        if flags.value:
            return INVALID_VALUE
        graph._obj.value = handle = next(self._handles)
        self.graphs[handle] = _Graph()
        return 0

    def cuGraphAddMemcpyNode(  # noqa: N802, PLR0917
        self, node: Any, graph: ctypes.c_void_p, after: Any, count: ctypes.c_size_t, parameters: ctypes.c_void_p,
        context: ctypes.c_void_p,
    ) -> int:  # fmt: skip
        assert isinstance(graph, ctypes.c_void_p)  # a bare int would be cut to 32 bits
        assert isinstance(parameters, ctypes.c_void_p)
        assert isinstance(count, ctypes.c_size_t)
        if context.value != self.CONTEXT:
            return INVALID_CONTEXT
        found = self.graphs.get(graph.value or 0)
        if found is None or count.value != (after is not None):
            return INVALID_VALUE
        given = Memcpy3D.from_buffer_copy(ctypes.string_at(parameters.value or 0, ctypes.sizeof(Memcpy3D)))
        before = after._obj.value if after is not None else None
        if not _sound(given) or (before is not None and before not in found.nodes):
            return INVALID_VALUE
        node._obj.value = handle = next(self._handles)
        found.nodes[handle] = (given, before)
        return 0

    def cuGraphInstantiateWithFlags(  # noqa: N802
        self, ready: Any, graph: ctypes.c_void_p, flags: ctypes.c_ulonglong
    ) -> int:
        if flags.value or graph.value not in self.graphs:
            return INVALID_VALUE
        ready._obj.value = handle = next(self._handles)
        self.ready[handle] = self.graphs[graph.value]
        return 0

    def cuGraphLaunch(self, ready: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:  # noqa: N802
        assert isinstance(ready, ctypes.c_void_p)
        assert isinstance(stream, ctypes.c_void_p)
        nodes = self.ready[ready.value or 0].nodes
        after: dict[int | None, list[int]] = {}
        for handle, (_, before) in nodes.items():
            after.setdefault(before, []).append(handle)
        pending = list(after.get(None, []))
        self.roots = len(pending)
        while pending:
            handle = pending.pop()
            _carry_out(nodes[handle][0])
            pending += after.get(handle, [])
        self.launched.append(stream.value or 0)
        return 0

    def cuGraphExecDestroy(self, ready: ctypes.c_void_p) -> int:  # noqa: N802
        del self.ready[ready.value or 0]
        return 0

    def cuGraphDestroy(self, graph: ctypes.c_void_p) -> int:  # noqa: N802
        del self.graphs[graph.value or 0]
        return 0


def _sound(given: Memcpy3D) -> bool:
    """What the driver would take."""
    unused = (
        given.srcXInBytes, given.srcY, given.srcZ, given.srcLOD, given.srcHost, given.srcArray, given.reserved0,
        given.dstXInBytes, given.dstY, given.dstZ, given.dstLOD, given.dstHost, given.dstArray, given.reserved1,
    )  # fmt: skip
    pitches = (given.srcPitch, given.dstPitch)
    sizes = given.WidthInBytes > 0 and given.Height > 0 and given.Depth == 1
    fits = all(given.WidthInBytes <= pitch < 2**31 for pitch in pitches)
    return not any(unused) and (given.srcMemoryType, given.dstMemoryType) == (4, 4) and sizes and fits


def _carry_out(given: Memcpy3D) -> None:
    for line in range(given.Height):
        source, target = given.srcDevice + line * given.srcPitch, given.dstDevice + line * given.dstPitch
        ctypes.memmove(target, source, given.WidthInBytes)
