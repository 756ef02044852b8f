"""Versions for servers that hold tensors in other dtypes than one for all, on real SGLang servers of real files.

One server's files keep norms in float32; two are launched in another dtype than their files. Each takes versions in its
own dtype by every transport, and refuses others before it is paused. The oracle is transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from weightbus.control.cli.entry_point import main
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.demo.child_processes import Programs
from weightbus.trainer_agent.machine import PublishReport, RoundAborted
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

from ..kit.flat_module import FlatModule
from .fleet import Fleet, poll
from .models import Answers, ask_oracle, check_answers, write_checkpoints
from .plain_rank import read

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

PROMPTS = [[5, 17, 33, 64, 101, 7], [400, 3, 9], [77, 78, 79, 80], [250, 1, 250, 2, 250], [11], [301, 302]]
SEEDS = 3
KEPT = ("model.norm.weight", "model.layers.1.input_layernorm.weight")
TRANSPORTS = ("local", "direct", "distributed", "sends", "disk")
HAIR = 1 + 2.0**-12
"""Factor that float32 shows and rounding to bfloat16 takes away again."""


class Case(NamedTuple):
    """How a server is launched, and in which dtypes versions come."""

    flags: tuple[str, ...]
    kept: tuple[str, ...]
    """Tensors that the served files keep in float32 beside bfloat16."""
    right: torch.dtype
    wrong: torch.dtype
    told: str
    """Pattern of the dtypes of a tensor in the refusal: of the manifest, the file and the server."""


CASES = {
    "kept in float32": Case(
        (), KEPT, torch.bfloat16, torch.float16,
        r"is float16 in the manifest .*, bfloat16 in .*/seed0/model.safetensors, bfloat16 in the server",
    ),
    "--dtype float16": Case(
        ("--dtype=float16",), (), torch.float16, torch.bfloat16,
        r"is bfloat16 in the manifest .*, bfloat16 in .*/seed0/model.safetensors, float16 in the server",
    ),
    "--dtype float32": Case(
        ("--dtype=float32",), (), torch.float32, torch.float16,
        r"is float16 in the manifest .*, bfloat16 in .*/seed0/model.safetensors, float32 in the server",
    ),
}  # fmt: skip


class Deployed(NamedTuple):
    """A coordinator and an engine."""

    fleet: Fleet
    case: Case


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seed 0 is served, the others are published."""
    return write_checkpoints(tmp_path_factory.mktemp("dtypes"), SEEDS)


@pytest.fixture(scope="module")
def expected(checkpoints: Path) -> dict[int, Answers]:
    """What each seed must answer, by transformers."""
    return ask_oracle(checkpoints, SEEDS, PROMPTS)


@pytest.fixture(scope="module", params=CASES)
def deployed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, expected: dict[int, Answers]
) -> Iterator[Deployed]:
    """One case at a time: each has a server of its own."""
    del expected
    case = CASES[request.param]
    folder = write_checkpoints(tmp_path_factory.mktemp("case"), SEEDS)
    stored = read(folder, 0)
    kept = {name: each.float() * HAIR if name in case.kept else each for name, each in stored.items()}
    save_file(kept, folder / "seed0" / "model.safetensors", {"format": "pt"})
    with Programs(folder) as programs:
        fleet = Fleet(folder, programs)
        try:
            fleet.start_coordinator()
            fleet.start_engine("one", 1, *case.flags)
            fleet.wait_ready("one")
            yield Deployed(fleet, case)
        finally:
            fleet.close()


def _publish(fleet: Fleet, seed: int, version: int, transport: str, dtype: torch.dtype) -> PublishReport:
    """From masters in float32, which are a hair beside what the checkpoint has where it keeps float32."""
    masters = {name: each.float() * (HAIR if name in KEPT else 1) for name, each in read(fleet.folder, seed).items()}
    source = HFModuleSource(FlatModule(masters), model="Qwen3ForCausalLM", dtype=dtype, served=fleet.folder / "seed0")
    with TrainerAgent.connect(
        source,
        channel="e2e",
        coordinator=fleet.coordinator,
        transport=(transport,),
        keys=fleet.keys,
        checkpoint_dir=fleet.folder / "disk",
        hf_config_dir=fleet.folder / "seed0",
        environ={},
    ) as agent:
        return agent.publish(version)


