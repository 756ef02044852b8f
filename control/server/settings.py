"""Settings of the coordinator. cli/settings.py reads them; `Limits` is the machine's part of them."""

from __future__ import annotations

import enum
import ipaddress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..journal import StoreLogin
from ..machine import Limits
from ..security import InsecureLoopback, KeysFolder, check_endpoint, check_key_settings, state_folder

Port = Annotated[int, Meta(ge=0, le=65535)]
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound
WaitSeconds = Annotated[float, Meta(gt=0, le=86400)]


def default_journal() -> Path:
    """Path of the journal in the folder of this user's state."""
    return state_folder() / "journal.sqlite"


class LogLevel(enum.StrEnum):
    """Least severity of a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """Format of log lines."""

    AUTO = "auto"
    """`HUMAN` on a terminal, `JSON` elsewhere."""
    HUMAN = "human"
    JSON = "json"


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus coordinator``, section ``[coordinator]``."""

    bind: Annotated[str, Meta(description="address of the bus; anything but the loopback needs keys")] = "127.0.0.1"
    router_port: Annotated[Port, Meta(description="commands (ROUTER)")] = 5750
    http_bind: Annotated[str, Meta(description="address of the HTTP port: no secrets, no authentication")] = "127.0.0.1"
    http_port: Annotated[Port, Meta(description="/metrics, /healthz, /readyz, /status")] = 5752
    store: Annotated[
        str, Meta(description="etcd://127.0.0.1:2379[,...][/prefix]: one of several coordinators; else the journal")
    ] = ""
    store_login_file: StoreLogin = None
    name: Annotated[str, Meta(description="what this one of several is called; empty: the host's name")] = ""
    advertise: Annotated[str, Meta(description="endpoint agents reach it at, if not bind and router_port")] = ""
    leader_s: Annotated[
        float, Meta(description="a leader that the store does not hear of for so long is replaced", ge=2, le=3600)
    ] = 5.0
    journal: Annotated[Path, Meta(description="SQLite file; on a local disk, never on NFS")] = msgspec.field(
        default_factory=default_journal
    )
    keys: KeysFolder = None
    insecure_loopback: InsecureLoopback = False

    max_channels: Annotated[int, Meta(description="channels that may be known, used or not", ge=1, le=4096)] = 64

    heartbeat_s: Annotated[WaitSeconds, Meta(description="how often agents say that they are alive")] = 1.0
    silence_s: Annotated[WaitSeconds, Meta(description="an agent silent for so long is lost")] = 10.0
    takeover_s: Annotated[WaitSeconds, Meta(description="a name silent for so long may be taken by a new process")] = (
        3.0
    )
    lease_s: Annotated[WaitSeconds, Meta(description="a trainer silent for so long loses its lease")] = 10.0
    publish_s: Annotated[WaitSeconds, Meta(description="a lease under which nothing is published for so long ends")] = (
        1800.0
    )
    prepare_s: Annotated[WaitSeconds, Meta(description="deadline of the phase")] = 60.0
    pause_s: Annotated[WaitSeconds, Meta(description="deadline of the phase")] = 60.0
    offer_s: Annotated[WaitSeconds, Meta(description="deadline for the trainer to open its transports")] = 60.0
    verify_s: Annotated[WaitSeconds, Meta(description="deadline of the phase")] = 300.0
    commit_s: Annotated[WaitSeconds, Meta(description="how long a version waits for a journal that fails")] = 30.0
    resume_s: Annotated[WaitSeconds, Meta(description="deadline of the phase; 10 s once one engine serves")] = 120.0
    abort_s: Annotated[WaitSeconds, Meta(description="deadline of the phase")] = 60.0

    log_level: Annotated[LogLevel, Meta(description="least level that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Meta(description="auto: for people on a terminal, else JSON")] = LogFormat.AUTO

    def __post_init__(self) -> None:
        check_key_settings(self.keys, insecure_loopback=self.insecure_loopback)
        for name, least, would in (
            ("silence_s", 2, "lose an agent"),
            ("lease_s", 2, "end a lease, and have engines resume in mid-round"),
            ("takeover_s", 1, "give an agent's name away"),
        ):
            wait_s: float = getattr(self, name)
            if wait_s < least * self.heartbeat_s:
                beats = "two heartbeats" if least > 1 else "one heartbeat"
                raise ValueError(
                    f"{name} = {wait_s:g} is less than {beats} of {self.heartbeat_s:g} s: one late heartbeat would"
                    f" {would}; raise {name} or lower heartbeat_s"
                )
        for name in ("bind", "http_bind"):
            _check_address(name, getattr(self, name))
        self._check_ports()
        if self.advertise:
            check_endpoint("advertise", self.advertise)

    def _check_ports(self) -> None:
        """Raise `ValueError` for a port used twice. Port 0 means any free port, so it may occur twice."""
        taken: dict[int, tuple[str, str]] = {}
        for name, address in (("router_port", self.bind), ("http_port", self.http_bind)):
            port: int = getattr(self, name)
            other, at = taken.get(port, ("", ""))
            if port and other and (address == at or _EVERYWHERE & {address, at}):
                raise ValueError(f"{other} and {name} are both {port}: give each a port of its own")
            taken.setdefault(port, (name, address))

    def limits(self) -> Limits:
        """Limits for the machine; bounds that are not settings keep their defaults."""
        names = {field.name for field in msgspec.structs.fields(Limits)}
        return Limits(**{name: value for name, value in msgspec.structs.asdict(self).items() if name in names})


def _check_address(name: str, text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError as problem:
        raise ValueError(f"{name} = {text!r} is not an IP address; write 0.0.0.0 to listen everywhere") from problem
