"""The subcommands of the control side: coordinator, status, keygen, version."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from pathlib import Path
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta
from rich.console import Console

from . import settings, status_view
from .bus import check_library, libzmq_version, new_keypair, public_of
from .coordinator_settings import CoordinatorSettings
from .keys import AGENTS, COORDINATOR, Written, write_pair
from .server import stop_on_signals
from .service import Service
from .telemetry import configure_logging

S = TypeVar("S", bound=msgspec.Struct)


class SettingsCommand(Generic[S]):
    """A subcommand that is told everything by one settings Struct. ``--check-config`` is answered here."""

    help: str
    section: str
    kind: type[S]

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """One flag for each setting."""
        settings.configure(parser, self.kind)

    def run(self, args: argparse.Namespace) -> int:
        """Read the settings; show them or use them."""
        resolved = settings.from_args(self.kind, self.section, args)
        if args.check_config:
            print(resolved.render())  # noqa: T201
            return 0
        return self.do(resolved.value)

    def do(self, given: S) -> int:
        """What the command is for."""
        raise NotImplementedError


class CoordinatorCommand(SettingsCommand[CoordinatorSettings]):
    """Decides versions, pauses and locks. Runs until SIGTERM or SIGINT."""

    help: str = "run the coordinator: versions, pauses and locks; no tensors, no GPU"
    section: str = "coordinator"
    kind = CoordinatorSettings

    def do(self, given: CoordinatorSettings) -> int:
        """Serve until told to stop."""
        configure_logging(given.log_level.value, given.log_format.value)
        service = Service(given)
        stop_on_signals(service.server)
        service.run()
        return 0


class StatusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus status``."""

    url: Annotated[str, Meta(description="the coordinator's HTTP port")] = "http://127.0.0.1:5752"
    json: Annotated[bool, Meta(description="print the document as it is")] = False
    watch: Annotated[bool, Meta(description="keep showing it until interrupted")] = False
    interval_s: Annotated[float, Meta(description="how often --watch looks", ge=0.1)] = 1.0
    timeout_s: Annotated[float, Meta(description="how long an answer may take", gt=0)] = 5.0


class StatusCommand(SettingsCommand[StatusSettings]):
    """Shows channels, versions, leases and engines."""

    help: str = "show channels, versions, leases and engines"
    section: str = "status"
    kind = StatusSettings

    def do(self, given: StatusSettings) -> int:
        """Read the status over HTTP and print it."""
        if given.watch:
            status_view.watch(Console(), given.url, given.interval_s, given.timeout_s)
            return 0
        document = status_view.fetch(given.url, given.timeout_s)
        if given.json:
            print(document.decode())  # noqa: T201
            return 0
        Console().print(status_view.render(status_view.parse(document)))
        return 0


class KeygenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus keygen``."""

    keys: Annotated[Path, Meta(description="folder that the keys are in")] = Path("keys")
    agents: Annotated[tuple[str, ...], Meta(description="agents, the same as NAME...")] = ()
    coordinator: Annotated[bool, Meta(description="make the coordinator's pair too")] = True

    def __post_init__(self) -> None:
        if COORDINATOR in self.agents:
            raise ValueError(
                f"no agent may be called {COORDINATOR!r}: its key files would be taken for the coordinator's own, which"
                " are made without being named; name the agent otherwise"
            )


class KeygenCommand(SettingsCommand[KeygenSettings]):
    """Makes CURVE keys. What exists is kept."""

    help: str = "make CURVE keys for the coordinator and for agents; keeps what exists"
    section: str = "keygen"
    kind = KeygenSettings

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Names may be given without a flag."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="agents to make keys for")
        super().configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Names without a flag are the same as --agents."""
        if args.names:
            args.agents = ",".join(args.names)
        return super().run(args)

    def do(self, given: KeygenSettings) -> int:
        """Write the pairs that are missing."""
        check_library()
        wanted = [(given.keys, COORDINATOR)] if given.coordinator else []
        wanted += [(given.keys / AGENTS, name) for name in given.agents]
        for folder, name in wanted:
            written = write_pair(folder, name, new_keypair, public_of)
            print(f"{written.value:<9} {folder / name}.key {folder / name}.pub")  # noqa: T201
            if written is Written.CREATED and name != COORDINATOR:
                print(f"          the agent needs {name}.key and {COORDINATOR}.pub; here only {name}.pub must stay")  # noqa: T201
        return 0


class VersionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``weightbus version`` has nothing to set."""


PACKAGES: Final = ("pyzmq", "msgspec", "torch", "sglang", "megatron-core", "megatron-bridge", "transformers")


class VersionCommand(SettingsCommand[VersionSettings]):
    """Says what is installed, without importing it."""

    help: str = "show the versions of weightbus and of what it stands on"
    section: str = "version"
    kind = VersionSettings

    def do(self, given: VersionSettings) -> int:
        """One line for each."""
        del given
        rows = [("weightbus", installed("weightbus") or "not installed: running from its tree")]
        rows += [("python", platform.python_version()), ("libzmq", libzmq_version())]
        rows += [(name, installed(name) or "not installed") for name in PACKAGES]
        for name, found in rows:
            print(f"{name:<16} {found}")  # noqa: T201
        return 0


def installed(distribution: str) -> str | None:
    """Version of a distribution; None when it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


coordinator = CoordinatorCommand()
status = StatusCommand()
keygen = KeygenCommand()
version = VersionCommand()
