"""Text that somebody else wrote, made fit for a terminal: it moves no cursor, sets no color and forges no line.

Agents are free in what they say of their servers, and servers in what they answer. Whatever of it people are shown goes
through `terminal_safe`. Programs get it as it is: JSON has escapes of its own.
"""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0, DEL, C1, what begins a line, what turns the direction of text, and what no terminal's encoding has."""
_HIDDEN_IN_LINES: Final = re.compile(_HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))


def terminal_safe(text: str, *, lines: bool = False) -> str:
    r"""`text` with a stand-in for each control character: ``\x1b`` for an escape. With `lines`, line feeds stay."""
    return (_HIDDEN_IN_LINES if lines else _HIDDEN).sub(_stand_in, text)


def _stand_in(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
