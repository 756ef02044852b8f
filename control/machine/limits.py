"""Deadlines of the coordinator, in seconds, and its bounds. PROTOCOL.md says what each one promises."""

from __future__ import annotations

from typing import Final

import msgspec

WATCHDOG_S: Final = 8.0
"""Silence after which a watchdog takes the place of a sidecar or a source in a `distributed` group.

The watchdogs (engine_agent/engines/sglang/group_watchdog.py, dataplane/transports/distributed/source_watchdog.py) use
it, and the coordinator's deadlines allow for it.
"""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The deadlines and bounds of one coordinator."""

    heartbeat_s: float = 1.0
    """How often agents say that they are alive."""
    silence_s: float = 10.0
    """An agent not heard of for so long is lost."""
    takeover_s: float = 3.0
    """A name not heard of for so long may be taken by a newer incarnation."""
    reconnect_s: float = 3.0
    """An engine whose connection is gone is lost after so long, unless it is back by then."""
    lease_s: float = 10.0
    """A trainer silent for so long loses its lease; a paused clean engine that hears nothing for so long resumes."""
    publish_s: float = 1800.0
    """A lease under which nothing is published for so long is taken back."""
    retry_s: float = 1.0
    """A command without an answer is sent again after so long, then after twice as long, and so on..."""
    retry_max_s: float = 8.0
    """... up to this."""
    grace_s: float = 5.0
    """Extra wait beyond an agent's own deadline: the agent's own report says more than a timeout."""
    prepare_s: float = 60.0
    pause_s: float = 60.0
    offer_s: float = 60.0
    verify_s: float = 300.0
    commit_s: float = 30.0
    """Longest wait of a commit for a journal that refuses writes."""
    resume_s: float = 120.0
    abort_s: float = 60.0
    straggle_s: float = 10.0
    """Longest wait for the last engines to resume once others serve the version, while the trainer waits."""
    probe_s: float = 2.0
    """Time between tries of a journal that refused a record."""
    answers: int = 4096
    """Replies remembered by request key."""
    blob_bytes: int = 512 * 1024 * 1024
    """Memory for manifests and digest tables."""
    forget_s: float = 3600.0
    """How long a lost engine stays in the status document."""
    max_channels: int = 64
    max_agents: int = 2560
    """2,048 engines and other agents. `Granted` and `RoundDone` name every engine, in one frame."""


def earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two times."""
    if one is None or (other is not None and other < one):
        return other
    return one
