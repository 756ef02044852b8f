"""ARCHITECTURE.md's path of a version is the one that a real round takes."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from .round_trace import ROOT, modules, trace

_STEP = re.compile(r"^\| ([a-z0-9, ]+) \| `([\w.]+:[\w.]+)` \|", re.MULTILINE)
_NAME = re.compile(r"`([\w.]+:[\w.]+)`")
PROCESSES = {"rank 0": "trainer-0", "other ranks": "trainer-1"}


def section(title: str) -> str:
    """The text of one section of ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.real
@pytest.mark.timeout(600)
def test_a_steady_round_calls_the_functions_that_the_page_names() -> None:
    """Each process calls its functions of the table; those of a weight are called over `local` or `direct`."""
    with tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp") as folder:  # names of sockets are short
        found = {transport: trace(transport, Path(folder, transport)) for transport in ("local", "direct")}
    calls = {name: {each.removeprefix("weightbus.") for each in called} for name, called in found["local"].items()}
    steps = _STEP.findall(section("The path of a version"))
    assert len(steps) > 10
    for processes, function in steps:
        for process in processes.split(", "):
            assert function in calls[PROCESSES.get(process, process)], f"{process} does not call {function}"
    called = {
        each.removeprefix("weightbus.") for programs in found.values() for all_ in programs.values() for each in all_
    }
    assert not [name for name in _NAME.findall(section("The path of a weight")) if name not in called]


def test_modules_are_counted_once() -> None:
    """A module of which several functions are called is one module."""
    assert modules(["weightbus.a.b:f", "weightbus.a.b:C.g", "weightbus.a:h"]) == ["a", "a.b"]
