"""The identifiers that travel on the control plane, one name per idea.

They are `NewType`s over plain values so that a `Version` is never passed where an `Epoch` is meant; msgspec
encodes them as the value below. Bounds are declared once, here, and hold on every message that carries the field.
"""

from typing import Annotated, Final, NewType

import msgspec

AgentId = NewType("AgentId", str)
"""A trainer or engine agent, unique in a deployment and stable across its restarts."""

Channel = NewType("Channel", str)
"""One model being synchronized: its lease, its versions and its engines."""

Version = NewType("Version", int)
"""What the trainer calls a state of the weights. Grows with every commit of a channel; never goes back."""

Epoch = NewType("Epoch", int)
"""The fencing number of a channel. Every grant and every re-drive takes a new one; a lower one is refused."""

Incarnation = NewType("Incarnation", str)
"""One life of an agent process. A message of an earlier incarnation changes nothing."""

RequestId = NewType("RequestId", str)
"""The idempotency key of one request: the same key always gets the same answer."""

Digest = NewType("Digest", str)
"""Lower-case hexadecimal SHA-256 of a blob (a manifest, a digest table)."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""What an agent or a channel may be called: safe in file names, metric labels and log lines."""

MAX_VERSION: Final = 2**53
"""Whole numbers up to here are the same in every language that reads our JSON."""

AgentName = Annotated[AgentId, msgspec.Meta(pattern=NAME_PATTERN)]
ChannelName = Annotated[Channel, msgspec.Meta(pattern=NAME_PATTERN)]
JoinedChannel = Annotated[Channel, msgspec.Meta(min_length=1, max_length=64)]
"""The channel that its agent joined. Compared with that one, whose name was looked at: thousands of answers need not
pass through the pattern again."""
VersionNumber = Annotated[Version, msgspec.Meta(ge=0, le=MAX_VERSION)]
EpochNumber = Annotated[Epoch, msgspec.Meta(ge=0, le=2**53)]
IncarnationId = Annotated[Incarnation, msgspec.Meta(min_length=1, max_length=64)]
RequestKey = Annotated[RequestId, msgspec.Meta(min_length=1, max_length=96)]
BlobDigest = Annotated[Digest, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
TableDigest = Annotated[Digest, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""Of a version's digest table. Empty while the table is open: what it will be follows (messages.py)."""
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ParallelSize = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Of a server. A group of as many engines as there may be still counts its ranks in what can be sent."""
