"""Errors of the data plane, by what a caller can do about them.

    DataplaneError
        ManifestError            a layout that cannot travel: the publisher must change it
            CoverageError        shards that do not make up a tensor exactly once: names it
        TransferFailed           bytes did not arrive: retryable under a new epoch
            StaleSession         the peer is in another epoch
            ForgedMessage        a message without the session's token
            PeerLost             the peer died or stopped answering
            WorkerDied           a process of the server has ended: the server ends too, and answers no call meanwhile
            DeadlineExceeded     the wait ran out
                ChunkTimeout     a chunk's messages did not move in time: smaller chunks may do
            OutOfStagingMemory   a member had no memory for its staging: smaller chunks may do
            DigestMismatch       the bytes that arrived are not those that were sent: names tensor and digests
        NotExportable            this memory cannot be shared with another process: use staging
        OutOfSharedMemory        the host has no room for a staging buffer: says how much is asked and free
        Unsupported              the transport cannot serve this engine: says which can
            NotTraceable         the engine's parameters cannot be written directly, in this launch of its server
        CopyEnginesUnavailable   a GPU's copy engines cannot be used: a kernel copies instead

Errors carry their fields; messages say what was found, what was expected and what to do.
"""


class DataplaneError(Exception):
    """Root of the data plane's errors."""


class ManifestError(DataplaneError):
    """A layout or digest table that cannot travel, or is not one."""


class CoverageError(ManifestError):
    """The shards of a tensor leave a part of it out, or hold a part twice."""

    def __init__(self, tensor: str, detail: str) -> None:
        self.tensor = tensor
        super().__init__(f"{tensor!r}: {detail}")


class TransferFailed(DataplaneError):
    """Bytes did not arrive. Everything may be sent again under a new epoch."""


class StaleSession(TransferFailed):
    """The peer is in another epoch than this session, or makes another round's weights."""

    def __init__(self, found: int, expected: int, what: str = "epoch") -> None:
        self.found = found
        self.expected = expected
        super().__init__(f"the peer speaks of {what} {found}, this session is of {what} {expected}")


class ForgedMessage(TransferFailed):
    """A message came from a peer that does not know the session's token."""

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(
            f"what stands under {where!r} was not written by a party of this session: a stranger reaches the transfer's"
            " port; bind it to a private network (host) and close it to others"
        )


class PeerLost(TransferFailed):
    """The peer died, or closed the session before its end."""


class WorkerDied(TransferFailed):
    """The process of a worker has ended. Its server ends too, and for seconds answers no call."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"worker {rank} of the server has died")


class DeadlineExceeded(TransferFailed):
    """A wait took longer than its deadline."""

    def __init__(self, waiting_for: str, seconds: float) -> None:
        self.waiting_for = waiting_for
        self.seconds = seconds
        super().__init__(f"waited {seconds:.1f} s for {waiting_for}")


class ChunkTimeout(DeadlineExceeded):
    """A chunk's messages did not move in time. Where no member has stalled, smaller chunks may do."""


class OutOfStagingMemory(TransferFailed):
    """A member of a transfer had no memory for packing or receiving. Smaller chunks may do."""


class DigestMismatch(TransferFailed):
    """The bytes that arrived do not have the digest of the manifest's table."""

    def __init__(self, tensor: str, found: str, expected: str) -> None:
        self.tensor = tensor
        self.found = found
        self.expected = expected
        super().__init__(f"tensor {tensor!r} arrived with digest {found}, its digest table says {expected}")


class NotExportable(DataplaneError):
    """This memory cannot be opened by another process."""


class OutOfSharedMemory(DataplaneError):
    """The host has no room for a staging buffer."""

    def __init__(self, asked: int, free: int) -> None:
        self.asked = asked
        self.free = free
        super().__init__(
            f"a staging buffer needs {asked} bytes of /dev/shm, {free} are free: enlarge it (docker: --shm-size), "
            "publish with smaller buckets, or choose the disk transport"
        )


class Unsupported(DataplaneError):
    """The transport cannot serve this engine; the message says which one can."""


class NotTraceable(Unsupported):
    """An engine's loader cannot be traced, or its parameters not verified. Transports of whole buckets can serve it."""


class CopyEnginesUnavailable(DataplaneError):
    """The copy engines of a GPU cannot be used; the kernel copies their rows."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"{detail}: a kernel copies instead, slower where two GPUs read from each other."
            " WEIGHTBUS_WORKER_BRANCHES=0 in the server's environment asks for the kernel at once"
        )
