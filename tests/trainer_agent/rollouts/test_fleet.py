"""`Fleet` before servers that stand in: the ready list, refusals, deaths, versions, with and without asyncio."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from weightbus import Fleet, NoEngineReady, RolloutRefused, Staleness
from weightbus.trainer_agent.rollouts.dispatch import FleetError
from weightbus.trainer_agent.rollouts.fleet import Rollout

from ...kit.waiting import until

PARAMS = {"max_new_tokens": 2}
Given = tuple[int, dict[str, str], Any]


class Stand(ThreadingHTTPServer):
    """One HTTP server whose answers a test sets."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Callable[[dict[str, Any], dict[str, str]], Given]) -> None:
        self.answer, self.asked = answer, 0
        self.headers: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Stand

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        self.server.asked += 1
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.headers.append(headers)
        status, more, document = self.server.answer(body, headers)
        if not status:  # hang up
            self.close_connection = True
            return
        data = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {**more, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def response(first: int, *versions: str, finish: str = "length") -> dict[str, Any]:
    runs = [{"version": each, "start": at, "end": at + 1} for at, each in enumerate(versions)]
    meta = {"weight_version": versions[-1], "weight_versions": runs, "finish_reason": {"type": finish}}
    return {"output_ids": [first] * len(versions), "text": "x", "meta_info": meta}


class World:
    """A coordinator's status page and two engines."""

    def __init__(self) -> None:
        self.listed: dict[str, dict[str, Any]] = {}
        self.stands_by = False
        self.status = Stand(self._status)
        self.engines = {name: Stand(self._answers(name)) for name in ("e0", "e1")}
        self.versions = {"e0": ["7", "7"], "e1": ["7", "7"]}
        self.refusals: dict[str, list[Given]] = {"e0": [], "e1": []}
        for name in self.engines:
            self.list(name, 7)
        self.fleet = Fleet("c", url=self.status.url, timeout_s=20.0, watch_s=0.05, staleness=Staleness(max_lag=1))

    def list(self, name: str, version: int | None, *, ready: bool = True) -> None:
        self.listed[name] = {"url": self.engines[name].url, "ready": ready, "version": version, "lag": 0}

    def _status(self, _body: dict[str, Any], _headers: dict[str, str]) -> Given:
        if self.stands_by:
            return 200, {}, {"stands_by": True, "leader": "", "endpoint": ""}
        return 200, {}, {"channels": {"c": {"engines": self.listed, "committed": {"version": 7}}}, "boot": 1}

    def _answers(self, name: str) -> Callable[[dict[str, Any], dict[str, str]], Given]:
        def answer(body: dict[str, Any], _headers: dict[str, str]) -> Given:
            if self.refusals[name]:
                return self.refusals[name].pop(0)
            prompts = body.get("input_ids") or body["text"]
            return 200, {}, [response(0 if isinstance(p, str) else p[0], *self.versions[name]) for p in prompts]

        return answer

    def close(self) -> None:
        self.fleet.close()
        for each in (self.status, *self.engines.values()):
            each.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


Ask = Callable[..., Rollout]


@pytest.fixture(params=["sync", "asyncio"])
def ask(request: pytest.FixtureRequest, world: World) -> Ask:
    """`generate`, or `agenerate` in a loop of its own."""
    if request.param == "sync":
        return world.fleet.generate
    return lambda *given, **more: asyncio.run(world.fleet.agenerate(*given, **more))


def test_a_response_and_its_versions(world: World, ask: Ask) -> None:
    """Tokens, lineage, engine, and the verdict of the fleet's policy."""
    world.versions["e0"] = ["6", "7"]
    found = ask([5, 6], PARAMS, current=8)
    assert (found.output_ids, found.engine, found.lineage.versions) == ([5, 5], "e0", (6, 7))
    assert found.verdict is not None
    assert not found.verdict.keep
    assert ask("text", PARAMS).verdict is None


def test_the_bound_is_sent_and_engines_below_it_are_not_asked(world: World, ask: Ask) -> None:
    """A proxy before the engine admits by the same bound."""
    world.list("e0", 6)
    until(lambda: world.fleet.ready(7) and len(world.fleet.ready()) == 2 and len(world.fleet.ready(7)) == 1, "the list")
    assert ask([1], PARAMS, min_version=7).engine == "e1"
    assert world.engines["e1"].headers[-1]["weightbus-min-version"] == "7"
    assert world.engines["e0"].asked == 0


@pytest.mark.parametrize("status", [409, 503])
def test_a_refusal_is_retried_elsewhere(world: World, ask: Ask, status: int) -> None:
    """And the engine that refused is not asked again before the time that it named."""
    world.refusals["e0"] = [(status, {"Retry-After": "9"}, "not now")] * 9
    for _ in range(2):
        assert ask([1], PARAMS).engine == "e1"
    assert world.engines["e0"].asked == 2


def test_the_only_engine_is_asked_again_after_its_time(world: World, ask: Ask) -> None:
    """One second, as its header says."""
    world.list("e1", 7, ready=False)
    until(lambda: len(world.fleet.ready()) == 1, "the list")
    world.refusals["e0"] = [(409, {"Retry-After": "1"}, "in a round")]
    began = time.monotonic()
    assert ask([1], PARAMS, min_version=7).engine == "e0"
    assert time.monotonic() - began >= 0.9


@pytest.mark.parametrize("lost", ["hangs up", "is gone", "was paused"])
def test_a_request_that_was_lost_is_sent_again(world: World, ask: Ask, lost: str) -> None:
    """To another engine where it broke; also one that a pause ended early."""
    if lost == "hangs up":
        world.refusals["e0"] = [(0, {}, "")]
    elif lost == "is gone":
        world.engines["e0"].close()
    else:
        world.refusals["e0"] = [(200, {}, [response(1, "7", finish="abort")])]
    found = ask([1], PARAMS)
    assert found.output_ids == [1, 1]
    assert lost == "was paused" or found.engine == "e1"


def test_an_answer_below_the_bound_is_none(world: World, ask: Ask) -> None:
    """An engine that was launched again a moment ago is on the list still; its answer is thrown away."""
    world.versions["e0"] = ["default", "7"]
    assert ask([1], PARAMS, min_version=7).engine == "e1"
    assert world.engines["e0"].asked == 1


def test_a_wrong_request_is_raised_at_once(world: World, ask: Ask) -> None:
    """Its engine's own words, and one try."""
    world.refusals["e0"] = [(400, {}, "no such parameter")]
    with pytest.raises(RolloutRefused, match=r"e0 refuses the request with 400.*no such parameter"):
        ask([1], PARAMS)
    assert world.engines["e1"].asked == 0


def test_a_request_waits_for_its_version(world: World, ask: Ask) -> None:
    """Until the list names an engine with it, or its deadline."""
    threading.Timer(0.3, world.list, ("e1", 8)).start()
    world.versions["e1"] = ["8", "8"]
    assert ask([1], PARAMS, min_version=8).engine == "e1"
    with pytest.raises(NoEngineReady, match=r"with version 9 or later.*e0 with version 7, e1 with version 8 ready"):
        ask([1], PARAMS, min_version=9, timeout_s=0.3)


def test_requests_are_spread_by_load(world: World) -> None:
    """Each goes to the engine with the fewest of this client's requests under way."""
    held = threading.Event()
    answers = {name: stand.answer for name, stand in world.engines.items()}
    for name, stand in world.engines.items():
        stand.answer = lambda body, headers, name=name: (held.wait(20), answers[name](body, headers))[1]

    async def all_at_once() -> list[Rollout]:
        jobs = [asyncio.create_task(world.fleet.agenerate([1], PARAMS)) for _ in range(10)]
        while sum(stand.asked for stand in world.engines.values()) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        held.set()
        return await asyncio.gather(*jobs)

    found = asyncio.run(all_at_once())
    assert sorted(each.engine for each in found) == ["e0"] * 5 + ["e1"] * 5


def test_batches_keep_the_order_of_the_prompts(world: World) -> None:
    """Shared out in equal runs, one request for each engine."""
    prompts = [[number] for number in range(7)]
    found = world.fleet.generate_batch(prompts, PARAMS)
    assert [each.output_ids[0] for each in found] == list(range(7))
    assert {each.engine for each in found} == {"e0", "e1"}
    assert [stand.asked for stand in world.engines.values()] == [1, 1]
    again = asyncio.run(world.fleet.agenerate_batch(prompts, PARAMS))
    assert [each.output_ids[0] for each in again] == list(range(7))


def test_the_list_is_watched_and_not_asked_for_by_requests(world: World) -> None:
    """A hundred requests cost the coordinator nothing; while it is gone, the last list stands."""
    world.fleet.wait_ready(2)
    with Fleet("c", url=world.status.url, watch_s=60.0) as fleet:
        fleet.wait_ready(2)
        world.fleet.close()
        looks = world.status.asked
        for _ in range(100):
            fleet.generate([1], PARAMS)
        assert world.status.asked <= looks + 1  # a look that was under way
    world.fleet = Fleet("c", url=world.status.url, watch_s=0.05)
    world.fleet.wait_ready(2)
    world.status.close()
    until(lambda: "Connect" in world.fleet._view.problem or "refused" in world.fleet._view.problem, "its end")
    assert world.fleet.generate([1], PARAMS).output_ids == [1, 1]


def test_the_leader_of_several_coordinators_is_found(world: World) -> None:
    """One that stands by, and one that is gone, name no engines."""
    other = World()
    other.stands_by = True
    try:
        with Fleet("c", url=f"http://127.0.0.1:1,{other.status.url},{world.status.url}") as fleet:
            assert len(fleet.wait_ready(2)) == 2
    finally:
        other.close()


def test_an_unknown_channel_is_said() -> None:
    """By the error, with what to look at."""
    made = World()
    try:
        with (
            Fleet("other", url=made.status.url) as fleet,
            pytest.raises(NoEngineReady, match=r"knows no channel 'other'.*weightbus status"),
        ):
            fleet.wait_ready(timeout_s=3.0)
    finally:
        made.close()


def test_closed() -> None:
    """A request that waits ends; closing twice is harmless."""
    made = World()
    fleet = made.fleet
    ended: list[BaseException] = []

    def waits() -> None:
        try:
            fleet.generate([1], PARAMS, min_version=99)
        except FleetError as error:
            ended.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.2)
    made.close()
    thread.join(10)
    assert "closed" in str(ended[0])
    fleet.close()
    with pytest.raises(FleetError, match="closed"):
        fleet.generate([1], PARAMS)
