"""A coordinator among several: what it does with a term that it cannot use."""

from __future__ import annotations

from typing import ClassVar

import pytest

from weightbus.control.protocol.errors import JournalUnwritable
from weightbus.control.server import candidate as module
from weightbus.control.server.candidate import CoordinatorCandidate
from weightbus.control.server.settings import CoordinatorSettings
from weightbus.control.server.standby import StandbyPorts


class Term:
    """One that was won."""

    def __init__(self) -> None:
        self.resigned = 0

    def resign(self) -> None:
        self.resigned += 1


class Standby:
    """Is elected once, and told to stop the next time."""

    ports = StandbyPorts(router=1, http=2)
    terms: ClassVar[list[Term | None]]

    def __init__(self, *_given: object) -> None:
        pass

    def run(self, _election: object) -> Term | None:
        return self.terms.pop(0)


def _cannot(*_given: object) -> None:
    raise JournalUnwritable("etcd://x", "no answer", "writing is tried again by itself")


@pytest.mark.parametrize("fails", ["EtcdJournal", "CoordinatorProcess"])
def test_who_is_elected_and_cannot_lead_lets_another(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store went away between election and boot: the term is given back at once, and the next one is stood for.

    A term that is kept is renewed by its own thread, and nobody would lead for as long as this process lives.
    """
    term = Term()
    Standby.terms = [term, None]
    monkeypatch.setattr(module, "StandbyServer", Standby)
    monkeypatch.setattr(module, "EtcdJournal", lambda *_given: None)
    monkeypatch.setattr(module, fails, _cannot)
    monkeypatch.setattr(CoordinatorCandidate, "_election", lambda *_given: None)
    settings = CoordinatorSettings(insecure_loopback=True, store="etcd://127.0.0.1:1/x")
    CoordinatorCandidate(settings).run()
    assert term.resigned == 1
    assert Standby.terms == [], "it stood by again"
