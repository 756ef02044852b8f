"""``weightbus simulate-fleet``: what it answers, what it refuses, and that it needs neither torch nor patience."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weightbus.control.cli.entry_point import main
from weightbus.trainer_agent.forecast import commands as forecast_commands
from weightbus.trainer_agent.forecast.fleet import (
    EngineLocation,
    Engines,
    FleetSpec,
    ForecastTransport,
    Links,
    TrainerSpec,
)
from weightbus.trainer_agent.forecast.forecast import Forecast, changes
from weightbus.trainer_agent.forecast.traffic import Tensors

MODEL = str(Path(__file__).parents[2] / "gpu" / "models" / "deepseek.json")
SHIPPED = Path(forecast_commands.__file__).with_name("configs")
KIMI_K2 = json.loads((SHIPPED / "Kimi-K2.json").read_text())
LARGE = (
    "--gpus", "512", "--tp", "8", "--pp", "8", "--ep", "32", "--etp", "1",
    "--engines", "32", "--engine-tp", "16", "--engine-ep", "16",
)  # fmt: skip


def asked(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    """The document."""
    assert main(["simulate-fleet", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What it says of a fleet that cannot be."""
    assert main(["simulate-fleet", *flags]) == 2
    return capsys.readouterr().err


def test_a_trillion_parameters_on_512_gpus_take_seconds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exact bytes of a model of 70,000 tensors, and all that would help, in a few seconds of one core."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(KIMI_K2))
    began = time.process_time()
    found = asked(capsys, "--model", str(tmp_path), *LARGE)
    assert time.process_time() - began < 60  # about 5; CI's machines do other things too
    assert 1.02e12 < found["parameters"] < 1.04e12
    assert found["bytes"] == 2_052_816_510_976
    assert found["fleet"]["engines"][0]["way"] == "sends"
    assert found["round"]["total_s"] > found["round"]["pause_s"] > found["round"]["loads"][0]["seconds"] > 1
    assert found["changes"][0]["what"].startswith("nic twice as fast")
    assert all(change["total_s"] < found["round"]["total_s"] for change in found["changes"])


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-8B", 8.19), ("Qwen3-30B-A3B", 30.53), ("Kimi-K2", 1026.4)])
def test_a_few_models_are_known_by_name(
    name: str, billions: float, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the published number of parameters, on 8 GPUs each; a file or folder of that name comes first."""
    assert {path.stem for path in SHIPPED.iterdir()} == {"Qwen3-8B", "Qwen3-30B-A3B", "Kimi-K2"}
    monkeypatch.chdir(tmp_path)
    found = asked(capsys, "--model", name, "--gpus", "8", "--tp", "8", "--engine-tp", "8", "--changes", "0")
    assert round(found["parameters"] / 1e9, 2) == pytest.approx(billions, rel=0.001)
    (tmp_path / name).write_text("{}")
    assert "names no architectures" in refused(capsys, "--model", name)


def test_the_documents_show_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of trainer_agent/GUIDE.md, line by line."""
    told = (Path(__file__).parents[3] / "trainer_agent" / "GUIDE.md").read_text()
    shown = told.partition("$ weightbus simulate-fleet --model Kimi-K2 ")[2].partition("```")[0].splitlines()
    assert main(["simulate-fleet", "--model", "Kimi-K2", *shown[0].split()]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown[1:]
    turns = told.partition("With `--max-paused 8`")[2].partition("```\n")[2].partition("```")[0]
    assert main(["simulate-fleet", "--model", "Kimi-K2", *shown[0].split(), "--max-paused", "8"]) == 0
    assert turns
    assert turns in capsys.readouterr().out


@pytest.mark.parametrize("unused", ["rms_norm_eps", "intermediate_size", "num_key_value_heads", "torch_dtype"])
def test_what_it_does_not_use_need_not_be_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, unused: str) -> None:
    """A config of which published ones leave out something: the same bytes, as all layers have experts."""
    whole = KIMI_K2 | {"first_k_dense_replace": 0, "num_hidden_layers": 2}
    config = tmp_path / "config.json"
    found: list[int] = []
    for document in (whole, {key: value for key, value in whole.items() if key != unused}):
        config.write_text(json.dumps(document))
        found.append(asked(capsys, "--model", str(tmp_path))["bytes"])
    assert found[0] == found[1]


def test_a_gpu_that_cannot_hold_it_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The round is calculated all the same: GPUs grow."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(KIMI_K2))
    one = asked(capsys, "--model", str(tmp_path))
    assert [note for note in one["notes"] if note.startswith("an engine's GPU would keep 2053 GB")]
    many = asked(capsys, "--model", str(tmp_path), *LARGE)
    assert not [note for note in many["notes"] if "would keep" in note]


def test_the_groups_of_the_figures_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Where broadcasts are predicted, and that waves form theirs anew, which nobody measured."""
    told = ("distributed was measured with servers that join groups", "over distributed every wave connects")
    for way, turns, said in (("sends", ["1"], 0), ("distributed", [], 1), ("distributed", ["1"], 2)):
        waves = [word for most in turns for word in ("--max-paused", most)]
        found = asked(capsys, "--model", MODEL, "--engines", "2", "--way", way, *waves)
        assert sum(note.startswith(told) for note in found["notes"]) == said


def test_people_get_steps_links_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar for each step, the busiest links, what would help, and what was only assumed."""
    assert main(["simulate-fleet", "--model", MODEL, "--figures"]) == 0
    shown = capsys.readouterr().out
    for word in ("transfer", "###", "busiest link", "NIC out of GPU 0", "what would help most", "not measured"):
        assert word in shown


def test_a_fleet_may_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """TOML with several groups of engines says what flags say of one; the slower group decides."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        "[trainer]\ngpus = 4\nep = 4\netp = 1\n[[engines]]\ncount = 4\nwhere = 'trainer-gpus'\n"
        "[[engines]]\ncount = 2\n[links]\nnic = 10.0\n"
    )
    mixed = asked(capsys, "--model", MODEL, "--fleet", str(file))
    beyond = asked(
        capsys, "--model", MODEL, *["--gpus", "4", "--ep", "4", "--etp", "1", "--engines", "2", "--nic", "10"]
    )
    assert [group["way"] for group in mixed["fleet"]["engines"]] == ["direct", "sends"]
    links = [load["link"] for load in mixed["round"]["loads"]]
    assert {"copies within GPU", "NVLink out of GPU", "NIC out of GPU"} <= set(links)
    assert mixed["round"]["loads"][0] == beyond["round"]["loads"][0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--gpus 8 --tp 3", "8 trainer GPUs are no multiple of tp x pp = 3 x 1"),
        ("--gpus 8 --ep 3 --etp 1", "no multiple of ep x etp = 3 x 1"),
        ("--gpus 32 --tp 32", "16 heads, tp = 32 does not divide them: change it"),
        ("--gpus 8 --pp 8", "use at most one stage for each"),
        ("--engine-tp 4 --engine-ep 3", "4 engine tp are no multiple of engine ep = 3"),
        ("--engine-tp 3", "16 heads, engine tp = 3 does not divide them"),
        ("--engines 2 --where trainer-gpus", "the trainer has 1: use fewer engines"),
        ("--way direct", "direct cannot serve engines at other-hosts"),
        ("--way sends --where trainer-gpus", "NCCL gives a GPU to one rank"),
        ("--fleet /nowhere.toml", "/nowhere.toml cannot be read"),
        ("--fleet /nowhere.toml --gpus 4", "both describe the fleet"),
        ("--gpus 0", "gpus = "),
        ("--engines 4 --max-paused 0", "max_paused = "),
        ("--nic inf", "nic = "),
        ("--nic 1e-300", "Expected `float` >= 0.001"),
        ("--nic 1e-7 --way disk --storage 1e-320", "Expected `float` >= 0.001"),
        (
            "--gpus 4 --engines 100 --engine-tp 8 --where trainer-hosts",
            "engines take 800 GPUs of host 0, where 4 are the",
        ),
        ("--gpus 4 --engines 5 --where trainer-hosts", "4 at most are left to them there. Use fewer engines"),
        (
            "--gpus 16 --engines 17 --where trainer-hosts",
            "engines take 9 GPUs of host 0, where 8 are the trainer's: 8 at",
        ),
        ("--nvlink nan", "nvlink = "),
        ("--engines 4097", "4097 engines are more than the 4096 that are calculated one by one"),
        ("--engines 100000", "100000 engines are more than the 4096"),
        ("--gpus 65536", "65537 GPUs of trainer and engines are more than the 65536"),
        ("--dtype int3", "dtype 'int3' is none that is known: give one of float64, "),
    ],
)
def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], flags: str, said: str) -> None:
    """Found, expected, what to do: exit code 2, and no traceback."""
    message = refused(capsys, "--model", MODEL, *flags.split())
    assert said in message
    assert "Traceback" not in message


def test_a_file_is_bounded_as_flags_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All groups together; and a rate is a number in either."""
    file = tmp_path / "fleet.toml"
    file.write_text("[[engines]]\ncount = 2048\n[[engines]]\ncount = 2049\n")
    assert "4097 engines are more than the 4096" in refused(capsys, "--model", MODEL, "--fleet", str(file))
    file.write_text("[links]\nnic = inf\n")
    assert "$.links.nic" in refused(capsys, "--model", MODEL, "--fleet", str(file))


def test_what_takes_long_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the document, which stays what it is."""
    for engines, said in (("128", ""), ("129", "129 engines, one by one for each change: this may take minutes\n")):
        assert main(["simulate-fleet", "--json", "--model", MODEL, "--engines", engines, "--changes", "0"]) == 0
        shown = capsys.readouterr()
        assert shown.err == said
        assert json.loads(shown.out)["fleet"]["engines"][0]["count"] == int(engines)


def test_files_that_describe_nothing_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A misspelt field is named, with those that there are; so is a config that names no model."""
    file = tmp_path / "fleet.json"
    file.write_text('{"trainer": {"gpu": 4}}')
    assert "gpus, gpus_per_host, tp" in refused(capsys, "--model", MODEL, "--fleet", str(file))
    assert "names no architectures" in refused(capsys, "--model", str(file))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 2_000_000_000}, "num_hidden_layers=2000000000: 4096 at most are served"),
    "experts": ({"n_routed_experts": 2_000_000_000}, "tensors, more than the 1048576 that are looked at one by one"),
    "predictions": ({"num_nextn_predict_layers": 2_000_000_000}, "=2000000000: 0 to 4096 are expected"),
    "less than none": ({"num_nextn_predict_layers": -1}, "=-1: 0 to 4096 are expected"),
    "bytes": ({"vocab_size": 1 << 62}, "more than the 1.1e+15 of any model"),
    "no family": ({"architectures": []}, "names no architectures: give the config.json"),
    "another family": ({"architectures": ["BertModel"]}, "the Hugging Face config names 'BertModel'"),
    "no sizes": ({"hidden_size": None}, "hidden_size=None: a positive number is expected"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    """Before anything is made of it: no memory is taken, and no time."""
    changed, said = CONFIGS[case]
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2 | changed))
    began = time.process_time()
    assert said in refused(capsys, "--model", str(tmp_path))
    assert time.process_time() - began < 5


