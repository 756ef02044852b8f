"""The subcommands that publish checkpoints: ``weightbus trainer-agent``, a sidecar for trainers, and ``rollback``."""

import argparse
import signal
import threading
from types import FrameType

from rich.console import Console

from weightbus.control.bus import check_keys
from weightbus.control.cli import add_settings_flags, settings_from_args
from weightbus.control.server import configure_logging

from ..settings import TrainerSettings
from . import rollback_settings
from .rollback_settings import RollbackSettings
from .watch_settings import SECTION, WatchSettings


class TrainerAgentCommand:
    """Publishes each finished checkpoint of a folder until SIGTERM or SIGINT."""

    help = "publish every finished checkpoint that appears in a folder"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """One flag for each setting."""
        add_settings_flags(parser, WatchSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Watch, and finish what is being published before leaving."""
        resolved = settings_from_args(WatchSettings, SECTION, args)
        if args.check_config:
            Console(highlight=False).print(resolved.render(), markup=False)
            _check_keys(resolved.value.trainer())
            return 0
        # Imported here: it brings torch, for which neither the list of commands nor a check of settings should wait.
        from .watcher import Watcher  # noqa: PLC0415

        configure_logging(resolved.value.log_level.value, resolved.value.log_format.value)
        watcher = Watcher(resolved.value)

        def stop(_number: int, _frame: FrameType | None) -> None:
            watcher.stop()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
        watcher.run()
        return 0


class RollbackCommand:
    """Takes a channel back to an older committed version, once, and says what came of it."""

    help = "take a channel back to an older committed version, from the checkpoint that holds it"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """The version, and one flag for each setting."""
        parser.add_argument("version", type=_version, metavar="VERSION", help="a version that was committed before")
        add_settings_flags(parser, RollbackSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Go back, or say why not. The committed version itself is done already: exit code 0."""
        resolved = settings_from_args(RollbackSettings, rollback_settings.SECTION, args)
        if args.check_config:
            Console(highlight=False).print(resolved.render(), markup=False)
            _check_keys(resolved.value.trainer())
            return 0
        from .rollback import roll_back  # noqa: PLC0415  # torch, as above

        given = resolved.value
        configure_logging(given.log_level.value, given.log_format.value)
        report = roll_back(given, args.version)
        if report is None:
            print(f"channel {given.channel} is at version {args.version} already")  # noqa: T201
        else:
            print(report.line())  # noqa: T201
        return 0


def _check_keys(given: TrainerSettings) -> None:
    check_keys(given.coordinator, given.keys, given.name, insecure_loopback=given.insecure_loopback)


def _version(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a version: a whole number is expected")
    return int(text)


trainer_agent = TrainerAgentCommand()
rollback = RollbackCommand()
