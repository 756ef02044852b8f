"""Enumerations and limits of the protocol: roles, transports, health of engines, refusal codes, outcomes."""

from __future__ import annotations

import enum
import re
from typing import Final, Self

PROTOCOL: Final = 3
"""Protocol number, raised when an older reader would misread a message. Sent in every header and in `Hello`."""

MAX_PAGE_BYTES: Final = 512 * 1024
"""Largest page of a blob. A manifest of 20,000 tensors takes a handful; a round of an unchanged layout none."""

MAX_PAGES: Final = 4096


class Role(enum.StrEnum):
    """Role of an agent."""

    __hash__ = str.__hash__  # that of enums is written in Python, and asked for with every message

    TRAINER = "trainer"
    """Takes leases, publishes versions, sends tensors."""
    ENGINE = "engine"
    """Sidecar of one SGLang server: loads versions into it and reports its state."""
    OBSERVER = "observer"
    """Reads status, changes nothing."""


_TRANSPORT_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


class TransportKind(enum.StrEnum):
    """Name of a transport: how the tensors of one engine travel in a round.

    The members are the built-in transports. Any other name that matches the pattern is a value too, equal to its
    string: a trainer and its engines may have a transport that the coordinator does not know.
    """

    __hash__ = str.__hash__  # that of enums is written in Python, and asked for with every message

    LOCAL = "local"
    """Same host: POSIX shared memory, or CUDA IPC where the weights are on a GPU."""
    DIRECT = "direct"
    """Same host: the engine's workers copy out of the trainer's own memory into their parameters, along a plan."""
    SENDS = "sends"
    """Any host: every rank of the trainer sends each worker of the engine its part of the weights: gloo or NCCL."""
    DISTRIBUTED = "distributed"
    """One collective group of the source rank and the engine's ranks: gloo or NCCL."""
    DISK = "disk"
    """A safetensors checkpoint on a file system that both see."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        """A member for a transport that is not built in. Not cached, so that no peer can fill memory with names."""
        if not isinstance(value, str) or _TRANSPORT_NAME.fullmatch(value) is None:
            return None
        other = str.__new__(cls, value)
        other._name_ = other._value_ = value
        return other


class PeerAccess(enum.StrEnum):
    """Access of one GPU to the memory of another, as reported by the driver."""

    NVLINK = "nvlink"
    """Direct reads over NVLink."""
    P2P = "p2p"
    """Direct reads over an unknown link."""
    NONE = "none"
    """No direct reads, though both GPUs are visible."""


class PauseMode(enum.StrEnum):
    """Treatment of running requests when an engine pauses (SGLang's own words)."""

    ABORT = "abort"
    """Requests end at once and return the tokens they have."""
    RETRACT = "retract"
    """Requests go back to the queue and are recomputed under the new weights."""
    IN_PLACE = "in_place"
    """Requests freeze, keep their KV cache, and go on under the new weights."""


class StragglerPolicy(enum.StrEnum):
    """Treatment of engines that are slower than others in a round (machine/round.py)."""

    WAIT_ALL = "wait-all"
    """The round waits for every engine, up to the deadline of each step."""
    QUORUM = "quorum"
    """Once `Policy.quorum` engines have finished a step, the others have `Policy.slow_s` left."""
    EVICT_AFTER = "evict-after"
    """An engine that takes longer than `Policy.slow_s` over a step is left out."""


class EngineHealth(enum.StrEnum):
    """State of the weights in an engine's server, as its agent reports it."""

    CLEAN = "clean"
    """All weights are of one committed version, or of the server's launch."""
    PENDING = "pending"
    """Complete weights of no committed version: verified but not committed, or unknown after a relaunch."""
    DIRTY = "dirty"
    """Some weights may be new and some old. Paused, and must not serve before a complete verified load."""


class RefusalCode(enum.StrEnum):
    """Reason for a refusal, with the caller's remedy."""

    STALE_EPOCH = "stale_epoch"
    """A later epoch was granted in the channel. Acquire again."""
    LEASE_HELD = "lease_held"
    """Another trainer holds the channel. Retry after `retry_after_s`."""
    VERSION_NOT_NEWER = "version_not_newer"
    """The version is not above the committed one. Publish a higher version."""
    UNKNOWN_BLOB = "unknown_blob"
    """Put the blob, then ask again."""
    BAD_BLOB = "bad_blob"
    """The pages do not hash to the digest they were sent under."""
    NOT_ALLOWED = "not_allowed"
    """The role, or the state of the round, does not allow this message."""
    UNKNOWN_AGENT = "unknown_agent"
    """Say `Hello` first; the coordinator does not know this connection."""
    NAME_TAKEN = "name_taken"
    """Another live incarnation uses this agent's name."""
    SERVER_TAKEN = "server_taken"
    """Another live engine agent serves this URL. One server, one agent: end one of them."""
    PROTOCOL_MISMATCH = "protocol_mismatch"
    """The two sides speak different protocol numbers. Upgrade the older one."""
    READ_ONLY = "read_only"
    """The journal cannot be written (disk full?). Nothing is granted until it can."""
    SHUTTING_DOWN = "shutting_down"
    """The coordinator is stopping. Retry after `retry_after_s`."""
    NOT_LEADER = "not_leader"
    """This coordinator stands by. `Refused.leader` is the endpoint of the leader, if known."""


class Step(enum.StrEnum):
    """The step of a round at which an engine failed."""

    PREPARE = "prepare"
    PAUSE = "pause"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"
    RESUME = "resume"


class Outcome(enum.StrEnum):
    """Result of a round, for the round and for each engine in it."""

    COMMITTED = "committed"
    """The version is durable; the engine serves it, verified."""
    ABORTED = "aborted"
    """Nothing changed: old weights, old version, serving."""
    QUARANTINED = "quarantined"
    """The engine does not serve until it has been loaded completely and verified."""
    LOST = "lost"
    """The engine stopped answering; it is out of the ready list."""
