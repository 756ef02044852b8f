"""The pins, the command and the Makefile agree with pyproject.toml and with each other."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PARTS = ("base", "dev", "engine-cpu", "trainer")


def canonical(requirement: str) -> str:
    """The name in a requirement line, as indexes compare names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def lines(name: str) -> list[str]:
    """The requirement lines of a file under requirements/."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("part", PARTS)
def test_everything_asked_for_is_pinned(part: str) -> None:
    """An installation today and in a year gets the same versions."""
    pinned = {canonical(line) for line in lines("constraints")}
    assert [line for line in lines(part) if canonical(line) not in pinned] == []


def test_pins_are_exact() -> None:
    """A constraint names one version for each Python."""
    assert [line for line in lines("constraints") + lines("engine-cpu-bare") if "==" not in line] == []


def test_base_requirements_are_the_distributions_own() -> None:
    """The pinned environment and the wheel need the same."""
    assert {canonical(each) for each in PROJECT["dependencies"]} == {canonical(line) for line in lines("base")}


def test_extras_are_covered_by_the_environment() -> None:
    """What an extra of the wheel asks for is installed where it is tested. Tests of nixl are skipped without it."""
    installed = {canonical(line) for part in PARTS for line in lines(part)}
    extras = PROJECT["optional-dependencies"]
    wanted = {canonical(each) for extra in extras.values() for each in extra} - {"weightbus", "nixl"}
    assert wanted <= installed


def test_every_command_is_found_without_torch() -> None:
    """`weightbus NAME` finds an object with help, configure and run for every name in pyproject.toml.

    Listing or configuring commands costs no import of torch: the coordinator's machine has none.
    """
    script = (
        "import argparse, importlib, sys\n"
        "for target in sys.argv[1:]:\n"
        "    module, _, name = target.partition(':')\n"
        "    command = getattr(importlib.import_module(module), name)\n"
        "    assert command.help and callable(command.run), target\n"
        "    command.configure(argparse.ArgumentParser())\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'torch was imported'\n"
    )
    targets = list(PROJECT["entry-points"]["weightbus.commands"].values())
    result = subprocess.run(
        [sys.executable, "-c", script, *targets], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


def test_make_lists_every_target() -> None:
    """`make` alone tells a stranger what there is."""
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    for target in " ".join(phony).split():
        assert f"make {target} " in listed, target


def test_a_missing_python_is_explained() -> None:
    """Without a usable Python the first command says what is needed, and installs nothing."""
    find = ROOT / "requirements" / "find-python"
    result = subprocess.run(
        [find],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/nonexistent/python"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert "expected Python 3.11" in result.stderr
