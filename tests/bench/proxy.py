"""nginx with and without admission before a real SGLang server, while versions change: `python -m tests.bench.proxy`.

A coordinator, a server on the CPU with its sidecar, nginx with deploy/nginx/weightbus.conf and beside it the same
without `auth_request`, and a trainer that publishes without a pause. Half of the clients ask through either at the same
time, each one request after the other, and change sides after each of the turns: `ratio` compares how many were
answered, on a machine that is equally busy for both. Then they ask with bounds at random around the version that they
saw last, every fourth one for a stream: `low` and `high` count answers that began outside of them, `broken` the streams
that did not end well. A request that waits in the server's queue when a round pauses it may be `high`. Needs Debian's
nginx. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.demo.child_processes import Programs

from ..deploy.test_proxies import BOUNDS, NGINX, NGINX_MAIN, at_ports, versions
from ..e2e.fleet import Fleet, poll
from ..kit import tiny_model
from ..kit.fake_source import FakeSource
from ..kit.fake_weights import read
from ..kit.ports import free_port


def publish(fleet: Fleet, ended: threading.Event, served: list[int]) -> None:
    """Versions from 1 on, of two checkpoints in turn."""
    sources = [FakeSource(read(fleet.folder / f"seed{number}")) for number in (1, 0)]
    version = 0
    while not ended.is_set():
        source = sources[version % 2]
        with TrainerAgent.connect(
            source, channel="e2e", coordinator=fleet.coordinator, keys=fleet.keys, transport=("local",)
        ) as trainer:
            for _ in range(5):
                version += 1
                assert trainer.publish(version).committed
                served.append(version)
                ended.wait(0.2)


class Clients:
    """Closed loops that ask with `ask` until told to end."""

    def __init__(self, count: int, ask: Callable[[httpx.Client, int], str]) -> None:
        self.answers: Counter[str] = Counter()
        self._ask, self._ended = ask, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def run(self, seconds: float) -> Counter[str]:
        """Answers by kind."""
        for thread in self._threads:
            thread.start()
        time.sleep(seconds)
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return self.answers

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=120, trust_env=False) as http:
            while not self._ended.is_set():
                self.answers[self._ask(http, number)] += 1


class Bounded:
    """A client of bounds at random."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.url, self.body, self.seen, self.chance = url, body, 0, random.Random(1)
        self.wrong: list[str] = []

    def ask(self, http: httpx.Client, _number: int) -> str:
        """One request; what became of it."""
        chance = self.chance
        name = chance.choice(["min", "max", "exact"])
        bound = max(0, self.seen + chance.choice([-1, 0, 0, 1]))
        headers = {BOUNDS[name]: str(bound)}
        if chance.random() < 0.25:
            with http.stream("POST", self.url, json={**self.body, "stream": True}, headers=headers) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            if answer.status_code != httpx.codes.OK:
                return str(answer.status_code)
            if lines[-1] != "[DONE]":
                return "broken"
            last = json.loads(lines[-2])
            if last["meta_info"]["completion_tokens"] != self.body["sampling_params"]["max_new_tokens"]:
                return "broken"
        else:
            answer = http.post(self.url, json=self.body, headers=headers)
            if answer.status_code != httpx.codes.OK:
                return str(answer.status_code)
            last = answer.json()
        first, end = (int(label) if label.isdigit() else -1 for label in (versions(last)[0], versions(last)[-1]))
        self.seen = max(self.seen, end)
        found = "low" if name != "max" and first < bound else "high" if name != "min" and first > bound else "within"
        if found != "within":
            self.wrong.append(f"{name} = {bound} began with {first}, told {dict(answer.headers)}")
        return found


def measure(given: argparse.Namespace, folder: Path, programs: Programs) -> dict[str, object]:
    """All turns."""
    for seed in (0, 1):
        tiny_model.write(folder / f"seed{seed}", seed)
    fleet = Fleet(folder, programs)
    fleet.start_coordinator()
    fleet.start_engine("e0", 1)
    engine = fleet.engines["e0"]
    poll("the engine", lambda: fleet.http.get(f"{engine.sidecar}/readyz").status_code == httpx.codes.OK)
    urls: dict[str, str] = {}
    for kind in ("plain", "admitted"):
        port, home = free_port(), folder / kind
        home.mkdir()
        text = at_ports(NGINX.read_text(), _port(engine.url), _port(engine.sidecar), port)
        if kind == "plain":
            text = re.sub(r"auth_request /weightbus-admit;", "", text)
        (home / "weightbus.conf").write_text(text)
        (home / "main.conf").write_text(NGINX_MAIN.format(folder=home))
        programs.start(f"nginx-{kind}", ["nginx", "-c", str(home / "main.conf")])
        urls[kind] = f"http://127.0.0.1:{port}/generate"
        poll("nginx", lambda url=urls[kind]: fleet.http.get(url.replace("generate", "readyz")).status_code < 600)
    body = {
        "input_ids": [1, 2, 3, 4],
        "sampling_params": {"max_new_tokens": given.tokens, "temperature": 0, "ignore_eos": True},
    }
    ended, served = threading.Event(), list[int]()
    trainer = threading.Thread(target=publish, args=(fleet, ended, served))
    trainer.start()
    counts: dict[str, list[int]] = {"plain": [], "admitted": []}
    others: Counter[str] = Counter()
    try:
        for turn in range(given.turns + 1):  # the first one warms up
            kinds = ("plain", "admitted") if turn % 2 else ("admitted", "plain")
            found = Clients(
                given.clients,
                lambda http, number, kinds=kinds: f"{(kind := kinds[number % 2])} {_plain(http, urls[kind], body)}",
            ).run(given.turn_s)
            for kind in kinds if turn else ():
                counts[kind].append(found.pop(f"{kind} 200"))
            others.update(found if turn else ())
        before = len(served)
        client = Bounded(urls["admitted"], body)
        bounded = Clients(given.clients, client.ask).run(given.bounded_s)
    finally:
        ended.set()
        trainer.join(120)
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "clients": given.clients,
        "tokens": given.tokens,
        "answered": counts,
        "ratio": round(sum(counts["admitted"]) / sum(counts["plain"]), 3),
        "other_answers": dict(others),
        "versions": len(served),
        "bounded": {"versions": len(served) - before, **dict(sorted(bounded.items()))},
        "wrong": client.wrong[:5],
    }


def _plain(http: httpx.Client, url: str, body: dict[str, Any]) -> str:
    return str(http.post(url, json=body).status_code)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--turns", type=int, default=8, help="an even number")
    parser.add_argument("--turn-s", type=float, default=10.0, help="seconds of a turn")
    parser.add_argument("--bounded-s", type=float, default=40.0, help="seconds of requests with bounds")
    with tempfile.TemporaryDirectory(prefix="wb-proxy-") as folder, Programs(Path(folder)) as programs:
        json.dump(measure(parser.parse_args(), Path(folder), programs), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
