"""A client of etcd's HTTP/JSON gateway, and the election of a leader among coordinators that share one etcd.

The gateway needs only the standard library; the Python clients that speak gRPC to etcd are no longer maintained. Every
call has one deadline for all members: if a member does not answer, the next one is tried. After `EtcdUnavailable` the
call may have been carried out, with its answer lost.

At most one leader can write. The leader is the coordinator that created the leader's key, which is attached to a lease.
The key's create revision is the token of the term: every write has the condition that the key still has it, so a former
leader that has not noticed yet changes nothing. A leader that cannot renew its lease in time stops by its own clock,
before etcd ends the lease.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import math
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from ..log import get_log
from ..protocol import ConfigurationError, WeightbusError

CONNECT_S: Final = 1.0
"""Longest wait for one member to accept a connection before the next one is tried."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
StoreLogin = Annotated[
    Path | None,
    Meta(description="file that holds USER:PASSWORD of the store, where etcd's access control is on; mode 0600"),
]


class EtcdUnavailable(WeightbusError):
    """No member answered in time. The call may have been carried out nevertheless."""

    def __init__(self, endpoints: Sequence[str], problem: str) -> None:
        self.problem = problem
        super().__init__(f"etcd at {', '.join(endpoints)}: {problem}; is it running, and has it a quorum?")


class StoreUrl(msgspec.Struct, frozen=True):
    """The address of an etcd that coordinators share."""

    members: tuple[str, ...]
    """``host:port`` each."""
    prefix: str


def parse_url(text: str) -> StoreUrl:
    """``etcd://host:port,host:port/prefix``. Raises `ConfigurationError`."""
    scheme, _, rest = text.partition("://")
    members, _, prefix = rest.partition("/")
    found = tuple(member for member in members.split(",") if member)
    if scheme != "etcd" or not found:
        raise ConfigurationError(f"store = {text!r} is not a store; write etcd://127.0.0.1:2379")
    for member in found:
        if "@" in member:
            raise ConfigurationError(
                "store names a user, and addresses are shown: write USER:PASSWORD into a file of mode 0600, and name"
                " that (store_login_file)"
            )
        host = urlsplit(f"//{member}").hostname
        if host not in _LOOPBACK:
            raise ConfigurationError(
                f"store = {text}: this speaks plain HTTP, so only to a member on its own host, which {host!r} is not."
                " Run a member beside every coordinator (members may use TLS among each other), and name 127.0.0.1"
            )
    return StoreUrl(found, prefix.strip("/") or "weightbus")


