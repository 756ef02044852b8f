"""The coordinator's page for people: the status document as one self-contained HTML page. A pure function of it.

The page needs nothing from elsewhere and can do nothing: no link, no form, one script, which reads the same page again
and puts its `main` in place of the old one. So each fact is rendered here alone, and the page works without JavaScript.
Agents choose names, URLs and reasons: each of them passes `_text`. Behind that, `SECURITY_HEADERS` let no other script
run and no other address be reached.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping
from typing import Final

from ..machine import ChannelView, EngineView, PastRound, RoundView, StandbyView, StatusView, TrainerView
from ..terminal_text import terminal_safe

MAX_ENGINES: Final = 200
"""Engines shown of a channel; those that are not ready come first. `/status` has all."""
MAX_TEXT: Final = 400
"""Characters shown of a name, a URL or a reason."""
MAX_VERSIONS: Final = 12
"""Versions shown of a channel's history."""
REFRESH_S: Final = 2
"""Seconds between two looks at the coordinator."""
ANSWER_S: Final = 10
"""Seconds that an answer may take before the page counts as stale. A stuck loop is told of after 5 s by the server."""
PHASES: Final = ("prepare", "offer", "pause", "transfer", "verify", "commit", "resume", "abort")
"""Phases of `RoundDone.seconds`, in the order of a round."""

_STYLE: Final = """
:root { color-scheme: light dark; --ground: #f5f6f8; --card: #fff; --ink: #1b1f27; --soft: #626b7a; --line: #e1e5eb;
  --good: #14804a; --bad: #c02b2b; --busy: #9a6200; --goodbg: #e2f4e9; --badbg: #fce6e6; --busybg: #fdf0d9;
  --prepare: #9aa6b8; --offer: #74889f; --pause: #e0a13a; --transfer: #3a7bd5; --verify: #7a5cc9; --commit: #22a06b;
  --resume: #57b8a5; --abort: #d04747; }
@media (prefers-color-scheme: dark) { :root { --ground: #11141a; --card: #191d26; --ink: #e4e8ef; --soft: #97a1b2;
  --line: #2a303c; --good: #58cf92; --bad: #ff8585; --busy: #f0b95c; --goodbg: #14301f; --badbg: #3a1a1c;
  --busybg: #35280f; --prepare: #66728a; --offer: #4f6079; --transfer: #5b97ea; --verify: #9d83ea; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.25rem; background: var(--ground); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; gap: .75rem; align-items: baseline; }
h1 { font-size: 1.25rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: .75rem; margin: 1.1rem 0 .3rem; color: var(--soft); text-transform: uppercase; letter-spacing: .05em; }
p { margin: .35rem 0; } .soft, th { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.15rem;
  margin-top: 1rem; overflow-x: auto; }
.facts { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; align-items: baseline; }
.version { font-size: 1.6rem; font-weight: 650; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 500; font-size: .8rem; }
td, th { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; } tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.url { font-family: ui-monospace, monospace; font-size: .85em; }
.why { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; width: 26%; }
.bar { width: 30%; min-width: 9rem; }
.chip { display: inline-block; padding: 0 .5rem; border-radius: 1rem; font-size: .85em; white-space: nowrap; }
.good { color: var(--good); background: var(--goodbg); } .bad { color: var(--bad); background: var(--badbg); }
.busy { color: var(--busy); background: var(--busybg); } .plain { border: 1px solid var(--line); }
#stale { color: var(--bad); background: var(--badbg); font-weight: 600; padding: .2rem .7rem; border-radius: 1rem; }
[hidden] { display: none !important; }
svg { display: block; width: 100%; height: .85rem; margin-top: .25rem; } svg.key { display: inline-block; width: .7rem;
  height: .7rem; margin: 0 .3rem 0 0; } .keys { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85em; }
""" + "\n".join(f".{phase} {{ fill: var(--{phase}); }}" for phase in PHASES)  # fmt: skip