def test_a_layer_of_every_zero_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By its name, not as a division by zero."""
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2 | {"full_attention_interval": 0}))
    assert "full_attention_interval=0: a positive number" in refused(capsys, "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("deep.json", "[" * 200_000, "is nested deeper than any description: give "),
        ("deep.toml", "a = " + "[" * 200_000, "is nested deeper than any description: give "),
        ("empty.toml", "", "says nothing of a fleet: give it [trainer] or [[engines]]"),
        ("links.toml", "[links]\nnic = 10.0\n", "says nothing of a fleet"),
        ("engines.toml", "[[engines]]\ntpp = 2\n", "[[engines]] count, tp, ep, where, way, gpus_per_host, shift"),
        ("waves.toml", "max_paused = 0\n[trainer]\ngpus = 1\n", "`int` >= 1 - at `$.max_paused`. Known: [trainer]"),
        ("misspelt.toml", "paused = 1\n[trainer]\ngpus = 1\n", "; bucket_mb, max_paused"),
        ("list.json", "[]", "holds a list: give a table of TOML or an object of JSON with trainer"),
    ],
)
def test_a_file_of_no_fleet_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: str, said: str
) -> None:
    """What was found, what is expected, and which fields there are."""
    file = tmp_path / name
    file.write_text(content)
    assert said in refused(capsys, "--model", MODEL, "--fleet", str(file))
    if name.startswith("deep.j"):
        assert "give the config.json" in refused(capsys, "--model", str(file))


def test_turns_are_asked_for_by_flag_or_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same document; a flag goes before the file. Without either all engines stand still at once."""
    file = tmp_path / "fleet.toml"
    file.write_text("max_paused = 2\n[[engines]]\ncount = 5\n")
    flags = asked(capsys, "--model", MODEL, "--engines", "5", "--max-paused", "2")
    assert asked(capsys, "--model", MODEL, "--fleet", str(file)) == flags
    assert (flags["fleet"]["max_paused"], flags["round"]["waves"], flags["round"]["serving"]) == (2, 3, 3)
    other = asked(capsys, "--model", MODEL, "--fleet", str(file), "--max-paused", "4")
    assert (other["round"]["waves"], other["round"]["serving"]) == (2, 1)
    assert asked(capsys, "--model", MODEL, "--engines", "5")["round"]["waves"] == 1
    assert [note for note in flags["notes"] if note.startswith("engines have their turns in the order")]
    assert not [note for note in asked(capsys, "--model", MODEL)["notes"] if "turns" in note]


