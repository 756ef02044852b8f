"""Which acknowledgements are owed, when they are said, and which need not be said at all. Pure.

A command to an engine acknowledges what the engine answered to those before it: nobody sends the next step before the
answer to the last one was taken. Where a command follows soon, as it does in every round, its engine is told one
message and not two. Both ends go by `acknowledges`; who repeats its answer all the same gets its `Ack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ..machine import Peer
from ..protocol import Ack, Commit, Message, Pause, Paused, Prepared, Request, Serving, Transfer, Transferred, Verified

_COVERED: Final[Mapping[type[Message], frozenset[type[Message]]]] = {
    Pause: frozenset({Prepared}),
    Transfer: frozenset({Prepared}),
    Commit: frozenset({Prepared, Paused, Transferred, Verified}),
}
"""By command: the answers, of its epoch or before, without which it would not have been given."""
_FOLLOWED: Final = frozenset({Prepared, Verified, Serving})
"""After these an engine has nothing to say before it is told the next step, so their `Ack` may wait for that.

It says one thing after the other: while the `Ack` of a `Transferred` waited, so would the `Verified` behind it.
"""

PROMPT_S: Final = 0.05
"""How long an `Ack` may wait while messages come in; its agent repeats itself after ten times as long."""
HOLD_S: Final = 0.2
"""How long one may wait for the command that says the same."""


def acknowledges(command: Message, answer: Message) -> bool:
    """Whether who is told `command` knows by it that its `answer` has arrived, or does not matter any more."""
    if type(answer) not in _COVERED.get(type(command), ()):
        return False
    answered, told = getattr(answer, "epoch", 0), getattr(command, "epoch", 0)
    return bool(answered <= told)


class AckBatcher:
    """What is owed to whom. Those of one connection leave in the order in which they became due."""

    def __init__(self) -> None:
        self._prompt: dict[Peer, list[Request]] = {}
        self._prompt_until = 0.0
        self._held: dict[Peer, Request] = {}
        """At most one: its agent says nothing more before it has this one, or the next command."""
        self._held_until = 0.0

    def __bool__(self) -> bool:
        return bool(self._prompt or self._held)

    def owe(self, owed: Iterable[tuple[Peer, Request]], now: float) -> None:
        """Each is to be told that what it said was taken."""
        prompt, held = self._prompt, self._held
        for peer, answer in owed:
            if type(answer) in _FOLLOWED and peer not in held:
                if not held:
                    self._held_until = now + HOLD_S
                held[peer] = answer
            else:
                if not prompt:
                    self._prompt_until = now + PROMPT_S
                prompt.setdefault(peer, []).append(answer)

    @property
    def pressing(self) -> bool:
        """Whether some are to be said as soon as nothing is left to be read."""
        return bool(self._prompt)

    def before(self, peers: Sequence[Peer], message: Message) -> list[tuple[Peer, Ack]]:
        """Those that `peers` are to be told before `message`; what `message` acknowledges itself is forgotten."""
        first: list[tuple[Peer, Ack]] = []
        prompt, held = self._prompt, self._held
        covered, told = _COVERED.get(type(message), frozenset[type[Message]]()), getattr(message, "epoch", 0)
        for peer in peers:
            if prompt and (answers := prompt.pop(peer, None)):
                left = [each for each in answers if type(each) not in covered or getattr(each, "epoch", 0) > told]
                first += [(peer, _ack(answer)) for answer in left]
            if answer := held.get(peer):
                if type(answer) in covered and getattr(answer, "epoch", 0) <= told:  # as `acknowledges`, for thousands
                    del held[peer]
                elif isinstance(answer, Serving):  # what comes now begins something else, and waits for this one
                    del held[peer]
                    first.append((peer, _ack(answer)))
        return first

    def due(self, now: float, *, quiet: bool) -> Iterator[tuple[Peer, Ack]]:
        """Those that are to be said now. `quiet`: nothing is there to be read."""
        if self._prompt and (quiet or now >= self._prompt_until):
            prompt, self._prompt = self._prompt, {}
            yield from ((peer, _ack(answer)) for peer, answers in prompt.items() for answer in answers)
        if self._held and now >= self._held_until:
            held, self._held = self._held, {}
            yield from ((peer, _ack(answer)) for peer, answer in held.items())

    def next_deadline(self) -> float | None:
        """When some are due though nothing happens."""
        return self._held_until if self._held else None


def _ack(answer: Request) -> Ack:
    return Ack(request=answer.request)
