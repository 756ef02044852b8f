"""A publication that goes on behind the training loop's back, as the loop holds it."""

from __future__ import annotations

from collections.abc import Callable

from .errors import PublishFailed
from .publish_report import PublishReport


class PublishHandle:
    """The publication of one snapshot. Made by `TrainerAgent.publish`; it may be dropped, and goes on all the same."""

    def __init__(
        self,
        version: int,
        conclude: Callable[[], PublishReport],
        over: Callable[[], bool] | None = None,
        stood_s: float = 0.0,
    ) -> None:
        self.version = version
        self.stood_s = stood_s
        """How long `publish` kept training waiting: for engines to catch up (`max_lag`), or for a free buffer."""
        self._conclude = conclude
        self._over = over
        self._end: PublishReport | PublishFailed | None = None

    def over(self) -> bool:
        """`wait` would return at once. Not collective, so only the root rank knows before it waited."""
        return self._end is not None or (self._over is not None and self._over())

    def wait(self) -> PublishReport:
        """Block until the publication ended; return its report or raise its `PublishFailed`. Collective, once.

        Further calls, on whatever rank, give the same again at once.
        """
        if self._end is None:
            try:
                self._end = self._conclude()
            except PublishFailed as failure:
                self._end = failure
        if isinstance(self._end, PublishFailed):
            raise self._end
        return self._end
