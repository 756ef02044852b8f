"""Every family in every layout, against checkpoints that transformers wrote.

A run takes a slice of the matrix, another one every day, that begins with what must never be left out; `make layouts`
takes all of it. A failure names the seed of its slice; ``LAYOUTS_SEED`` repeats it, ``LAYOUTS`` changes its size.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from weightbus.engine_agent.engines.sglang import cpu_server
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors
from weightbus.trainer_agent.sources.megatron.model_families import FAMILIES as SERVED

from ....kit.tiny_families import FAMILIES, Case, matrix, parse, slice_of, text_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

KIT = Path(__file__).parents[3] / "kit"
SHIM = Path(cpu_server.__file__).with_name("cpu_shim")
SEED = os.environ.get("LAYOUTS_SEED", dt.datetime.now(tz=dt.UTC).date().isoformat())
COUNT = os.environ.get("LAYOUTS", "32")
AT_ONCE = 40
"""Cases of one process; each begins and ends Megatron's groups for every rank."""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def core() -> int:
    """Minor version of the Megatron-core that is here."""
    return int(importlib.metadata.version("megatron-core").split(".")[1])


REAL = {
    1: tuple(f"{name}:alone-te" for name in FAMILIES),
    2: ("qwen3_moe:ep2-te", "qwen3:tp2", "qwen3:pp2-vpp2", "qwen3_tied:pp2", "llama:dp2"),
    4: (
        "qwen3_moe:tp2-ep2-etp2-te", "qwen3_moe:ep4", "deepseek_v3_no_q_lora:pp2-ep2-te", "qwen2_moe:tp2-ep2-etp1-te",
        "qwen3_tied:tp2-pp2-vpp2", "llama_biases:tp2-pp2", "qwen3_2_groups:tp4", "qwen2:dp2-tp2",
    ),
}  # fmt: skip
"""Computed with on real ranks, and read out of their memory: every family once, and layouts that collectives carry."""
MORE = {2: 4, 4: 8}
"""Further layouts on real ranks, others every day, for their bits alone; six times as many in `make layouts`."""


def more(world: int) -> list[str]:
    """Any cases of so many ranks. Of context parallelism and of experts cut otherwise than attention, there is one."""
    known = [case for case in matrix(core=core()) if case.layout.world == world and str(case) not in REAL[world]]
    sparse = [case for case in known if case.layout.etp not in {None, case.layout.tp}]
    cut = [case for case in known if case.layout.cp > 1]
    chosen = [case for kind in (cut, sparse) for case in _drawn(kind, 1)]
    count = MORE[world] * (6 if COUNT == "all" else 1)
    return [str(case) for case in dict.fromkeys((*chosen, *_drawn(known, count)))][:count]


def _drawn(cases: list[Case], count: int) -> list[Case]:
    return random.Random(SEED).sample(cases, min(count, len(cases)))


