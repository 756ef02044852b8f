"""Clients that generate without a pause, from whatever is on the ready list, and check who made every token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import model

TOKENS = 24


class Hammer:
    """One thread for each engine. `ready` says where requests may be sent."""

    def __init__(
        self, checkpoint: Path, ready: Callable[[], Sequence[str]], threads: int, *, real: bool = False
    ) -> None:
        """Of `real` servers it is not known what a version says, only that it says the same to the same prompt."""
        self._checkpoint = checkpoint
        self._ready = ready
        self._real = real
        self._said: dict[tuple[int, int], list[int]] = {}
        self.tokens = 0
        self.versions: set[int] = set()
        """Versions whose tokens were seen."""
        self.wrong: list[str] = []
        """Tokens that no complete version made, or another than their label says."""
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
        turn = 0
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            while not self._over.is_set():
                turn += 1
                urls = self._ready()
                if not urls:
                    time.sleep(0.01)
                    continue
                prompt = [number, turn % 4 if self._real else turn]
                try:
                    self._check(prompt, self._generate(http, urls[(number + turn) % len(urls)], prompt))
                except httpx.HTTPError:
                    continue  # it was just killed, or stopped: that costs a request, not its truth

    @staticmethod
    def _generate(http: httpx.Client, url: str, prompt: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return http.post(f"{url}/generate", json=body).raise_for_status().json()

    def _check(self, prompt: list[int], answer: dict[str, Any]) -> None:
        tokens = answer["output_ids"]
        wrong: list[str] = []
        versions: set[int] = set()
        for span in answer["meta_info"]["weight_versions"]:
            version = model.LAUNCH if span["version"] == "default" else int(span["version"])
            versions.add(version)
            if self._real:
                continue
            made_of = model.digest(self._checkpoint, version)
            wrong += [
                f"token {at} of {prompt} is not of version {version}"
                for at in range(span["start"], span["end"])
                if tokens[at] != model.token(made_of, prompt, tokens[:at])
            ]
        with self._lock:
            if self._real and len(versions) == 1 and len(tokens) == TOKENS:
                first = self._said.setdefault((*versions, prompt[1]), tokens)
                wrong += [] if first == tokens else [f"version {versions} says {tokens} to {prompt}, and said {first}"]
            self.tokens += len(tokens)
            self.versions |= versions
            self.wrong += wrong
