"""What is answered, and counted, of what came in and is no message, whoever leads."""

from __future__ import annotations

from typing import Final

from ..machine import Refusal
from ..protocol import RefusalCode, Refused, RequestId, WrongProtocol
from .interface import Rejected, Throttled, TurnedAway

REJECTED_KEY: Final = RequestId("rejected")
"""Stands in the `Refused` that answers what is no message."""


def answer_to(item: Rejected) -> Refused:
    """Tells whoever sent it what was found."""
    return Refused(request=REJECTED_KEY, code=_code(item), reason=str(item.error))


def refusal_of(item: Rejected | Throttled | TurnedAway) -> Refusal:
    """For logs and metrics."""
    match item:
        case Rejected():
            agent = item.principal.name if item.principal else "?"
            return Refusal(agent=agent, message="?", code=_code(item), reason=str(item.error))
        case Throttled():
            return Refusal(agent=item.agent, message="?", code=RefusalCode.NOT_ALLOWED, reason=item.reason)
        case TurnedAway():
            return Refusal(agent="?", message="?", code=RefusalCode.NOT_ALLOWED, reason=item.reason)


def _code(item: Rejected) -> RefusalCode:
    return RefusalCode.PROTOCOL_MISMATCH if isinstance(item.error, WrongProtocol) else RefusalCode.NOT_ALLOWED
