"""``weightbus demo``: found through the entry points of the distribution, so that control imports nothing of it."""

from __future__ import annotations

import argparse
from typing import Final

from weightbus.control.cli import add_settings_flags, settings_from_args

from .settings import SECTION, DemoSettings


class Demo:
    """The command. torch is imported only when it runs."""

    help: Final = "train a toy policy with real Megatron ranks and two real SGLang servers, on the CPU"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Give `parser` the demo's flags."""
        add_settings_flags(parser, DemoSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Run the demo, or show its settings."""
        resolved = settings_from_args(DemoSettings, SECTION, args)
        if args.check_config:
            print(resolved.render())  # noqa: T201 - what the flag asks for
            return 0
        from .demo_run import run  # noqa: PLC0415 - the coordinator's machine has no torch

        return run(resolved.value)


demo = Demo()
