"""control/README.md and the map of the folder say what the code says."""

import ast
import re
from pathlib import Path

from weightbus import control
from weightbus.control.server.metrics import markdown_table

README = Path(__file__).parents[2] / "control/README.md"


def test_the_metrics_table_is_the_declared_one() -> None:
    """Names, labels and meanings are declared once; README repeats them to the letter."""
    text = README.read_text()
    begin, end = "<!-- metrics:begin -->", "<!-- metrics:end -->"

    assert text[text.index(begin) + len(begin) : text.index(end)].strip() == markdown_table().strip()


def test_the_map_of_the_folder_names_every_module() -> None:
    """Whoever begins to read begins with it: what it leaves out is not found."""
    named = re.findall(r"\w+", control.__doc__ or "")
    modules = [path.stem for path in README.parent.glob("*.py") if not path.stem.startswith("__")]
    assert [name for name in sorted(modules) if name not in named] == []


def test_what_has_to_be_read_is_what_decides() -> None:
    """All that the coordinator's machine imports is in the order of reading, or named as left out; as long as said."""
    text = README.read_text()
    section = text[text.index("## Reading it") : text.index("## Metrics")]
    tables = [_steps(table) for table in section.split("| what it is made of |")]
    read = {name for steps in tables for names, _ in steps for name in names}
    left = set(re.findall(r"`(\w+)`", section[section.index("What can be left") :]))
    assert read | left == _imported("coordinator")
    assert not read & left
    said = re.findall(r"(?:read these|declarations,) (\d+)(?: modules and|,) ([\d,]+) lines", section)
    assert len(said) == len(tables) == 2
    for steps, (count, total) in zip(tables, said, strict=True):
        for names, lines in steps:
            assert abs(sum(map(_length, names)) - lines) < 0.05 * lines, names
        found = [name for names, _ in steps for name in names]
        assert int(count) == len(found)
        assert abs(sum(map(_length, found)) - _number(total)) < 0.02 * _number(total)


def _steps(table: str) -> list[tuple[list[str], int]]:
    """Its rows: modules, and the lines that they are said to have."""
    rows = re.findall(r"^\|.*\| (`.*`) \| ([\d,]+) \|$", table, re.MULTILINE)
    return [(re.findall(r"`(\w+)`", names), _number(lines)) for names, lines in rows]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _length(module: str) -> int:
    return len((README.parent / f"{module}.py").read_text().splitlines())


def _imported(module: str) -> set[str]:
    """`module`, and the modules of this folder that it imports, and so on."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for node in ast.walk(ast.parse((README.parent / f"{name}.py").read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 1:
                    waiting += [node.module] if node.module else [alias.name for alias in node.names]
    return found
