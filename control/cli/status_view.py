"""Fetches the status document over HTTP and renders it as text."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from http.client import HTTPException
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ..machine import ChannelView, EngineView, PastRound, RoundView, StatusView, TrainerView, parse
from ..protocol import ConfigurationError, CoordinatorUnreachable, WeightbusError
from ..security import check_url
from ..terminal_text import terminal_safe

MAX_PAGE_BYTES: Final = 64 << 20
"""Largest page. The status of 4,096 engines is some 2 MB."""


def read_page(url: str, timeout_s: float) -> bytes:
    """Body of the page at `url`. Raises `OSError` (`TimeoutError` at the deadline) or `HTTPException`.

    It is read on a thread of its own, because a name lookup has no timeout. The thread is abandoned at the deadline.
    """
    page: Future[bytes] = Future()
    until = time.monotonic() + timeout_s

    def run() -> None:
        try:
            page.set_result(_read_body(url, timeout_s, until))
        except Exception as problem:  # noqa: BLE001  raised again by `result`
            page.set_exception(problem)

    threading.Thread(target=run, name="page", daemon=True).start()
    try:
        return page.result(timeout_s)
    except FutureTimeoutError as problem:
        if page.done():
            raise
        raise TimeoutError(f"it was not complete after {timeout_s:g} s") from problem


def _read_body(url: str, timeout_s: float, until: float) -> bytes:
    # The port is on this host or this network: a proxy for the Internet has no business here.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = bytearray()
    with opener.open(url, timeout=timeout_s) as answer:
        while part := answer.read1():
            body += part
            if len(body) > MAX_PAGE_BYTES:
                raise HTTPException(f"more than {MAX_PAGE_BYTES} bytes came: this is no page of a coordinator")
            if time.monotonic() > until:
                raise TimeoutError(f"it was not complete after {timeout_s:g} s")
    return bytes(body)


_ADVICE: Final = "Check that `weightbus coordinator` runs there, and that --url names its HTTP port (--http-port)"


def fetch(url: str, timeout_s: float, page: str = "/status") -> bytes:
    """Page of the coordinator at `url`. Raises `CoordinatorUnreachable` after `timeout_s` seconds altogether."""
    try:
        check_url("url", url)
    except ValueError as problem:
        raise ConfigurationError(str(problem)) from problem
    begun = time.monotonic()
    try:
        return read_page(f"{url.rstrip('/')}{page}", timeout_s)
    except (HTTPException, OSError) as problem:
        reason = getattr(problem, "reason", problem)  # urllib wraps what the socket said
        raise CoordinatorUnreachable(url, time.monotonic() - begun, f"GET {page}", str(reason), _ADVICE) from problem


def post(url: str, timeout_s: float, page: str) -> tuple[bool, str]:
    """Ask the coordinator at `url` for an action. Returns whether it was carried out, and what was said."""
    request = urllib.request.Request(f"{url.rstrip('/')}{page}", data=b"", method="POST")  # noqa: S310  check_url allows http alone
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    begun = time.monotonic()
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return True, answer.read(MAX_PAGE_BYTES).decode(errors="replace").strip()
    except urllib.error.HTTPError as refused:
        return False, refused.read(MAX_PAGE_BYTES).decode(errors="replace").strip()
    except (HTTPException, OSError) as problem:
        reason = getattr(problem, "reason", problem)
        raise CoordinatorUnreachable(url, time.monotonic() - begun, f"POST {page}", str(reason), _ADVICE) from problem


def render(view: StatusView) -> Text:
    """The status as lines of text: a paragraph for each channel.

    Lines are as long as their content. A URL, or a command in a reason, stays whole at any width of the terminal, so
    that it can be copied, and each engine is one line for `grep`.
    """
    state = "stopping" if view.stopping else "READ-ONLY: its journal takes no writes" if view.read_only else "running"
    shown = Text(f"coordinator {state}, boot {view.boot}, {view.agents} agents", no_wrap=True, overflow="ignore")
    for warning in view.warnings:
        shown.append(f"\nwarning: {terminal_safe(warning)}", style="red")
    for each in view.refused:
        shown.append(f"\n{terminal_safe(each)}", style="red")
    if not view.channels:
        return shown.append("\nno channel yet: no agent has joined")
    for name, channel in sorted(view.channels.items()):
        title, *lines = _channel(name, channel)
        shown.append(f"\n\n{terminal_safe(title)}", style="bold")
        for line in lines:
            shown.append(f"\n  {terminal_safe(line)}")
    return shown


def watch(console: Console, url: str, interval_s: float, timeout_s: float) -> None:
    """Show the status every `interval_s` seconds until interrupted. An unreachable coordinator is shown as such.

    A terminal is cleared before each; into a pipe or a file one follows the other, each written at once.
    """
    while True:
        try:
            shown = render(parse(fetch(url, timeout_s)))
        except WeightbusError as error:
            shown = Text(terminal_safe(str(error), lines=True), style="red")
        console.clear()  # nothing, unless this is a terminal
        print_unwrapped(console, shown)
        if not console.is_terminal:
            console.print()
        time.sleep(interval_s)


def print_unwrapped(console: Console, shown: Text) -> None:
    """Print lines at their own length: a terminal continues a long one below, and copies it as one."""
    console.print(shown, soft_wrap=True)


def _channel(name: str, channel: ChannelView) -> list[str]:
    committed = f"version {channel.committed.version}" if channel.committed else "nothing committed"
    ready = f"{len(channel.ready)} of {len(channel.engines)} engines ready"
    run = f", of run {channel.owner}" if channel.owner else ""
    lines = [f"channel {name}: {committed}, epoch {channel.epoch}, {ready}{run}"]
    lines += [f"trainer     {_trainer(trainer, each, channel)}" for trainer, each in sorted(channel.trainers.items())]
    if not channel.trainers:
        lines.append(f"trainer     none is connected{_lease_of('', channel)}")
    if channel.round.version is not None:
        lines.append(f"round       {_round(channel.round)}")
    if channel.rounds:
        lines.append(f"last round  {_past(channel.rounds[-1])}")
    if not channel.engines:
        return [*lines, "no engine has joined"]
    engines = [(name, *_engine(each)) for name, each in sorted(channel.engines.items())]
    rows = [_HEAD, *(tuple(map(terminal_safe, row)) for row in engines)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return lines + [_aligned(row, widths) for row in rows]


_HEAD: Final = ("engine", "state", "version", "lag", "transport", "server", "url", "ready")
"""Columns of the table of engines. The last one has text of any length."""
_NUMBERS: Final = frozenset({"version", "lag"})


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    cells: list[str] = []
    for head, cell, width in zip(_HEAD, row, widths, strict=True):
        space = " " * (width - cell_len(cell))
        cells.append(f"{space}{cell}" if head in _NUMBERS else f"{cell}{space}")
    return "  ".join(cells).rstrip()


def _lease_of(trainer: str, channel: ChannelView) -> str:
    lease = channel.lease
    if lease is None or (trainer and lease.holder != trainer):
        return ""
    holder = "" if trainer else f" of {lease.holder}"
    return f", lease{holder} for version {lease.version} (epoch {lease.epoch})"


def _trainer(name: str, each: TrainerView, channel: ChannelView) -> str:
    gone = "" if each.last_seen_s is not None else ", not connected"
    published = "" if each.published is None else f", announced version {each.published} last"
    ranks = f"{each.ranks or 'unknown number of'} rank{'' if each.ranks == 1 else 's'}"
    where = f"{ranks} at {each.address or 'an unknown address'} ({each.device or 'unknown device'})"
    return f"{name}: {where}{published}{_lease_of(name, channel)}{gone}"


def _round(round_: RoundView) -> str:
    shown = f"{round_.state.value} version {round_.version}, {round_.age_s:.1f} s"
    shown += f", at most {round_.max_paused} paused" if round_.max_paused else ""
    return shown + (", a resync" if round_.catch_up else "")


def _past(done: PastRound) -> str:
    when = "before the coordinator started" if done.ended_s is None else f"{done.ended_s:.0f} s ago"
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in done.seconds.items() if name != "total")
    engines = ", ".join(f"{count} {outcome}" for outcome, count in sorted(done.engines.items())) or "no engine"
    over = f" over {', '.join(done.transports)}" if done.transports else ""
    shown = f"version {done.version} {done.outcome.value} {when}, {done.seconds.get('total', 0.0):.2f} s"
    shown += f" ({phases})" if phases else ""
    shown += f"; engines: {engines}{over}"
    return shown + (f"; {done.reason}" if done.reason else "")


def _engine(each: EngineView) -> tuple[str, ...]:
    version = "-" if each.version is None else str(each.version)
    ready = "yes" if each.ready else f"no: {each.reason}"
    shape = f"{each.server_version} {each.device} tp{each.tp}"
    return each.state, version, str(each.lag), each.last_transport or "-", shape, each.url, ready
