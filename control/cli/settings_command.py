"""What the subcommands share: a command that is told everything by one settings Struct."""

from __future__ import annotations

import argparse
from typing import Generic, TypeVar

import msgspec

from . import settings_loader as settings

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
            self.check(resolved.value)
            return 0
        return self.do(resolved.value)

    def check(self, given: S) -> None:
        """Raise the `ConfigurationError` that a start would, as far as files on this machine tell."""

    def do(self, given: S) -> int:
        """What the command is for."""
        raise NotImplementedError
