"""What a group is made of, before there is one. No GPU."""

from __future__ import annotations

import pytest
import torch

from weightbus.dataplane.broadcast_group import backend_for
from weightbus.dataplane.errors import Unsupported


@pytest.mark.parametrize("found", [None, "1", ""])
def test_settings_with_which_nccl_would_hang_are_refused(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """SGLang's workers have 0, whatever they were started with; the first broadcast between both would never end."""
    if found is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    else:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", found)
    with pytest.raises(Unsupported, match="NCCL_CUMEM_ENABLE=0"):
        backend_for(torch.device("cuda"))
    assert backend_for(torch.device("cpu")) == "gloo"


def test_settings_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang sets it."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert backend_for(torch.device("cuda")) == "nccl"
