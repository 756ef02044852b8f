"""Which moves a memory export allows in which state."""

from __future__ import annotations

import itertools

import pytest

from weightbus.control.protocol.errors import IllegalMove
from weightbus.trainer_agent.export.memory_export import MOVES, ExportMove, ExportState, after

ALL = tuple(itertools.product(ExportState, ExportMove))


@pytest.mark.parametrize(("state", "move"), [pair for pair in ALL if pair[0] not in MOVES[pair[1]]])
def test_an_illegal_move_raises(state: ExportState, move: ExportMove) -> None:
    """The error names the state and the move."""
    with pytest.raises(IllegalMove, match=f"memory export in state {state.value} does not take {move.value}"):
        after(state, move)


def test_digests_that_prepare_began_go_on_through_the_export() -> None:
    """They are collected after it, and no second time."""
    state = ExportState.NEW
    for move in (ExportMove.PREPARE, ExportMove.BEGIN_DIGESTS, ExportMove.EXPORT):
        state = after(state, move)
    assert state is ExportState.EXPORTED_DIGESTING
    assert after(state, ExportMove.END_DIGESTS) is ExportState.EXPORTED
    with pytest.raises(IllegalMove):
        after(ExportState.EXPORTED, ExportMove.END_DIGESTS)


@pytest.mark.parametrize("move", [ExportMove.PREPARE, ExportMove.EXPORT_ANEW])
def test_another_version_discards_digests_that_run(move: ExportMove) -> None:
    """They are of weights that may change now."""
    for state in set(ExportState) - {ExportState.CLOSED}:
        assert not after(state, move).digesting


def test_only_a_prepared_version_is_exported_as_it_was_prepared() -> None:
    """Everywhere else the memory has to be looked at again."""
    assert {state for state in ExportState if state.prepared} == set(MOVES[ExportMove.EXPORT])


def test_no_move_leaves_a_closed_export() -> None:
    """Closing it twice is allowed."""
    legal = [move for move in ExportMove if ExportState.CLOSED in MOVES[move]]
    assert legal == [ExportMove.CLOSE]
    assert after(ExportState.CLOSED, ExportMove.CLOSE) is ExportState.CLOSED
