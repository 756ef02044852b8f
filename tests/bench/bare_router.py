"""The yardstick: a ROUTER with CURVE and an allow-list, and nothing else. One payload to every peer, one echo of each.

python tests/bench/bare_router.py KEYS COUNT    prints its port, then carries out commands from stdin
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from weightbus.control.keys import read_secret
from weightbus.control.trust import TRUST_FILE, TrustList


class _Doorman:
    def __init__(self, keys: Path) -> None:
        self._known = {key.encode() for key in TrustList(keys / TRUST_FILE).principals()}

    def callback(self, domain: str, key: bytes) -> bool:
        return bool(domain) and key in self._known


def cpu_s() -> float:
    """Processor seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Serve one command after the other."""
    keys, count = Path(sys.argv[1]), int(sys.argv[2])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("bench", _Doorman(keys))
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.set(zmq.LINGER, 0)
    router.set(zmq.BACKLOG, 4096)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.curve_server = True
    router.curve_secretkey = read_secret(keys / "coordinator.key").encode()
    router.zap_domain = b"bench"
    router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    say({"port": port})
    peers: list[bytes] = []
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "accept":
            say(accept(router, peers, count))
        else:
            say(barrier(router, peers, asked["bytes"]))
    authenticator.stop()
    context.destroy(linger=0)


def accept(router: zmq.Socket[bytes], peers: list[bytes], count: int) -> dict[str, Any]:
    """Answer the first message of every agent."""
    used = cpu_s()
    while len(peers) < count:
        peer, payload = router.recv_multipart()
        router.send_multipart([peer, payload], zmq.NOBLOCK)
        peers.append(peer)
    return {"cpu_s": cpu_s() - used}


def barrier(router: zmq.Socket[bytes], peers: list[bytes], size: int) -> dict[str, Any]:
    """The same payload to all, one answer from each."""
    payload = bytes(size)
    used, began = cpu_s(), time.perf_counter()
    for peer in peers:
        router.send_multipart([peer, payload], zmq.NOBLOCK)
    for _ in peers:
        router.recv_multipart()
    return {"seconds": time.perf_counter() - began, "cpu_s": cpu_s() - used}


def say(answer: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
