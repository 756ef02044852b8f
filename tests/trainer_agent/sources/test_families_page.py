"""The page of model families says what the code and the recorded runs say, and transports know no family."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from weightbus.dataplane.transports.registry import BUILT_IN
from weightbus.trainer_agent.sources.exported import ExportedSource, FullTensorSource
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource
from weightbus.trainer_agent.sources.megatron.bridge_mode import BridgedSource
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource
from weightbus.trainer_agent.sources.megatron.model_families import FAMILIES

ROOT = Path(__file__).parents[3]


@pytest.fixture
def families_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that writes the page; its neighbors are programs, too."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "kit")
    return importlib.import_module("families_page")


def test_the_page_is_what_tables_and_runs_say(families_page: Any) -> None:
    """A family that comes, a refusal that changes: `python tests/kit/families_page.py` writes the page anew."""
    found = families_page.json.loads(families_page.FOUND.read_text())
    assert families_page.page(found) == families_page.PAGE.read_text()
    assert all(f"| `{name}` |" in families_page.PAGE.read_text() for name in FAMILIES)


def test_what_differed_in_a_run_is_no_success(families_page: Any) -> None:
    """Neither does a family that no run had pass for one that was tested."""
    found = families_page.json.loads(families_page.FOUND.read_text())
    found["modules"]["llama"]["FSDP2"]["fp8"] = ["lm_head.weight"]
    found["modules"]["mistral"]["HF"] = "no such thing"
    del found["modules"]["qwen2"]
    lines = {line.split("`")[1]: line for line in families_page.page(found).splitlines() if line.startswith("| `")}
    assert "| differs | bf16, FP8 |" in lines["LlamaForCausalLM"]
    assert "| bf16, FP8 | refused: no such thing |" in lines["MistralForCausalLM"]
    assert "| not run yet | not run yet |" in lines["Qwen2ForCausalLM"]


def test_transports_follow_from_the_source(families_page: Any) -> None:
    """Shards in memory can be read in place; whole tensors of an exporter are gone when the next one comes.

    A transport or source that comes has its row or column, with what the agent says where it is refused.
    """
    for in_memory in (MegatronSource, FSDPSource, HFModuleSource):
        assert families_page.exportable(in_memory)
    for exported in (BridgedSource, ExportedSource, FullTensorSource):
        assert not families_page.exportable(exported)
    rows = [line for line in families_page.PAGE.read_text().splitlines() if line.endswith("| in buckets |")]
    assert len(rows) == len(families_page.SOURCES)
    assert all(row.count(" | ") == len(BUILT_IN) for row in rows)
    assert all(("does not say where its tensors lie" in row) is not ("| in place" in row) for row in rows)


@pytest.mark.parametrize(
    "room", ["trainer_agent/export", "trainer_agent/publish", "dataplane/transports", "dataplane/memory"]
)
def test_transports_know_no_family(room: str) -> None:
    """So that each of them is tested with one model, and not with every one."""
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        text = file.read_text()
        assert not [name for name in FAMILIES if name in text], file
