"""Settings of an engine agent, and the keys of its server. Read once, at the start."""

import enum
import stat
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from weightbus.control.bus import check_keys
from weightbus.control.protocol import NAME_PATTERN, TransportKind
from weightbus.control.security import (
    InsecureLoopback,
    KeysFolder,
    allow_list_path,
    check_endpoints,
    check_key_settings,
    check_url,
    read_allow_list,
    state_folder,
)
from weightbus.control.server import LogFormat, LogLevel
from weightbus.dataplane.transports import registry as transports

from ..engines import DEFAULT, Keys, require_known
from ..errors import KeyFileUnusable
from ..machine import ORPHANED_S, OrphanPolicy

SECTION: Final = "engine_agent"
"""Of the settings file; environment variables begin with ``WEIGHTBUS_ENGINE_AGENT_``."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Wait = Annotated[float, Meta(gt=0, le=86400)]


class VerificationMode(enum.StrEnum):
    """Proof that a version needs before it is served."""

    REQUIRED = "required"
    """Live parameters or arrived buckets were compared with the digest table; anything else is refused."""
    AVAILABLE = "available"
    """Compared where that is possible. Where it is not, the version is served, and reported as not proven."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every command that calls an inference server."""

    server: Annotated[str, Meta(description="where this command reaches the inference server")] = (
        "http://127.0.0.1:30000"
    )
    engine: Annotated[str, Meta(description="kind of that server")] = DEFAULT
    api_key: Annotated[
        str, Meta(description="the server's --api-key; by environment or file only", extra={"secret": True})
    ] = ""
    api_key_file: Annotated[Path | None, Meta(description="file that holds the server's --api-key")] = None
    admin_api_key: Annotated[
        str, Meta(description="the server's --admin-api-key; by environment or file only", extra={"secret": True})
    ] = ""
    admin_api_key_file: Annotated[Path | None, Meta(description="file that holds the server's --admin-api-key")] = None
    model_path: Annotated[Path | None, Meta(description="the served checkpoint, where it is seen elsewhere here")] = (
        None
    )
    dialect: Annotated[str, Meta(description="treat an unknown SGLang version as this one")] = ""

    def __post_init__(self) -> None:
        check_url("server", self.server)
        require_known(self.engine)
        for name, key, file in (
            ("api_key", self.api_key, self.api_key_file),
            ("admin_api_key", self.admin_api_key, self.admin_api_key_file),
        ):
            if key and file is not None:
                raise ValueError(f"{name} and {name}_file are both given, expected one: remove either")


class EngineAgentSettings(ServerSettings, frozen=True, kw_only=True):
    """Settings of ``weightbus engine-agent``."""

    name: Annotated[Name, Meta(description="name of this engine, kept across restarts of agent and server")]
    channel: Annotated[Name, Meta(description="the model whose weights this engine takes")]
    url: Annotated[str, Meta(description="where clients reach the server, if that is elsewhere")] = ""
    coordinator: Annotated[str, Meta(description="endpoint of the coordinator; of several, comma-separated")] = (
        "tcp://127.0.0.1:5750"
    )
    keys: KeysFolder = None
    insecure_loopback: InsecureLoopback = False
    http_bind: Annotated[str, Meta(description="address of the HTTP port: no secrets, no authentication")] = "127.0.0.1"
    http_port: Annotated[Port, Meta(description="/metrics, /healthz, /readyz, /status")] = 5760
    state_dir: Annotated[Path, Meta(description="folder for what must survive the agent; local disk")] = msgspec.field(
        default_factory=state_folder
    )
    runtime_dir: Annotated[Path | None, Meta(description="folder for sockets, shared with a trainer on this host")] = (
        None
    )
    saved_dir: Annotated[Path | None, Meta(description="folder of versions kept as files: the trainer's save_dir")] = (
        None
    )
    saved_after_s: Annotated[
        Wait, Meta(description="how long a round is waited for before a kept version is loaded")
    ] = 15.0
    transports: Annotated[tuple[TransportKind, ...], Meta(description="those that may be used", min_length=1)] = (
        TransportKind.DIRECT,
        TransportKind.LOCAL,
        TransportKind.SENDS,
        TransportKind.DISTRIBUTED,
        TransportKind.DISK,
    )
    beside: Annotated[
        bool, Meta(description="receive what is sent into a second buffer where memory allows (sends)")
    ] = True
    hands_on: Annotated[
        bool,
        Meta(description="take part in broadcasts in the server's place, and hand on what comes (distributed)"),
    ] = True
    record_ahead: Annotated[
        bool, Meta(description="record the server's loader before the first version asks for it (direct, sends)")
    ] = True
    gives_back: Annotated[
        bool,
        Meta(description="let POST /give-back on the HTTP port have the server give its GPU memory back"),
    ] = False
    verify: Annotated[
        VerificationMode, Meta(description="required: serve only what was proven; available: prove what can be")
    ] = VerificationMode.REQUIRED
    orphaned: Annotated[
        OrphanPolicy,
        Meta(
            description="a verified version without a coordinator that committed it: wait, or serve_verified after"
            " orphaned_s (then it is served, and not ready)"
        ),
    ] = OrphanPolicy.WAIT
    orphaned_s: Annotated[
        Wait, Meta(description="how long no coordinator is heard of before an engine that cannot serve raises an alarm")
    ] = ORPHANED_S
    poll_s: Annotated[Wait, Meta(description="how often the server is looked at")] = 1.0
    watch_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="a change of the server by another party takes it off the ready list in this time; 0: never",
        ),
    ] = 5.0
    watch_weights: Annotated[
        bool, Meta(description="... also by digests of some live weights at a time, where the server gives them")
    ] = True
    ends_pauses: Annotated[
        bool, Meta(description="let a server continue that another party paused while it served")
    ] = False
    start_timeout_s: Annotated[Wait, Meta(description="how long server and coordinator are waited for")] = 1800.0
    log_level: Annotated[LogLevel, Meta(description="least level that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Meta(description="auto: for people on a terminal, else JSON")] = LogFormat.AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key_settings(self.keys, insecure_loopback=self.insecure_loopback)
        check_endpoints("coordinator", self.coordinator)
        if self.url:
            check_url("url", self.url)
        transports.require_known(self.transports)


def read_keys(settings: ServerSettings) -> tuple[Keys, dict[str, str]]:
    """The server's keys, and what to do about files that others can read, by setting. Raises `KeyFileUnusable`."""
    exposed: dict[str, str] = {}
    keys = Keys(
        api=_key("api_key_file", settings.api_key_file, settings.api_key, exposed),
        admin=_key("admin_api_key_file", settings.admin_api_key_file, settings.admin_api_key, exposed),
    )
    return keys, exposed


def check_trust(given: EngineAgentSettings) -> None:
    """Raise the `ConfigurationError` that would come up later, before anything is started."""
    check_keys(given.coordinator, given.keys, given.name, insecure_loopback=given.insecure_loopback)
    if not given.insecure_loopback:
        read_allow_list(allow_list_path(given.keys))


def _key(setting: str, path: Path | None, given: str, exposed: dict[str, str]) -> str:
    if path is None:
        return given
    try:
        words = path.read_text(encoding="ascii").split()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise KeyFileUnusable(setting, path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise KeyFileUnusable(setting, path, "does not hold ASCII text") from error
    if len(words) != 1:
        raise KeyFileUnusable(setting, path, f"holds {len(words)} words" if words else "is empty")
    if mode & _OTHERS:
        exposed[setting] = f"others may read it (mode {mode:04o}): chmod 600 {path}"
    return words[0]
