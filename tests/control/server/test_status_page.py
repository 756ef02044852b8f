"""The coordinator's page: all of the status, nothing from elsewhere, and no text of an agent as anything but text."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.kit.status import EVERYTHING, engine, past
from weightbus.control.machine import StandbyView, StatusView, TrainerView
from weightbus.control.machine.status import LeaseView
from weightbus.control.protocol.messages import Outcome
from weightbus.control.server import HttpPort, Readiness
from weightbus.control.server.http_server import HttpAnswer
from weightbus.control.server.status_page import MAX_ENGINES, MAX_TEXT, SECURITY_HEADERS, render_page
from weightbus.control.terminal_text import terminal_safe

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REACHES_OUT = "fetch('/status?reached');document.title='reached'"
HOSTILE = (
    f"<script>{REACHES_OUT}</script>",
    f"</title></style></main></script><script>{REACHES_OUT}</script>",
    f'"><img src=x onerror="{REACHES_OUT}">',
    f"'><svg onload={REACHES_OUT}>",
    f"javascript:{REACHES_OUT}",
    "<!-- <base href=//elsewhere> <meta http-equiv=refresh content=0;url=//elsewhere>",
    "&lt;b&gt; \x1b[2J \u202e \ud800 \r\n\t",
)


def status_with(text: str) -> StatusView:
    """The status in which each text that an agent chooses is `text`."""
    channel = EVERYTHING.channels["policy"]
    hostile = msgspec.structs.replace(
        channel,
        owner=text,
        lease=LeaseView(text, 9, 42, 9.0),
        engines={text: engine(text, "dirty", reason=text, server_version=text, device=text)},
        trainers={text: TrainerView(text, text, 4, None, published=42)},
        rounds=(past(41, Outcome.ABORTED, text),),
    )
    return msgspec.structs.replace(EVERYTHING, channels={text: hostile}, warnings=(text,), refused=(text,))


def page_of(view: StatusView | StandbyView, situation: str = "boot 3, 5 agents", *, ready: bool = True) -> str:
    return render_page(view, ready=ready, situation=situation, at="2026-11-26 09:20:00 UTC").decode()


class Parsed(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[tuple[str, str | None]] = set()
        self.texts: list[str] = []
        self.raw: dict[str, str] = {}
        """Content of the script and the style."""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= set(attrs)

    def handle_data(self, data: str) -> None:
        if self.tags and self.cdata_elem is not None:
            self.raw[self.cdata_elem] = data
        else:
            self.texts.append(data)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_an_agent_is_markup(text: str) -> None:
    """The page has the tags and attributes that it has with a harmless text, and shows the text as it is."""
    found, harmless = Parsed(page_of(status_with(text), text)), Parsed(page_of(status_with("x"), "x"))
    assert found.tags == harmless.tags
    assert found.attributes == harmless.attributes
    assert found.raw == harmless.raw
    texts = "\n".join(found.texts)
    assert texts.count(terminal_safe(text)) == "\n".join(Parsed(page_of(status_with("QQ"), "QQ")).texts).count("QQ")


def test_the_page_shows_refused_keys_with_the_command_that_mends_it() -> None:
    """As the status does: also before any agent has joined."""
    refused = "'e0', whose key has the fingerprint 419f-b1cb, is not trusted: run `weightbus trust add e0 ...` here"
    alone = msgspec.structs.replace(EVERYTHING, channels={}, refused=(refused,), warnings=("the disk hangs",))
    texts = "\n".join(Parsed(page_of(alone)).texts)
    assert refused in texts
    assert "the disk hangs" in texts
    assert "To be mended" not in page_of(msgspec.structs.replace(alone, refused=(), warnings=()))


def test_the_page_asks_for_nothing_and_does_nothing() -> None:
    """It has no link, form, image or handler, and its policy allows its own script and style by their content."""
    found = Parsed(page_of(EVERYTHING))
    assert not {"a", "form", "input", "button", "img", "link", "iframe", "object", "embed", "base"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in {"href", "src", "style"}]
    policy = dict(SECURITY_HEADERS)["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.raw[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?:|//\w|url\(|@import", found.raw["script"] + found.raw["style"])


def test_all_of_the_status_is_shown() -> None:
    """Channel, versions, trainers, engines with lag and reason, and the rounds, newest first, with their phases."""
    page = page_of(EVERYTHING)
    texts = "|".join(Parsed(page).texts)
    for part in (
        "policy",
        "version 41",
        "1 of 3 engines ready",
        "lease of t0",
        "of run run-7",
        "announced version 42",
        "transferring",
    ):
        assert part in texts
    for name, each in EVERYTHING.channels["policy"].engines.items():
        assert f"{name}|{each.state}|{each.version}|{each.lag}|direct|0.5.17 cuda tp2|{each.url}" in texts
        assert each.reason in texts
    assert re.findall(r"(\d+)\|(transferring|committed|aborted)\|", texts) == [
        ("42", "transferring"), ("41", "committed"), ("40", "aborted"), ("39", "committed"),
    ]  # fmt: skip
    assert page.count('<rect class="transfer" x="') == 4
    assert '<rect class="prepare" x="0.0" width="166.7"' in page  # 0.25 s, where the longest round takes 1.5 s
    assert "before the start" in texts


@pytest.mark.parametrize("seconds", [{}, {"total": 0.0}, {"prepare": 0.0, "total": 0.0}, {"unheard": 1.0}])
def test_a_round_without_times_is_shown(seconds: dict[str, float]) -> None:
    """As those are whose end was not kept."""
    channel = EVERYTHING.channels["policy"]
    round_ = msgspec.structs.replace(past(41), seconds=seconds)
    idle = msgspec.structs.replace(
        channel, rounds=(round_,), round=msgspec.structs.replace(channel.round, version=None)
    )
    page = page_of(msgspec.structs.replace(EVERYTHING, channels={"policy": idle}))
    assert "<title>prepare" not in page
    assert "unheard" not in page


def test_the_page_is_bounded() -> None:
    """Of a large fleet it shows the engines with a problem first, and of a long text the beginning."""
    fleet = {f"e{number:04}": engine(f"http://h{number}:1") for number in range(2 * MAX_ENGINES)}
    fleet["late"] = engine("http://late:1", "lost", reason="y" * 100_000)
    channel = msgspec.structs.replace(EVERYTHING.channels["policy"], engines=fleet)
    page = page_of(msgspec.structs.replace(EVERYTHING, channels={"policy": channel}))
    assert page.count("http://") == MAX_ENGINES
    assert "http://late:1" in page
    assert f"{MAX_ENGINES + 1} more" in page
    assert "y" * MAX_TEXT + "…" in page
    assert "y" * (MAX_TEXT + 1) not in page


def test_what_is_not_ready_is_said() -> None:
    """By a coordinator that stands by, one without a channel, and one whose loop is stuck."""
    assert "c1 leads, at tcp://10.0.0.6:5750" in page_of(StandbyView(True, "c1", "tcp://10.0.0.6:5750"), ready=False)
    assert "no leader is known" in page_of(StandbyView(True, "", ""), ready=False)
    assert "No channel yet" in page_of(msgspec.structs.replace(EVERYTHING, channels={}))
    stuck = page_of(EVERYTHING, "the loop has not moved for 7.0 s", ready=False)
    assert "not ready" in stuck
    assert "the loop has not moved for 7.0 s" in stuck


# -- served, and in a browser ------------------------------------------------------------------------------------------


@contextmanager
def served(page: Callable[[], bytes]) -> Generator[tuple[str, list[str]]]:
    """Address of a port with the page, and what else was asked of it."""
    asked: list[str] = []

    def status() -> bytes:
        asked.append("status")
        return b"{}"

    def html() -> HttpAnswer:
        return HttpAnswer("text/html; charset=utf-8", page(), headers=SECURITY_HEADERS)

    port = HttpPort(
        "127.0.0.1",
        0,
        registry=CollectorRegistry(),
        readiness=lambda: Readiness(True),
        status=status,
        pages={"/": html},
    )
    port.start()
    try:
        yield f"http://127.0.0.1:{port.port}/", asked
    finally:
        port.stop()


def test_the_page_is_served_with_its_policy() -> None:
    """As HTML, never kept by a cache."""
    with served(lambda: page_of(EVERYTHING).encode()) as (url, _):
        answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30)
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        for name, value in SECURITY_HEADERS:
            assert answer.headers[name] == value
        assert answer.read().decode() == page_of(EVERYTHING)


def dom(url: str, tmp_path: Path, *flags: str) -> str:
    """The document as Chromium has it after 7 s, of which only the requests take time."""
    assert BROWSER
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", *flags]
    command += ["--virtual-time-budget=7000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


@needs_browser
def test_a_browser_refreshes_the_page_and_says_when_it_is_stale(tmp_path: Path) -> None:
    """The second answer takes the place of the first. Once answers fail the last one stays, marked as stale."""
    newer = msgspec.structs.replace(EVERYTHING, boot=4, channels={})
    answers = iter([page_of(EVERYTHING).encode(), page_of(newer, "boot 4").encode()])
    with served(lambda: next(answers)) as (url, _):  # then StopIteration: the port answers 500
        found = dom(url, tmp_path)
    assert "No channel yet" in found
    assert "boot 4" in found
    assert "version 41" not in found
    assert re.search(r'<span id="stale">stale since [^<]+: the coordinator does not answer</span>', found)


@needs_browser
def test_a_browser_runs_nothing_that_an_agent_said(tmp_path: Path) -> None:
    """Neither in the first page nor in those put in its place."""
    channels = {text: status_with(text).channels[text] for text in HOSTILE}
    page = page_of(msgspec.structs.replace(EVERYTHING, channels=channels))
    with served(page.encode) as (url, asked):
        found = dom(url, tmp_path)
    assert "<title>weightbus</title>" in found
    assert '<span id="stale" hidden="">' in found
    assert asked == []


@needs_browser
def test_the_policy_holds_where_an_escape_was_forgotten(tmp_path: Path) -> None:
    """Markup of a stranger in the page runs nothing: neither a script nor a handler, and no style of it applies."""
    page = page_of(EVERYTHING).replace("<main>", f'<main>{HOSTILE[0]}<img src=x onerror="{REACHES_OUT}">')
    with served(page.encode) as (url, asked):
        assert "<title>weightbus</title>" in dom(url, tmp_path)
    assert asked == []
