"""Identity of this machine and its network interfaces, so that two agents can tell what they share."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import socket
import struct
import uuid
from pathlib import Path
from typing import Final, NamedTuple

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = Path("/proc/self/ns")
_IPV6: Final = Path("/proc/net/if_inet6")
_INTERFACES: Final = Path("/sys/class/net")
_SIOCGIFADDR: Final = 0x8915
"""Asks an interface for its IPv4 address: https://man7.org/linux/man-pages/man7/netdevice.7.html"""


class HostInterface(NamedTuple):
    """A network interface with a routable address."""

    name: str
    addresses: tuple[str, ...]
    mbps: int
    """Link speed in Mbit/s as the driver reports it; 0 where it does not (virtual interfaces)."""


@functools.cache
def host_identity() -> str:
    """The kernel's boot id: equal in all processes and containers of one running kernel, new after a reboot.

    Raises `OSError` where it is there and cannot be read now: any other name would make this another host.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except FileNotFoundError:  # not a Linux kernel: the network card's address has to do
        return f"node-{uuid.getnode():012x}"


def network_identity() -> str:
    """The network namespace of this process; processes with the same one share a loopback. Empty where unknown."""
    return _namespace("net")


def files_identity() -> str:
    """The mount namespace; processes with the same one see the same files under the same names. Empty where unknown."""
    return _namespace("mnt")


def folder_identity(folder: Path) -> str:
    """Device and inode of `folder`: equal for two processes of a host that see the same one.

    Empty where it does not exist.
    """
    try:
        found = folder.stat()
    except OSError:
        return ""
    return f"{found.st_dev:x}:{found.st_ino:x}"


def network_interfaces() -> tuple[HostInterface, ...]:
    """The interfaces with an address, without loopback and link-local ones. Raises `OSError`."""
    six = _ipv6()
    found: list[HostInterface] = []
    for _, name in socket.if_nameindex():
        addresses = [each for each in (_ipv4(name), *six.get(name, ())) if each]
        usable = tuple(each for each in addresses if _usable(each))
        if usable:
            found.append(HostInterface(name, usable, _mbps(name)))
    return tuple(found)


def _namespace(kind: str) -> str:
    try:
        return f"{host_identity()}/{(_NAMESPACES / kind).readlink()}"
    except OSError:
        return ""


def _usable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not parsed.is_loopback and not parsed.is_link_local


def _ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):  # it has none
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _ipv6() -> dict[str, list[str]]:
    """Addresses by interface. Each line is: address, index, length of the prefix, scope, flags, name."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):  # no IPv6 here
        for line in _IPV6.read_text(encoding="ascii").splitlines():
            fields = line.split()
            found.setdefault(fields[5], []).append(str(ipaddress.IPv6Address(int(fields[0], 16))))
    return found


def _mbps(name: str) -> int:
    try:
        return max(0, int((_INTERFACES / name / "speed").read_text(encoding="ascii")))
    except (OSError, ValueError):  # it is down, or virtual
        return 0
