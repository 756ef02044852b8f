"""Several hosts on one machine: network namespaces that reach each other through a bridge in one of their own.

Nothing of them can be reached from outside, and everything is gone with the last of them. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

_SUBNET = "10.203.17"


class Host(NamedTuple):
    """One namespace with an address on the bridge, and a loopback of its own."""

    namespace: str
    address: str

    def argv(self, command: Sequence[str]) -> list[str]:
        """`command`, run on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def request(self, method: str, url: str, **more: Any) -> Any:
        """An HTTP request made from this host; the answer's JSON. Raises `httpx.HTTPError` when there is none."""
        call = [sys.executable, "-c", _REQUEST, method, url, msgspec.json.encode(more).decode()]
        done = subprocess.run(self.argv(call), capture_output=True, check=False, timeout=90)
        if done.returncode:
            raise httpx.TransportError(done.stderr.decode()[-400:])
        return msgspec.json.decode(done.stdout)


_REQUEST = """
import json, sys, httpx
method, url, more = sys.argv[1:]
answer = httpx.request(method, url, timeout=60, trust_env=False, **json.loads(more)).raise_for_status()
sys.stdout.write(answer.text)
"""


def unavailable() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if os.geteuid():
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    probe = f"wb{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this system gives no network namespaces"
    _ip("netns", "del", probe)
    return ""


@contextlib.contextmanager
def hosts(*names: str) -> Generator[dict[str, Host]]:
    """One host a name, all on one bridge."""
    switch = f"wb{os.getpid()}s"
    made = {name: Host(f"wb{os.getpid()}h{index}", f"{_SUBNET}.{index + 1}") for index, name in enumerate(names)}
    with contextlib.ExitStack() as stack:
        _namespace(stack, switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for index, host in enumerate(made.values()):
            _namespace(stack, host.namespace)
            port = f"port{index}"
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made


def _namespace(stack: contextlib.ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
