"""Which life of a server this is."""

import subprocess
import sys

from weightbus.engine_agent.identity import listener, start_time

BUSY = """
import os, socket, threading
listening = socket.create_server(("127.0.0.1", 0))
def churn():
    while True:
        for each in [os.dup(0) for _ in range(50)]:
            os.close(each)
threading.Thread(target=churn, daemon=True).start()
print(listening.getsockname()[1], flush=True)
import sys; sys.stdin.read()
"""


def test_a_busy_server_is_not_taken_for_another() -> None:
    """It opens and closes files all the time, also while its own are looked at: the same process, every time.

    A server that is not recognised counts as launched anew: it would be paused until the next round.
    """
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        url = f"http://127.0.0.1:{int(busy.stdout.readline())}"
        found = {listener(url) for _ in range(30)}
        expected = (busy.pid, start_time(busy.pid))
        busy.kill()
    assert found == {expected}