def with_path(*folders: Path) -> dict[str, str]:
    """The environment, with these in front of what Python imports."""
    paths = [str(folder) for folder in folders] + [os.environ.get("PYTHONPATH", "")]
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers' `save_pretrained` wrote, by family."""
    out = tmp_path_factory.mktemp("checkpoints")
    command = [sys.executable, str(KIT / "hf_checkpoints.py"), str(out)]
    done = subprocess.run(command, env=with_path(SHIM), timeout=600, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def run_worlds(cases: Sequence[Case], checkpoints: Path, out: Path) -> dict[str, Any]:
    """What became of each case, in one process."""
    command = [sys.executable, "-W", "ignore", str(KIT / "family_worlds.py"), str(checkpoints), str(out)]
    done = subprocess.run(
        [*command, *map(str, cases)],
        env=with_path(KIT / "te_stub"),
        timeout=1200,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {str(case): json.loads((out / f"{case}.json").read_text()) for case in cases}


def launch(program: str, world: int, cases: Sequence[str], checkpoints: Path, out: Path) -> None:
    """Run one world of real ranks to its end."""
    command = [sys.executable, "-W", "ignore", str(KIT / program)]
    environment = with_path(KIT / "te_stub", SHIM)
    ranks = []
    for rank in range(world):
        log = (out / f"rank{rank}.log").open("w")
        rest = [str(rank), str(world), str(out / "rendezvous"), str(checkpoints), str(out), *cases]
        ranks.append((subprocess.Popen([*command, *rest], stdout=log, stderr=log, env=environment), log))
    try:
        for rank, (process, _) in enumerate(ranks):
            assert process.wait(timeout=900) == 0, (out / f"rank{rank}.log").read_text()[-4000:]
    finally:
        for process, log in ranks:
            process.kill()
            process.wait()
            log.close()


def test_every_served_family_is_tested() -> None:
    """A table that no tiny model uses would be a claim."""
    # The same tables under other names, of remote code or of transformers.
    aliases = {"KimiK2ForCausalLM", "Kimi_K25ForConditionalGeneration"}
    assert {tiny.architecture for tiny in FAMILIES.values()} | aliases == set(SERVED)


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_name_what_checkpoints_hold(family: str, checkpoints: Path) -> None:
    """Every tensor that `save_pretrained` writes, and no other, with its shape."""
    config = json.loads((checkpoints / family / "config.json").read_text())
    with safe_open(checkpoints / family / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {spec.name: spec.shape for spec in hf_tensors(HFModel.parse(config), "float32")} == text_of(written)


def test_layouts_export_what_was_loaded(checkpoints: Path, tmp_path: Path) -> None:
    """Hugging Face to Megatron to Hugging Face, bit for bit: whole tensors cut by an oracle, put together by pieces."""
    every = list(matrix(core=core()))
    cases = every if COUNT == "all" else slice_of(every, seed=SEED, count=int(COUNT))
    print(f"{len(cases)} of {len(every)} layouts, LAYOUTS_SEED={SEED}")  # noqa: T201  a slice can be repeated by it
    verdicts: dict[str, Any] = {}
    for first in range(0, len(cases), AT_ONCE):
        verdicts |= run_worlds(cases[first : first + AT_ONCE], checkpoints, tmp_path)
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict.get("count") != 0}
    assert not wrong, f"LAYOUTS_SEED={SEED}"
    assert all(verdict["tensors"] > 30 for verdict in verdicts.values())
    kinds = {kind for case in cases if case.layout.te for kind in verdicts[str(case)]["kinds"]}
    assert kinds == {"norms in linears", "grouped experts", "extra state"}, "the stand-in is not Transformer Engine"
    assert not {kind for case in cases if not case.layout.te for kind in verdicts[str(case)]["kinds"]} - {"extra state"}


NOT_BRIDGED = {
    # Not known to Megatron-Bridge 0.6.
    *("qwen2_moe", "qwen2_moe_no_biases", "glm4", "ministral", "ministral3", "olmo2", "olmo3", "deepseek_v32"),
    *("llama_biases", "deepseek_v3_no_q_lora"),  # dropped by it: biases, and queries without a latent
    *("qwen3_5_vl", "qwen3_5_moe_vl", "kimi_k25", "qwen3_omni"),  # whole models to it, not tried here
}
BRIDGED_AT_ONCE = {1: 20, 2: 20, 4: 12}
"""Random layouts of one run, by ranks: `LAYOUTS_SEED` repeats them."""


def bridged(world: int) -> list[str]:
    """What Megatron-Bridge is asked on so many ranks: every family alone, any layout of any family on more."""
    known = [case for case in matrix(core=core()) if case.layout.world == world and _is_bridged(case)]
    return [str(case) for case in slice_of(known, seed=SEED, count=BRIDGED_AT_ONCE[world])]


def _is_bridged(case: Case) -> bool:
    layout = case.layout
    placed = layout.uneven or (layout.vpp and FAMILIES[case.family].predictions)  # bridge_ranks.py places no layers
    padded = layout.tp > 2  # its providers pad no vocabulary of their own accord, and this one is even
    return layout.te and not layout.hybrid and not placed and not padded and case.family not in NOT_BRIDGED


@pytest.mark.parametrize("world", BRIDGED_AT_ONCE)
def test_megatron_bridge_agrees(world: int, checkpoints: Path, tmp_path: Path) -> None:
    """What it loaded into a layout, we export as it was, bit for bit; and what it exports comes through unchanged."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed: it asks for more than `make env` installs")
    if world > 1 and COUNT != "all":
        pytest.skip("several ranks of it are part of `make layouts`")
    cases = bridged(world)
    launch("bridge_ranks.py", world, cases, checkpoints, tmp_path)
    for name in cases:
        verdict = json.loads((tmp_path / f"{name}.json").read_text())
        assert verdict.get("count") == 0, (name, verdict)
        assert verdict["bridge"] == [], name


@pytest.mark.parametrize("world", REAL)
def test_real_ranks_export_what_they_compute_with(world: int, checkpoints: Path, tmp_path: Path) -> None:
    """Over gloo, bit for bit the files; and Megatron computes the logits that transformers does when it loads those."""
    cases = [name for name in REAL[world] if FAMILIES[parse(name).family].built_by(core())]
    others = more(world) if world in MORE else []
    print(f"also {' '.join(others)}, LAYOUTS_SEED={SEED}")  # noqa: T201  a slice can be repeated by it
    launch("family_ranks.py", world, [*cases, *(f"bits,{name}" for name in others)], checkpoints, tmp_path)
    for name in (*cases, *others):
        verdict = json.loads((tmp_path / f"{name}.json").read_text())
        assert verdict["odd"] == [], f"{name}, LAYOUTS_SEED={SEED}"
        if name in others:
            continue
        assert verdict["difference"] is not None, f"{name}: no logits were computed"
        assert verdict["difference"] < 1e-4, name


RECORDED = json.loads((KIT.parent / "golden" / "families.json").read_text())
"""What trainer_agent/FAMILIES.md is written of."""


def test_modules_of_every_family_export_what_was_recorded(checkpoints: Path, tmp_path: Path) -> None:
    """Whole and sharded by FSDP2 over two ranks, in bfloat16 and in FP8 blocks: bit for bit the files."""
    launch("family_modules.py", 2, list(FAMILIES), checkpoints, tmp_path)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in FAMILIES}
    assert found == RECORDED["modules"]


def test_what_megatron_bridge_lists_is_exported_as_recorded(tmp_path: Path) -> None:
    """Every family that it can build here, by its table or by itself; the reasons why others are not."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed: it asks for more than `make env` installs")
    if COUNT != "all":
        pytest.skip("all that it lists is part of `make layouts`")
    command = [sys.executable, "-W", "ignore", str(KIT / "bridge_list.py"), str(tmp_path)]
    environment = with_path(KIT / "te_stub", SHIM)
    done = subprocess.run(command, env=environment, timeout=1800, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / "bridge_list.json").read_text()) == RECORDED["bridge"]
