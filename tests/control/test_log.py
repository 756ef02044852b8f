"""Log levels: our commands log what they asked for, a program that imports the package what it asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

TALK = """
from weightbus.control.log import get_log
log = get_log("weightbus.trainer_agent.publish.driver").bind(channel="policy")
log.debug("publication_state", state="idle")
log.info("lease_granted", epoch=3)
log.warning("coordinator_back", boot=2)
try:
    raise ValueError("what was wrong")
except ValueError:
    log.exception("rank_failed")
"""
STDLIB = "import logging; logging.basicConfig(level=20, format='%(levelname)s %(name)s %(funcName)s %(message)s')"
STRUCTLOG = """
import structlog
structlog.configure(
    processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer(sort_keys=True)],
    wrapper_class=structlog.make_filtering_bound_logger(20),
)
"""
OURS = "from weightbus.control.server.metrics import configure_logging; configure_logging('debug', 'json')"


def said(before: str, program: str = TALK) -> tuple[list[str], list[str]]:
    """Lines on standard output and on standard error of a program of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{program}"], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_a_program_that_configured_nothing_hears_warnings_only() -> None:
    """On standard error, as of any library; nothing on standard output, which is the program's own."""
    out, err = said("")
    assert out == []
    assert err[0] == "coordinator_back channel='policy' boot=2"
    assert err[1] == "rank_failed channel='policy'"
    assert err[-1] == "ValueError: what was wrong"
    assert not [line for line in err if "publication_state" in line or "lease_granted" in line]


def test_a_program_with_logging_gets_our_events_there() -> None:
    """Under the module's name, at its levels, with the line of whoever spoke."""
    out, err = said(STDLIB)
    assert out == []
    assert err[:2] == [
        "INFO weightbus.trainer_agent.publish.driver <module> lease_granted channel='policy' epoch=3",
        "WARNING weightbus.trainer_agent.publish.driver <module> coordinator_back channel='policy' boot=2",
    ]
    assert "publication_state" not in "".join(err)


def test_a_program_with_structlog_gets_our_events_there() -> None:
    """In its own pipeline, with the bound fields."""
    out, _ = said(STRUCTLOG)
    assert out[0] == '{"channel": "policy", "epoch": 3, "event": "lease_granted", "level": "info"}'
    assert len(out) == 3


@pytest.mark.parametrize("level", ["debug", "info"])
def test_our_commands_log_what_they_are_told_to(level: str) -> None:
    """On standard error, from their level on; also for a log that was made before."""
    first = "from weightbus.control.log import get_log; log = get_log('x')"
    out, err = said(f"{first}; {OURS.replace('debug', level)}", "log.debug('state'); log.info('joined')")
    assert out == []
    assert len(err) == (2 if level == "debug" else 1)


def test_importing_us_configures_nothing() -> None:
    """What the host has, or has not, stays as it is."""
    imports = "import weightbus.trainer_agent, weightbus.engine_agent.sidecar.driver, logging, structlog"
    out, err = said(imports, "print(structlog.is_configured(), logging.getLogger().handlers)")
    assert (out, err) == (["False []"], [])
