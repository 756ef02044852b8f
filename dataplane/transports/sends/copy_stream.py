"""What both kinds of groups share on a GPU: a stream of their own for copies, beside what the process computes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch


class OwnStream:
    """The stream of one device; on a CPU there is none, and everything happens where it is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def lane(self) -> Generator[None, None, None]:
        """Where copies into and out of messages are launched: in front of what is posted next."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """Wait for what was launched in the lane."""
        if self._stream is not None:
            self._stream.synchronize()
