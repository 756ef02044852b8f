"""`weightbus check`: what would be sent, left, cast and refused, by the code that decides it in a round."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightbus.control.cli.entry_point import main
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.engine_agent.engines import Engine, EngineConnection, open_engine
from weightbus.engine_agent.errors import UnfitManifest

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang
from ...kit.ports import free_port


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The checkpoint that the server was launched with."""
    return tiny_model.write(tmp_path / "served", 1)


@pytest.fixture
def fake(served: Path) -> Iterator[FakeSGLang]:
    server = FakeSGLang(served).start()
    yield server
    server.die()


def check(capsys: pytest.CaptureFixture[str], server: str, model: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document."""
    capsys.readouterr()
    code = main(["check", f"--server={server}", f"--model={model}", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def engine_of(server: str) -> Engine:
    engine = open_engine("sglang", EngineConnection(server))
    engine.identify()
    return engine


def test_a_checkpoint_that_fits(fake: FakeSGLang, served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, all of it sent; every transport with the reason that the sidecar would give the coordinator."""
    code, found = check(capsys, fake.url, served)

    assert code == 0
    assert found["fits"] is True
    assert (
        found["sent"]["tensors"] == found["sent"]["dtypes"]["bfloat16"] == len(load_file(served / "model.safetensors"))
    )
    assert (found["left"], found["cast"], found["refused"]) == ([], [], [])
    engine = engine_of(fake.url)
    missing = engine.missing_transports()
    assert {name for name, way in found["transports"].items() if way["fits"]} == {"local", "distributed"}
    assert found["transports"]["direct"]["reason"] == missing["direct"].found
    assert found["transports"]["direct"]["needed"] == missing["direct"].needed
    assert "checkpoint_dir" in found["transports"]["disk"]["reason"]
    engine.close()


def test_nothing_is_changed_at_the_server(fake: FakeSGLang, served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is asked who it is, and an admin call without its argument tells whether the key is good."""
    assert check(capsys, fake.url, served)[0] == 0
    assert set(fake.calls) <= {"/weights_checker"}


def test_a_refusal_is_the_one_of_the_round(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and word for word what the sidecar says to `Prepare`."""
    other = tiny_model.write(tmp_path / "other", 1, layers=3)
    code, found = check(capsys, fake.url, other)

    tensors = [
        TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape))
        for name, each in load_file(other / "model.safetensors").items()
    ]
    engine = engine_of(fake.url)
    with pytest.raises(UnfitManifest) as refused:
        engine.check(Manifest.of("Qwen3ForCausalLM", tensors), "local", served)
    engine.close()
    assert code == 1
    assert found["fits"] is False
    assert found["refused"] == [str(refused.value)]


