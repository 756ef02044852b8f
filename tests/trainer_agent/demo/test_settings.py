"""What the demo may be told: nothing that it would not show."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from weightbus.control.cli.entry_point import main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mixed --transport disk", "transport = disk is one way for all engines, and mixed takes two"),
        ("--mixed --transport local", "transport = local is one way for all engines, and mixed takes two"),
        ("--mixed --sync off", "mixed shows two ways of what is published: leave sync on"),
        ("--mixed --asynchronous", "leave mixed off"),
        ("--asynchronous --transport sends", "take local"),
    ],
)
def test_what_would_be_ignored_is_refused(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    assert main(["demo", "--check-config", *flags.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ("", 'transport = "none"'),
        ("MIXED=1", "mixed = true"),
        ("MIXED=0", "mixed = false"),
        ("TRANSPORT=disk", 'transport = "disk"'),
        ("ASYNC=1", "asynchronous = true"),
        ("SYNC=off TRANSPORT=distributed ROUNDS=15 TRAINER=fsdp2", "rounds = 15"),
    ],
)
def test_what_make_says_is_taken(variables: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every demo that the documents name: make passes only what was asked for."""
    call = ["make", "-n", "-o", "env", "demo", *variables.split()]
    told = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    line = next(line for line in told.splitlines() if "weightbus demo" in line)
    words = shlex.split(line)
    assert main([*words[words.index("demo") :], "--check-config"]) == 0
    assert shown in capsys.readouterr().out
