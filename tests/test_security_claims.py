"""SECURITY.md promises nothing that no test shows."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    """A promise whose test was renamed or removed is found here."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) > 30
    for file, name in named:
        path = ROOT / file
        assert path.is_file(), file
        if name:
            functions = {
                node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
            }
            assert name in functions, f"{file}::{name}"


def test_every_promise_names_a_test() -> None:
    """Each row of the table of promises ends with at least one."""
    table = TEXT.split("| promise | test |", 1)[1].split("\n\n", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row.rsplit("|", 2)[1]] == []
