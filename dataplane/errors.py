"""What can go wrong with tensors, by what the caller can do about it.

    DataplaneError
        ManifestError            a layout that cannot travel: the publisher must change it
            CoverageError        pieces that do not make up a tensor exactly once: names it
        TransferFailed           bytes did not arrive: retryable under a new epoch
            StaleSession         the other side speaks of another epoch
            Forged               somebody without the session's token spoke in it
            PeerLost             the other side died or stopped answering
            WorkerDied           a process of the server has ended: all of it ends, and answers nothing meanwhile
            DeadlineExceeded     the wait ran out
                TurnLate         a turn's messages did not move in its time: less at a time may do
            NoRoom               a member had no memory for what it moves: less at a time may do
            DigestMismatch       what arrived is not what was sent: names the tensor and both digests
        NotExportable            this memory cannot be shared with another process: use staging
        OutOfSharedMemory        the host has no room for a staging buffer: says how much is asked and free
        Unsupported              the transport cannot serve this engine: says which can
            NotRecordable        nothing can be copied straight into its parameters, in this launch of its server
        NoCopyEngines            a GPU's copy engines cannot be used: a kernel copies instead

Errors carry their fields; messages say what was found, what was expected and what to do.
"""


class DataplaneError(Exception):
    """Root of the data plane's errors."""


class ManifestError(DataplaneError):
    """A layout or digest table that cannot travel, or is not one."""


class CoverageError(ManifestError):
    """The pieces of a tensor leave a part of it out, or hold a part twice."""

    def __init__(self, tensor: str, detail: str) -> None:
        self.tensor = tensor
        super().__init__(f"{tensor!r}: {detail}")


class TransferFailed(DataplaneError):
    """Bytes did not arrive. Everything may be sent again under a new epoch."""


class StaleSession(TransferFailed):
    """The other side speaks of another epoch than this session's, or makes another round's weights."""

    def __init__(self, found: int, expected: int, what: str = "epoch") -> None:
        self.found = found
        self.expected = expected
        super().__init__(f"the peer speaks of {what} {found}, this session is of {what} {expected}")


class ForgedMessage(TransferFailed):
    """Somebody who does not know the session's token spoke in it."""

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(
            f"what stands under {where!r} was not written by a party of this session: a stranger reaches the transfer's"
            " port; bind it to a private network (host) and close it to others"
        )


class PeerLost(TransferFailed):
    """The other side died or closed the session before the end."""


class WorkerDied(TransferFailed):
    """The process of a worker has ended. Its server ends too, and takes seconds in which no call is answered."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"worker {rank} of the server has died")


class DeadlineExceeded(TransferFailed):
    """A wait ran out."""

    def __init__(self, waiting_for: str, seconds: float) -> None:
        self.waiting_for = waiting_for
        self.seconds = seconds
        super().__init__(f"waited {seconds:.1f} s for {waiting_for}")


class ChunkTimeout(DeadlineExceeded):
    """A turn's messages did not move in its time. Where nobody stands still, less at a time may do."""


class OutOfStagingMemory(TransferFailed):
    """A member of a transfer had no memory for what it packs or receives. Less at a time may do."""


class DigestMismatch(TransferFailed):
    """What arrived is not what the manifest's digest table says."""

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
    """An engine's loader cannot be followed, or what it keeps not be proven. Whole buckets can serve it."""


class CopyEnginesUnavailable(DataplaneError):
    """The copy engines of a GPU cannot be used; the kernel copies what they would have."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"{detail}: a kernel copies instead, slower where two GPUs read from each other."
            " WEIGHTBUS_WORKER_BRANCHES=0 in the server's environment asks for the kernel at once"
        )
