"""Which machine this is, so that two agents can tell whether they share memory."""

import uuid
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """The kernel's boot id: equal in all processes and containers of one running kernel, new after a reboot."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not a Linux kernel: the network card's address has to do
        return f"node-{uuid.getnode():012x}"
