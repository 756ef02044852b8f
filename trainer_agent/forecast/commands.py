"""``weightbus simulate-fleet``: its settings, and the fleet that they describe, by flags or by a file."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta
from rich.console import Console

from weightbus.control.cli import add_settings_flags, settings_from_args
from weightbus.control.protocol import ConfigurationError

from .fleet import Count, EngineLocation, Engines, FleetError, FleetSpec, ForecastTransport, Links, Rate, TrainerSpec

SECTION = "simulate_fleet"


class SimulateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus simulate-fleet``."""

    model: Annotated[
        Path,
        Meta(description="the served model: its config.json, the folder with it, or Kimi-K2, Qwen3-8B, Qwen3-30B-A3B"),
    ]
    dtype: Annotated[str | None, Meta(description="in which it is served; none: as its config says")] = None
    fleet: Annotated[
        Path | None, Meta(description="TOML or JSON with trainer, engines (several groups) and links, for these flags")
    ] = None
    gpus: Annotated[Count | None, Meta(description="of the trainer; none: 1")] = None
    gpus_per_host: Annotated[Count | None, Meta(description="of trainer and engines; none: 8")] = None
    tp: Annotated[Count | None, Meta(description="the trainer's tensor parallel ranks; none: 1")] = None
    pp: Annotated[Count | None, Meta(description="its pipeline stages; none: 1")] = None
    ep: Annotated[Count | None, Meta(description="its expert parallel ranks; none: 1")] = None
    etp: Annotated[Count | None, Meta(description="ranks that it cuts an expert into; none: as tp")] = None
    engines: Annotated[Count | None, Meta(description="how many servers; none: 1")] = None
    engine_tp: Annotated[Count | None, Meta(description="GPUs of each; none: 1")] = None
    engine_ep: Annotated[Count | None, Meta(description="its expert parallel groups; none: 1")] = None
    where: Annotated[EngineLocation | None, Meta(description="on which GPUs engines run; none: other-hosts")] = None
    way: Annotated[
        ForecastTransport | None, Meta(description="how bytes travel; none: the first of direct, sends, nearest")
    ] = None
    bucket_mb: Annotated[Count | None, Meta(description="size of buckets of whole tensors; none: 512")] = None
    max_paused: Annotated[
        Count | None, Meta(description="engines that stand still at a time, the others take turns; none: all at once")
    ] = None
    device: Annotated[Rate | None, Meta(description="GB/s of copies within a GPU; none: as measured")] = None
    nvlink: Annotated[Rate | None, Meta(description="GB/s of a GPU to its host's others; none: as measured")] = None
    nic: Annotated[Rate | None, Meta(description="GB/s of a NIC; none: 45, an assumption")] = None
    nics_per_host: Annotated[Count | None, Meta(description="NICs that a host shares; none: one for each GPU")] = None
    storage: Annotated[Rate | None, Meta(description="GB/s of files, all hosts together; none: as measured")] = None
    changes: Annotated[int, Meta(description="how many changes that would help to show", ge=0, le=20)] = 3
    figures: Annotated[bool, Meta(description="show every constant and where it was measured")] = False
    json: Annotated[bool, Meta(description="print the document")] = False


_TRAINER = ("gpus", "gpus_per_host", "tp", "pp", "ep", "etp")
_ENGINES = {"engines": "count", "engine_tp": "tp", "engine_ep": "ep", "where": "where", "way": "way"}
_FLEET = ("bucket_mb", "max_paused")
_LINKS = ("device", "nvlink", "nic", "nics_per_host", "storage")


def fleet_of(given: SimulateSettings) -> FleetSpec:
    """The fleet of the file, or of the flags; links and rounds go by the flags in either case.

    Raises `FleetError` for a file that describes none, and where file and flags both speak of a layout.
    """
    said = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
    links, rounds = ({name: said[name] for name in names if name in said} for names in (_LINKS, _FLEET))
    if given.fleet is None:
        engines = {field: said[name] for name, field in _ENGINES.items() if name in said}
        if "gpus_per_host" in said:
            engines["gpus_per_host"] = said["gpus_per_host"]
        trainer = {name: said[name] for name in _TRAINER if name in said}
        document = {"trainer": trainer, "engines": [engines], "links": links}
        return msgspec.convert(document | rounds, FleetSpec)
    both = [name for name in (*_TRAINER, *_ENGINES) if name in said]
    if both:
        flag = "--" + both[0].replace("_", "-")
        raise FleetError(f"{flag} and --fleet {given.fleet} both describe the fleet: say it in one of them")
    document = _read(given.fleet, "a table of TOML or an object of JSON with trainer, engines and links")
    try:
        found = msgspec.convert(document | rounds, FleetSpec)
    except msgspec.ValidationError as problem:
        kinds = {"[trainer]": TrainerSpec, "[[engines]]": Engines, "[links]": Links}
        known = "; ".join(f"{name} {', '.join(kind.__struct_encode_fields__)}" for name, kind in kinds.items())
        raise FleetError(
            f"{given.fleet} describes no fleet: {problem}. Known: {known}; {', '.join(_FLEET)}"
        ) from problem
    if not document.keys() & {"trainer", "engines"}:
        raise FleetError(f"{given.fleet} says nothing of a fleet: give it [trainer] or [[engines]], or use flags")
    return msgspec.structs.replace(found, links=msgspec.structs.replace(found.links, **links))


_CONFIGS: Final = Path(__file__).with_name("configs")
"""The sizes of a few models as their published configs have them, under the models' names."""


def config_of(path: Path) -> Mapping[str, object]:
    """The model's config: of a file, a folder, or a model that is known by its name. Raises `FleetError` for none."""
    file = path / "config.json" if path.is_dir() else path
    if len(path.parts) == 1 and not path.exists() and (shipped := _CONFIGS / f"{path}.json").exists():
        file = shipped
    document = _read(file, "the config.json of a Hugging Face checkpoint")
    if not document.get("architectures"):
        raise FleetError(f"{file} names no architectures: give the config.json of a Hugging Face checkpoint")
    return document


def _read(file: Path, expected: str) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        found = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as problem:
        raise ConfigurationError(f"{file} cannot be read: {problem.strerror}; give {expected}") from problem
    except RecursionError as problem:
        raise FleetError(f"{file} is nested deeper than any description: give {expected}") from problem
    except ValueError as problem:
        raise FleetError(f"{file} is neither TOML (*.toml) nor JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise FleetError(f"{file} holds a {type(found).__name__}: give {expected}")
    return cast("dict[str, Any]", found)


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
        from .forecast import (  # noqa: PLC0415
            Forecast,
            figures_table,
            render,
            report_of,
        )
        from .traffic import tensors_of  # noqa: PLC0415

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
