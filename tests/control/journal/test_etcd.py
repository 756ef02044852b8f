"""The client of etcd, against members that answer what no etcd does; and the election of a leader."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import cast

import pytest

from weightbus.control.journal.etcd import (
    Deposed,
    Election,
    Etcd,
    EtcdUnavailable,
    Json,
    KeyValue,
    LeaderRecord,
    Login,
    Term,
    TxnResult,
    parse_url,
    read_login,
)
from weightbus.control.protocol.errors import ConfigurationError


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as the base names it
        pass


@pytest.fixture
def member() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"status":"ok"}', b'{"header":{"revision":"1\xff"},"succeeded":true}', b"\xff"]
)
def test_what_no_etcd_answers_is_no_answer(member: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text or not: another process may listen at the port. No store is empty, and no term over, because it says so."""
    monkeypatch.setattr(_Handler, "content", content)
    with closing(Etcd((member,), 2.0)) as etcd:
        for call in (
            lambda: etcd.txn([], []),
            lambda: etcd.under("a/"),
            lambda: etcd.grant(1.0),
            lambda: etcd.keep_alive(7),
            lambda: etcd.revoke(7),
        ):
            with pytest.raises(EtcdUnavailable, match="is it running"):
                call()


def test_a_user_in_the_address_is_refused() -> None:
    """Addresses are shown by --check-config and logged; nor would it be used."""
    with pytest.raises(ConfigurationError, match="store_login_file") as refused:
        parse_url("etcd://root:secret@127.0.0.1:2379")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("root:secret", 0o644, "others may read it"),
        ("root:secret", 0o640, "others may read it"),
        ("root:secret", 0o604, "others may read it"),
        ("root", 0o600, "one line USER:PASSWORD"),
        (":secret", 0o600, "one line USER:PASSWORD"),
        ("root:secret\nmore", 0o600, "one line USER:PASSWORD"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_login_that_is_none_or_no_secret_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    """By name, and without what it holds."""
    path = tmp_path / "login"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_login(path)
    assert "secret" not in str(refused.value)


def test_a_login_is_read_and_its_password_not_shown(tmp_path: Path) -> None:
    """A password may hold colons."""
    path = tmp_path / "login"
    path.write_text("root:se:cret\n")
    path.chmod(0o600)
    assert read_login(path) == Login("root", "se:cret")
    assert "cret" not in repr(read_login(path))
    assert read_login(None) is None


DEADLINE_S = 60.0


class SlowStore:
    """An etcd whose lease calls take time, by the leader's clock, before they are answered."""

    def __init__(self, *, grant_s: float = 0.0, renewals_s: Sequence[float] = ()) -> None:
        """After `renewals_s` it answers no renewal any more."""
        self.now = 0.0
        self._grant_s, self._renewals_s = grant_s, list(renewals_s)
        self.unanswered = threading.Event()

    def txn(self, conditions: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json] = ()) -> TxnResult:
        del conditions, then, otherwise
        return TxnResult(succeeded=True, revision=1, found=())

    def grant(self, ttl_s: float) -> int:
        del ttl_s
        self.now += self._grant_s
        return 1

    def keep_alive(self, lease: int) -> bool:
        del lease
        if not self._renewals_s:
            self.unanswered.set()
            raise EtcdUnavailable(("one",), "no answer")
        self.now += self._renewals_s.pop(0)
        return True

    def revoke(self, lease: int) -> None:
        del lease

    def elect(self, ttl_s: float) -> Term:
        term = Election(cast("Etcd", self), "wb", LeaderRecord("c0", ""), ttl_s, lambda: self.now).stand()
        assert isinstance(term, Term)
        return term


class ScrawledStore:
    """An etcd with a leader's key that is no leader's record."""

    def __init__(self, written: bytes) -> None:
        self._written = base64.b64encode(written).decode()

    def txn(self, conditions: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json] = ()) -> TxnResult:
        del conditions, then, otherwise
        key = base64.b64encode(b"wb/leader").decode()
        return TxnResult(succeeded=False, revision=1, found=(KeyValue(key=key, value=self._written),))


@pytest.mark.parametrize("written", [b"me", b"\xff", b"[1]", b""])
def test_an_empty_leader_key_still_has_an_owner(written: bytes) -> None:
    """Standbys wait until it is gone, and say so; they do not end by it."""
    found = Election(cast("Etcd", ScrawledStore(written)), "wb", LeaderRecord("c0", ""), 5.0).stand()
    assert isinstance(found, LeaderRecord)
    assert "unreadable" in found.name


def lasts_until(term: Term, store: SlowStore, moment: float) -> None:
    """It does so up to then, and no longer."""
    store.now = moment - 0.01
    term.confirm()
    store.now = moment
    with pytest.raises(Deposed, match="not be renewed in time"):
        term.confirm()


def test_a_lease_counts_from_the_moment_it_was_asked_for() -> None:
    """However late the answer comes: another may be elected when etcd's time is over, not when ours is."""
    store = SlowStore(grant_s=50.0)
    term = store.elect(ttl_s=80.0)
    try:
        lasts_until(term, store, 80.0)
    finally:
        term.resign()


def test_a_renewal_that_does_not_return_keeps_no_leader_from_ending() -> None:
    """Nothing bounds how long a name is looked up. Its lease runs out, and it says nothing more to that etcd."""
    asked, released, revoked = threading.Event(), threading.Event(), list[int]()

    class Hanging(SlowStore):
        def keep_alive(self, lease: int) -> bool:
            asked.set()
            assert released.wait(DEADLINE_S)
            return super().keep_alive(lease)

        def revoke(self, lease: int) -> None:
            revoked.append(lease)

    term = Hanging().elect(ttl_s=0.4)
    assert asked.wait(DEADLINE_S)
    resigning = threading.Thread(target=term.resign, daemon=True)
    resigning.start()
    resigning.join(DEADLINE_S / 4)
    held = resigning.is_alive()
    released.set()
    assert not held
    assert term.lost == "it resigned"
    assert not revoked


def test_a_renewal_counts_from_the_moment_it_was_asked_for() -> None:
    """It adds nothing that etcd may not have granted."""
    store = SlowStore(renewals_s=(0.1, 0.15))
    term = store.elect(ttl_s=0.2)  # which is also how often it is renewed, in real time: four times as often
    try:
        assert store.unanswered.wait(DEADLINE_S)
        lasts_until(term, store, 0.1 + 0.2)
    finally:
        term.resign()
