"""IPC handles travel between processes of one user, over a socket of that user, or not at all.

The tests of other users run as root and become `nobody` in a child; elsewhere they are skipped.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightbus.dataplane.errors import PeerLost, TransferFailed, Unsupported
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes.connections import Deadline, open_runtime_dir
from weightbus.dataplane.transports.interface import Peer, SharedBucket
from weightbus.dataplane.transports.local import shared_buckets as module
from weightbus.dataplane.transports.local.shared_buckets import (
    RECEIVER,
    Hello,
    LocalReceiver,
    LocalSender,
    connect,
)

from ...loopback import CHANNEL, LoopbackServer, Places, make_manifest, make_session, send_all

NOBODY = 65534
SESSION = make_session(3, 1, make_manifest())
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def sender(run: Path) -> Iterator[LocalSender]:
    made = LocalSender(run, "c")
    yield made
    made.close()


def as_nobody(action: Callable[[], object]) -> str:
    """What `action` raised in a child of another user; empty when it returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
            status = 0
        except BaseException as error:  # noqa: BLE001  told to the test
            os.write(writing, f"{type(error).__name__}: {error}".encode())
            traceback.print_exc(file=sys.stderr)
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert (status == 0) is (text == "")
    return text


def open_to_all(path: Path) -> None:
    """Undo every right that files have: what is left is the check of the peer itself."""
    for each in (path, *path.parents):
        if each != Path("/"):
            each.chmod(stat.S_IMODE(each.stat().st_mode) | 0o077)


def test_the_socket_is_its_owners_alone(sender: LocalSender, run: Path) -> None:
    """Folder 0700, socket 0600, both of this user."""
    path = Path(sender.offer(SESSION, [Peer("e0", 1)]).address)
    assert path.parent == run
    assert stat.S_IMODE(run.lstat().st_mode) == 0o700
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert path.lstat().st_uid == run.lstat().st_uid == os.getuid()


def test_a_folder_that_is_not_private_is_refused(run: Path, tmp_path: Path) -> None:
    """Rights of others, a link to somewhere else, something that is no folder, another owner."""
    run.mkdir(mode=0o700)
    open_runtime_dir(run)
    run.chmod(0o710)
    with pytest.raises(Unsupported, match="mode 710"):
        open_runtime_dir(run)
    run.chmod(0o700)
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(Unsupported, match="link"):
        open_runtime_dir(tmp_path / "link")
    if os.getuid() == 0:
        os.chown(run, NOBODY, NOBODY)
        with pytest.raises(Unsupported, match=f"user {NOBODY}"):
            open_runtime_dir(run)


def test_an_engine_speaks_to_no_socket_but_a_private_one(run: Path, tmp_path: Path) -> None:
    """The path came over the network: links, open folders, open sockets and other files are not connected to."""
    run.mkdir(mode=0o700)
    path = run / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        path.chmod(0o600)
        connect(os.fspath(path), Deadline(30)).close()
        (run / "link.sock").symlink_to(path)
        (run / "file").touch(0o600)
        (tmp_path / "linked").symlink_to(run)
        for wrong in (run / "link.sock", run / "file", tmp_path / "linked" / "s.sock", run / "none"):
            with pytest.raises(PeerLost, match="not one to be trusted"):
                connect(os.fspath(wrong), Deadline(30))
        path.chmod(0o666)
        with pytest.raises(PeerLost, match="mode 666"):
            connect(os.fspath(path), Deadline(30))
        path.chmod(0o600)
        run.chmod(0o755)
        with pytest.raises(PeerLost, match="mode 755"):
            connect(os.fspath(path), Deadline(30))


def hello(path: str, *, look: bool) -> None:
    """What an engine says first; `look` as our own receiver does, or not, as an attacker would."""
    if look:
        connect(path, Deadline(30)).close()
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(30)
        raw.connect(path)
        raw.send(RECEIVER.encode(Hello(channel="c", epoch=3, engine="e0")))


