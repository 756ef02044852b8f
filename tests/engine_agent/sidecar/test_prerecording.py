"""When an agent has its server's loader recorded ahead, with which tensors, and when it leaves the server alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.transports import plan_exchange as rehearsal, registry as transports
from weightbus.engine_agent.engines.sglang import compatibility
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.machine.engine_machine import ServerView
from weightbus.engine_agent.sidecar import prerecording as rehearsing
from weightbus.engine_agent.sidecar.memory_release import Noticed
from weightbus.engine_agent.sidecar.prerecording import Prerecorder
from weightbus.engine_agent.sidecar.settings import EngineAgentSettings

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang
from ...kit.fake_weights import read


class Launched(FakeSGLang):
    """With our loader."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.info: dict[str, Any] = {}

    def server_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**super().server_info(body), "custom_weight_loader": [LOADER], **self.info}


@dataclasses.dataclass
class Stage:
    """A server, and the agent's part."""

    folder: Path
    fake: Launched
    asked: list[tuple[TensorSpec, ...]]
    foreseen: list[Manifest] = dataclasses.field(default_factory=list[Manifest])
    used: list[tuple[frozenset[str], frozenset[str]]] = dataclasses.field(default_factory=list)
    paused: bool = False
    record_ahead: bool = True

    def carry_out(self) -> tuple[Prerecorder, list[str]]:
        """One life of the agent; what it said."""
        settings = EngineAgentSettings(
            name="e0", channel="c", server=self.fake.url, insecure_loopback=True, state_dir=self.folder / "state",
            runtime_dir=self.folder / "run", record_ahead=self.record_ahead,
        )  # fmt: skip
        server = SGLangServer(self.fake.url)
        server.identify()
        posted: list[Noticed] = []
        view = cast("ServerView", type("Seen", (), {"paused": self.paused, "checkpoint": server.facts.model_path}))
        made = Prerecorder(
            settings,
            server,
            lambda: view,
            posted.append,
            self.foreseen.append,
            note_used=lambda *found: self.used.append(found),
        )
        with capture_logs() as logs:
            made.carry_out()
        assert made.over
        assert len(posted) == 1
        server.close()
        return made, [f"{each['event']}: {each.get('reason', '')}" for each in logs]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    asked: list[tuple[TensorSpec, ...]] = []

    def record(_: object, tensors: tuple[TensorSpec, ...], *__: object) -> int:
        asked.append(tensors)
        return 1

    monkeypatch.setattr(rehearsal.Prerecording, "record", record)
    monkeypatch.setattr(compatibility, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(rehearsing, "_AGAIN_S", 0.01, raising=False)
    (tmp_path / "cpuinfo").write_text("flags: fpu avx2\n")
    launched = Launched(tiny_model.write(tmp_path / "a", 1))
    launched.start()
    made = Stage(tmp_path, launched, asked)
    yield made
    made.fake.stop()


def specs_of(folder: Path) -> list[TensorSpec]:
    return [TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in read(folder).items()]


@pytest.mark.parametrize("record_ahead", [True, False])
def test_transports_are_imported_before_a_round_waits(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, record_ahead: bool
) -> None:
    """All that may be used, recorded or not."""
    loaded: list[str] = []
    monkeypatch.setattr(transports, "preload", loaded.extend)
    stage.record_ahead = record_ahead
    stage.carry_out()
    assert sorted(loaded) == sorted(transports.names())


def test_the_checkpoints_files_say_what_is_recorded(stage: Stage) -> None:
    """Names, shapes and dtypes of all of its tensors."""
    _, said = stage.carry_out()

    assert said == ["recorded_ahead: "]
    assert sorted(stage.asked[0], key=lambda spec: spec.name) == sorted(
        specs_of(stage.fake.checkpoint), key=lambda spec: spec.name
    )


def test_what_the_files_suggest_is_the_manifest_of_a_trainer_that_keeps_their_order(stage: Stage) -> None:
    """Such a version has that digest, and neither fetches nor reads its manifest."""
    stage.carry_out()
    assert [each.digest() for each in stage.foreseen] == [Manifest.of("Qwen3ForCausalLM", stage.asked[0]).digest()]


def test_the_last_versions_manifest_goes_before_the_files(stage: Stage) -> None:
    """A trainer that serves fewer tensors than the files have, or others in another order, will do so again."""
    first, _ = stage.carry_out()
    last = Manifest.of("Qwen3ForCausalLM", specs_of(stage.fake.checkpoint)[::-1], 1000)
    first.remember(last)

    stage.carry_out()

    assert stage.asked[1] == last.tensors != stage.asked[0]
    assert stage.foreseen[1:] == [last]


@pytest.mark.parametrize("spoil", ["another model", "other shapes", "not a manifest"])
def test_a_manifest_of_another_model_is_not_used(stage: Stage, spoil: str) -> None:
    """The server was launched with something else since."""
    first, _ = stage.carry_out()
    specs = specs_of(stage.fake.checkpoint)
    if spoil == "other shapes":
        specs = [TensorSpec(spec.name, spec.dtype, (7,)) for spec in specs]
    first.remember(Manifest.of("LlamaForCausalLM" if spoil == "another model" else "Qwen3ForCausalLM", specs, 1000))
    if spoil == "not a manifest":
        (stage.folder / "state/e0.manifest").write_bytes(b"\x00garbage")

    stage.carry_out()

    assert stage.asked[1] == stage.asked[0]


def test_a_server_with_requests_is_left_alone(stage: Stage) -> None:
    """SGLang would let them end, and keep new ones waiting. One that is paused keeps them waiting anyway."""
    stage.fake.running = 1
    _, said = stage.carry_out()
    assert "has requests" in said[0]
    assert not stage.asked

    stage.paused = True
    stage.carry_out()
    assert stage.asked


@pytest.mark.parametrize("busy", [{"num_waiting_reqs": 1}, {"num_used_tokens": 4096}])
@pytest.mark.parametrize("look", [0, 1])
def test_a_server_that_reads_a_prompt_is_left_alone(stage: Stage, busy: dict[str, int], look: int) -> None:
    """SGLang counts such a request neither as running nor as waiting, and between its parts it may count none."""
    none = {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
    looks = iter([none | busy if at == look else none for at in range(2)])
    stage.fake.loads = lambda _: {"loads": [next(looks)]}  # type: ignore[method-assign]

    _, said = stage.carry_out()

    assert "has requests" in said[0]
    assert not stage.asked


def test_an_update_that_a_server_has_not_begun_is_not_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """To end it would wait behind it, with all new requests behind both; the next update finds it open and uses it."""

    def record(asked: rehearsal.Prerecording, *arguments: object) -> int:
        cast("SGLangServer", arguments[2])._begin_update(5.0)
        asked.pending = True
        raise TransferFailed("it has requests")

    monkeypatch.setattr(rehearsal.Prerecording, "record", record)

    _, said = stage.carry_out()

    assert said == ["not_recorded_ahead: it has requests"]
    assert stage.fake.session


def test_a_server_that_does_not_say_whether_it_has_requests_is_left_alone(stage: Stage) -> None:
    """Nothing of what it does not say is assumed."""
    stage.fake.loads = lambda _: {"loads": [{"dp_rank": 0}]}  # type: ignore[method-assign]

    _, said = stage.carry_out()

    assert said[0].startswith("not_recorded_ahead: ")
    assert not stage.asked


@pytest.mark.parametrize(
    ("version", "info", "experts", "may"),
    [
        ("0.5.17", {}, True, True),
        ("0.5.17", {"quantization": "fp8"}, False, True),
        ("0.5.23", {}, True, False),
        ("0.5.23", {"quantization": "fp8"}, False, False),
        ("0.5.23", {}, False, True),
    ],
)
def test_a_version_that_lays_out_anew_what_it_loads_is_asked_for_plain_models_only(
    stage: Stage, version: str, info: dict[str, Any], experts: bool, may: bool
) -> None:
    """At the end of a session it would do so with weights that were not loaded in it."""
    if experts:
        config = stage.fake.checkpoint / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Qwen3MoeForCausalLM"]}))
    stage.fake.stop()
    stage.fake = Launched(stage.fake.checkpoint, version)
    stage.fake.info = info
    stage.fake.start()

    _, said = stage.carry_out()

    assert (said == ["recorded_ahead: "]) is may
    assert bool(stage.asked) is may
    assert not stage.fake.session


def test_a_processor_whose_weights_are_packed_in_place_is_left_alone(stage: Stage) -> None:
    """Of a version with sessions."""
    (stage.folder / "cpuinfo").write_text("flags: fpu amx_tile\n")

    stage.carry_out()

    assert not stage.asked


def test_it_can_be_switched_off(stage: Stage) -> None:
    """Nothing is asked of the server, and nothing kept."""
    stage.record_ahead = False
    made, said = stage.carry_out()
    made.remember(Manifest.of("Qwen3ForCausalLM", specs_of(stage.fake.checkpoint), 1000))

    assert said == []
    assert stage.asked == []
    assert not (stage.folder / "state").exists()


@pytest.mark.parametrize("error", [TransferFailed("it broke"), RuntimeError("it broke")])
def test_what_fails_is_said_and_the_agent_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The session that was opened for it is closed."""

    def record(_: object, *__: object) -> int:
        server = cast("SGLangServer", __[2])
        server._begin_update(5.0)
        raise error

    monkeypatch.setattr(rehearsal.Prerecording, "record", record)

    _, said = stage.carry_out()

    assert said[0].startswith("not_recorded_ahead")
    assert not stage.fake.session


def test_a_manifest_that_cannot_be_written_is_told_and_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk costs the next life its manifest, and no round; the next version is written."""
    made, _ = stage.carry_out()
    full, written = [True], list[Path]()

    def write(path: Path, _: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)

    monkeypatch.setattr(rehearsing, "write_durably", write)
    manifest = Manifest.of("X", (TensorSpec("w", "float32", (2,)),))
    with capture_logs() as logs:
        made.remember(manifest)
    assert [line["event"] for line in logs] == ["manifest_not_kept"]
    assert "No space left" in logs[0]["reason"]
    full[0] = False
    made.remember(manifest)
    made.remember(manifest)
    assert len(written) == 1


def test_an_error_that_was_not_foreseen_ends_the_prerecording_and_not_the_agent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over, so that the agent joins, and the log has the traceback."""

    def record(_: object, *__: object) -> int:
        raise ZeroDivisionError("0")

    monkeypatch.setattr(rehearsal.Prerecording, "record", record)
    made, said = stage.carry_out()
    assert made.over
    assert said[0].startswith("not_recorded_ahead")


def test_a_server_without_our_loader_is_not_asked(stage: Stage) -> None:
    """It would end by it."""
    stage.fake.info = {"custom_weight_loader": []}

    _, said = stage.carry_out()

    assert said == []
    assert stage.asked == []


@pytest.mark.parametrize("when", ["before", "while it looks", "just before it asks"])
def test_a_closed_agent_asks_its_server_for_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """New requests would wait for an unwanted recording, and the agent's end for the server."""
    lives: list[Prerecorder] = []
    made, plain = Prerecorder.__init__, rehearsal.Prerecording.record

    def begin(self: Prerecorder, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        lives.append(self)
        if when == "before":
            self.close()

    looked: list[str] = []

    def idle(self: Prerecorder) -> bool:
        looked.append(when)
        if when == "while it looks":
            self.close()
        return True

    def record(self: rehearsal.Prerecording, *arguments: Any) -> int:
        lives[0].close()
        return plain(self, *arguments)

    monkeypatch.setattr(Prerecorder, "__init__", begin)
    if when == "just before it asks":
        monkeypatch.undo()
        monkeypatch.setattr(Prerecorder, "__init__", begin)
        plain = rehearsal.Prerecording.record
        monkeypatch.setattr(rehearsal.Prerecording, "record", record)
        monkeypatch.setattr(compatibility, "_CPU", stage.folder / "cpuinfo")
    monkeypatch.setattr(Prerecorder, "_idle", idle)
    called: list[str] = []
    monkeypatch.setattr(SGLangServer, "load_direct", lambda _self, path, _deadline_s: called.append(path))

    _, said = stage.carry_out()

    assert not stage.asked
    assert not called
    assert bool(looked) is (when != "before")
    assert not any(each.startswith("recorded_ahead") for each in said)
