"""Progress of a device through its queued work, polled with a deadline."""

from __future__ import annotations

import time
from typing import Final

import torch

from ..processes import Deadline

_LOOK_S: Final = 0.0005


class DeviceFence:
    """A point behind all work that was queued on the current stream of `device` when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def reached(self) -> bool:
        """True when the device is done with it. Raises RuntimeError when the device has failed."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self, deadline: Deadline) -> None:
        """Block until `reached`. Raises `DeadlineExceeded`, and RuntimeError as `reached`."""
        while not self.reached():
            deadline.check("the device to finish what it was given")
            time.sleep(_LOOK_S)
