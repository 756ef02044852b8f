"""Clients that generate without a pause from all that is on the ready list, and find out what made every token."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import model

TOKENS = 24
NAMED = 20
"""Answers with wrong tokens whose maker is looked for among all versions, which takes seconds where there are many."""


class Hammer:
    """One thread for each engine. `ready` says where requests may be sent, `published` which versions there are."""

    def __init__(
        self,
        checkpoint: Path,
        ready: Callable[[], Sequence[str]],
        threads: int,
        *,
        real: bool = False,
        published: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Servers that are `real` answer with log probabilities, light ones with digests of their weights."""
        self._checkpoint = checkpoint
        self._ready = ready
        self._real = real
        self._published = published
        self.tokens = 0
        self.answered_at = 0.0
        """When the last answer came."""
        self.seen: dict[int, float] = {}
        """Version -> when the first token came that its complete weights made."""
        self.wrong: list[str] = []
        """What is to be said of tokens that no complete version made, or another than their label says."""
        self.wrong_tokens = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop."""
        self._over.set()
        for thread in self._threads:
            thread.join(10)

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            for turn in itertools.takewhile(lambda _: not self._over.is_set(), itertools.count(1)):
                urls = self._ready()
                if not urls:
                    time.sleep(0.01)
                    continue
                prompt = [number, turn % 509]
                try:
                    answer = self._generate(http, urls[(number + turn) % len(urls)], prompt)
                except httpx.HTTPError:
                    continue  # it was just killed, or stopped: that costs a request, not its truth
                self.check(prompt, answer, time.monotonic())

    @staticmethod
    def _generate(http: httpx.Client, url: str, prompt: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return http.post(f"{url}/generate", json=body).raise_for_status().json()

    def check(self, prompt: list[int], answer: dict[str, Any], at: float) -> None:
        """Judge every token of an answer that came `at` that time."""
        tokens, meta = answer["output_ids"], answer["meta_info"]
        if self._real:
            told = [each[0] for each in meta["output_token_logprobs"]]
            makes = model.real_maker(self._checkpoint, prompt, tokens, told)
        else:
            makes = model.light_maker(self._checkpoint, prompt, tokens)
        for span in meta["weight_versions"]:
            version = model.LAUNCH if span["version"] == "default" else int(span["version"])
            right = makes(version)
            with self._lock:
                if any(right[span["start"] : span["end"]]):
                    self.seen.setdefault(version, at)
            for run in _runs(span, right):
                self._note(prompt, run, version, makes, at)
        with self._lock:
            self.tokens += len(tokens)
            self.answered_at = max(self.answered_at, at)

    def _note(self, prompt: list[int], run: range, label: int, makes: model.Makes, at: float) -> None:
        """`run` are tokens that the weights of their label did not make."""
        where = f"tokens {run.start} to {run.stop - 1} of {prompt}, labeled {label}"
        maker: int | None = None
        if len(self.wrong) < NAMED:
            maker = model.maker_of(makes, run, {model.LAUNCH: None, **dict.fromkeys(self._published())})
        with self._lock:
            self.wrong_tokens += len(run)
            self.wrong.append(f"{where}: made by " + ("no complete version" if maker is None else f"version {maker}"))
            if maker is not None:
                self.seen.setdefault(maker, at)


def _runs(span: dict[str, Any], right: Sequence[bool]) -> Iterator[range]:
    """Stretches of `span` without a right token."""
    for ok, group in itertools.groupby(range(span["start"], span["end"]), right.__getitem__):
        if not ok:
            found = list(group)
            yield range(found[0], found[-1] + 1)
