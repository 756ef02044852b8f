"""The subcommand ``weightbus trainer-agent``: a sidecar for trainers that write checkpoints and may not be touched."""

import argparse
import signal
import threading
from types import FrameType

from rich.console import Console

from weightbus.control import settings
from weightbus.control.telemetry import configure_logging

from .watch_settings import SECTION, WatchSettings


class TrainerAgentCommand:
    """Publishes each finished checkpoint of a folder until SIGTERM or SIGINT."""

    help = "publish every finished checkpoint that appears in a folder"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """One flag for each setting."""
        settings.configure(parser, WatchSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Watch, and finish what is being published before leaving."""
        resolved = settings.from_args(WatchSettings, SECTION, args)
        if args.check_config:
            Console(highlight=False).print(resolved.render(), markup=False)
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


trainer_agent = TrainerAgentCommand()
