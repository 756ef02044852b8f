"""control/README.md and the map of the folder say what the code says."""

import re
from pathlib import Path

from weightbus import control
from weightbus.control.telemetry import markdown_table

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