def test_people_are_told_of_waves_and_joiners(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """How many and how large, who serves meanwhile, and when one more engine does; of one wave nothing."""
    flags = ["--engines", "5", "--way", "sends"]
    document = asked(capsys, "--model", MODEL, *flags, "--max-paused", "2")
    assert main(["simulate-fleet", "--model", MODEL, *flags, "--max-paused", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(lines)
    wait = f"{document['round']['pause_s']:.3f} s"
    assert f" in 3 waves of at most 2 engines, of which a request that runs waits {wait}: that of its engine" in shown
    assert "at least 3 of 5 engines serve at any time" in lines
    assert f"an engine that joins is routable after about {document['joining_s']:.3f} s" in lines
    assert "a wave is paused" in shown
    assert "over NCCL those that share one take turns" in shown
    assert main(["simulate-fleet", "--model", MODEL, "--gpus", "2", "--engines", "2", "--where", "trainer-gpus"]) == 0
    assert not {"wave", "joins", "joining:", "NCCL"}.intersection(capsys.readouterr().out.split())
    file = tmp_path / "fleet.toml"
    file.write_text("[[engines]]\nway = 'sends'\n[[engines]]\nway = 'disk'\n")
    mixed = asked(capsys, "--model", MODEL, "--fleet", str(file))
    assert mixed["joining_s"] is None
    assert not [note for note in mixed["notes"] if "joining" in note]


def test_hosts_that_are_larger_than_said_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """The trainer's share of its hosts may be all that was said of them."""
    flags = ("--gpus", "16", "--gpus-per-host", "4", "--engines", "16", "--where", "trainer-hosts")
    found = asked(capsys, "--model", MODEL, *flags)
    assert [note for note in found["notes"] if note.startswith("the trainer's hosts are taken to have 8 GPUs each")]
    few = asked(capsys, "--model", MODEL, "--gpus", "4", "--engines", "4", "--where", "trainer-hosts")
    assert not [note for note in few["notes"] if "taken to have" in note]


def test_changes_are_calculated_and_not_told() -> None:
    """What is said to be saved is what the changed fleet takes; what cannot be is not said."""
    forecast = Forecast(Tensors.parse(json.loads(Path(MODEL).read_text())))
    fleet = FleetSpec(
        TrainerSpec(4, 4, ep=4, etp=1),
        (Engines(4, location=EngineLocation.OTHER, transport=ForecastTransport.SENDS),),
        Links(nic=1.0),
    )
    now = forecast.round(fleet)
    found = {change.what: change for change in changes(forecast, fleet, now, 20)}
    twice = forecast.round(FleetSpec(fleet.trainer, fleet.engines, Links(nic=2.0)))
    assert found["nic twice as fast: 2 GB/s"].total_s == twice.total_s
    assert "by direct" not in found
    assert [change.total_s for change in found.values()] == sorted(change.total_s for change in found.values())


def test_it_needs_no_torch() -> None:
    """A laptop with numpy answers: torch is not imported on the way."""
    program = (
        "import sys; sys.modules['torch'] = None; from weightbus.control.cli.entry_point import main;"
        f"sys.exit(main(['simulate-fleet', '--model', {MODEL!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
