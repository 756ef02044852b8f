"""What more it takes than `megatron_cpu` to build and run every kind of Megatron-core layer on a CPU. Import it first.

`prepare` before megatron is imported, `patch` after. Each patch says what it stands in for; none touches parameters.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  its usual name
import typing_extensions


def prepare() -> None:
    """Let Megatron-core 0.19 be imported on Python 3.11 and without triton, where it wants both newer."""
    # Asked for where gated delta nets are computed by torch.
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    try:
        import triton  # noqa: F401
    except ImportError:
        _lend_triton()


def patch() -> None:
    """Once, after megatron was imported."""
    _exchange_with_lists()
    _gather_unequal()
    _local_attention()
    _local_norms()
    _delta_net()


def _lend_triton() -> None:
    """A stub that only code inside megatron sees: torch would take it for the real one."""
    import torch.utils._triton as torch_triton

    torch_triton.has_triton_package()  # torch remembers that there is none
    stub, language = types.ModuleType("triton"), types.ModuleType("triton.language")

    def same(function: Any = None, **_: object) -> Any:
        return function if callable(function) else (lambda wrapped: wrapped)

    def nothing(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    stub.jit = same  # type: ignore[attr-defined]
    stub.autotune = stub.heuristics = lambda *_, **__: lambda wrapped: wrapped  # type: ignore[attr-defined]
    stub.Config = lambda *_, **__: None  # type: ignore[attr-defined]
    stub.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    stub.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    stub.__version__ = "0.0.0"  # type: ignore[attr-defined]
    stub.language = language  # type: ignore[attr-defined]
    language.__getattr__ = nothing  # type: ignore[method-assign]
    usual = builtins.__import__

    def imported(name: str, scope: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        asking = (scope or {}).get("__name__", "")
        if not level and name.split(".", maxsplit=1)[0] == "triton" and asking.startswith("megatron."):
            return language if name == "triton.language" and wanted else stub
        return usual(name, scope, local, wanted, level)

    builtins.__import__ = imported
    sys.modules["triton.language"] = language  # `import a.b as c` looks here
    try:
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
    finally:
        sys.modules.pop("triton.language", None)


def _exchange_with_lists() -> None:
    """The token dispatcher turns split sizes into lists on a GPU only; c10d wants lists."""
    usual = dist.all_to_all_single

    def exchange(output: Any, inputs: Any, *sizes: Any, **more: Any) -> Any:
        named = {name: _listed(value) if name.endswith("sizes") else value for name, value in more.items()}
        return usual(output, inputs, *map(_listed, sizes), **named)

    dist.all_to_all_single = exchange


def _listed(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _gather_unequal() -> None:
    """Expert tensor parallelism gathers and scatters unequal token counts: NCCL does, gloo does not."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(tensors: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({tuple(each.shape) for each in tensors}) == 1:
            return gather(tensors, tensor, group=group, async_op=async_op)
        for rank, out in zip(dist.get_process_group_ranks(group), tensors, strict=True):
            if rank == dist.get_rank():
                out.copy_(tensor)
            dist.broadcast(out, src=rank, group=group)
        return None

    def reduce_scatter(
        out: Any, tensors: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({tuple(each.shape) for each in tensors}) == 1:
            return scatter(out, list(tensors), op=op, group=group, async_op=async_op)
        full = torch.cat(list(tensors)).contiguous()
        dist.all_reduce(full, op=op, group=group)
        out.copy_(full.split([each.shape[0] for each in tensors])[dist.get_rank(group)])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter  # type: ignore[assignment]


def _local_attention() -> None:
    """MLA passes channels that the local attention does not take; another may stand in, as it holds no parameters."""
    from megatron.core.models import backends
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: Any = None, **kwargs: Any) -> None:
            kwargs.pop("v_channels", None)
            super().__init__(*args, **kwargs)
            self.k_channels = k_channels

        def forward(self, q: Any, k: Any, v: Any, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.k_channels is None:
                return super().forward(q, k, v, mask, *args, **kwargs)
            q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)

    backends.LocalSpecProvider.core_attention = lambda _: Attention


def _local_norms() -> None:
    """The local norm refuses to be built for sequence parallelism, which experts with tensor parallelism need."""
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.transformer.torch_norm as norms
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models import backends

    usual = norms.WrappedTorchNorm

    class Norm(torch.nn.Module):
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            alone = copy.copy(config)
            alone.sequence_parallel = False
            return usual(alone, hidden_size, eps)

    for module in (norms, backends, specs, block):
        for name in ("WrappedTorchNorm", "LNImpl"):
            if getattr(module, name, None) is usual:
                setattr(module, name, Norm)


def _delta_net() -> None:
    """Gated delta nets are built without their kernels, and with `deterministic_mode` computed by torch."""
    for name in ("common", "gdn"):
        module = _try(lambda name=name: importlib.import_module(f"megatron.core.ssm.gated_delta_net.{name}"))
        if module is not None:
            module.HAVE_FLA = True
            module.chunk_gated_delta_rule = _no_kernel
            module.l2norm = _l2norm


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _no_kernel(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def _try(load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError:
        return None
