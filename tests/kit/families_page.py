"""Writes trainer_agent/FAMILIES.md of the code's tables and of what test runs found.

    python tests/kit/families_page.py                        # the page, of tests/golden/families.json
    python tests/kit/families_page.py MODULES BRIDGE_LIST    # that file first, of these runs

MODULES is the folder of family_modules.py, BRIDGE_LIST the file of bridge_list.py.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tiny_families import FAMILIES

from weightbus.dataplane.transports.registry import BUILT_IN
from weightbus.trainer_agent.export.memory_export import Exportable
from weightbus.trainer_agent.publish.agent import without_places
from weightbus.trainer_agent.source import UnsupportedModel
from weightbus.trainer_agent.sources.exported import ExportedSource, FullTensorSource
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource
from weightbus.trainer_agent.sources.megatron.bridge_mode import BridgedSource, bridge_of
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource
from weightbus.trainer_agent.sources.megatron.model_families import FAMILIES as SERVED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "trainer_agent" / "FAMILIES.md"
FOUND = ROOT / "tests" / "golden" / "families.json"

HEAD = """\
# Model families

Each family by each source, in bfloat16 and quantized in FP8 blocks: tested bit for bit, or refused with the text that
is shown. `python tests/kit/families_page.py` writes this page of the tables in
`trainer_agent/sources/megatron/model_families.py` and of what the last runs of `tests/kit/family_modules.py` and
`tests/kit/bridge_list.py` found. Tests compare page, tables and runs.

| architecture | `MegatronSource` by its table | equal to Megatron-Bridge {version} | `FSDPSource` | `HFModuleSource` |
|---|---|---|---|---|
"""
TRANSPORTS = """
Transports carry tensors and know no family, nor a dtype: which ones a version can go by follows from the source, for
each family above alike, in bfloat16 and in FP8 blocks. Where one is refused, the log says the text and the next in the
trainer's order is taken; a trainer that allows no other is refused when it connects (`ConfigurationError`).

| source | {transports} |
|---|{lines}|
{ways}
## Through Megatron-Bridge

`MegatronSource` converts families without a table by Megatron-Bridge, of which {version} lists these. Built from a
small config on a CPU, and every tensor equal to the checkpoint's, in the trainer's dtypes: {bridged}.
FP8 blocks are made of whole tensors here (`tests/trainer_agent/quantized/test_quantized_source.py`).

Not built on a CPU, and therefore untested:

"""
TAIL = """
Llama 4, Nemotron-H and OLMo 1 have no table: Megatron-Bridge {version} does not list the first and the last, and builds
the second with mamba-ssm only. `HFModuleSource` exports all three as their files have them
(`tests/trainer_agent/sources/test_hf_models.py`).

Without Megatron-Bridge, or where it does not know the family either, `MegatronSource` is refused:

