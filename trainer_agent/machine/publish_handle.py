"""Handle of a publication that runs in the background of the training loop."""

from __future__ import annotations

from collections.abc import Callable

from .errors import PublishFailed
from .publish_report import PublishReport


class PublishHandle:
    """Publication of one snapshot, made by `TrainerAgent.publish`. Dropping the handle does not stop it."""

    def __init__(
        self,
        version: int,
        conclude: Callable[[], PublishReport],
        over: Callable[[], bool] | None = None,
        stood_s: float = 0.0,
    ) -> None:
        self.version = version
        self.stood_s = stood_s
        """Seconds for which `publish` blocked training: for engines to catch up (`max_lag`), or for a free buffer."""
        self._conclude = conclude
        self._over = over
        self._end: PublishReport | PublishFailed | None = None

    def over(self) -> bool:
        """True if `wait` would return at once. Not collective: before `wait`, only rank 0 knows."""
        return self._end is not None or (self._over is not None and self._over())

    def wait(self) -> PublishReport:
        """Block until the publication has ended; return its report or raise its `PublishFailed`. Collective, once.

        Further calls return or raise the same at once, on any rank.
        """
        if self._end is None:
            try:
                self._end = self._conclude()
            except PublishFailed as failure:
                self._end = failure
        if isinstance(self._end, PublishFailed):
            raise self._end
        return self._end
