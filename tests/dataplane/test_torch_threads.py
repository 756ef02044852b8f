"""A program that ends while a thread of ours is inside of torch ends as it wanted to."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import threading
    from datetime import timedelta
    from torch._C._distributed_c10d import TCPStore
    from weightbus.dataplane import torch_threads

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = threading.Event()

    def wait():
        begun.set()
        try:
            store.wait(["never"], timedelta(seconds=1.0))
        except RuntimeError:
            print("came back", flush=True)

    torch_threads.start(wait, "in torch")
    begun.wait()
    """
)


def test_the_interpreter_waits_for_threads_that_are_in_torch() -> None:
    """A thread that came back too late would end the program with SIGABRT: "terminate called without ..."."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "came back\n"), done.stderr
