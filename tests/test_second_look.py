"""What `make test` makes of a folder of toy tests: flaky ones are told apart, and nothing else is turned green."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TWO_PROCESSES = ("--numprocesses", "2", "--dist", "loadfile")  # as in `make test`

GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): raise AssertionError('always')\n"
ONCE = """
from pathlib import Path
def test_once():
    mark = Path(__file__).with_suffix(".ran")
    ran = mark.exists()
    mark.touch()
    assert ran
"""
BROKEN_FIXTURE_ONCE = """
import pytest
from pathlib import Path
@pytest.fixture
def fixture():
    mark = Path(__file__).with_suffix(".ran")
    ran = mark.exists()
    mark.touch()
    assert ran
def test_prepared(fixture): pass
"""
SKIPS_THEN = """
import pytest
from pathlib import Path
def test_skips_then():
    mark = Path(__file__).with_suffix(".ran")
    if mark.exists():
        pytest.skip("says nothing")
    mark.touch()
    raise AssertionError
"""
DIES_ONCE = """
import os
from pathlib import Path
def test_dies_once():
    mark = Path(__file__).with_suffix(".ran")
    if not mark.exists():
        mark.touch()
        os._exit(1)
"""
DIES_THEN = """
import os
from pathlib import Path
def test_dies_then():
    mark = Path(__file__).with_suffix(".ran")
    if mark.exists():
        os._exit(0)
    mark.touch()
    raise AssertionError
"""
FOUR_ONCE = ONCE.replace(
    "def test_once():", "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_once(n):"
)
FOUR_ONCE = FOUR_ONCE.replace('".ran"', 'f".ran{n}"')


def judged(folder: Path, files: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the second look over toy tests."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "tests.second_look", "-p", "xdist", "-p", "pytest_timeout"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), TWO_PROCESSES], ids=["alone", "two processes"])
def test_what_passes_the_second_time_is_named_and_counts_as_passed(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A test that failed once, and one whose fixture did, are both printed as flaky; the run is green."""
    files = {"good": GOOD, "once": ONCE, "prepared": BROKEN_FIXTURE_ONCE}
    run = judged(tmp_path, files, *arguments)
    assert run.returncode == 0, run.stdout
    assert "FLAKY (failed, then passed): test_once.py::test_once" in run.stdout
    assert "FLAKY (failed, then passed): test_prepared.py::test_prepared" in run.stdout
    assert "2 passed only the second time" in run.stdout
    assert run.stdout.splitlines()[-1] == "3 passed, 0 failed, 0 skipped"


def test_tests_of_a_folder_with_a_conftest_get_one_too(tmp_path: Path) -> None:
    """As ours are: pytest sorts its plugins by folder then."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "conftest.py").write_text("")
    (inner / "test_once.py").write_text(ONCE)
    run = judged(tmp_path, {"good": GOOD}, *TWO_PROCESSES)
    assert run.returncode == 0, run.stdout
    assert "FLAKY (failed, then passed): inner/test_once.py::test_once" in run.stdout


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    """A failure that stays turns the run red, beside a flaky test, too."""
    run = judged(tmp_path, {"good": GOOD, "once": ONCE, "bad": BAD})
    assert run.returncode == 1, run.stdout
    assert "FLAKY (failed, then passed): test_once.py::test_once" in run.stdout
    assert "FAILED, and not passed alone either: test_bad.py::test_bad" in run.stdout
    assert run.stdout.splitlines()[-1] == "2 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("then", [SKIPS_THEN, DIES_THEN])
def test_only_a_test_that_passes_is_flaky(tmp_path: Path, then: str) -> None:
    """A test that is skipped the second time, or ends its process, has not passed."""
    run = judged(tmp_path, {"good": GOOD, "then": then})
    assert run.returncode != 0, run.stdout
    assert "FLAKY" not in run.stdout


@pytest.mark.parametrize(
    ("files", "arguments"),
    [
        pytest.param({"good": GOOD, "four": FOUR_ONCE}, (), id="four failures"),
        pytest.param({"once": ONCE, "unreadable": "import nothing_of_this_name\n"}, TWO_PROCESSES, id="collection"),
        pytest.param(
            {"once": ONCE, "unreadable": "import nothing_of_this_name\n"},
            (*TWO_PROCESSES, "--continue-on-collection-errors"),
            id="collection, and the rest is run",
        ),
        pytest.param({"good": GOOD, "dies": DIES_ONCE}, TWO_PROCESSES, id="a test that kills its process"),
        pytest.param({"a_once": ONCE, "b_good": GOOD}, ("-x",), id="tests that never ran"),
        pytest.param({"once": ONCE}, ("--no-such-option",), id="usage"),
        pytest.param({}, (), id="no tests"),
    ],
)
def test_nothing_else_gets_a_second_look(tmp_path: Path, files: Mapping[str, str], arguments: tuple[str, ...]) -> None:
    """More failures than a few, and whatever leaves open what a test would have said, are red at once."""
    run = judged(tmp_path, files, *arguments)
    assert run.returncode != 0, run.stdout
    assert "second look" not in run.stdout


ENDS_BADLY = """
from pathlib import Path
def pytest_sessionfinish(session):
    mark = Path(__file__).with_suffix(".ran")
    if mark.exists() == {second}:
        session.exitstatus = 3
    mark.touch()
"""


@pytest.mark.parametrize("second", [False, True])
def test_an_error_of_pytest_itself_is_red_in_either_look(tmp_path: Path, second: bool) -> None:
    """What the tests said counts for nothing if pytest says that it failed."""
    (tmp_path / "conftest.py").write_text(ENDS_BADLY.format(second=second))
    run = judged(tmp_path, {"once": ONCE})
    assert run.returncode != 0, run.stdout
    assert ("second look" in run.stdout) == second
    assert "FLAKY" not in run.stdout


def test_a_session_out_of_time_gets_no_second_look(tmp_path: Path) -> None:
    """The end of the whole run's time leaves tests unrun: the few that failed until then say little."""
    run = judged(tmp_path, {"a_once": ONCE, "b_good": GOOD}, "--session-timeout", "0.000001")
    assert run.returncode != 0, run.stdout
    assert "second look" not in run.stdout
