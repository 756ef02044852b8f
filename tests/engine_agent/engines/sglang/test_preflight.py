"""A sidecar that joins says at once what its server will not take, and with which launch it would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from weightbus.engine_agent.engines.sglang.compatibility import dialect_of, refusals

from ....kit import tiny_model
from .test_compatibility import CHANNELS, FP8, INT4, facts, stored_quantized

NEWEST = dialect_of("0.5.23")


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (FP8, {}, ""),
        (CHANNELS, {}, "transposes.*weight_block_size"),
        (INT4, {}, "unpacks experts only"),
        (FP8, {"device": "cpu"}, "serve the plain checkpoint"),
    ],
)
def test_what_prepare_will_refuse_is_known_before(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    """By the served checkpoint alone, without a version."""
    folder = stored_quantized(tmp_path / "m", config)
    found = [*refusals(facts(**{"device": "cuda", **changes}), NEWEST, folder)]
    assert len(found) == bool(said)
    if said:
        assert re.search(said, found[0])


def test_a_plain_server_is_told_of_only_where_something_is_wrong(tmp_path: Path) -> None:
    """A server that quantizes by itself, and a checkpoint that the sidecar does not see."""
    folder = tiny_model.write(tmp_path / "m", 1)
    assert [*refusals(facts(), NEWEST, folder)] == []
    (reason,) = refusals(facts(device="cuda", quantization="fp8"), NEWEST, folder)
    assert "--quantization fp8" in reason
    (reason,) = refusals(facts(), NEWEST, tmp_path / "gone")
    assert "--model-path" in reason
