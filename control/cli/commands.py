"""The subcommands coordinator, status, version and forget-channel."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import platform
import resource
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import msgspec
from msgspec import Meta
from rich.console import Console

from ..bus import check_bind, libzmq_version
from ..journal import Election, Etcd, EtcdJournal, LeaderRecord, SqliteJournal, StoreLogin, Term, parse_url, read_login
from ..log import get_log
from ..machine import WATCHDOG_S, status as status_document
from ..protocol import Channel, ConfigurationError
from ..security import check_url
from ..server import (
    CoordinatorCandidate,
    CoordinatorProcess,
    CoordinatorSettings,
    configure_logging,
    default_journal,
    on_signals,
    read_keys,
)
from ..terminal_text import terminal_safe
from . import status_view
from .settings import SettingsCommand

_WATCHED_BY_SETTING: Final = {"silence_s": "a sidecar", "lease_s": "a trainer"}
"""Process whose silence ends an attempt over `distributed`, by the setting with the deadline."""
_STORE_SETTINGS: Final = ("advertise", "name", "leader_s", "store_login_file")
"""Settings without effect unless `CoordinatorSettings.store` is set."""


class CoordinatorCommand(SettingsCommand[CoordinatorSettings]):
    """``weightbus coordinator``: runs until SIGTERM or SIGINT."""

    help: str = "run the coordinator: versions, pauses and locks; no tensors, no GPU"
    section: str = "coordinator"
    kind = CoordinatorSettings

    def check(self, given: CoordinatorSettings) -> None:
        """Check keys, allow-list, bind address and store as a start would; print warnings."""
        check_bind(given.bind, read_keys(given))
        if given.store:
            parse_url(given.store)
            read_login(given.store_login_file)
        for event, told in _warnings(given):
            print(terminal_safe(f"warning: {event}: {'; '.join(told.values())}"), file=sys.stderr)  # noqa: T201

    def do(self, given: CoordinatorSettings) -> int:
        """Serve until a signal arrives."""
        configure_logging(given.log_level.value, given.log_format.value)
        raise_open_file_limit()
        tune_garbage_collection()
        service = CoordinatorCandidate(given) if given.store else CoordinatorProcess(given)
        _warn(given)  # before anything is served, or a store is waited for
        on_signals(service.stop, service.reload_allow_list)
        service.run()
        return 0


def _warn(given: CoordinatorSettings) -> None:
    log = get_log(__name__)
    if given.insecure_loopback:
        log.warning("insecure", reason="no keys: any process of this machine may publish weights")
    for event, told in _warnings(given):
        log.warning(event, **told)


def _warnings(given: CoordinatorSettings) -> list[tuple[str, dict[str, str]]]:
    """Warnings about settings without effect or with a risk: log event and its fields."""
    found: list[tuple[str, dict[str, str]]] = []
    if given.store and given.journal != default_journal():
        reason = "with a store nothing is read from a file, nor written to it"
        found.append(("journal_not_used", {"journal": str(given.journal), "store": given.store, "reason": reason}))
    usual = {field.name: field.default for field in msgspec.structs.fields(CoordinatorSettings)}
    idle = [name for name in _STORE_SETTINGS if getattr(given, name) != usual[name]]
    if idle and not given.store:
        reason = "without --store this is the only coordinator, and these are settings of one of several"
        found.append(("store_not_named", {"settings": ", ".join(idle), "reason": reason}))
    return found + _ends_too_soon(given)


def _ends_too_soon(given: CoordinatorSettings) -> list[tuple[str, dict[str, str]]]:
    """Warnings for deadlines that end an attempt before a watchdog has released workers blocked in a collective."""
    least_s = WATCHDOG_S + given.heartbeat_s  # the last one may have been heard so long before
    found: list[tuple[str, dict[str, str]]] = []
    for name, watched in _WATCHED_BY_SETTING.items():
        wait_s: float = getattr(given, name)
        if wait_s < least_s:
            reason = (
                f"over distributed {watched} that stands still is stood in for after {WATCHDOG_S:g} s, which is too"
                f" late: workers of stock servers still wait in the group when the attempt has ended; set {name} to"
                f" {least_s:g} ({WATCHDOG_S:g} s and heartbeat_s) or more, or use no distributed"
            )
            found.append(("ends_too_soon", {"setting": f"{name} = {wait_s:g}", "reason": reason}))
    return found


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: every agent takes one, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def tune_garbage_collection() -> None:
    """Collect cycles seldom, and never scan the program's own objects.

    A step with two thousand engines makes tens of thousands of objects, and all of them are in use.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


class StatusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus status``."""

    url: Annotated[str, Meta(description="the coordinator's HTTP port")] = "http://127.0.0.1:5752"
    json: Annotated[bool, Meta(description="print the document as it is")] = False
    watch: Annotated[bool, Meta(description="keep showing it until interrupted")] = False
    interval_s: Annotated[float, Meta(description="how often --watch looks", ge=0.1)] = 1.0
    timeout_s: Annotated[float, Meta(description="how long an answer may take", gt=0, le=86400)] = 5.0


class StatusCommand(SettingsCommand[StatusSettings]):
    """``weightbus status``: prints the coordinator's status."""

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
        status_view.print_unwrapped(Console(), status_view.render(status_document.parse(document)))
        return 0


class VersionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus version``: none."""


PACKAGES: Final = ("pyzmq", "msgspec", "torch", "sglang", "megatron-core", "megatron-bridge", "transformers")


class VersionCommand(SettingsCommand[VersionSettings]):
    """``weightbus version``: prints installed versions without importing the packages."""

    help: str = "show the versions of weightbus and of what it stands on"
    section: str = "version"
    kind = VersionSettings

    def do(self, given: VersionSettings) -> int:
        """Print one line for each package."""
        del given
        rows = [("weightbus", installed("weightbus") or "not installed: running from its tree")]
        rows += [("python", platform.python_version()), ("libzmq", libzmq_version())]
        rows += [(name, installed(name) or "not installed") for name in PACKAGES]
        for name, found in rows:
            print(f"{name:<16} {found}")  # noqa: T201
        return 0


def installed(distribution: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_FOLLOWS = (
    "A channel of that name begins anew: nothing is committed in it, and its epochs begin at a number that each start"
    " draws. Where keys are used, every engine that served it refuses what is published there, until its server is"
    " launched anew."
)
_LEASE_S = 5.0
_CALL_S = 2.0


class ForgetChannelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus forget-channel``."""

    journal: Annotated[Path, Meta(description="the coordinator's SQLite file")] = msgspec.field(
        default_factory=default_journal
    )
    store: Annotated[str, Meta(description="etcd://127.0.0.1:2379[,...][/prefix], where that is used instead")] = ""
    store_login_file: StoreLogin = None

    def __post_init__(self) -> None:
        if self.store and self.journal != default_journal():
            raise ValueError(f"store = {self.store}, but journal = {self.journal} as well: name the one that is meant")


class ForgetChannelCommand(SettingsCommand[ForgetChannelSettings]):
    """Removes versions, epochs and answers of channels from the journal; the audit trail records the removal."""

    help: str = "remove unused channels from the journal; the coordinator has to be stopped"
    section: str = "forget_channel"
    kind = ForgetChannelSettings

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Channel names are positional."""
        parser.add_argument("names", nargs="+", metavar="CHANNEL", help="what to forget")
        super().configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Keep the positional arguments, which are no settings."""
        self._names = tuple[str, ...](args.names)
        return super().run(args)

    def do(self, given: ForgetChannelSettings) -> int:
        """Remove all of the channels, or none. Exit code 1: one is not known (misspelled, or removed before)."""
        with ExitStack() as opened:
            journal = _of_store(given, opened) if given.store else _of_file(given.journal)
            opened.callback(journal.close)
            known = journal.restore()
            strange = [name for name in self._names if name not in known]
            if not strange:
                journal.forget(list(map(Channel, dict.fromkeys(self._names))))
            for name in self._names:
                print(f"{'not known' if name in strange else 'kept' if strange else 'forgotten':<9} {name}")  # noqa: T201
            if not strange:
                print(_FOLLOWS, file=sys.stderr)  # noqa: T201
        return 1 if strange else 0


def _of_file(path: Path) -> SqliteJournal:
    if not path.exists():
        raise ConfigurationError(f"journal = {path} is not there: name the coordinator's with --journal")
    return SqliteJournal(path)


def _of_store(given: ForgetChannelSettings, opened: ExitStack) -> EtcdJournal:
    url = parse_url(given.store)
    etcd = opened.enter_context(closing(Etcd(url.members, _CALL_S, read_login(given.store_login_file))))
    found = Election(etcd, url.prefix, LeaderRecord("forget-channel", ""), _LEASE_S).stand()
    if not isinstance(found, Term):
        raise ConfigurationError(f"{found.name} leads at {given.store}: stop all its coordinators first")
    opened.callback(found.resign)
    return EtcdJournal(etcd, url.prefix, found)


class ForgetEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus forget-engine``."""

    url: Annotated[str, Meta(description="the coordinator's HTTP port")] = "http://127.0.0.1:5752"
    timeout_s: Annotated[float, Meta(description="how long an answer may take", gt=0, le=86400)] = 5.0

    def __post_init__(self) -> None:
        check_url("url", self.url)


class ForgetEngineCommand(SettingsCommand[ForgetEngineSettings]):
    """Drops lost engines from the status and the metrics of a running coordinator; an engine that comes is back."""

    help: str = "drop lost engines from status and metrics; the coordinator goes on"
    section: str = "forget_engine"
    kind = ForgetEngineSettings

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Engine names are positional."""
        parser.add_argument("names", nargs="+", metavar="ENGINE", help="what to forget")
        super().configure(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Keep the positional arguments, which are no settings."""
        self._names = tuple[str, ...](args.names)
        return super().run(args)

    def do(self, given: ForgetEngineSettings) -> int:
        """Ask for each. Exit code 1: one is not known, or is here."""
        answers = [
            status_view.post(given.url, given.timeout_s, f"/forget-engine/{quote(name, safe='')}")
            for name in self._names
        ]
        for _, said in answers:
            print(terminal_safe(said))  # noqa: T201
        return 0 if all(done for done, _ in answers) else 1


coordinator = CoordinatorCommand()
status = StatusCommand()
version = VersionCommand()
forget_channel = ForgetChannelCommand()
forget_engine = ForgetEngineCommand()
