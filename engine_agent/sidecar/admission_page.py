"""``/admit``: the answer to a proxy that asks whether its server may be given a request.

The query has the bounds (`/admit?min=7`), or headers of the request itself do (`Weightbus-Min-Version: 7`), as where a
proxy passes the request on as it came: then the path below ``/admit`` and its query are the request's own. Every answer
comes from memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from weightbus.control.protocol import Version
from weightbus.control.server import ADMISSIONS, HttpAnswer, HttpQuestion, Metrics

from ..machine import BOUND_HEADERS, AdmissionVerdict, BadBounds, ServerView, VersionBounds, admit, version_name

VERSION_HEADER: Final = "Weightbus-Version"
"""The version that the engine holds: a number, or ``launch``."""
COMING_HEADER: Final = "Weightbus-Version-Coming"
"""The version of a round under way: a request that is admitted now begins with one of the two."""
_RETRY_S: Final = "1"
"""Whole seconds, the least that the header can say; a round takes less."""
_INVALID: Final = "invalid"
_STATUS: Final = {
    AdmissionVerdict.ADMITTED: HTTPStatus.OK,
    AdmissionVerdict.OUT_OF_BOUNDS: HTTPStatus.CONFLICT,
    AdmissionVerdict.UNCLEAN: HTTPStatus.SERVICE_UNAVAILABLE,
}


class AdmissionPage:
    """Answers with the version, the reason and, for a request that may be repeated, ``Retry-After``."""

    def __init__(self, view: Callable[[], ServerView], trouble: Callable[[], str], metrics: Metrics) -> None:
        """`view` and `trouble` return the newest snapshots; they are called on the threads of the HTTP port."""
        self._view, self._trouble, self._metrics = view, trouble, metrics

    def answer(self, question: HttpQuestion) -> HttpAnswer:
        """200, or 409 (outside of the bounds), 503 (no clean weights), 400 (no bounds that can be read)."""
        try:
            bounds = VersionBounds.read(_given(question))
        except BadBounds as bad:
            self._metrics.add(ADMISSIONS, verdict=_INVALID)
            return _page(HTTPStatus.BAD_REQUEST, str(bad), ())
        found = admit(bounds, self._view(), time.monotonic(), self._trouble())
        self._metrics.add(ADMISSIONS, verdict=found.verdict.value)
        headers = [(name, _label(v)) for name, v in zip((VERSION_HEADER, COMING_HEADER), found.versions, strict=False)]
        if found.verdict is AdmissionVerdict.ADMITTED:
            return _page(HTTPStatus.OK, version_name(found.versions[0]), headers)
        return _page(_STATUS[found.verdict], found.reason, [*headers, ("Retry-After", _RETRY_S)])


def _given(question: HttpQuestion) -> list[tuple[str, str]]:
    """The bounds of a question. A proxy's question below ``/admit`` has the query of its request."""
    by_header = [(name, question.headers.get(header.lower(), "")) for name, header in BOUND_HEADERS.items()]
    return by_header if question.path else [*question.query, *by_header]


def _label(version: Version | None) -> str:
    return "launch" if version is None else str(version)


def _page(status: HTTPStatus, text: str, headers: list[tuple[str, str]] | tuple[()]) -> HttpAnswer:
    return HttpAnswer("text/plain; charset=utf-8", f"{text}\n".encode(), status, tuple(headers))
