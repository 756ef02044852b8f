"""What survives a restart: SQLite, or etcd with an election."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .election import Deposed as Deposed, Election as Election, LeaderRecord as LeaderRecord, Term as Term
    from .etcd_client import (
        Etcd as Etcd,
        EtcdUnavailable as EtcdUnavailable,
        StoreLogin as StoreLogin,
        parse_url as parse_url,
        read_login as read_login,
    )
    from .etcd_journal import EtcdJournal as EtcdJournal
    from .interface import Journal as Journal
    from .sqlite_journal import SqliteJournal as SqliteJournal
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
