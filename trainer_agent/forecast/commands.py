"""The subcommand ``weightbus simulate-fleet``."""

from __future__ import annotations

import argparse
import sys
from typing import Final

import msgspec
from rich.console import Console

from weightbus.control.cli import add_settings_flags, settings_from_args

from .settings import SECTION, SimulateSettings

_QUICK: Final = 128
"""Most engines that are calculated without a warning: time grows with their number."""


class SimulateFleetCommand:
    """Predicts a round of a fleet, shows where the time goes and what would help."""

    help = "predict the time of a round for a model, a trainer's layout and engines; needs no GPU"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """One flag for each setting."""
        add_settings_flags(parser, SimulateSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Calculate and print."""
        resolved = settings_from_args(SimulateSettings, SECTION, args)
        console = Console(highlight=False, soft_wrap=True)
        if args.check_config:
            console.print(resolved.render(), markup=False)
            return 0
        # Imported here: it brings numpy, for which the list of commands should not wait.
        from .forecast import Forecast  # noqa: PLC0415
        from .forecast_report import figures_table, render, report_of  # noqa: PLC0415
        from .settings import config_of, fleet_of  # noqa: PLC0415
        from .tensor_blocks import tensors_of  # noqa: PLC0415

        given = resolved.value
        fleet = fleet_of(given)
        engines = sum(group.count for group in fleet.engines)
        if engines > _QUICK:
            print(f"{engines} engines, one by one for each change: this may take minutes", file=sys.stderr)  # noqa: T201
        report = report_of(Forecast(tensors_of(config_of(given.model), given.dtype)), fleet, given.changes)
        if given.json:
            print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())  # noqa: T201
            return 0
        console.print(render(report))
        if given.figures:
            console.print(figures_table())
        return 0


simulate_fleet = SimulateFleetCommand()
