"""Rollouts come only from engines on the ready list, and say which weights wrote them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from weightbus.trainer_agent.demo.rollouts import BadRollout, NotReady, RolloutClient
from weightbus.trainer_agent.demo.toy_task import RESPONSE_TOKENS


class Stage(ThreadingHTTPServer):
    """A coordinator's status and one engine, on one port."""

    ready: tuple[str, ...] = ()
    tokens = RESPONSE_TOKENS

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Stage

    def do_GET(self) -> None:
        engine = {"lag": 0, "ready": True, "version": 7, "url": self.server.url, "something": "new"}
        channel = {"committed": {"version": 7}, "engines": {"e0": engine}, "ready": self.server.ready}
        self.reply({"boot": 1, "channels": {"c": channel}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        meta = {"weight_version": "7", "id": "x"}
        one = {"text": "", "output_ids": [1] * self.server.tokens, "meta_info": meta}
        self.reply([one | {"output_ids": [prompt[0]] * self.server.tokens} for prompt in asked["input_ids"]])

    def reply(self, document: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage(("127.0.0.1", 0), Answers) as server:
        server.ready = (server.url,)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


@pytest.fixture
def fleet(stage: Stage) -> Iterator[RolloutClient]:
    made = RolloutClient(f"{stage.url}/status", "c", 60.0)
    yield made
    made.close()


def test_the_ready_list_is_waited_for(fleet: RolloutClient, stage: Stage) -> None:
    """With too few ready engines the wait ends at its deadline and says how many there are."""
    assert fleet.wait_ready(1, 60.0) == (stage.url,)
    with pytest.raises(NotReady, match="1 engines are ready"):
        fleet.wait_ready(2, 0.0)


def test_an_unknown_channel_has_no_engines(stage: Stage) -> None:
    """Before the first agent says hello the channel is not in the status."""
    other = RolloutClient(f"{stage.url}/status", "other", 10.0)
    assert other.state().ready == ()
    other.close()


def test_responses_keep_the_order_of_the_prompts(fleet: RolloutClient, stage: Stage) -> None:
    """Prompts are shared out among engines, and come back in order, each with its label."""
    prompts = [[number] for number in range(5)]
    responses = fleet.generate([stage.url, stage.url], prompts)
    assert [response.output_ids[0] for response in responses] == list(range(5))
    assert {response.meta_info["weight_version"] for response in responses} == {"7"}


def test_rollouts_may_wait_for_a_version(fleet: RolloutClient, stage: Stage) -> None:
    """An engine that is ready with an older one is waited for, too."""
    assert fleet.wait_ready(1, 0.0, version=7) == (stage.url,)
    with pytest.raises(NotReady, match=r"versions \[7\] after 0 s, expected 1 with 8 or later"):
        fleet.wait_ready(1, 0.0, version=8)


def test_a_short_response_is_refused(fleet: RolloutClient, stage: Stage) -> None:
    """An aborted request is not training data."""
    stage.tokens = 3
    with pytest.raises(BadRollout, match="wrote 3 tokens"):
        fleet.generate([stage.url], [[1]])
