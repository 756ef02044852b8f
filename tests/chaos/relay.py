"""A TCP relay as a process: `relay.py LISTEN CONTROL`, both ``host:port`` or a path. It forwards to where it is told.

The listening process is then not the server, as behind a service address, a forwarded port or a proxy. A line to the
unix socket CONTROL is obeyed and answered: ``to HOST PORT`` has later connections end there and cuts those that are
open; ``hold up``, ``hold down`` and ``hold up down`` stop what clients send, what they are sent, or both; ``pass`` lets
everything through again. What is held is not lost: it arrives late, as TCP has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CHUNK_BYTES = 1 << 16
START_S = 30.0


class Relay:
    """The side of the process."""

    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        for way in self._open.values():
            way.set()
        self._connections: set[asyncio.StreamWriter] = set()

    async def serve(self, listen: str, control: str) -> None:
        """Until killed."""
        host, _, port = listen.rpartition(":")
        await asyncio.start_server(self._accept, host, int(port))
        controls = await asyncio.start_unix_server(self._obey, control)
        await controls.serve_forever()

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        what, *words = (await reader.readline()).decode().split()
        if what == "to":
            self._target = words[0], int(words[1])
            for each in self._connections:
                each.transport.abort()
        for way, event in self._open.items():
            if what == "hold" and way in words:
                event.clear()
            elif what == "pass":
                event.set()
        writer.write(b"done\n")
        await writer.drain()
        writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        with contextlib.suppress(OSError, TypeError):  # nothing listens there, or no target was named yet
            there, back = await asyncio.open_connection(*(self._target or ()))
            ends.append(back)
            self._connections.update(ends)
            pumps = [asyncio.create_task(self._pump(*each)) for each in ((reader, back, "up"), (there, writer, "down"))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
        for end in ends:
            self._connections.discard(end)
            end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                await self._open[way].wait()
                sink.write(data)
                await sink.drain()


class RelayProcess:
    """A relay of the campaign. It listens at ``host:port``."""

    def __init__(self, listen: str, control: Path) -> None:
        argv = [sys.executable, __file__, listen, str(control)]
        self._control = str(control)
        self._process = subprocess.Popen(argv, start_new_session=True)
        until = time.monotonic() + START_S
        while not control.exists():
            if time.monotonic() > until or self._process.poll() is not None:
                raise TimeoutError(f"no relay at {listen} within {START_S:.0f} s")
            time.sleep(0.02)

    def say(self, *words: object) -> None:
        """One line; returns when it was obeyed."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(START_S)
            line.connect(self._control)
            line.sendall(" ".join(map(str, words)).encode() + b"\n")
            line.recv(10)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(10)


def main(argv: Sequence[str]) -> None:
    """Relay."""
    asyncio.run(Relay().serve(argv[0], argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
