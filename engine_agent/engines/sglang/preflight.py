"""Objections to a server that are known when its sidecar joins: the first round would be late to report them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...errors import UnfitManifest
from .. import checkpoint_spec
from ..checkpoint_spec import Expected
from .api_versions import Dialect
from .quantized_reload import objections
from .server_identity import ServerFacts

_CPU: Final = Path("/proc/cpuinfo")


def refusals(facts: ServerFacts, dialect: Dialect, checkpoint: Path) -> Iterator[str]:
    """Why `Prepare` will refuse every version, as far as the files in `checkpoint` tell."""
    try:
        expected = checkpoint_spec.expected(checkpoint)
    except (UnfitManifest, OSError, ValueError) as error:
        yield str(error)
        return
    yield from objections(expected.quantization, expected.shapes, facts, dialect)


def prerecording_objection(facts: ServerFacts, dialect: Dialect, expected: Expected) -> str:
    """Why this server's loader must not be called outside of a round; empty when it may be."""
    plain = not facts.quantization and expected.quantization is None and checkpoint_spec.dense(facts.architectures)
    packed = facts.device == "cpu" and "amx_tile" in _CPU.read_text(encoding="utf-8")
    if dialect.sessions and (packed or not plain):
        return (
            f"SGLang {facts.version} lays weights out anew after a loader was called, as if all had been loaded: those"
            " that were not would be laid out twice"
        )
    return ""
