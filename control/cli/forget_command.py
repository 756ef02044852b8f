"""``weightbus forget-channel``: removes unused channels from the journal.

It needs the journal's lock, so it runs only while no coordinator does, and cuts off no agent.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..journal import Election, Etcd, EtcdJournal, LeaderRecord, SqliteJournal, StoreLogin, Term, parse_url, read_login
from ..protocol import Channel, ConfigurationError
from ..server import default_journal
from .settings_loader import SettingsCommand

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


forget_channel = ForgetChannelCommand()
