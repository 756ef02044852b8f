"""PROTOCOL.md and the tests agree on its numbers: guarantees (G), assumptions (A) and notes (N)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]
PAGE = (TESTS.parent / "control" / "protocol" / "PROTOCOL.md").read_text(encoding="utf-8")
_DEFINED = re.compile(r"^\*\*([GAN]\d+)\b", re.MULTILINE)
_CITED = re.compile(r"\b[GAN]\d+\b")
_CITATION = re.compile(r"\((?:[GAN]\d+(?:, )?)+\)")


def citations() -> Iterator[tuple[str, str]]:
    """Test, and a number that its docstring cites in parentheses: "(G3)" or "(G3, N12)"."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for citation in _CITATION.findall(ast.get_docstring(node) or ""):
                    for number in _CITED.findall(citation):
                        yield f"{file.relative_to(TESTS)}::{node.name}", number


def test_numbers_are_defined_once_and_in_order() -> None:
    """Every letter counts from 1 without a gap."""
    defined = _DEFINED.findall(PAGE)
    for letter in "GAN":
        found = [int(number[1:]) for number in defined if number[0] == letter]
        assert found == list(range(1, len(found) + 1)), letter


def test_every_number_that_is_cited_exists() -> None:
    """Neither a test nor the page itself refers to a number that the page does not define."""
    defined = set(_DEFINED.findall(PAGE))
    assert [(test, number) for test, number in citations() if number not in defined] == []
    assert set(_CITED.findall(PAGE)) - defined == set()


def test_every_guarantee_has_a_test() -> None:
    """Each guarantee is cited by the docstring of at least one test."""
    guarantees = {number for number in _DEFINED.findall(PAGE) if number.startswith("G")}
    assert guarantees - {number for _, number in citations()} == set()


def test_cells_of_tables_are_short() -> None:
    """A cell has at most two lines of text; longer text is a note with a number."""
    cells = [cell.strip() for line in PAGE.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell) > 160] == []
