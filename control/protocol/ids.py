"""Identifiers of the control plane, and the bounds of their values.

They are `NewType`s so that a `Version` is never passed where an `Epoch` is meant; msgspec encodes the value below.
Bounds are declared once, here, and hold for every message that carries the field.
"""

from typing import Annotated, Final, NewType

import msgspec

AgentId = NewType("AgentId", str)
"""Name of a trainer or engine agent, unique in a deployment and stable across restarts."""

Channel = NewType("Channel", str)
"""Name of one synchronized model, with its own lease, versions and engines."""

Version = NewType("Version", int)
"""The trainer's number of a state of the weights. Grows with every commit of a channel, except for a rollback."""

Epoch = NewType("Epoch", int)
"""Fencing token of a channel. Every grant and every retry takes a new one; receivers refuse a lower one."""

Incarnation = NewType("Incarnation", str)
"""Process generation of an agent. A message of an earlier one changes nothing."""

RequestId = NewType("RequestId", str)
"""Idempotency key of a request: the same key always gets the same answer."""

Digest = NewType("Digest", str)
"""Lower-case hexadecimal SHA-256 of a blob (a manifest, a digest table)."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Names of agents and channels: safe in file names, metric labels and log lines."""

MAX_VERSION: Final = 2**53
"""Integers up to here are exact in every language that reads the JSON documents."""

AgentName = Annotated[AgentId, msgspec.Meta(pattern=NAME_PATTERN)]
ChannelName = Annotated[Channel, msgspec.Meta(pattern=NAME_PATTERN)]
JoinedChannel = Annotated[Channel, msgspec.Meta(min_length=1, max_length=64)]
"""Channel of an engine's answer. Compared with the channel that the agent joined, whose name matched the pattern, so
that thousands of answers need not pass through the pattern again."""
VersionNumber = Annotated[Version, msgspec.Meta(ge=0, le=MAX_VERSION)]
EpochNumber = Annotated[Epoch, msgspec.Meta(ge=0, le=2**53)]
IncarnationId = Annotated[Incarnation, msgspec.Meta(min_length=1, max_length=64)]
RequestKey = Annotated[RequestId, msgspec.Meta(min_length=1, max_length=96)]
BlobDigest = Annotated[Digest, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
TableDigest = Annotated[Digest, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""Digest of a version's digest table. Empty while the digests are deferred (PROTOCOL.md)."""
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ParallelSize = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Parallel size of a server, bounded so that the rank numbers of a group of all engines fit into a message."""