_SCRIPT: Final = f"""
"use strict";
const stale = document.getElementById("stale");
let heard = new Date();
async function look() {{
  try {{
    const within = AbortSignal.timeout({ANSWER_S * 1000});
    const answer = await fetch(location.pathname, {{cache: "no-store", signal: within}});
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const shown = page.querySelector("main");
    if (!answer.ok || !shown) throw new Error("not the page of a coordinator");
    if (getSelection().isCollapsed) document.querySelector("main").replaceWith(shown);
    heard = new Date();
    stale.hidden = true;
  }} catch {{
    stale.textContent = "stale since " + heard.toLocaleTimeString() + ": the coordinator does not answer";
    stale.hidden = false;
  }}
  setTimeout(look, {REFRESH_S * 1000});
}}
setTimeout(look, {REFRESH_S * 1000});
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_POLICY: Final = (
    "default-src 'none'",
    f"script-src {_hash(_SCRIPT)}",
    f"style-src {_hash(_STYLE)}",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
SECURITY_HEADERS: Final = (
    ("Content-Security-Policy", "; ".join(_POLICY)),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
"""Headers of the page: its one script and its one style by their hashes, and requests to its own origin alone."""


def render_page(view: StatusView | StandbyView, *, ready: bool, situation: str, at: str) -> bytes:
    """The page. `ready` and `situation` are the answer of `/readyz`; `at` is the time of the document, as shown."""
    chip = _chip("good" if ready else "bad", "ready" if ready else "not ready")
    lines = [f'<p class="facts">{chip}<span>{_text(situation)}</span><span class="soft">as of {_text(at)}</span></p>']
    if isinstance(view, StandbyView):
        where = f"{_text(view.leader)} leads, at {_text(view.endpoint)}" if view.leader else "no leader is known"
        lines.append(f"<section><h2>This coordinator stands by</h2><p>{where}</p></section>")
    else:
        if to_mend := "".join(f'<p class="why">{_text(each)}</p>' for each in (*view.warnings, *view.refused)):
            lines.append(f"<section><h2>To be mended</h2>{to_mend}</section>")
        lines += (_channel(name, channel) for name, channel in sorted(view.channels.items()))
        if not view.channels:
            lines.append("<section><h2>No channel yet</h2><p>No trainer and no engine has joined.</p></section>")
    main = "\n".join(lines)
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>weightbus</title>
<noscript><meta http-equiv="refresh" content="{REFRESH_S}"></noscript>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>weightbus</h1><span id="stale" hidden></span></header>
<main>
{main}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""
    return page.encode("utf-8", "replace")


def _text(value: str) -> str:
    """Text of an agent as HTML: no markup, no control character, and no more of it than fits."""
    clipped = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}…"
    return html.escape(terminal_safe(clipped), quote=True)


def _chip(kind: str, text: str) -> str:
    return f'<span class="chip {kind}">{_text(text)}</span>'


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    """`rows` are made of escaped cells."""
    marked = "".join(f"<th{_NUMBER if head in _NUMBERS else ''}>{head}</th>" for head in heads)
    return f"<table><thead><tr>{marked}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


_NUMBER: Final = ' class="number"'
_NUMBERS: Final = frozenset({"version", "lag", "seconds", "ranks"})


def _channel(name: str, channel: ChannelView) -> str:
    committed = f"version {channel.committed.version}" if channel.committed else "nothing committed"
    ready, all_ = len(channel.ready), len(channel.engines)
    lease = channel.lease
    facts = [
        f'<span class="version">{committed}</span>',
        _chip("good" if ready == all_ and all_ else "bad" if not ready else "busy", f"{ready} of {all_} engines ready"),
        f"<span>epoch {channel.epoch}</span>",
        f"<span>of run {_text(channel.owner)}</span>" if channel.owner else "",
        f"<span>lease of {_text(lease.holder)} for version {lease.version}</span>" if lease else "",
    ]
    parts = [f'<section><h2>{_text(name)}</h2><p class="facts">{"".join(facts)}</p>']
    if past := channel.history[-MAX_VERSIONS:]:
        shown = (_chip("plain", f"{each.version}{' (rollback)' if each.rollback else ''}") for each in reversed(past))
        parts.append(f"<h3>Versions</h3><p>{' '.join(shown)}</p>")
    parts.append(f"<h3>Trainers</h3>{_trainers(channel.trainers)}")
    parts.append(f"<h3>Engines</h3>{_engines(channel.engines)}")
    parts.append(f"<h3>Rounds</h3>{_rounds(channel)}</section>")
    return "\n".join(parts)


def _trainers(trainers: Mapping[str, TrainerView]) -> str:
    if not trainers:
        return '<p class="soft">None is connected.</p>'
    rows = (
        f'<tr><td>{_text(name)}</td><td class="number">{each.ranks or "-"}</td>'
        f"<td>{_text(each.address)}</td><td>{_text(each.device)}</td>"
        f"<td>{'' if each.published is None else f'announced version {each.published} last'}</td>"
        f"<td>{_chip('bad', 'not connected') if each.last_seen_s is None else _chip('good', 'connected')}</td></tr>"
        for name, each in sorted(trainers.items())
    )
    return _table(("trainer", "ranks", "address", "device", "last", "state"), rows)


def _engines(engines: Mapping[str, EngineView]) -> str:
    if not engines:
        return '<p class="soft">None has joined.</p>'
    order = sorted(engines.items(), key=lambda item: (item[1].ready, item[0]))
    rows = (_engine(name, each) for name, each in order[:MAX_ENGINES])
    left = len(order) - MAX_ENGINES
    more = f'<p class="soft">{left} more, which `weightbus status` lists.</p>' if left > 0 else ""
    return _table(("engine", "state", "version", "lag", "transport", "server", "address", "reason"), rows) + more


def _engine(name: str, each: EngineView) -> str:
    kind = "good" if each.ready else "bad" if each.state in _TROUBLE else "busy"
    server = f"{each.server_version} {each.device} tp{each.tp}"
    return (
        f"<tr><td>{_text(name)}</td><td>{_chip(kind, each.state)}</td>"
        f'<td class="number">{"-" if each.version is None else each.version}</td><td class="number">{each.lag}</td>'
        f'<td>{each.last_transport or "-"}</td><td>{_text(server)}</td><td class="url">{_text(each.url)}</td>'
        f'<td class="why">{"" if each.ready else _text(each.reason)}</td></tr>'
    )


_TROUBLE: Final = frozenset({"lost", "dirty", "pending", "broken", "quarantined", "left", "leaving"})


def _rounds(channel: ChannelView) -> str:
    running = channel.round if channel.round.version is not None else None
    longest = max((each.seconds.get("total", 0.0) for each in channel.rounds), default=0.0)
    longest = max(longest, running.age_s if running else 0.0)
    if not channel.rounds and not running:
        return '<p class="soft">None yet.</p>'
    rows = [_running(running, longest)] if running else []
    rows += [_past(each, longest) for each in reversed(channel.rounds)]
    keys = "".join(f"<span>{_key(phase)}{phase}</span>" for phase in PHASES)
    heads = ("version", "outcome", "time by phase", "seconds", "engines", "over", "ended", "reason")
    return f'<p class="keys soft">{keys}</p>{_table(heads, rows)}'


def _running(each: RoundView, longest: float) -> str:
    what = "resync" if each.catch_up else each.state.value
    return (
        f'<tr><td class="number">{each.version}</td><td>{_chip("busy", what)}</td>'
        f'<td class="bar">{_bar(each.seconds, longest)}</td><td class="number">{each.age_s:.2f}</td>'
        f'<td>{len(each.engines)}</td><td></td><td>running</td><td class="why"></td></tr>'
    )


def _past(each: PastRound, longest: float) -> str:
    engines = ", ".join(f"{count} {outcome}" for outcome, count in sorted(each.engines.items()))
    size = f" {each.bytes / 1e9:.3g} GB" if each.bytes else ""
    total = each.seconds.get("total", 0.0)
    ended = "before the start" if each.ended_s is None else f"{_span(each.ended_s)} ago"
    return (
        f'<tr><td class="number">{each.version}</td>'
        f"<td>{_chip('good' if each.outcome.value == 'committed' else 'bad', each.outcome.value)}</td>"
        f'<td class="bar">{_bar(each.seconds, longest)}</td><td class="number">{total:.2f}</td>'
        f"<td>{_text(engines)}</td><td>{', '.join(each.transports)}{size}</td><td>{ended}</td>"
        f'<td class="why">{_text(each.reason)}</td></tr>'
    )


def _bar(seconds: Mapping[str, float], longest: float) -> str:
    """A bar as long as the round was in comparison with the longest one, in the colors of its phases."""
    at = 0.0
    parts: list[str] = []
    for phase in PHASES:
        if (spent := seconds.get(phase, 0.0)) > 0 and longest > 0:
            width = 1000 * spent / longest
            told = f"<title>{phase} {spent:.3f} s</title>"
            parts.append(f'<rect class="{phase}" x="{at:.1f}" width="{width:.1f}" height="10">{told}</rect>')
            at += width
    return f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" role="img">{"".join(parts)}</svg>'


def _key(phase: str) -> str:
    return (
        f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true"><rect class="{phase}" width="10" height="10"/></svg>'
    )


def _span(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