class Login(msgspec.Struct, frozen=True):
    """User and password for an etcd with access control."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.user})"


def read_login(path: Path | None) -> Login | None:
    """The login in a private file with ``USER:PASSWORD``; None for no file. Raises `ConfigurationError`."""
    if path is None:
        return None
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"store_login_file = {path} cannot be read: {problem}") from problem
    if mode & 0o077:
        raise ConfigurationError(f"store_login_file = {path}: others may read it (mode {mode:04o}); chmod 600 {path}")
    user, colon, password = text.partition(":")
    if not (user and colon and password) or "\n" in text:
        raise ConfigurationError(f"store_login_file = {path} does not hold one line USER:PASSWORD")
    return Login(user, password)


# -- messages of the gateway -------------------------------------------------------------------------------------------


class KeyValue(msgspec.Struct, frozen=True):
    """One stored key. The gateway writes numbers as text."""

    key: str
    value: str = ""
    create_revision: str = "0"
    mod_revision: str = "0"

    @property
    def name(self) -> str:
        """The key."""
        return base64.b64decode(self.key).decode()

    @property
    def content(self) -> bytes:
        """The value."""
        return base64.b64decode(self.value)


class _Header(msgspec.Struct, frozen=True):
    """The gateway leaves out what is zero or false, but no answer of etcd is without a header.

    So anything else that answers at a member's port is no member, and not a store without keys.
    """

    revision: str = "0"


class _Ranged(msgspec.Struct, frozen=True):
    kvs: tuple[KeyValue, ...] = ()


class _Found(_Ranged, frozen=True, kw_only=True):
    header: _Header


class _Response(msgspec.Struct, frozen=True):
    response_range: _Ranged | None = None


class _Committed(msgspec.Struct, frozen=True):
    header: _Header
    succeeded: bool = False
    responses: tuple[_Response, ...] = ()


class _Lease(msgspec.Struct, frozen=True):
    ID: str
    TTL: str = "0"


class _Revoked(msgspec.Struct, frozen=True):
    header: _Header


class _Session(msgspec.Struct, frozen=True):
    token: str


class _KeptAlive(msgspec.Struct, frozen=True):
    result: _Lease


class TxnResult(msgspec.Struct, frozen=True):
    """The result of a transaction."""

    succeeded: bool
    revision: int
    found: tuple[KeyValue, ...]
    """Keys found by its `read` operations."""


Json = dict[str, object]
T = TypeVar("T")


def created_at(key: str, revision: int) -> Json:
    """The condition that `key` was created at `revision`; 0: that it does not exist."""
    return {"key": _text(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def modified_at(key: str, revision: int) -> Json:
    """The condition that `key` was last written at `revision`; 0: that it does not exist."""
    return {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: str, value: bytes, lease: int = 0) -> Json:
    """The operation that writes `key`, for as long as `lease` lives."""
    return {"request_put": {"key": _text(key), "value": base64.b64encode(value).decode(), "lease": str(lease)}}


def delete(key: str) -> Json:
    """The operation that removes `key`."""
    return {"request_delete_range": {"key": _text(key)}}


def read(key: str) -> Json:
    """The operation that reads `key`."""
    return {"request_range": {"key": _text(key)}}


class Etcd:
    """A connection to one of the members. Threads may share it; calls are serialized."""

    def __init__(self, members: Sequence[str], deadline_s: float, login: Login | None = None) -> None:
        """`deadline_s` bounds every call, whatever the number of members."""
        self.members = tuple(members)
        self._login = login
        self._token = ""
        """Session token of the login. It ends after minutes without use, and with the member that issued it."""
        self._deadline_s = deadline_s
        self._place = 0
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    def txn(self, conditions: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json] = ()) -> TxnResult:
        """Carry out `then` if all `conditions` hold, otherwise `otherwise`; atomically."""
        body: Json = {"compare": list(conditions), "success": list(then), "failure": list(otherwise)}
        answer = self._call("/v3/kv/txn", body, _Committed)
        ranged = [each.response_range.kvs for each in answer.responses if each.response_range]
        return TxnResult(answer.succeeded, int(answer.header.revision), tuple(kv for kvs in ranged for kv in kvs))

    def under(self, prefix: str) -> tuple[KeyValue, ...]:
        """Every key that begins with `prefix`, as of the newest revision."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return self._call("/v3/kv/range", {"key": _text(prefix), "range_end": _text(end)}, _Found).kvs

    def grant(self, ttl_s: float) -> int:
        """A lease of whole seconds, rounded up; its keys are deleted unless it is kept alive."""
        return int(self._call("/v3/lease/grant", {"TTL": str(math.ceil(ttl_s))}, _Lease).ID)

    def keep_alive(self, lease: int) -> bool:
        """Renew the lease; False if it has ended."""
        return int(self._call("/v3/lease/keepalive", {"ID": str(lease)}, _KeptAlive).result.TTL) > 0

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys."""
        self._call("/v3/lease/revoke", {"ID": str(lease)}, _Revoked)

    def close(self) -> None:
        """Drop the connection."""
        with self._lock:
            self._drop()

    def _call(self, path: str, body: Json, kind: type[T]) -> T:
        data = msgspec.json.encode(body)
        until = time.monotonic() + self._deadline_s
        problem = "no time was left"
        with self._lock:
            for _ in range(2 * len(self.members)):  # twice for each member: a kept connection may have been closed
                if (left_s := until - time.monotonic()) <= 0:
                    break
                try:
                    return msgspec.json.decode(self._post(path, data, left_s), type=kind)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    problem = f"{self.members[self._place]}: {type(error).__name__}: {error}"
                    self._drop()
                    self._place = (self._place + 1) % len(self.members)
        raise EtcdUnavailable(self.members, problem)

    def _post(self, path: str, data: bytes, left_s: float) -> bytes:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.members[self._place], timeout=min(CONNECT_S, left_s))
            self._connection.connect()
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left_s)
        if self._login and not self._token:
            asked = {"name": self._login.user, "password": self._login.password}
            answer = self._exchange(self._connection, "/v3/auth/authenticate", msgspec.json.encode(asked))
            self._token = msgspec.json.decode(answer, type=_Session).token
        return self._exchange(self._connection, path, data)

    def _exchange(self, connection: http.client.HTTPConnection, path: str, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        connection.request("POST", path, data, headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"status {answer.status}: {content[:200].decode(errors='replace')}")
        return content

    def _drop(self) -> None:
        self._token = ""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _text(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


_log = get_log(__name__)

RENEWALS_PER_LEASE: Final = 4
"""Renewals within the time of a lease."""


class Deposed(WeightbusError):
    """This coordinator is not the leader any more."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this coordinator leads no more: {reason}; it stands by again")


