"""The allow-list as a running process knows it: `AllowList` follows the file on a thread of its own.

Readers get the list that is in force and never wait for a disk. What a look at the file changes:

* a valid file replaces the list in force, and `trusted_again` is logged if no agent was trusted before;
* a missing file, or one that other users may write, is a decision: no agent is trusted (`AllowList.problem`);
* a file that cannot be read, or is invalid, says nothing: the list in force stands, the log and `AllowList.warning` say
  so, and the file is read again with every look until it can be used. An error, such as a lack of file descriptors, a
  hung disk or a slip of the editor, does not remove all agents.

A file that is edited in place counts once it has been at rest for a moment; one that was replaced, as by
``weightbus trust``, counts at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ..log import get_log
from ..machine import Principal
from ..protocol import AgentId, PeerKeyError
from .trust import AllowListDocument, AllowListEntry, AllowListUnusable, read_allow_list

RELOAD_S: Final = 0.1
"""Seconds between two looks at the file, and for which a file that is edited in place must be at rest."""
HUNG_S: Final = 1.0
"""Seconds after which a look counts as hung: `AllowList` waits no longer for it."""


class AllowList:
    """The list in force. Thread-safe. Raises nothing: errors are in `problem` and `warning`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, *, follow: bool = True) -> None:
        """Read the file. With `follow` a thread looks at it from now on; else `look` has to be called."""
        self.path = path
        self.problem = ""
        """Reason for which no agent is trusted; empty while a valid list is in force."""
        self._unusable = ""
        self._clock = clock
        self._trust = AllowListDocument()
        self._principals: Mapping[str, Principal] = {}
        self._taken: _Stamp = ()
        """Stamp of the file that is in force; empty before the first one, None for a missing file."""
        self._seen: _Stamp = ()
        self._seen_at = clock()
        """Time at which the file was first seen with the stamp `_seen`."""
        self._read_again = False
        self._looking_since: float | None = None
        self._hang_logged = False
        self._spare = _SpareDescriptor()
        self._looked = threading.Condition()
        self._wanted = threading.Event()
        self._asked = self._answered = 0
        self.look()
        self._follows = follow
        if follow:
            arguments = (weakref.ref(self), self._wanted)
            threading.Thread(target=_follow, args=arguments, name="allow-list", daemon=True).start()

    def principals(self, *, fresh: bool = False) -> Mapping[str, Principal]:
        """Trusted principals by CURVE key; the same object until the list changes.

        `fresh` waits for a look at the file, at most `HUNG_S`; without it nothing is waited for.
        """
        if fresh:
            self._await_look()
        elif not self._hang_logged and self._hung_s() > HUNG_S:
            self._hang_logged = True
            get_log(__name__).error("allow_list_not_in_force", reason=self.warning)
        return self._principals

    def agents(self) -> Mapping[AgentId, AllowListEntry]:
        """Entries by agent name, after a fresh look."""
        self._await_look()
        return self._trust.agents

    @property
    def warning(self) -> str:
        """Why the file as it is now is not in force; empty if it is."""
        if (hung_s := self._hung_s()) > HUNG_S:
            return f"{self.path} cannot be read, its disk has not answered for {hung_s:.0f} s; {_STANDS}"
        return self._unusable

    def expire(self) -> None:
        """Read the file at the next look, even if unchanged. Takes no lock: safe in a signal handler."""
        self._read_again = True

    def look(self) -> None:
        """Look at the file, and take what it says. Called by one thread at a time; may block as long as a disk does."""
        now = self._clock()
        self._looking_since = now
        try:
            with self._spare:
                self._look(now)
        except AllowListUnusable as error:
            self._stands(str(error))
        except OSError as error:
            self._stands(f"{self.path} cannot be looked at: {error.strerror}")
        finally:
            self._looking_since = None
            self._hang_logged = False

    def _look(self, now: float) -> None:
        stamp = _stamp(self.path)
        if stamp != self._seen:
            self._seen, self._seen_at = stamp, now
        if stamp == self._taken and not self._read_again:
            self._is_in_force()
            return
        if self._taken != () and _same_file(stamp, self._taken) and now < self._seen_at + RELOAD_S:
            return  # its writer may not be through
        try:
            trust, problem = read_allow_list(self.path), ""
        except AllowListUnusable:
            raise
        except PeerKeyError as error:
            trust, problem = AllowListDocument(), str(error)
        if _stamp(self.path) == stamp:  # else it was written meanwhile: the next look
            self._take(trust, problem)
            self._taken, self._read_again = stamp, False
            self._is_in_force()

    def _take(self, trust: AllowListDocument, problem: str) -> None:
        before, self.problem = self.problem, problem
        known, found = self._principals, trust.principals()
        kept = {key: known[key] for key, each in found.items() if known.get(key) == each}
        self._trust = trust
        self._principals = {**found, **kept}  # an unchanged principal stays the same object
        if problem and problem != before:
            get_log(__name__).error("nobody_is_trusted", reason=problem)
        elif before and not problem:
            get_log(__name__).info("trusted_again", agents=len(found))

    def _stands(self, reason: str) -> None:
        """The file cannot be used: the list in force stands. At the start there is none, and no agent is trusted."""
        if self._taken == ():
            if reason != self.problem:
                get_log(__name__).error("nobody_is_trusted", reason=reason)
            self.problem = reason
        elif (warning := f"{reason}; {_STANDS}") != self._unusable:
            self._unusable = warning
            get_log(__name__).error("allow_list_not_in_force", reason=warning)

    def _is_in_force(self) -> None:
        if self._unusable:
            self._unusable = ""
            get_log(__name__).info("allow_list_in_force", agents=len(self._principals))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _await_look(self) -> None:
        if not self._follows:
            self.look()
        elif self._hung_s() <= HUNG_S:
            with self._looked:
                self._asked += 1
                mine = self._asked
                self._wanted.set()
                self._looked.wait_for(lambda: self._answered >= mine, HUNG_S)

    def answer(self) -> None:
        """Look, and wake the callers that wait for it. Called by the thread."""
        asked = self._asked
        try:
            self.look()
        except Exception as error:  # noqa: BLE001  # the thread must live on: without it no change would be seen
            self._stands(f"{self.path} cannot be used: {error!r}")
        with self._looked:
            self._answered = asked
            self._looked.notify_all()

    def _hung_s(self) -> float:
        """Seconds for which the present look has not ended."""
        since = self._looking_since
        return 0.0 if since is None else self._clock() - since


_STANDS: Final = "the list that was read before stands"
_Stamp = tuple[int, ...] | None


def _follow(list_of: weakref.ref[AllowList], wanted: threading.Event) -> None:
    """Look at the file again and again, until the list is gone."""
    while True:
        wanted.wait(RELOAD_S)
        wanted.clear()
        followed = list_of()
        if followed is None:
            return
        followed.answer()
        del followed


def _stamp(path: Path) -> _Stamp:
    """Identity of the file's content by its metadata, the file itself first; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode)


def _same_file(stamp: _Stamp, before: _Stamp) -> bool:
    """Whether the file may be one that is being edited; a missing one may be about to be replaced."""
    return stamp is None or (before is not None and stamp[:2] == before[:2])


class _SpareDescriptor:
    """A file descriptor that is given back for as long as the file is read: it can be read if all others are in use."""

    def __init__(self) -> None:
        self._held = -1
        self._hold()

    def __enter__(self) -> None:
        self._release()

    def __exit__(self, *_: object) -> None:
        self._hold()

    def __del__(self) -> None:
        self._release()

    def _hold(self) -> None:
        with contextlib.suppress(OSError):  # the next time
            self._held = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _release(self) -> None:
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
