"""What agents and servers say is text: on a terminal it is neither markup nor a command, whatever it is."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import example, given, strategies as st
from rich.console import Console, RenderableType

from weightbus.control.cli import commands, entry_point as cli, plan_command, status_view
from weightbus.control.log import get_log
from weightbus.control.machine import status
from weightbus.control.protocol.errors import WeightbusError
from weightbus.control.protocol.messages import AgentId, Role, TransportKind
from weightbus.control.security.trust import ALLOW_LIST_FILE, AllowListEntry, edit_allow_list
from weightbus.control.server.metrics import configure_logging
from weightbus.control.server.transport_plan import ChannelPlan, EnginePlan, FasterTransport, PlanView, TrainerPlan
from weightbus.control.terminal_text import terminal_safe

HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "a[/x] [red]b[/red] :x: \x1b[2J\x9b8m\x7f\r\n\t\u202e"
SHOWN = r"a[/x] [red]b[/red] :x: \x1b[2J\x9b8m\x7f\r\n\t\u202e"

anything = st.text(st.one_of(st.characters(), st.sampled_from("[]/\\:\x1b\x7f\x9b\r\n\u2028\u202e\udc80")))
"""What JSON may hold, and what a file name may."""


def status_of(text: str) -> RenderableType:
    """A status in which every free text is `text`."""
    lease = {"holder": text, "epoch": 1, "version": 1, "remaining_s": 1.0}
    engine = {
        "url": text,
        "state": text,
        "version": None,
        "lag": 0,
        "ready": False,
        "reason": text,
        "last_seen_s": None,
        "incarnation": text,
        "server_version": text,
        "tp": 1,
        "pp": 1,
        "dp": 1,
        "device": text,
        "transports": (),
    }
    channel = {
        "epoch": 1,
        "committed": None,
        "lease": lease,
        "round": {"state": "idle"},
        "engines": {text: engine},
        "ready": (),
    }
    document = {"boot": 1, "read_only": False, "stopping": False, "agents": 1, "blob_bytes": 0}
    return status_view.render(msgspec.convert({**document, "channels": {text: channel}}, status.StatusView))


def plan_of(text: str, *, explain: bool) -> RenderableType:
    """A plan in which every free text is `text`."""
    engine = EnginePlan(
        transport=TransportKind.LOCAL,
        why=text,
        bytes_per_gpu=1,
        bytes_why=text,
        host=text,
        devices=(text,),
        faster=(FasterTransport(TransportKind.DIRECT, text, text),),
    )
    trainer = TrainerPlan(
        name=text,
        here=True,
        device=text,
        hosts=(text,),
        devices=(text,),
        address=text,
        transports=(),
        version=1,
        bytes=1,
    )
    found = ChannelPlan(trainer=trainer, engines={text: engine})
    return plan_command.render_plan(PlanView({text: found}), explain=explain)


class Odd:
    """Of a library that quotes others in its representation."""

    def __repr__(self) -> str:
        return HOSTILE


def explode() -> None:
    """As a call to a server does."""
    raise ValueError(HOSTILE)


VIEWS: dict[str, Callable[[str], RenderableType]] = {
    "status": status_of,
    "plan": lambda text: plan_of(text, explain=False),
    "plan --explain": lambda text: plan_of(text, explain=True),
}


def shown(what: RenderableType) -> str:
    """What a terminal gets, but for our own styles."""
    console = Console(width=20_000, file=(file := io.StringIO()), force_terminal=True, color_system="standard")
    console.print(what)
    return file.getvalue()


@pytest.fixture
def _logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logging.basicConfig(force=True)


@given(anything)
@example(HOSTILE)
def test_a_stand_in_can_be_seen(text: str) -> None:
    """Nothing is left that a terminal obeys, nothing else changes, and doing it twice changes nothing."""
    made = terminal_safe(text)
    assert not HIDDEN.search(made)
    assert terminal_safe(made) == made
    assert made == text or HIDDEN.search(text)
    assert terminal_safe(text, lines=True) == "\n".join(map(terminal_safe, text.split("\n")))


@pytest.mark.parametrize("view", VIEWS)
@given(text=anything)
@example(text="[/x]")
@example(text=HOSTILE)
def test_any_text_of_an_agent_is_shown(view: str, text: str) -> None:
    """Without an error, without a control character, and with every bracket of it."""
    made = shown(VIEWS[view](text))
    assert not HIDDEN.search(STYLES.sub("", made).replace("\n", ""))
    assert STYLES.sub("", made).count("[") >= text.count("[")


@pytest.mark.parametrize("view", VIEWS)
def test_it_reads_as_it_was_written(view: str) -> None:
    """In cells, titles and reasons: brackets, what looks like an emoji, and stand-ins."""
    made = " ".join(STYLES.sub("", shown(VIEWS[view](HOSTILE))).split())  # a title is wrapped
    assert made.count(SHOWN) >= {"status": 7, "plan": 4, "plan --explain": 9}[view]


@pytest.mark.usefixtures("_logs_as_before")
@pytest.mark.parametrize("value", [HOSTILE, [HOSTILE], Exception(HOSTILE), Odd()])
def test_the_log_for_people_obeys_no_escape_sequence(capsys: pytest.CaptureFixture[str], value: object) -> None:
    """Values, events, what exceptions say, and lines of libraries."""
    configure_logging("info", "human")
    log = get_log("x")
    log.warning("engine_failed", reason=value)
    log.warning(HOSTILE)
    try:
        explode()
    except ValueError:
        log.exception("surprised")
        logging.getLogger("library").exception("said %s", HOSTILE)
    told = capsys.readouterr().err
    assert not HIDDEN.search(STYLES.sub("", told).replace("\n", ""))
    assert "\x1b[2J" not in told
    assert STYLES.sub("", told).count(r"[red]b[/red] :x: \x1b[2J") >= 5


@pytest.mark.usefixtures("_logs_as_before")
def test_the_log_for_programs_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """They get what was said."""
    configure_logging("info", "json")
    get_log("x").warning("engine_failed", reason=HOSTILE)
    assert msgspec.json.decode(capsys.readouterr().err)["reason"] == HOSTILE


@pytest.mark.usefixtures("_logs_as_before")
def test_harmless_values_look_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    """What is quoted and what is not."""
    configure_logging("info", "human")
    get_log("x").info("joined", bare="x", words="two words", path=Path("/a b"), count=3, held=None, all=["a", "b c"])
    told = STYLES.sub("", capsys.readouterr().err)
    assert "all=['a', 'b c'] bare=x count=3 held=None path=PosixPath('/a b') words='two words'" in told


def test_errors_of_the_command_line_obey_no_escape_sequence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a coordinator or a server answered may be in them: in the line, and in the traceback."""

    def fail(_given: object) -> int:
        raise WeightbusError(f"it says {HOSTILE}")

    monkeypatch.setattr(commands.version, "do", fail)
    assert cli.main(["version"]) == 1
    assert capsys.readouterr().err == "weightbus: error: it says " + SHOWN.replace(r"\n", "\n") + "\n"
    assert cli.main(["version", "--debug"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert not HIDDEN.search(told.replace("\n", ""))


def test_keys_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Z85 has brackets and colons: neither markup nor an emoji."""
    key = "[b]:x:[/b]" + "a" * 30
    with edit_allow_list(tmp_path / ALLOW_LIST_FILE) as agents:
        agents[AgentId("e0")] = AllowListEntry(Role.ENGINE, ("c",), key, "0" * 64)
    assert cli.main(["trust", "list", "--keys", str(tmp_path)]) == 0
    assert key in capsys.readouterr().out
