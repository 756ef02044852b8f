"""A coordinator among several: stands by, leads when it is elected, and stands by again when it is deposed."""

from __future__ import annotations

import socket
import threading
from typing import Final

import msgspec

from ..bus import ServerKeys
from ..journal import Deposed, Election, Etcd, EtcdJournal, LeaderRecord, Term, parse_url, read_login
from ..log import get_log
from ..protocol import JournalUnwritable
from ..security import keys_folder
from .coordinator_process import CoordinatorProcess
from .settings import CoordinatorSettings
from .standby import StandbyPorts, StandbyServer

DEADLINE: Final = 0.4
"""A call to the store may take this share of the leader's lease: a lost answer must not cost the lease."""


class CoordinatorCandidate:
    """`run` serves, in one role or the other, until `stop`."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._store = parse_url(settings.store)
        self._login = read_login(settings.store_login_file)
        self._settings = settings
        self._keys = None if settings.insecure_loopback else ServerKeys.read(keys_folder(settings.keys))
        self._log = get_log(__name__)
        self._name = settings.name or socket.gethostname()
        self._stop = threading.Event()
        self._acting: StandbyServer | CoordinatorProcess = StandbyServer(settings, self._keys)

    def run(self) -> None:
        """Stand by and lead by turns. Raises what broke either."""
        while not self._stop.is_set():
            standby = self._acting
            assert isinstance(standby, StandbyServer)
            etcd = self._connect()
            term = standby.run(self._election(etcd, standby.ports))
            if term is None:
                etcd.close()
                return
            settings = _at(self._settings, standby.ports)
            try:
                self._lead(settings, term)
            except (Deposed, JournalUnwritable) as problem:  # the latter: etcd went away between election and boot
                self._log.warning("deposed", reason=str(problem))
            finally:
                etcd.close()
            if not self._stop.is_set():
                self._acting = StandbyServer(settings, self._keys)

    def stop(self) -> None:
        """End `run`; from any thread or signal handler."""
        self._stop.set()
        self._acting.stop()

    def look_again(self) -> None:
        """Read the allow-list now. Safe in a signal handler."""
        if self._keys is not None:
            self._keys.trust.expire()

    def _lead(self, settings: CoordinatorSettings, term: Term) -> None:
        try:
            # a connection of its own: a slow write must not hold up the renewal of the lease
            journal = EtcdJournal(self._connect(), self._store.prefix, term)
            service = CoordinatorProcess(settings, journal)
        except BaseException:
            term.resign()
            raise
        self._acting = service
        if self._stop.is_set():  # it came while the service was built
            service.stop()
        service.run()

    def _connect(self) -> Etcd:
        return Etcd(self._store.members, self._settings.leader_s * DEADLINE, self._login)

    def _election(self, etcd: Etcd, ports: StandbyPorts) -> Election:
        host = f"[{self._settings.bind}]" if ":" in self._settings.bind else self._settings.bind
        endpoint = self._settings.advertise or f"tcp://{host}:{ports.router}"
        return Election(etcd, self._store.prefix, LeaderRecord(self._name, endpoint), self._settings.leader_s)


def _at(settings: CoordinatorSettings, ports: StandbyPorts) -> CoordinatorSettings:
    """The settings with the ports that were found: both roles answer at the same ones."""
    return msgspec.structs.replace(settings, router_port=ports.router, http_port=ports.http)
