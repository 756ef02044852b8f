"""Brings what a channel wants out: to the connections of its agents, to the pen, and to whoever listens. Pure."""

from __future__ import annotations

from .channel import Channel
from .effects import Committed, EpochRaised, EpochTaken, ReadinessChanged, RoundClosed, RoundReadiness
from .errors import InvariantBroken
from .membership import Membership
from .outbox import Outbox
from .outgoing import Out, Tell
from .pen import Pen
from .tenure import Answer, Denial


class Relay:
    """Knows on which connections agents are; channels know their names only."""

    def __init__(self, members: Membership, out: Outbox, pen: Pen) -> None:
        self._members, self._out, self._pen = members, out, pen

    def flush(self, channel: Channel, now: float) -> None:
        """Everything that `channel` wants sent, noted and written now, in its order."""
        for out in channel.flush(now):
            if isinstance(out, Tell):
                self._out.tell(self._members.peers(out.agents), out.message)
            else:
                self._put(channel, out)

    def _put(self, channel: Channel, out: Out) -> None:
        match out:
            case ReadinessChanged() | RoundReadiness():
                self._out.observe(out)
            case Answer():
                self._out.replies.remember(out.agent, out.question, out.message)
                self._out.tell(self._members.peers((out.agent,)), out.message)
            case Denial():
                for peer in self._members.peers((out.agent.name,)):
                    self._out.refuse(peer, out.agent.name, out.message, out.verdict)
            case Tell():
                raise InvariantBroken("what agents are told was sent already")
            case EpochTaken() | EpochRaised() | Committed() | RoundClosed():
                self._pen.write(out, channel.name)
            case _:
                channel.story.append(out)
                self._out.observe(out)