def _pauses(fleet: Fleet) -> int:
    return (fleet.folder / "server-one.log").read_text().count("/pause_generation")


@pytest.mark.parametrize(("version", "transport"), [*enumerate(TRANSPORTS, 1)])
def test_a_version_in_the_servers_dtype_is_served_and_proven(
    deployed: Deployed, expected: dict[int, Answers], version: int, transport: str
) -> None:
    """By every transport. What the server casts of it has no live digest to compare: it is proven before (G5)."""
    fleet, case = deployed
    seed = 1 + version % 2
    (one,) = _publish(fleet, seed, version, transport, case.right).engines
    by_workers = transport in {"direct", "sends"}
    rest = f"; cast tensors by bucket-digest: {len(case.kept)}" if case.kept and not by_workers else ""
    assert (one.outcome, one.transport, one.verified_by) == ("committed", transport, f"live-digest{rest}")
    check_answers(fleet, "one", PROMPTS, expected[seed], str(version))
    assert fleet.sidecar("one")["cast"] == len(case.kept)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_version_in_another_dtype_is_refused_before_the_pause(
    deployed: Deployed, expected: dict[int, Answers], transport: str
) -> None:
    """The refusal names the dtypes and where each is from; the server goes on with the version that it has (N62)."""
    fleet, case = deployed
    before = _pauses(fleet)
    with pytest.raises(RoundAborted, match=case.told):
        _publish(fleet, 2, len(TRANSPORTS) + 1, transport, case.wrong)
    assert _pauses(fleet) == before > 0
    fleet.wait_ready("one")
    seed = 1 + len(TRANSPORTS) % 2
    check_answers(fleet, "one", PROMPTS[:2], expected[seed][:2], str(len(TRANSPORTS)))


def test_the_doctor_says_the_same(deployed: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`weightbus check` of masters in float32: what fits, what each side casts, and the refusal, as in the rounds."""
    fleet, case = deployed
    served, masters = fleet.folder / "seed0", tmp_path / "masters"
    masters.mkdir()
    shutil.copy(served / "config.json", masters)
    save_file({name: each.float() for name, each in read(fleet.folder, 1).items()}, masters / "model.safetensors")

    def checked(dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
        named = str(dtype).removeprefix("torch.")
        flags = [f"--server={fleet.engines['one'].url}", f"--model={masters}", f"--served={served}"]
        code = main(["check", "--json", f"--dtype={named}", *flags])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    code, found = checked(case.right)
    assert (code, found["refused"]) == (0, [])
    assert {name for name, way in found["transports"].items() if way["fits"]} == {*TRANSPORTS} - {"disk"}
    assert {name for each in found["cast_by_server"] for name in each["names"]} == {*case.kept}
    casts = {(each["found"], each["served"]) for each in found["cast"]}
    named = str(case.right).removeprefix("torch.")
    assert casts == {("float32", named)} - {(named, named)}
    code, found = checked(case.wrong)
    assert code == 1
    assert re.search(case.told, found["refused"][0]), found["refused"][0]


def test_a_sidecar_without_its_record_recognizes_the_version(deployed: Deployed) -> None:
    """By live digests; of tensors that are cast by those that the server gave after the proof (N58)."""
    fleet, case = deployed
    state = fleet.state / "one.json"
    version = len(TRANSPORTS) + 2
    _publish(fleet, 1, version, "local", case.right)
    digests = fleet.state / "one.digests.json"
    poll("the digests to be kept", lambda: digests.exists() and f'"version":{version}' in digests.read_text())
    fleet.kill("sidecar-one")
    state.unlink()
    fleet.start_sidecar("one")
    log = fleet.folder / "sidecar-one.log"
    poll("the version to be recognized", lambda: "server_proven" in log.read_text(), 240)
    fleet.wait_ready("one")
    assert fleet.sidecar("one")["engine"]["held"]["version"] == version
