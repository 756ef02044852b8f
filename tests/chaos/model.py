"""The policy of the campaign: a version's weights follow from its number, so who sees a token can name its maker."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.kit import tiny_model  # noqa: E402
from tests.kit.fake_weights import FakeWeights  # noqa: E402

LAUNCH = 0
"""The version that a server holds when it was just launched: those of its checkpoint."""


def write_checkpoint(folder: Path) -> Path:
    """The checkpoint that servers are launched with."""
    return tiny_model.write(folder, LAUNCH, layers=2)


def weights(checkpoint: Path, version: int) -> dict[str, torch.Tensor]:
    """What `version` consists of."""
    return tiny_model.tensors(json.loads((checkpoint / "config.json").read_text()), version)


@functools.lru_cache(maxsize=4096)
def digest(checkpoint: Path, version: int) -> bytes:
    """What a light server's tokens are made of under `version`."""
    whole = FakeWeights(checkpoint, 1)
    whole.load(list(weights(checkpoint, version).items()))
    return whole.digest()


def token(made_of: bytes, prompt: list[int], before: list[int]) -> int:
    """The token that a light server with these weights says next (tests/kit/fake_sglang.py)."""
    seen = json.dumps([prompt, before]).encode()
    return int.from_bytes(hashlib.sha256(made_of + seen).digest()[:4], "big") % 512
