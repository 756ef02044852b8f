"""Looks at the coordinator's status again and again, from a process of its own: a line whenever an engine's changes.

    python3 tests/gpu/watch.py URL CHANNEL ENGINE LOOK_S

Each line is [seconds of the monotonic clock, state, whether it is ready]. Ends when nobody reads it.
"""

from __future__ import annotations

import json
import sys
import time

import httpx


def main(url: str, channel: str, engine: str, look_s: str) -> None:
    """Until it is killed, or whoever started it is gone."""
    said = None
    with httpx.Client(trust_env=False, timeout=10.0) as http:
        while True:
            channels = http.get(url).json()["channels"]
            found = channels.get(channel, {"engines": {}})["engines"].get(engine, {})
            state = found.get("state", "unknown"), bool(found.get("ready"))
            if state != said:
                sys.stdout.write(json.dumps([time.monotonic(), *state]) + "\n")
                sys.stdout.flush()
                said = state
            time.sleep(float(look_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
