"""``/admit`` as proxies ask it."""

from __future__ import annotations

import pytest

from weightbus.control.server.http_server import HttpQuestion
from weightbus.control.server.metrics import Metrics, MetricSource
from weightbus.engine_agent.sidecar.admission_page import AdmissionPage

from ..world import World


class Asked:
    """A page over the machine of a world."""

    def __init__(self) -> None:
        self.world = World()
        self.trouble = ""
        self.metrics = Metrics(MetricSource.ENGINE)
        self.page = AdmissionPage(self.world.machine.view, lambda: self.trouble, self.metrics)

    def __call__(self, path: str = "", query: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
        pairs = tuple((name, value) for name, _, value in (each.partition("=") for each in query.split("&") if each))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.page.answer(HttpQuestion(path, pairs, named))
        return answer.status.value, dict(answer.headers), answer.body.decode()

    def counted(self, verdict: str) -> float:
        found = self.metrics.registry.get_sample_value("weightbus_sidecar_admissions_total", {"verdict": verdict})
        return found or 0.0


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_status_and_headers(asked: Asked) -> None:
    """200 and 409 name the version, refusals say when to try again, and each verdict is counted."""
    assert asked() == (200, {"Weightbus-Version": "launch"}, "the weights of its launch\n")
    asked.world.to_serving()
    assert asked(query="min=7") == (200, {"Weightbus-Version": "7"}, "version 7\n")
    again = {"Retry-After": "1"}
    assert asked(query="min=8") == (409, {"Weightbus-Version": "7", **again}, "holds version 7\n")
    status, headers, body = asked(query="exact=x")
    assert (status, headers) == (400, {})
    assert "exact is 'x'" in body
    asked.world.prepare(2, 8)
    asked.world.end()
    coming = {"Weightbus-Version": "7", "Weightbus-Version-Coming": "8"}
    assert asked(query="min=7")[:2] == (200, coming)
    assert asked(query="exact=7")[:2] == (409, coming | again)
    asked.trouble = "it starts"
    assert asked() == (503, again, "it starts\n")
    counts = {"admitted": 3, "out_of_bounds": 2, "unclean": 1, "invalid": 1}
    assert {verdict: asked.counted(verdict) for verdict in counts} == counts


def test_bounds_of_a_request_that_is_passed_on(asked: Asked) -> None:
    """Headers have them, joined with the query of `/admit` itself; the query of a request below it is its own."""
    asked.world.to_serving()
    assert asked(weightbus_min_version="8")[0] == 409
    assert asked(query="min=8", weightbus_min_version="8")[0] == 409
    assert asked(query="min=7", weightbus_min_version="8")[0] == 400
    assert asked(query="max=9", weightbus_exact_version="7")[0] == 200
    assert asked("/generate", "exact=3&stream=1", weightbus_max_version="9")[0] == 200
    assert asked("/generate", weightbus_max_version="6")[0] == 409
    assert asked("/generate", weightbus_max_version="7, 8")[0] == 400
    assert asked(query="version=3")[0] == 400
