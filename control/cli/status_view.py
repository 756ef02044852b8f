"""Fetches the status document over HTTP and renders it as tables."""

from __future__ import annotations

import threading
import time
import urllib.request
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from http.client import HTTPException
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..machine import ChannelView, EngineView, StatusView, parse
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


def render(view: StatusView) -> RenderableType:
    """The status as one table for each channel."""
    state = "stopping" if view.stopping else "READ-ONLY: its journal takes no writes" if view.read_only else "running"
    head = Text(f"coordinator {state}, boot {view.boot}, {view.agents} agents")
    if not view.channels:
        return Group(head, Text("no channel yet: no agent has joined"))
    return Group(head, *(_channel(name, each) for name, each in sorted(view.channels.items())))


def watch(console: Console, url: str, interval_s: float, timeout_s: float) -> None:
    """Show the status every `interval_s` seconds until interrupted. An unreachable coordinator is shown as such."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                shown = render(parse(fetch(url, timeout_s)))
            except WeightbusError as error:
                shown = Text(terminal_safe(str(error), lines=True), style="red")
            live.update(shown, refresh=True)
            time.sleep(interval_s)


def _channel(name: str, channel: ChannelView) -> Table:
    committed = f"version {channel.committed.version}" if channel.committed else "nothing committed"
    lease = f"lease {channel.lease.holder} (epoch {channel.lease.epoch})" if channel.lease else "no lease"
    round_ = channel.round.state.value
    if channel.round.version is not None:
        round_ += f" version {channel.round.version}, {channel.round.age_s:.1f} s"
        round_ += f", at most {channel.round.max_paused} paused" if channel.round.max_paused else ""
        round_ += ", a resync" if channel.round.catch_up else ""
    title = f"channel {name}: {committed}, epoch {channel.epoch}, {lease}, {round_}, {len(channel.ready)} ready"
    table = Table(title=Text(terminal_safe(title), style="bold"), title_justify="left")
    for column in ("engine", "url", "state", "version", "lag", "ready", "server"):
        table.add_column(column, justify="right" if column in {"version", "lag"} else "left", overflow="fold")
    for engine, each in sorted(channel.engines.items()):
        table.add_row(*(Text(terminal_safe(cell)) for cell in (engine, *_engine(each))))
    return table


def _engine(each: EngineView) -> tuple[str, ...]:
    version = "-" if each.version is None else str(each.version)
    ready = "yes" if each.ready else f"no: {each.reason}"
    shape = f"{each.server_version} {each.device} tp{each.tp}"
    return each.url, each.state, version, str(each.lag), ready, shape