@needs_root
def test_another_user_does_not_reach_the_socket(sender: LocalSender) -> None:
    """The folder keeps it out; if that were opened, the socket's own rights do (S14)."""
    path = Path(sender.offer(SESSION, [Peer("e0", 1)]).address)
    assert "Permission" in as_nobody(lambda: hello(os.fspath(path), look=False))
    mode = path.lstat().st_mode
    open_to_all(path.parent)
    assert stat.S_IMODE(path.lstat().st_mode) == stat.S_IMODE(mode)
    assert "Permission" in as_nobody(lambda: hello(os.fspath(path), look=False))


@needs_root
def test_another_user_that_reaches_the_socket_is_not_let_in(sender: LocalSender) -> None:
    """With every right of the files given away, SO_PEERCRED still tells the sender who speaks (S14)."""
    path = Path(sender.offer(SESSION, [Peer("e0", 1)]).address)
    open_to_all(path)
    assert as_nobody(lambda: hello(os.fspath(path), look=False)) == ""
    with pytest.raises(TransferFailed, match="did not come"):
        sender.ready(0.3)


@needs_root
def test_an_engine_takes_nothing_from_another_user(run: Path) -> None:
    """A socket of somebody else, in a folder of ours or theirs, is not spoken to (S14)."""
    run.mkdir(mode=0o700)
    path = run / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        path.chmod(0o600)
        os.chown(path, NOBODY, NOBODY)
        receiver = LocalReceiver(run)
        with pytest.raises(PeerLost, match=f"user {NOBODY}"):
            receiver.receive(SESSION, type("A", (), {"address": os.fspath(path)})(), "e0", 0, LoopbackServer(), 5.0)  # type: ignore[arg-type]  # only its path is read
        receiver.shutdown()


@needs_root
def test_a_listener_of_another_user_is_found_out(run: Path) -> None:
    """Even behind a socket file of ours: who listens is asked of the kernel."""
    run.mkdir(mode=0o700)
    path = run / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        os.seteuid(NOBODY)
        try:
            listener.listen()  # from now on the kernel calls it nobody's
        finally:
            os.seteuid(0)
        with pytest.raises(PeerLost, match=f"user {NOBODY}"):
            connect(os.fspath(path), Deadline(30))


# What a sidecar asks of its server over the local transport, and how long it waits for it.


BUCKETS = 6
PATIENCE_S = 60.0
STILL_S = 0.5


class Stopped(LoopbackServer):
    """Its workers stand still from the second bucket on."""

    def load_shared(self, bucket: SharedBucket, deadline_s: float) -> None:
        """Answer nothing, as long as is waited for it."""
        if self.loads < 1:
            return super().load_shared(bucket, deadline_s)
        self.loads += 1
        time.sleep(deadline_s)
        raise TransferFailed(f"no answer in {deadline_s:.1f} s")


def test_a_server_that_stands_still_in_a_load_is_given_up_long_before_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines of a round stand still for it meanwhile. It is asked for nothing more, and the sender hears of it."""
    asked: list[int] = []
    monkeypatch.setattr(module, "bucket_timeout_s", lambda nbytes: (asked.append(nbytes), STILL_S)[1])
    session, places, server = make_session(1, 1, make_manifest(BUCKETS)), Places(tmp_path), Stopped()
    sender, receiver = places.sender("local"), places.receiver("local")
    pool = BucketBuffers("cpu", 2, session.manifest.largest_bucket, CHANNEL)
    address, began = sender.offer(session, [Peer("e0", 1)]), time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(receiver.receive, session, address, "e0", 0, server, PATIENCE_S)
        sender.ready(PATIENCE_S)
        with pytest.raises(TransferFailed):
            send_all(sender, session, pool, PATIENCE_S)
        assert "no answer in 0.5 s" in str(taken.exception(PATIENCE_S))
    assert STILL_S <= time.monotonic() - began < PATIENCE_S / 4
    assert server.loads == 2
    assert "no answer" in sender.failed["e0"]
    assert asked[0] == session.manifest.buckets[0].nbytes
    sender.close()
    receiver.shutdown()
    pool.close()
