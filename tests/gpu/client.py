"""One request that generates until it is told to stop: a process of its own, so that only its server holds it up.

    python3 tests/gpu/client.py URL TOKENS

Says ``begun`` once some tokens have come. The end of stdin stops it, some tokens later. Then it says when each token
came, as a JSON object: ``times``, in seconds of `time.perf_counter`, and ``problem``.
"""

from __future__ import annotations

import http.client
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

SOME = 30
"""Tokens before and after what is watched."""
PATIENCE_S = 60.0
"""For the next token."""


def generate(url: str, tokens: int, stop: threading.Event) -> dict[str, Any]:
    """Until `stop` and some tokens more, or until the server ends it."""
    times: list[float] = []
    body = {
        "input_ids": [5, 17, 33, 64],
        "stream": True,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0},
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    last = 0
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            return {"times": times, "problem": f"{answer.status}: {answer.read().decode(errors='replace')[:300]}"}
        for line in answer:
            if not line.startswith(b"data:"):
                continue
            times.append(time.perf_counter())
            if len(times) == SOME:
                sys.stdout.write("begun\n")
                sys.stdout.flush()
            if stop.is_set():
                last = last or len(times) + SOME
                if len(times) >= last:
                    break
        if not stop.is_set():
            return {"times": times, "problem": "it ended before it was told to"}
    except (OSError, http.client.HTTPException) as error:
        return {"times": times, "problem": f"{type(error).__name__}: {error}"}
    finally:
        connection.close()
    return {"times": times, "problem": ""}


class Client:
    """The other end of such a process."""

    def __init__(self, url: str, tokens: int) -> None:
        command = [sys.executable, __file__, url, str(tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._found: dict[str, Any] = {"times": [], "problem": ""}

    def start(self) -> None:
        """Returns when some tokens have come, or none will."""
        line = self._line()
        if line != "begun\n":
            self._found = json.loads(line or '{"times": [], "problem": "it ended"}')

    def stop(self) -> None:
        """After some more tokens."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._found["problem"]:
            self._found = json.loads(self._line() or '{"times": [], "problem": "it ended"}')

    def close(self) -> None:
        """End it."""
        with self._process:
            self._process.kill()

    def gaps(self) -> dict[str, Any]:
        """The longest pause between two tokens, less the usual one; nothing of a request that ended too early."""
        times, problem = self._found["times"], self._found["problem"]
        steps = [after - before for before, after in itertools.pairwise(times)]
        if problem or len(steps) < 10:
            return {"client": problem or "too few tokens"}
        usual = statistics.median(steps)
        return {"pause_gap_s": max(steps) - usual, "token_s": usual, "tokens": len(steps), "client": problem}

    def _line(self) -> str:
        """The next one; the client waits for no token longer than a minute."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def main() -> None:
    stop = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    sys.stdout.write(json.dumps(generate(sys.argv[1], int(sys.argv[2]), stop)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
