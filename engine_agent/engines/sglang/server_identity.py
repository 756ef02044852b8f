"""What a server is, and which life of it this is: two launches must never be taken for one.

A server that restarted holds its launch weights under its old address. SGLang does not say when it was started, so the
identity is made of what differs between two launches: the random seed it drew and the times its start took, and, where
the agent sees its processes, the process id and start time behind the port.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from weightbus.dataplane.copy import copy_streams_setting
from weightbus.dataplane.errors import Unsupported

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"
_WORKER: Final = b"sglang::scheduler"
"""What SGLang calls the processes of its workers."""
_START_FIELD: Final = 19
"""``starttime`` in /proc/PID/stat, counted after the command's closing parenthesis."""


class ServerFacts(msgspec.Struct, frozen=True):
    """What one launch of a server is. `label` and `model_path` as they were when read."""

    identity: str
    version: str
    tp: int
    pp: int
    dp: int
    dp_attention: bool
    """Attention is cut for fewer ranks than `tp`: what a rank holds does not follow from `tp` alone."""
    device: str
    dtype: str
    """As asked for at launch: ``auto`` means the checkpoint's."""
    model_path: str
    architectures: tuple[str, ...]
    speculative: str
    quantization: str
    label: str
    process: tuple[int, int] | None = None
    """Process id and start time behind the port, where this machine can see them."""
    loaders: tuple[str, ...] = ()
    """What it was started with as ``--custom-weight-loader``."""
    moves_experts: str = ""
    """The flag by which it does that while it serves, to balance its ranks or to lose one; empty when it does not."""
    gives_back: bool = False
    """It can give its GPU memory back (``--enable-memory-saver``)."""
    undefined: bool = False
    """It has given its weights back since it was launched."""
    unrecordable: str = ""
    """Why nothing can be copied straight into its parameters, once that has been found out."""
    misset: str = ""
    """What its environment says that keeps its workers from reading a trainer's memory."""
    gpus: tuple[int, ...] = ()
    """Which of the GPUs that it sees its workers use, by rank; none where that does not follow from its settings."""


_MOVING: Final = {"enable_eplb": "--enable-eplb", "elastic_ep_backend": "--elastic-ep-backend"}
"""What has SGLang put experts elsewhere after it has loaded them (`EPLBManager`, `ElasticEPStateManager`)."""


def facts_of(server_info: Mapping[str, object], model_info: Mapping[str, object], url: str) -> ServerFacts:
    """Read the answers of /server_info and /model_info. Replicas under attention data parallelism count as one."""
    dp_attention = bool(server_info.get("enable_dp_attention")) or _integer(server_info, "attn_dp_size") > 1
    architectures = model_info.get("architectures")
    process = listener(url)
    return ServerFacts(
        identity=_identity(server_info, process),
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


def layout_of(facts: ServerFacts) -> tuple[str, ...]:
    """What of a server a `Hello` describes once and for all."""
    ranks = (facts.tp, facts.pp, facts.dp, facts.dp_attention)
    return (facts.version, facts.device, facts.misset, *map(str, ranks))


def _misset(process: tuple[int, int] | None) -> str:
    """Workers have the environment of the process that started them. What cannot be read they will say themselves."""
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


def _identity(server_info: Mapping[str, object], process: tuple[int, int] | None) -> str:
    seen = {key: server_info.get(key) for key in ("random_seed", "startup_time", "version")}
    content = msgspec.json.encode([seen, process], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:32]


def listener(url: str) -> tuple[int, int] | None:
    """Process id and start time of whoever listens on `url`'s port on this machine, if this process can see it."""
    parts = urlsplit(url)
    if parts.hostname not in {"127.0.0.1", "localhost", "::1"} or parts.port is None:
        return None
    sockets = set(_listening(parts.port))
    if not sockets:
        return None
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and _holds(folder, sockets):
            started = start_time(int(folder.name))
            return None if started is None else (int(folder.name), started)
    return None


def workers_of(pid: int) -> dict[int, int]:
    """The processes of SGLang's workers below the server's, with their start times, as far as they can be seen here."""
    parents: dict[int, int] = {}
    workers: list[int] = []
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            each = int(folder.name)
            parents[each] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(_WORKER):
                workers.append(each)
    found = {each: start_time(each) for each in workers if pid in _above(each, parents)}
    return {each: started for each, started in found.items() if started is not None}


def _above(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 1:
        yield pid


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with. Raises `OSError` where it may not be read, and while it begins or ends."""
    entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    if not any(entries):
        raise ProcessLookupError(f"process {pid} has no environment: it is about to begin, or has ended")
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def start_time(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when it has ended, reaped or not."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[_START_FIELD])


def _listening(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on `port`."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (_PROC / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _holds(folder: Path, sockets: set[str]) -> bool:
    try:
        return any(_socket(link) in sockets for link in (folder / "fd").iterdir())
    except OSError:  # it ended meanwhile, or belongs to somebody else
        return False


def _socket(link: Path) -> str | None:
    """Inode of the socket behind one open file. A server closes some while they are looked at: that is not its end."""
    try:
        found = re.match(r"socket:\[(\d+)\]$", str(link.readlink()))
    except FileNotFoundError:
        return None
    return found[1] if found else None
