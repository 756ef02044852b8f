"""How far behind the committed version an engine may be and still get requests. Pure.

Without a policy only the committed version is served. With `Policy.max_lag` an engine that a round left behind goes on
with what it has, until that is further behind than the trainer allowed; then it gets no requests before a round took it
in again. What is told apart are digest tables, not numbers: after a rollback a number may stand for other weights.
"""

from __future__ import annotations

import msgspec

from .messages import Held


class Window(msgspec.Struct, frozen=True):
    """What engines of a channel may serve."""

    committed: Held | None = None
    max_lag: int = 0
    """Of the round that committed it. A coordinator that was restarted allows nothing but the committed version."""
    past: tuple[Held | None, ...] = ()
    """Those committed before it that are not too far behind, newest first; None for the weights of a launch."""

    def after(self, held: Held, max_lag: int, *, rollback: bool) -> Window:
        """Once `held` is committed. A channel that goes back breaks with what it had."""
        before = () if rollback or self.committed is None else (self.committed, *self.past)
        past = tuple(each for each in before if each and 0 < held.version - each.version <= max_lag)
        return Window(held, max_lag, past)

    def also(self, held: Held | None) -> Window:
        """For an engine that may serve `held` too, for as long as it waits for its turn."""
        return msgspec.structs.replace(self, past=(*self.past, held))

    def allows(self, held: Held | None) -> bool:
        """Whether requests may be answered from `held`; None stands for the weights of a launch.

        Before anything is committed those may. A version that the channel does not know may not, whoever claims it.
        """
        return held == self.committed or held in self.past

    def against(self, held: Held | None) -> str:
        """Why not, for people."""
        found = f"version {held.version}" if held else "the weights of its launch"
        if self.committed is None:
            return f"holds {found}, which this channel has not committed"
        allowed = f", and max_lag is {self.max_lag}" if self.max_lag else ""
        return f"holds {found}, committed is {self.committed.version}{allowed}"