def test_what_is_left_is_shown(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that is not trained: refused with the setting that leaves it, and left once the trainer's file has it."""
    trained = tiny_model.write(tmp_path / "trained", 2)
    held = load_file(served / "model.safetensors")
    save_file({**held, "extra.head.weight": torch.ones(4, dtype=torch.bfloat16)}, served / "model.safetensors")

    code, found = check(capsys, fake.url, trained)
    assert code == 1
    assert 'left = ["extra."]' in found["refused"][0]

    config = tmp_path / "trainer.toml"
    config.write_text('[trainer]\nchannel = "policy"\nleft = ["extra."]\n')
    code, found = check(capsys, fake.url, trained, f"--trainer-config={config}")
    assert code == 0
    assert found["left"] == [{"name": "extra.", "reason": "not_trained"}]
    assert found["sent"]["tensors"] == len(held)
    code, whole = check(capsys, fake.url, served, f"--trainer-config={config}")
    assert (code, whole["sent"]) == (0, found["sent"])


def test_casts_are_shown_from_and_to(fake: FakeSGLang, served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters kept in another dtype than they travel in; here the server refuses the result."""
    code, found = check(capsys, fake.url, served, "--dtype=float16")
    assert code == 1
    (cast,) = found["cast"]
    assert (cast["found"], cast["served"], cast["tensors"]) == ("bfloat16", "float16", found["sent"]["tensors"])
    assert "float16" in found["refused"][0]


def test_tensors_that_the_files_keep_apart(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the trainer sends by `served`, and what the server casts of it; a table's source knows it by itself."""
    file, norm = served / "model.safetensors", "model.norm.weight"
    weights = load_file(file)
    masters = tiny_model.write(tmp_path / "masters", 1)
    save_file({name: each.float() for name, each in weights.items()}, masters / "model.safetensors")
    save_file({**weights, norm: weights[norm].float()}, file)
    rest = len(weights) - 1

    code, found = check(capsys, fake.url, masters, "--dtype=bfloat16", f"--served={served}")
    assert code == 0
    assert found["sent"]["dtypes"] == {"float32": 1, "bfloat16": rest}
    (cast,), (by_server,) = found["cast"], found["cast_by_server"]
    assert (cast["found"], cast["served"], cast["tensors"]) == ("float32", "bfloat16", rest)
    assert by_server == {"found": "float32", "served": "bfloat16", "tensors": 1, "names": [norm]}
    assert check(capsys, fake.url, served, "--source=megatron")[1]["sent"]["dtypes"] == found["sent"]["dtypes"]
    assert check(capsys, fake.url, masters, "--dtype=bfloat16")[1]["cast_by_server"] == []
    code, found = check(capsys, fake.url, masters)
    assert code == 1
    assert f"served='{served}'" in found["refused"][0]
    main(["check", f"--server={fake.url}", f"--model={served}"])
    assert "1 from float32 to bfloat16: model.norm.weight (by the server, as at its launch)" in capsys.readouterr().out


def test_a_server_of_an_unknown_version(fake: FakeSGLang, served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A document too, and its version: every sidecar would refuse it."""
    fake.version = "0.9.0"
    code, found = check(capsys, fake.url, served)
    assert code == 1
    assert (found["server"]["version"], found["sent"], found["transports"]) == ("0.9.0", None, {})
    assert "--dialect" in found["refused"][0]
    assert main(["check", f"--server={fake.url}", f"--model={served}"]) == 1
    assert capsys.readouterr().out.startswith(f"server     {fake.url}: version 0.9.0\nrefused    SGLang '0.9.0' is not")
    assert check(capsys, fake.url, served, "--dialect=0.5.23")[0] == 0


def test_a_config_is_enough_for_a_family_with_a_table(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is downloaded: by the table, as `MegatronSource` would present it."""
    alone = tmp_path / "config-alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((served / "config.json").read_bytes())
    code, found = check(capsys, fake.url, alone)
    by_files = check(capsys, fake.url, served)[1]
    assert code == 0
    assert found["sent"] == {**by_files["sent"], "source": "megatron"}


def test_an_exporter_gives_no_memory_in_place(
    fake: FakeSGLang, served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family without a table goes through Megatron-Bridge, whatever the trainer's files are: buckets remain."""
    assert check(capsys, fake.url, served, "--source=megatron")[1]["sent"]["source"] == "megatron"
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps({**config, "architectures": ["NoTableForCausalLM"]}))
    fake.restart()
    code, found = check(capsys, fake.url, served, "--source=megatron")
    assert code == 0
    assert found["sent"]["source"] == "exported"
    assert "where its tensors lie" in found["transports"]["direct"]["reason"]
    assert found["transports"]["local"]["fits"]


def test_the_trainers_file_names_transports(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only those are looked at; with none that the server has, every version is refused for that reason."""
    config = tmp_path / "trainer.toml"
    config.write_text('[trainer]\nchannel = "policy"\ntransport = ["direct"]\n')
    code, found = check(capsys, fake.url, served, f"--trainer-config={config}")
    assert code == 1
    assert list(found["transports"]) == ["direct"]
    assert found["refused"] == ["direct: the server was launched without our loader"]


def test_what_cannot_be_told_has_its_own_code(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, with the cause and what to do: no server, no checkpoint, no sight of the served one."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert main(["check", f"--server={nowhere}", f"--model={served}"]) == 2
    assert "no connection to" in capsys.readouterr().err
    assert main(["check", f"--server={fake.url}", f"--model={tmp_path / 'none'}"]) == 2
    assert "--model names the folder" in capsys.readouterr().err
    fake.model_path = "/elsewhere/served"
    assert main(["check", f"--server={fake.url}", f"--model={served}"]) == 2
    assert "--model-path" in capsys.readouterr().err
    assert main(["check", f"--server={fake.url}", f"--model={served}", f"--model-path={served}"]) == 0


def test_wrong_settings_are_told_with_the_next_step(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without its config, a file, a hub's name, an abbreviated dtype, a setting outside of its section."""
    (tmp_path / "weights").mkdir()
    config = tmp_path / "trainer.toml"
    config.write_text('channel = "policy"\n')
    wanted = "--model names the folder of the checkpoint that is trained"
    for flags, told in (
        ([f"--model={tmp_path / 'weights'}"], rf"weights has no config.json: {wanted}\. Copy .* \(--trainer-config\)"),
        ([f"--model={served / 'config.json'}"], rf"config.json is a file: {wanted}, as {served}"),
        (["--model=Qwen/Qwen3-8B"], rf"no folder Qwen/Qwen3-8B here: {wanted}; .* download it first"),
        ([f"--model={served}", "--dtype=bf16"], r"dtype = 'bf16': bfloat16, float16, float32, float64 is expected"),
        (
            [f"--model={served}", f"--trainer-config={config}"],
            r"'channel' stands outside of a section: write it below \[trainer\]",
        ),
    ):
        assert main(["check", f"--server={fake.url}", *flags]) == 2
        assert re.search(told, capsys.readouterr().err)


def test_another_model_is_told_at_once(
    fake: FakeSGLang, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another architecture that alone; of other sizes the shapes; both with what to launch."""
    llama = tiny_model.write(tmp_path / "llama", 1, architecture="llama")
    wide = tiny_model.write(tmp_path / "wide", 1, hidden=128)
    advice = "launch the server with a checkpoint of the trained model. Nothing was sent to the server"
    assert check(capsys, fake.url, llama)[1]["refused"] == [
        f"the manifest is of LlamaForCausalLM, the server serves Qwen3ForCausalLM: {advice}"
    ]
    (told,) = check(capsys, fake.url, wide)[1]["refused"]
    assert "'lm_head.weight' has shape (512, 128), the server's has (512, 64)" in told
    assert told.endswith(f"another model is trained than the served one: {advice}")
    assert served.is_dir()


def test_the_page_says_the_same(fake: FakeSGLang, served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people: a line for each answer, the last one the verdict."""
    assert main(["check", f"--server={fake.url}", f"--model={served}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "server", "sent", "left", "cast", "refused", "transports", "answer",
    ]  # fmt: skip
    assert lines[-1].split() == ["answer", "fits"]


def test_its_settings_need_no_torch() -> None:
    """The list of commands, and `--check-config`, wait for nothing."""
    program = "import sys, weightbus.check_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
