"""A server of HTTP that answers a byte at a time, or without an end: every single read of it is in time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

STEP_S = 0.05


@contextlib.contextmanager
def trickling(answer: bytes = b"", *, then: bytes = b"x", step_s: float = STEP_S) -> Iterator[str]:
    """Its address. `answer` is sent at once, `then` again and again, every `step_s`."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):  # the client has gone
                connection.settimeout(0.5)
                connection.recv(1 << 16)
                connection.sendall(answer)
                while not over.wait(step_s):
                    connection.sendall(then)

        def listen() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    each = threading.Thread(target=serve, args=(connection,))
                    each.start()
                    threads.append(each)

        threads = [threading.Thread(target=listen)]
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            for each in threads:
                each.join(10.0)
