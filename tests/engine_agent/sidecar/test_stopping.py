"""SIGTERM ends a sidecar whatever it waits for, and says so."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang

NOBODY = "127.0.0.1:9"
"""The port of discard, where nothing listens."""
DEADLINE_S = 60.0


@contextmanager
def sidecar(state: Path, server: str) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory(prefix="wb-") as runtime:
        command = [
            sys.executable, "-m", "weightbus.control", "engine-agent", "--name", "e0", "--channel", "c",
            "--server", server, "--coordinator", f"tcp://{NOBODY}", "--insecure-loopback", "--http-port", "0",
            "--state-dir", os.fspath(state), "--runtime-dir", runtime,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def says(process: subprocess.Popen[str], word: str) -> None:
    """Read its log until `word` comes."""
    assert process.stdout is not None
    heard, until = "", time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while word not in heard:
            assert selector.select(until - time.monotonic()), f"it never said {word}: {heard}"
            line = os.read(process.stdout.fileno(), 65536).decode()
            assert line, f"it ended: {heard}"
            heard += line


def test_while_there_is_no_server(tmp_path: Path) -> None:
    """It waits ten minutes for one by default."""
    with sidecar(tmp_path, f"http://{NOBODY}") as process:
        says(process, "waiting_for_server")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_while_there_is_no_coordinator(tmp_path: Path) -> None:
    """The server is there, and the first word to a coordinator is not answered."""
    fake = FakeSGLang(tiny_model.write(tmp_path / "model", 1)).start()
    try:
        with sidecar(tmp_path / "state", fake.url) as process:
            says(process, "coordinator_unreachable")
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
    finally:
        fake.stop()
