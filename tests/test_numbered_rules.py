"""PROTOCOL.md and SECURITY.md have numbered rules, which the docstrings of tests cite: "(G3)" or "(G3, F9)".

Guarantees (G), assumptions (A), notes (N) and faults (F) are PROTOCOL.md's; promises of security (S) are SECURITY.md's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from weightbus.control.machine.states import ENGINE_MOVES, ROUND_MOVES
from weightbus.engine_agent.machine.weight_state import MOVES

TESTS = Path(__file__).parent
PROTOCOL, SECURITY = (
    (TESTS.parent / page).read_text(encoding="utf-8") for page in ("control/protocol/PROTOCOL.md", "SECURITY.md")
)
_DEFINED = re.compile(r"^(?:\| |- )?\*\*([GANFS]\d+[a-g]?)\b", re.MULTILINE)
_NUMBER = re.compile(r"\b[GANFS]\d+[a-g]?\b")
_CITATION = re.compile(r"\((?:[GANFS]\d+[a-g]?(?:, )?)+\)")
DEFINED = _DEFINED.findall(PROTOCOL + SECURITY)


def citations() -> Iterator[tuple[str, str]]:
    """Test, and a number that its docstring cites in parentheses."""
    for file in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for citation in _CITATION.findall(ast.get_docstring(node) or ""):
                    for number in _NUMBER.findall(citation):
                        yield f"{file.relative_to(TESTS)}::{node.name}", number


def test_numbers_are_defined_once_and_in_order() -> None:
    """Every letter counts from 1 without a gap; of the faults, 1 and 7 have parts."""
    assert len(DEFINED) == len(set(DEFINED))
    for letter in "GANFS":
        found = [int(number[1:].rstrip("abcdefg")) for number in DEFINED if number[0] == letter]
        assert sorted(set(found)) == list(range(1, max(found) + 1)), letter
        assert found == sorted(found), letter


def test_every_number_that_is_cited_exists() -> None:
    """Neither a test nor PROTOCOL.md itself refers to a number that is not defined."""
    assert [(test, number) for test, number in citations() if number not in DEFINED] == []
    assert set(_NUMBER.findall(PROTOCOL)) - set(DEFINED) == set()


def test_every_guarantee_fault_and_promise_has_a_test() -> None:
    """Each is cited by the docstring of at least one test."""
    attacked = {number for number in DEFINED if number[0] in "GFS"}
    assert attacked - {number for _, number in citations()} == set()


def test_cells_of_tables_are_short() -> None:
    """A cell has at most two lines of text; longer text is a note with a number."""
    lines = [line for page in (PROTOCOL, SECURITY) for line in page.splitlines() if line.startswith("|")]
    assert [cell for line in lines for cell in line.strip("|").split("|") if len(cell.strip()) > 160] == []


@pytest.mark.parametrize("moves", [ROUND_MOVES, ENGINE_MOVES, MOVES], ids=["round", "engine", "weights"])
def test_diagrams_are_the_tables_that_the_code_obeys(moves: Mapping[Any, frozenset[Any]]) -> None:
    """A line of a diagram is a state with all states that may follow it, in the order of their enumeration."""
    lines = [
        f"    {source.name} --> {' & '.join(target.name for target in type(source) if target in targets)}"
        for source, targets in moves.items()
        if targets
    ]
    assert "\n".join(["```mermaid", "flowchart LR", *lines, "```"]) in PROTOCOL
