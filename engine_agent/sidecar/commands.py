"""The subcommand ``weightbus engine-agent``."""

import argparse
import signal
import threading
from types import FrameType

from weightbus.control.cli import add_settings_flags, settings_from_args
from weightbus.control.log import get_log
from weightbus.control.server import configure_logging

from .settings import SECTION, EngineAgentSettings, check_trust, read_keys


class EngineAgentCommand:
    """Runs one sidecar until SIGTERM or SIGINT."""

    help = "sidecar of one SGLang server: takes new weights into it"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """One flag for each setting."""
        add_settings_flags(parser, EngineAgentSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Serve, and leave the server as it is at the end."""
        resolved = settings_from_args(EngineAgentSettings, SECTION, args)
        read_keys(resolved.value)  # a file that cannot be used is known before anything runs
        if args.check_config:
            print(resolved.render())  # noqa: T201  # no console: one would wrap lines, and the output is a file
            check_trust(resolved.value)
            return 0
        # Imported here: it brings torch, for which neither the list of commands nor a check of settings should wait.
        from .driver import EngineAgent  # noqa: PLC0415

        configure_logging(resolved.value.log_level.value, resolved.value.log_format.value)
        for found in resolved.exposed():
            get_log(__name__).warning("secret_exposed", reason=found)
        agent = EngineAgent(resolved.value)

        def stop(_number: int, _frame: FrameType | None) -> None:
            agent.stop()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
        agent.run()
        return 0


engine_agent = EngineAgentCommand()