```
{refusal}
```
"""


def refusal() -> str:
    """What `MegatronSource` says of a family that nothing converts, where Megatron-Bridge is not installed."""
    with patch.dict(sys.modules, {"megatron.bridge": None}):
        try:
            bridge_of("OlmoForCausalLM", {})
        except UnsupportedModel as error:
            return str(error)
    raise AssertionError("it is converted")


def found_by(modules: Path, bridge_list: Path, version: str) -> dict[str, Any]:
    """What the two runs said."""
    verdicts = {name: json.loads((modules / f"{name}.json").read_text()) for name in FAMILIES}
    return {"bridge version": version, "bridge": json.loads(bridge_list.read_text()), "modules": verdicts}


def page(found: Mapping[str, Any]) -> str:
    """The page."""
    version, bridge = found["bridge version"], found["bridge"]
    rows = [f"| `{name}` | {' | '.join(_cells(name, found))} |\n" for name in SERVED]
    bridged = sorted(name for name, outcome in bridge.items() if outcome == "bridge" and name not in SERVED)
    left = {name: outcome for name, outcome in bridge.items() if outcome not in {"bridge", "table"}}
    reasons: dict[str, list[str]] = defaultdict(list)
    for name in sorted(left):
        if name not in SERVED:
            reasons[left[name].removeprefix("not built: ")].append(f"`{name}`")
    why = "".join(f"- {', '.join(names)}: {_plain(reason)}\n" for reason, names in reasons.items())
    return (
        HEAD.format(version=version)
        + "".join(rows)
        + TRANSPORTS.format(**_matrix(), version=version, bridged=", ".join(f"`{name}`" for name in bridged))
        + why
        + TAIL.format(version=version, refusal=refusal())
    )


SOURCES: tuple[tuple[str, type], ...] = (
    ("`MegatronSource` by its table", MegatronSource),
    ("`MegatronSource` by Megatron-Bridge", BridgedSource),
    ("`FSDPSource`", FSDPSource),
    ("`HFModuleSource`", HFModuleSource),
    ("`FullTensorSource`", FullTensorSource),
    ("`ExportedSource`", ExportedSource),
)


def exportable(kind: type) -> bool:
    """Whether sources of this kind say where their tensors lie; three names are attributes of an object alone."""
    needed = {name for name in vars(Exportable) if not name.startswith("_")} - {"rank", "root", "device"}
    return all(hasattr(kind, name) for name in needed)


def _matrix() -> dict[str, str]:
    """Each source by each transport."""
    rows = [
        f"| {name} | {' | '.join(_way(kind, in_place=transport.in_place) for transport in BUILT_IN)} |\n"
        for name, kind in SOURCES
    ]
    names = " | ".join(f"`{transport.name}`" for transport in BUILT_IN)
    return {"transports": names, "lines": "|".join("---" for _ in BUILT_IN), "ways": "".join(rows)}


def _way(kind: type, *, in_place: bool) -> str:
    if not in_place:
        return "in buckets"
    return "in place" if exportable(kind) else f"refused: {without_places(kind)}"


def _cells(architecture: str, found: Mapping[str, Any]) -> list[str]:
    outcome = found["bridge"].get(architecture)
    # Where the last run was one of bridge mode, the table came later.
    equal = {"table": "yes", "bridge": "not run yet", None: "not listed by it"}.get(
        outcome, f"not built: {_plain(str(outcome))}"
    )
    tiny = [name for name, each in FAMILIES.items() if each.architecture == architecture]
    same = [name for name, each in SERVED.items() if each is SERVED[architecture]]
    table = "bf16, FP8" if tiny else f"the table of `{same[0]}`"
    tiny = tiny or [
        name
        for name, each in FAMILIES.items()
        if each.made_as == architecture and SERVED[architecture] is SERVED[each.architecture]
    ]
    return [table, equal, *(_module(tiny, source, found) for source in ("FSDP2", "HF"))]


def _module(tiny: list[str], source: str, found: Mapping[str, Any]) -> str:
    if not tiny:
        return "code of the checkpoint"
    made = FAMILIES[tiny[0]].made_as
    # Another family's class has the same tensors; one without a table is the family's own, or a part of it.
    if made in SERVED and SERVED[made] is not SERVED[FAMILIES[tiny[0]].architecture]:
        return f"as `{made}`"
    if any(name not in found["modules"] for name in tiny):
        return "not run yet"
    said = [found["modules"][name][source] for name in tiny]
    refused = [each for each in said if isinstance(each, str)]
    if refused:
        return "refused: " + _plain(refused[0])
    return "differs" if any(each["odd"] or each["fp8"] for each in said) else "bf16, FP8"


def _plain(text: str) -> str:
    """Text of a cell."""
    said, _, _ = text.removeprefix("not built: ").partition(" when instantiating")
    return said[:120].replace("|", "/").replace("<", "less than ").replace(">", "more than ")


def main() -> None:
    if len(sys.argv) > 1:
        from megatron.bridge import __version__ as version

        found = found_by(Path(sys.argv[1]), Path(sys.argv[2]), version)
        FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(json.loads(FOUND.read_text())))


if __name__ == "__main__":
    main()
