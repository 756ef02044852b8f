"""`make test`: pytest, and a second look at what failed, so that one flaky test does not hide what thousands say.

At most `FEW` failures of a run that is whole otherwise are run once more, in a fresh process, one after the other. What
passes then is printed as FLAKY and counts as passed; whatever fails twice fails. Anything else that pytest ends with is
final: a file that cannot be collected, a test that killed its process, a test that never ran, an interruption, an error
of pytest itself.

    python -m tests.second_look [pytest's arguments]
"""

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import pytest

FEW = 3


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Look:
    """What one run of pytest came to, as its hooks tell it, those of the process that hands tests to others."""

    exit_code: int = pytest.ExitCode.INTERNAL_ERROR
    expected: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Every test was collected and ran to its end, and the worst that happened is that tests failed."""
        ended = self.exit_code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        return ended and not self.broken and bool(self.expected) and self.expected == self.finished

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.expected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report.nodeid)

    def pytest_internalerror(self) -> None:
        self.broken.append("pytest itself")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error:
            self.broken.append(f"{node}: {error}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.finished.add(nodeid)


def look(arguments: list[str]) -> Look:
    """Runs pytest in this process."""
    seen = Look()
    seen.exit_code = int(pytest.main(arguments, plugins=[seen]))
    return seen


def look_again(tests: list[str]) -> Look:
    """Runs `tests` in a fresh process, alone; raises BrokenProcessPool if that process dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(look, ["-p", "no:xdist", *tests]).result()


def verdict(first: Look, flaky: set[str]) -> Iterator[str]:
    """Both outcomes of every test that failed, then one closing line for the whole run."""
    for test in sorted(first.failed):
        yield f"{'FLAKY (failed, then passed)' if test in flaky else 'FAILED, and not passed alone either'}: {test}\n"
    if flaky:
        yield f"{len(flaky)} passed only the second time: each is a bug, please report it with its traceback above\n"
    passed = first.passed - first.failed | flaky
    yield f"{len(passed)} passed, {len(first.failed - flaky)} failed, {len(first.skipped - first.failed)} skipped\n"


def main(arguments: list[str]) -> int:
    """Returns the exit code of the first look, or 0 if it was not zero because of flaky tests alone."""
    first = look(arguments)
    if not first.whole or not 1 <= len(first.failed) <= FEW:
        return first.exit_code
    sys.stdout.write(f"\nA second look at what failed, alone ({len(first.failed)} of {len(first.expected)}):\n")
    sys.stdout.flush()
    second = look_again(sorted(first.failed))
    flaky = first.failed & (second.passed - second.failed) if second.whole else set[str]()
    sys.stdout.writelines(verdict(first, flaky))
    return 0 if flaky == first.failed else first.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
