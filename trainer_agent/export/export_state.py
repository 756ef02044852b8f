"""States of one rank's memory export, and the moves between them. Pure.

NEW --export--> EXPORTED <--export-- PREPARED <--prepare-- any open state
                 |    ^                |    ^
   begin digests |    | collect, drop  |    | collect, drop
                 v    |                v    |
      EXPORTED_DIGESTING <--export-- PREPARED_DIGESTING
"""

from __future__ import annotations

import enum
from typing import Final

from weightbus.control.protocol import IllegalMove


class ExportState(enum.Enum):
    """State of one rank's export. Each member says what is true while in it."""

    NEW = "new"
    """This rank has exported nothing yet."""
    PREPARED = "prepared"
    """The next version is prepared: a device may still write it, and the other ranks do not know of it.

    Memory of the version before stays readable under its own layout; engines must not read it any more.
    """
    PREPARED_DIGESTING = "prepared, digesting"
    """As PREPARED, and a device digests this rank's share of the version."""
    EXPORTED = "exported"
    """This rank has told the others how its memory is exported as of the current version. No digest runs."""
    EXPORTED_DIGESTING = "exported, digesting"
    """As EXPORTED, and a device digests this rank's share of the version."""
    CLOSED = "closed"
    """The memory is not exported any more."""

    @property
    def prepared(self) -> bool:
        """True while a prepared version waits for its export."""
        return self in {ExportState.PREPARED, ExportState.PREPARED_DIGESTING}

    @property
    def digesting(self) -> bool:
        """True while a device digests this rank's share."""
        return self in {ExportState.PREPARED_DIGESTING, ExportState.EXPORTED_DIGESTING}


class ExportMove(enum.Enum):
    """What changes the state."""

    PREPARE = "prepare"
    """Another version is prepared; digests that ran before are of no use."""
    EXPORT = "export"
    """The prepared version is exported as it is; digests that run go on."""
    EXPORT_ANEW = "export anew"
    """The memory is exported as it is now; what was prepared, and digests of it, are discarded."""
    BEGIN_DIGESTS = "begin digests"
    """A device begins to digest this rank's share."""
    END_DIGESTS = "end digests"
    """The digests were collected, or discarded because memory or layout changed."""
    CLOSE = "close"


_NEW, _PREPARED, _PREPARED_DIGESTING, _EXPORTED, _EXPORTED_DIGESTING, _CLOSED = ExportState
_OPEN: Final = frozenset(ExportState) - {_CLOSED}

MOVES: Final[dict[ExportMove, dict[ExportState, ExportState]]] = {
    ExportMove.PREPARE: dict.fromkeys(_OPEN, _PREPARED),
    ExportMove.EXPORT: {_PREPARED: _EXPORTED, _PREPARED_DIGESTING: _EXPORTED_DIGESTING},
    ExportMove.EXPORT_ANEW: dict.fromkeys(_OPEN, _EXPORTED),
    ExportMove.BEGIN_DIGESTS: {_PREPARED: _PREPARED_DIGESTING, _EXPORTED: _EXPORTED_DIGESTING},
    ExportMove.END_DIGESTS: {_PREPARED_DIGESTING: _PREPARED, _EXPORTED_DIGESTING: _EXPORTED},
    ExportMove.CLOSE: dict.fromkeys(ExportState, _CLOSED),
}
"""Legal moves: for each move, the state that follows each state in which it is allowed."""


def after(state: ExportState, move: ExportMove) -> ExportState:
    """State after `move`. Raises `IllegalMove` when `state` does not allow it."""
    following = MOVES[move].get(state)
    if following is None:
        raise IllegalMove("memory export", state.value, move.value)
    return following