class LeaderRecord(msgspec.Struct, frozen=True):
    """The content of the leader's key."""

    name: str = ""
    endpoint: str = ""
    """Endpoint for agents."""


class Term:
    """One coordinator's time as the leader."""

    def __init__(
        self,
        etcd: Etcd,
        key: str,
        *,
        token: int,
        lease: int,
        ttl_s: float,
        granted_at: float,
        clock: Callable[[], float],
    ) -> None:
        """`granted_at` is when the lease was requested: etcd counts from later, so this side never counts too long."""
        self.key = key
        self.token = token
        self.lost = ""
        """Why the term is over; empty while it is known to last."""
        self._etcd = etcd
        self._lease = lease
        self._ttl_s = ttl_s
        self._clock = clock
        self._until = granted_at + ttl_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leader-lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Raise `Deposed` unless the lease is known to last. Costs a look at the clock."""
        if not self.lost and self._clock() >= self._until:
            self.lost = "its lease could not be renewed in time"
        if self.lost:
            raise Deposed(self.lost)

    def depose(self, reason: str) -> None:
        """End the term because another coordinator leads."""
        self.lost = self.lost or reason

    def resign(self) -> None:
        """End the term and its lease, so that another coordinator can lead at once."""
        self._over.set()
        self._thread.join(self._ttl_s)
        if not self.lost:
            self.lost = "it resigned"
            if self._thread.is_alive():  # an etcd that does not answer would not answer this either
                _log.warning("lease_left", waited_s=self._ttl_s, reason="a renewal has not returned: it runs out")
                return
            with contextlib.suppress(EtcdUnavailable):  # the lease then runs out by itself
                self._etcd.revoke(self._lease)

    def _renew(self) -> None:
        while not self._over.wait(self._ttl_s / RENEWALS_PER_LEASE) and not self.lost:
            asked_at = self._clock()
            try:
                alive = self._etcd.keep_alive(self._lease)
            except EtcdUnavailable:
                continue  # tried again; `confirm` raises once the time is over
            if not alive:
                self.depose("its lease ran out")
                return
            self._until = asked_at + self._ttl_s


class Election:
    """A candidate for the leader's key under one prefix."""

    def __init__(
        self, etcd: Etcd, prefix: str, me: LeaderRecord, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._etcd = etcd
        self._key = f"{prefix}/leader"
        self._me = me
        self._ttl_s = ttl_s
        self._clock = clock

    def stand(self) -> Term | LeaderRecord:
        """Become the leader if there is none; otherwise return the leader's record. Raises `EtcdUnavailable`."""
        found = self._etcd.txn([created_at(self._key, 0)], [], [read(self._key)])
        if not found.succeeded:
            return _leader(found.found)
        asked_at = self._clock()
        lease = self._etcd.grant(self._ttl_s)
        value = msgspec.json.encode(self._me)
        won = self._etcd.txn([created_at(self._key, 0)], [put(self._key, value, lease)], [read(self._key)])
        if not won.succeeded:
            self._etcd.revoke(lease)
            return _leader(won.found)
        return Term(
            self._etcd,
            self._key,
            token=won.revision,
            lease=lease,
            ttl_s=self._ttl_s,
            granted_at=asked_at,
            clock=self._clock,
        )


def _leader(found: tuple[KeyValue, ...]) -> LeaderRecord:
    if not found:
        return LeaderRecord()
    try:
        return msgspec.json.decode(found[0].content, type=LeaderRecord)
    except ValueError:  # its writer leads all the same, until the key is gone
        return LeaderRecord(name="unknown: the leader's key is unreadable")
