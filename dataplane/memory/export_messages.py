"""The exporter's wire: fixed structs on a Unix SEQPACKET socket, spoken only after the peer's user was checked.

A reader asks for regions of one generation; the exporter answers with one record for each, and with file descriptors in
the same order for those in host memory. The connection that stays open is the reader's lease.

    ASK      magic, kind 1, count, generation        + count x region number
    GRANT    magic, kind 2, count, generation        + count x (region number, kind of memory, bytes, uuid, handle)
    REFUSE   magic, kind 3, 0,     generation        + reason, UTF-8
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from ..errors import PeerLost, TransferFailed

BATCH: Final = 128
"""Regions in one packet. Linux passes at most 253 descriptors at once."""

_MAGIC: Final = b"WBX1"
_HEAD: Final = struct.Struct("<4sBxHQ")
_NUMBER: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<IBxxxQ48s64s")
_ASK, _GRANT, _REFUSE = 1, 2, 3
HOST: Final = 1
CUDA: Final = 2
_MAX_BYTES: Final = 2**48
_MAX_PACKET: Final = _HEAD.size + BATCH * _RECORD.size + 2048
_UUID: Final = re.compile(r"^[A-Za-z0-9-]{8,48}$")


class Ask(msgspec.Struct, frozen=True):
    """Reader: regions of one generation."""

    generation: int
    regions: tuple[int, ...]


class GrantedRegions(msgspec.Struct, frozen=True):
    """Exporter: how one region is opened. `handle` is a cudaIpcMemHandle_t of the GPU `uuid`; empty in host memory."""

    region: int
    memory: int
    nbytes: int
    uuid: str = ""
    handle: bytes = b""


class Grant(msgspec.Struct, frozen=True):
    """Exporter: all regions of the request."""

    generation: int
    regions: tuple[GrantedRegions, ...]


class Refuse(msgspec.Struct, frozen=True):
    """Exporter: refusal. `generation` is the present one."""

    generation: int
    reason: str


def encode_ask(ask: Ask) -> bytes:
    """The struct of a request."""
    head = _HEAD.pack(_MAGIC, _ASK, len(ask.regions), ask.generation)
    return head + b"".join(_NUMBER.pack(region) for region in ask.regions)


def encode_grant(grant: Grant) -> bytes:
    """The struct of an answer."""
    records = (
        _RECORD.pack(each.region, each.memory, each.nbytes, each.uuid.encode("ascii"), each.handle)
        for each in grant.regions
    )
    return _HEAD.pack(_MAGIC, _GRANT, len(grant.regions), grant.generation) + b"".join(records)


def encode_refuse(refuse: Refuse) -> bytes:
    """The struct of a refusal."""
    return _HEAD.pack(_MAGIC, _REFUSE, 0, refuse.generation) + refuse.reason.encode("utf-8")[:2000]


def decode_ask(packet: bytes) -> Ask:
    """A reader's packet. Raises `TransferFailed` on anything else."""
    kind, count, generation = _head(packet)
    if kind != _ASK or not 0 < count <= BATCH or len(packet) != _HEAD.size + count * _NUMBER.size:
        raise TransferFailed(f"a packet of {len(packet)} bytes asks for no regions")
    return Ask(generation, tuple(number for (number,) in _NUMBER.iter_unpack(packet[_HEAD.size :])))


def decode_answer(packet: bytes) -> Grant | Refuse:
    """An exporter's packet. Raises `TransferFailed` on anything else."""
    kind, count, generation = _head(packet)
    if kind == _REFUSE:
        return Refuse(generation, packet[_HEAD.size :].decode("utf-8", "replace"))
    if kind != _GRANT or not 0 < count <= BATCH or len(packet) != _HEAD.size + count * _RECORD.size:
        raise TransferFailed(f"a packet of {len(packet)} bytes grants nothing")
    return Grant(generation, tuple(_granted(*fields) for fields in _RECORD.iter_unpack(packet[_HEAD.size :])))


def _head(packet: bytes) -> tuple[int, int, int]:
    if len(packet) < _HEAD.size or packet[:4] != _MAGIC:
        raise TransferFailed(f"{len(packet)} bytes that begin with {packet[:4].hex()} speak another protocol")
    _, kind, count, generation = _HEAD.unpack_from(packet)
    return int(kind), int(count), int(generation)


def _granted(region: int, memory: int, nbytes: int, raw_uuid: bytes, handle: bytes) -> GrantedRegions:
    uuid = raw_uuid.rstrip(b"\0").decode("ascii", "replace")
    known = memory == HOST or (memory == CUDA and _UUID.match(uuid) is not None)
    if not known or not 0 < nbytes <= _MAX_BYTES:
        raise TransferFailed(f"region {region} of {nbytes} bytes, memory {memory} of {uuid!r}, is out of bounds")
    return (
        GrantedRegions(region, memory, nbytes, uuid, handle)
        if memory == CUDA
        else GrantedRegions(region, memory, nbytes)
    )


def send(sock: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Send a packet, with descriptors. Raises `PeerLost`."""
    try:
        if fds:
            socket.send_fds(sock, [packet], list(fds), socket.MSG_NOSIGNAL)
        else:
            sock.send(packet, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise PeerLost(f"the other end of the export socket is gone: {error}") from error


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and the descriptors that came with it, which are now the caller's. Raises `PeerLost`."""
    try:
        packet, fds, flags, _ = socket.recv_fds(sock, _MAX_PACKET, BATCH)
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerLost(f"the export socket broke: {error}") from error
    if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise PeerLost("the exporter closed its socket" if not packet else "a packet was longer than any we know")
    return packet, list(fds)
