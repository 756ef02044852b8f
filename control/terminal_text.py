"""Text for a terminal: sizes, and untrusted text, escaped: it moves no cursor, sets no color and forges no line.

Agents choose the text that they send, and servers the text of their answers. All of it that is printed passes
`terminal_safe`. Programs get the text unchanged: JSON has escapes of its own.
"""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0, DEL, C1, line separators, bidirectional controls and lone surrogates."""
_HIDDEN_IN_LINES: Final = re.compile(_HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def terminal_safe(text: str, *, lines: bool = False) -> str:
    r"""`text` with each control character escaped, such as ``\x1b``. With `lines`, line feeds stay."""
    return (_HIDDEN_IN_LINES if lines else _HIDDEN).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def byte_size(count: int) -> str:
    """A number of bytes with its unit, in three digits."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if unit else f"{count} B"
