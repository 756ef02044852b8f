"""Facts of a server, and the identity of its process generation: two launches must never be taken for one.

A server that restarted holds its launch weights under its old address. SGLang does not report when it was started, so
the identity is made of what differs between two launches: the random seed and the times that the start took, and, where
the agent sees its processes, the process id and start time behind the port.

The generation is made of what the server says alone. Agents see different processes behind one port (a forwarder, or
none at all from another container), and must find one server to be one. Several servers may be started with one
``--random-seed``: the times of their starts tell them apart. Older releases (0.5.11) do not report those; there the
agent's host stands for them, beside the server's port, so that agents of one host alone find one server to be one.
"""

import hashlib
from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

from weightbus.dataplane.copy import copy_streams_setting
from weightbus.dataplane.errors import Unsupported
from weightbus.dataplane.processes import host_identity

from ..interface import EngineFacts
from ..local_process import environment_of, listener

WORKER: Final = b"sglang::scheduler"
"""SGLang's name for the processes of its workers."""
_MOVING: Final = {"enable_eplb": "--enable-eplb", "elastic_ep_backend": "--elastic-ep-backend"}
"""Settings that have SGLang put experts elsewhere after it has loaded them (`EPLBManager`, `ElasticEPStateManager`)."""


class ServerFacts(EngineFacts, frozen=True, kw_only=True):
    """Facts of one launch of an SGLang server."""

    ONE_GPU_VARIABLE: ClassVar[str] = "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"

    dp_attention: bool
    """True where attention is cut for fewer ranks than `tp`: the shards of a rank do not follow from `tp` alone."""
    dtype: str
    """As asked for at launch: ``auto`` means the checkpoint's."""
    speculative: str
    """Algorithm of speculative decoding; empty without."""
    quantization: str
    """``--quantization``; empty without."""
    loaders: tuple[str, ...] = ()
    """Functions that it was started with as ``--custom-weight-loader``."""
    moves_experts: str = ""
    """Flag by which it moves experts while it serves, to balance its ranks or to lose one; empty when it does not."""
    gives_back: bool = False
    """True if it can release its GPU memory (``--enable-memory-saver``)."""
    misset: str = ""
    """Setting in its environment that keeps its workers from reading a trainer's memory; empty where there is none."""

    @property
    def layout(self) -> tuple[object, ...]:
        """The part of the facts that a `Hello` describes once."""
        return *super().layout, self.dp_attention, self.misset


def facts_of(server_info: Mapping[str, object], model_info: Mapping[str, object], url: str) -> ServerFacts:
    """Read the answers of /server_info and /model_info. Replicas under attention data parallelism count as one."""
    dp_attention = bool(server_info.get("enable_dp_attention")) or _integer(server_info, "attn_dp_size") > 1
    architectures = model_info.get("architectures")
    process = listener(url)
    return ServerFacts(
        identity=identity_of(server_info, process),
        generation=_generation(server_info),
        version=str(server_info.get("version", "")),
        tp=_integer(server_info, "tp_size"),
        pp=_integer(server_info, "pp_size"),
        dp=1 if dp_attention else _integer(server_info, "dp_size"),
        dp_attention=dp_attention,
        device=str(server_info.get("device") or "cuda"),
        dtype=str(server_info.get("dtype") or "auto"),
        model_path=str(model_info.get("model_path") or server_info.get("model_path") or ""),
        architectures=tuple(str(name) for name in _sequence(architectures)),
        speculative=str(server_info.get("speculative_algorithm") or ""),
        quantization=str(server_info.get("quantization") or ""),
        label=str(model_info.get("weight_version", "")),
        process=process,
        loaders=tuple(str(name) for name in _sequence(server_info.get("custom_weight_loader"))),
        moves_experts=next((flag for key, flag in _MOVING.items() if server_info.get(key)), ""),
        gives_back=bool(server_info.get("enable_memory_saver")),
        misset=_misset(process),
        gpus=_gpus(server_info),
    )


def _misset(process: tuple[int, int] | None) -> str:
    """Workers have the environment of the process that started them; if it cannot be read, they report it."""
    try:
        copy_streams_setting(environment_of(process[0]) if process else {})
    except OSError:
        return ""
    except Unsupported as wrong:
        return str(wrong)
    return ""


def _gpus(info: Mapping[str, object]) -> tuple[int, ...]:
    """SGLang gives worker `i` of a single node GPU ``base_gpu_id + i * gpu_id_step``."""
    first, step = info.get("base_gpu_id"), info.get("gpu_id_step")
    if not isinstance(first, int) or not isinstance(step, int) or _integer(info, "nnodes") > 1:
        return ()
    return tuple(first + rank * step for rank in range(_integer(info, "tp_size")))


def _sequence(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _integer(info: Mapping[str, object], key: str) -> int:
    value = info.get(key, 1)
    return value if isinstance(value, int) and value > 0 else 1


def identity_of(server_info: Mapping[str, object], process: tuple[int, int] | None) -> str:
    """`EngineFacts.identity` by the answer of /server_info and the process behind the port."""
    seen = {key: server_info.get(key) for key in ("random_seed", "startup_time", "version")}
    content = msgspec.json.encode([seen, process], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:32]


def _generation(server_info: Mapping[str, object]) -> str:
    seed, started = server_info.get("random_seed"), server_info.get("startup_time")
    if seed is None and not started:
        return ""
    places = [server_info.get(key) for key in ("port", "nccl_port", "dist_init_addr")]
    seen = [seed, started, server_info.get("version"), places, "" if started else host_identity()]
    return hashlib.sha256(msgspec.json.encode(seen, order="deterministic")).hexdigest()[:32]
