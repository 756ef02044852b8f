"""A real etcd of one member for tests, on free ports of the loopback, and what is asked of it beside."""

from __future__ import annotations

import base64
import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from weightbus.control.journal.etcd import Etcd, EtcdUnavailable, Login

from .leashed import leashed
from .ports import free_port
from .waiting import stands_still, until

BINARY = shutil.which("etcd")
MISSING = "there is no etcd here (Debian: apt-get install etcd-server)"


class EtcdMember:
    """One process, which ends with this one. Its data outlives `kill` and `start`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._peers = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """As clients name it."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert BINARY
        here, peers = f"http://{self.address}", f"http://127.0.0.1:{self._peers}"
        argv = [BINARY, "--name=one", f"--data-dir={self.folder / 'etcd'}", "--logger=zap", "--log-level=error"]
        argv += [f"--listen-client-urls={here}", f"--advertise-client-urls={here}"]
        argv += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        argv += [f"--initial-cluster=one={peers}"]
        log = (self.folder / "etcd.log").open("ab")
        with log:
            self._process = subprocess.Popen(leashed(argv), stdout=log, stderr=log, start_new_session=True)
        etcd, until = Etcd((self.address,), 1.0), time.monotonic() + 30
        with contextlib.closing(etcd):
            while True:
                with contextlib.suppress(EtcdUnavailable):
                    etcd.txn([], [])
                    return
                assert time.monotonic() < until, (self.folder / "etcd.log").read_text()
                assert self._process.poll() is None, (self.folder / "etcd.log").read_text()
                time.sleep(0.05)

    def signal(self, number: int) -> None:
        """SIGSTOP, SIGCONT, ... Returns when it stands still, if it is to."""
        assert self._process
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            until(partial(stands_still, self._process.pid), "a process that was stopped")

    def lock(self, login: Login, begin: str, end: str) -> None:
        """Turn access control on: `login` may read and write keys from `begin` to before `end`, and nobody else may."""

        def text(key: str) -> str:
            return base64.b64encode(key.encode()).decode()

        owner, role = Login("root", "of this test"), f"of-{login.user}"
        perm = {"permType": "READWRITE", "key": text(begin), "range_end": text(end)}
        asked: list[tuple[str, dict[str, object]]] = [
            ("user/add", {"name": each.user, "password": each.password}) for each in (owner, login)
        ]
        asked += [("role/add", {"name": "root"}), ("user/grant", {"user": "root", "role": "root"})]
        asked += [("role/add", {"name": role}), ("role/grant", {"name": role, "perm": perm})]
        asked += [("user/grant", {"user": login.user, "role": role}), ("enable", {})]
        with contextlib.closing(Etcd((self.address,), 10.0)) as etcd:
            for path, body in asked:
                etcd._call(f"/v3/auth/{path}", body, dict[str, object])

    def kill(self) -> None:
        """End it at once."""
        if self._process:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(10)
            self._process = None


@contextlib.contextmanager
def etcd_member(folder: Path) -> Iterator[EtcdMember]:
    """A running member, ended afterwards."""
    member = EtcdMember(folder)
    member.start()
    try:
        yield member
    finally:
        member.kill()


@contextlib.contextmanager
def quick_etcd_member() -> Iterator[EtcdMember]:
    """The same in memory where the machine has a folder for that: a busy disk holds every write for seconds."""
    memory = Path("/dev/shm")
    within = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    with within as folder, etcd_member(Path(folder)) as member:
        yield member
