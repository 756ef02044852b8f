"""The yardstick: a ROUTER with CURVE and an allow-list, and nothing else.

One payload to every peer, one answer of each, and one acknowledgement of every answer, where that is asked for: to be
sure of an answer takes three messages, whoever sends them.

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
from agents import COMMAND
from zmq.auth.thread import ThreadAuthenticator

from weightbus.control.bus.session import HOLD_S
from weightbus.control.security.allow_list import AllowList
from weightbus.control.security.keys import read_secret_key
from weightbus.control.security.trust import ALLOW_LIST_FILE


class _Doorman:
    def __init__(self, keys: Path) -> None:
        self._known = {key.encode() for key in AllowList(keys / ALLOW_LIST_FILE).principals()}

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
    router.curve_secretkey = read_secret_key(keys / "coordinator.key").encode()
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
            say(barrier(router, peers, bytes(asked["command"]), bytes(asked["ack"])))
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


def barrier(router: zmq.Socket[bytes], peers: list[bytes], command: bytes, ack: bytes) -> dict[str, Any]:
    """The same command to all, one answer from each.

    With `ack` answers are acknowledged after as long as the coordinator lets those of its barriers wait, or when the
    barrier is over, which it is with the last answer, as the coordinator's are.
    """
    payload = COMMAND + command[1:]
    answered: list[bytes] = []
    used, began = cpu_s(), time.perf_counter()
    for peer in peers:
        router.send_multipart([peer, payload], zmq.NOBLOCK)
    left, ack_at = len(peers), 0.0
    while left:
        if ack:
            peer, _ = router.recv_multipart()
            now = time.perf_counter()
            if not answered:
                ack_at = now + HOLD_S
            answered.append(peer)
            if now >= ack_at:
                acknowledge(router, answered, ack)
        else:
            router.recv_multipart()
        left -= 1
    seconds = time.perf_counter() - began
    acknowledge(router, answered, ack)
    return {"seconds": seconds, "cpu_s": cpu_s() - used}


def acknowledge(router: zmq.Socket[bytes], answered: list[bytes], ack: bytes) -> None:
    """One message to each that answered, and forget them."""
    for peer in answered:
        router.send_multipart([peer, ack], zmq.NOBLOCK)
    answered.clear()


def say(answer: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
