"""What survives a restart: SQLite, or etcd with an election."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .etcd import (
        Deposed as Deposed,
        Election as Election,
        Etcd as Etcd,
        EtcdUnavailable as EtcdUnavailable,
        LeaderRecord as LeaderRecord,
        StoreLogin as StoreLogin,
        Term as Term,
        parse_url as parse_url,
        read_login as read_login,
    )
    from .etcd_journal import EtcdJournal as EtcdJournal
    from .interface import Journal as Journal
    from .sqlite_journal import SqliteJournal as SqliteJournal
    from .writer_thread import InlineWriter as InlineWriter, WriterThread as WriterThread
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
