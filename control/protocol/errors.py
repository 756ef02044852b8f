"""Errors of the control side, by origin and by the caller's remedy.

    WeightbusError
        ConfigurationError          a setting to be fixed before the start: the message says which and how
            PeerKeyError            keys that cannot authenticate (missing, mismatched or readable by others)
        ProtocolError               a fault of the peer: its message is refused, nothing changed
            WrongProtocol           another protocol number: upgrade the older side
            Oversize                a frame above its limit
            UnknownMessage          a message type unknown to this side, or not of this direction
            Malformed               not a message at all, or one with values out of bounds
            BlobMismatch            pages that do not hash to the digest under which they were requested
        RequestRefused              the coordinator refused: `code` says what can be done
            NotTrusted              ... because it does not trust this agent's key: names the command that mends it
        CoordinatorUnreachable      no answer in time: names the endpoint, the time waited and what to check
        CoordinatorOnStandby        this coordinator does not lead, and has no channels to show
        NoTrainer                   a plan was requested, and no trainer has joined yet
        ClientClosed                the client was closed, or its thread died: make a new one
        BlobCancelled               the caller cancelled its request for a blob
        JournalError                the journal cannot be read or written
            JournalUnwritable       a write failed (disk full?): read-only until one succeeds
            VersionNotNewer         a shared store holds a version that its writer did not know of
            JournalCorrupt          the file's content cannot be trusted: the coordinator does not start
        InvariantBroken             a bug in weightbus: carries the machine's recent events
            IllegalMove             an event that this state does not know; the machine did not change

Errors carry their fields; messages say what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .messages import RefusalCode


class WeightbusError(Exception):
    """Root of the control side's errors."""


class ConfigurationError(WeightbusError):
    """The configuration cannot work. Nothing was started."""


class PeerKeyError(ConfigurationError):
    """A CURVE key file that cannot be used."""

    def __init__(self, path: Path, problem: str, advice: str) -> None:
        self.path, self.problem, self.advice = path, problem, advice
        super().__init__(f"key file {path}: {problem}; {advice}")


# -- faults of the peer ----------------------------------------------------------------------------------------------


class ProtocolError(WeightbusError):
    """The peer sent bytes that are not a message of this protocol."""


class WrongProtocol(ProtocolError):
    """The two sides speak different protocol numbers."""

    def __init__(self, found: int, expected: int) -> None:
        self.found, self.expected = found, expected
        older = "the peer" if found < expected else "this side"
        super().__init__(f"peer speaks protocol {found}, this side {expected}: upgrade {older}")


class Oversize(ProtocolError):
    """A frame above its limit."""

    def __init__(self, frame: str, found_bytes: int, limit_bytes: int) -> None:
        self.frame, self.found_bytes, self.limit_bytes = frame, found_bytes, limit_bytes
        super().__init__(f"{frame} frame of {found_bytes} bytes, at most {limit_bytes} are allowed")


class UnknownMessage(ProtocolError):
    """A message type that this side does not take."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        super().__init__(f"message type {tag!r} is not known here, or does not travel in this direction")


class Malformed(ProtocolError):
    """Not a message: wrong frames, wrong encoding, an unknown field, or a value out of bounds."""


class BlobMismatch(ProtocolError):
    """The pages of a blob do not add up to its digest."""

    def __init__(self, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(f"pages of blob {expected} hash to {found}: they changed on the way; ask again")


# -- refusals, or no answer ------------------------------------------------------------------------------------------


class RequestRefused(WeightbusError):
    """The coordinator refused a request, which changed nothing."""

    def __init__(self, code: RefusalCode, reason: str, retry_after_s: float = 0.0) -> None:
        self.code, self.reason, self.retry_after_s = code, reason, retry_after_s
        again = f" (retry after {retry_after_s:g} s)" if retry_after_s else ""
        super().__init__(f"refused ({code.value}): {reason}{again}")


class NotTrusted(RequestRefused):
    """The coordinator does not trust this agent's key, or not any more, in this role and channel."""

    def __init__(self, reason: str, advice: str) -> None:
        self.advice = advice
        super().__init__(RefusalCode.NOT_ALLOWED, f"{reason}; {advice}")


_BUS_ADVICE: Final = (
    "Check that `weightbus coordinator` runs there, that host and port are its own, that no firewall stands between,"
    " and, where keys are used, that this agent's public key is among the coordinator's"
)


class CoordinatorUnreachable(WeightbusError):
    """No useful answer came in time."""

    def __init__(self, endpoint: str, tried_s: float, waiting_for: str, found: str, advice: str = _BUS_ADVICE) -> None:
        self.endpoint, self.tried_s, self.waiting_for, self.found = endpoint, tried_s, waiting_for, found
        super().__init__(
            f"coordinator at {endpoint}: no answer to {waiting_for} in {tried_s:.1f} s ({found}). {advice}"
        )


class CoordinatorOnStandby(WeightbusError):
    """This coordinator stands by and has no channels: another one leads."""

    def __init__(self, leader: str, endpoint: str) -> None:
        situation = (
            f"{leader!r} leads, with agents at {endpoint}: name its HTTP port with --url"
            if leader
            else "no coordinator leads yet"
        )
        super().__init__(f"this coordinator stands by; {situation}")


class NoTrainer(WeightbusError):
    """No trainer has described yet what it sends, and from where."""

    def __init__(self) -> None:
        super().__init__(
            "no trainer has joined or published yet, so there is nothing to plan for: start one (TrainerAgent.connect,"
            " or `weightbus trainer-agent`), or describe a fleet and give it with --file"
        )


class ClientClosed(WeightbusError):
    """This client serves no more requests."""


class BlobCancelled(WeightbusError):
    """The caller cancelled its request for a blob before all pages had arrived."""

    def __init__(self, digest: str, pages: int) -> None:
        self.digest, self.pages = digest, pages
        super().__init__(f"blob {digest[:12]} was called off after {pages} of its pages")


# -- the journal -----------------------------------------------------------------------------------------------------


class JournalError(WeightbusError):
    """The journal cannot be used."""

    def __init__(self, path: Path | str, problem: str, advice: str) -> None:
        self.path, self.problem, self.advice = str(path), problem, advice
        super().__init__(f"journal {path}: {problem}; {advice}")


class JournalUnwritable(JournalError):
    """A write failed. Durable records stay readable; nothing new may be promised."""


class VersionNotNewer(JournalError):
    """The store holds a version that its writer did not know of, and took none that is not newer."""


class JournalCorrupt(JournalError):
    """The content of the file is not what was written to it."""


# -- bugs in weightbus -----------------------------------------------------------------------------------------------


class InvariantBroken(WeightbusError):
    """An invariant of the code does not hold."""

    def __init__(self, what: str, trace: Sequence[object] = ()) -> None:
        """`trace`: recent events, rendered only here because most are never read."""
        self.what = what
        self.trace = tuple(map(str, trace))
        super().__init__("\n  ".join([what, *(("recently:",) if trace else ()), *self.trace]))


class IllegalMove(InvariantBroken):
    """An event that the machine's state does not allow. The machine did not change."""

    def __init__(self, machine: str, state: str, event: str, trace: Sequence[object] = ()) -> None:
        self.machine, self.state, self.event = machine, state, event
        super().__init__(f"{machine} in state {state} does not take {event}", trace)
