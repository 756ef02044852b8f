"""The table of metrics in control/README.md is the declared one."""

from pathlib import Path

from weightbus.control.server.metrics import markdown_table

README = Path(__file__).parents[2] / "control/README.md"


def test_the_metrics_table_is_the_declared_one() -> None:
    """Names, labels and meanings are declared once; README repeats them to the letter."""
    text = README.read_text()
    begin, end = "<!-- metrics:begin -->", "<!-- metrics:end -->"

    assert text[text.index(begin) + len(begin) : text.index(end)].strip() == markdown_table().strip()
