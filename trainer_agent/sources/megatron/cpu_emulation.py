"""Lets unmodified megatron-core train on CPU ranks over gloo: for the demo, tests and laptops.

Megatron-core uses CUDA in three ways, each of which is replaced. Calls such as ``torch.cuda.current_device()`` become
their CPU counterparts or do nothing; ``device="cuda"`` in a factory call and ``.cuda()`` mean the CPU, by a torch
function mode; the random number tracker keeps CPU states. No file of Megatron is touched. Works with megatron-core
0.16 to 0.19 and its local layer specs (Transformer Engine needs a GPU). No data path depends on this module.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

import torch
from torch.overrides import TorchFunctionMode

CONFIG: Final[Mapping[str, object]] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "transformer_impl": "local",
}
"""Fields of a TransformerConfig on the CPU, which has no fused kernels. With CPU initialization one seed gives every
tensor-parallel layout shards of the same weights."""

_CPU: Final = torch.device("cpu")
_active: list[TorchFunctionMode] = []


def install() -> None:
    """Patch torch for this process, once; call it before building a model. Refuses where there is a GPU to use."""
    if _active:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "this process has a GPU: the CPU shim would hide it; set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read by the decorators that the import below runs into
    # First, because it imports torch._dynamo, which wants to find every function of torch.cuda where it belongs.
    from megatron.core.tensor_parallel import random  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted by Megatron for tensor parallelism
    for name, replacement in _replacements().items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.nvtx.range_push = _gives()
    torch.cuda.nvtx.range_pop = _gives()
    mode = _CudaMeansCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    _active.append(mode)
    # Its only doors to CUDA's generator.
    random._get_cuda_rng_state = _rng_state  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    random._set_cuda_rng_state = _set_rng_state  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    # The router asks whether it is None; 0.16 defines it only where Transformer Engine is.
    if not hasattr(moe_utils, "te_general_gemm"):
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010  to a type checker it is always there


class _Immediate:
    """A stream or event where everything has already happened."""

    cuda_stream = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Take what CUDA's would take."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def record_event(self, *_args: object) -> _Event:
        return _Event()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: object) -> float:
        return 0.0

    def _nothing(self, *_args: object) -> None:
        pass

    wait = record = synchronize = wait_stream = wait_event = _nothing


class _Stream(_Immediate):
    """torch.cuda.Stream."""


class _Event(_Immediate):
    """torch.cuda.Event."""


class _CudaMeansCpu(TorchFunctionMode):
    """Every request for CUDA memory is answered with CPU memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        wanted = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "record_stream":
            return None
        if _is_cuda(wanted.get("device")):
            wanted["device"] = _CPU
        if wanted.get("pin_memory"):
            wanted["pin_memory"] = False
        if name == "to" and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **wanted)
        if name == "type" and len(args) == 1 and isinstance(result, str) and result.count(".") == 1:
            # The optimizer sorts parameters by type name and knows torch.cuda.FloatTensor, not torch.FloatTensor.
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    torch.set_rng_state(state)


def _seeder() -> Callable[[int], object]:
    """Not torch.manual_seed, which would call torch.cuda.manual_seed, which is this."""
    return lambda seed: torch.default_generator.manual_seed(int(seed))


def _gives(value: object = None) -> Callable[..., object]:
    """A function of its own for each name: torch._dynamo refuses one function under two."""
    return lambda *_args, **_kwargs: value


def _replacements() -> dict[str, object]:
    idle = ("set_device", "synchronize", "empty_cache")
    counters = ("memory_allocated", "max_memory_allocated", "memory_reserved")
    return {
        **{name: _gives() for name in idle},
        **{name: _gives(0) for name in counters},
        "current_device": _gives(_CPU),  # Megatron only ever passes it on as device=
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _gives(_Stream()),
        "default_stream": _gives(_Stream()),
        "stream": _gives(contextlib.nullcontext()),
        "manual_seed": _seeder(),
        "manual_seed_all": _seeder(),
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "is_current_stream_capturing": _gives(False),
        "get_device_capability": _gives((9, 0)),
    }
