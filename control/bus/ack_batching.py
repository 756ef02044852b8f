"""Acknowledgements: which are due, when they are sent, and which need not be sent at all. Pure.

A command to an engine acknowledges the engine's earlier answers, because the coordinator sends the next step only after
it has taken the answer to the last one. Where a command follows soon, as in every round, the engine gets one message
instead of two. Both ends decide by `acknowledges`; an engine that repeats its answer all the same gets an `Ack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ..machine import Peer
from ..protocol import Ack, Commit, Message, Pause, Paused, Prepared, Request, Serving, Transfer, Transferred, Verified

_IMPLIED_BY: Final[Mapping[type[Message], frozenset[type[Message]]]] = {
    Pause: frozenset({Prepared}),
    Transfer: frozenset({Prepared}),
    Commit: frozenset({Prepared, Paused, Transferred, Verified}),
}
"""The answers, of the same epoch or an earlier one, that each command acknowledges."""
_COMMAND_FOLLOWS: Final = frozenset({Prepared, Verified, Serving})
"""Answers after which an engine waits for its next command, so their `Ack` may wait for that command.

An engine sends one answer after the other: if the `Ack` of a `Transferred` waited, the `Verified` behind it would too.
"""

PROMPT_S: Final = 0.05
"""Longest wait of an `Ack` while messages arrive; an agent repeats its answer after ten times as long."""
HOLD_S: Final = 0.2
"""Longest wait of an `Ack` for a command that acknowledges the same answer."""


def acknowledges(command: Message, answer: Message) -> bool:
    """Whether `command` tells its engine that `answer` has arrived, or does not matter any more."""
    if type(answer) not in _IMPLIED_BY.get(type(command), ()):
        return False
    answered, told = getattr(answer, "epoch", 0), getattr(command, "epoch", 0)
    return bool(answered <= told)


class AckBatcher:
    """The acknowledgements that are due. Those of one connection are sent in the order of its requests."""

    def __init__(self) -> None:
        self._prompt: dict[Peer, list[Request]] = {}
        self._prompt_until = 0.0
        self._held: dict[Peer, Request] = {}
        """At most one request per connection, held for `HOLD_S`: its agent waits for a reply before its next one."""
        self._held_until = 0.0

    def __bool__(self) -> bool:
        return bool(self._prompt or self._held)

    def add(self, requests: Iterable[tuple[Peer, Request]], now: float) -> None:
        """Add requests to be acknowledged, each with its connection."""
        prompt, held = self._prompt, self._held
        for peer, answer in requests:
            if type(answer) in _COMMAND_FOLLOWS and peer not in held:
                if not held:
                    self._held_until = now + HOLD_S
                held[peer] = answer
            else:
                if not prompt:
                    self._prompt_until = now + PROMPT_S
                prompt.setdefault(peer, []).append(answer)

    @property
    def urgent(self) -> bool:
        """True if acknowledgements are due as soon as no message is left to be read."""
        return bool(self._prompt)

    def take_before(self, peers: Sequence[Peer], message: Message) -> list[tuple[Peer, Ack]]:
        """The acknowledgements to send to `peers` before `message`; those that it implies are dropped."""
        first: list[tuple[Peer, Ack]] = []
        prompt, held = self._prompt, self._held
        covered, told = _IMPLIED_BY.get(type(message), frozenset[type[Message]]()), getattr(message, "epoch", 0)
        for peer in peers:
            if prompt and (answers := prompt.pop(peer, None)):
                left = [each for each in answers if type(each) not in covered or getattr(each, "epoch", 0) > told]
                first += [(peer, _ack(answer)) for answer in left]
            if answer := held.get(peer):
                if type(answer) in covered and getattr(answer, "epoch", 0) <= told:  # as `acknowledges`, for thousands
                    del held[peer]
                elif isinstance(
                    answer, Serving
                ):  # the message begins another round, and comes after the acknowledgement
                    del held[peer]
                    first.append((peer, _ack(answer)))
        return first

    def take_due(self, now: float, *, quiet: bool) -> Iterator[tuple[Peer, Ack]]:
        """The acknowledgements to send now. `quiet`: no message is left to be read."""
        if self._prompt and (quiet or now >= self._prompt_until):
            prompt, self._prompt = self._prompt, {}
            yield from ((peer, _ack(answer)) for peer, answers in prompt.items() for answer in answers)
        if self._held and now >= self._held_until:
            held, self._held = self._held, {}
            yield from ((peer, _ack(answer)) for peer, answer in held.items())

    def next_deadline(self) -> float | None:
        """The time at which held acknowledgements are due."""
        return self._held_until if self._held else None


def _ack(answer: Request) -> Ack:
    return Ack(request=answer.request)
