"""Faces of packages: the public names of a room, loaded when they are asked for.

A face lists its names as relative imports under ``if TYPE_CHECKING``, where type checkers and readers find them::

    if TYPE_CHECKING:
        from .exporter import RegionExporter as RegionExporter
    else:
        __getattr__, __dir__ = lazy_face(__name__, __file__)

At run time the same lines say which module a name is in. So a process that needs one name of a room does not import
what the others need: the command line runs without torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def lazy_face(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of `package`, whose source is `file`."""
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "typing"):
            home = "." * node.level + (node.module or "")
            homes |= {alias.asname or alias.name: (home, alias.name) for alias in node.names}
    del homes["lazy_face"]

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        if home.strip("."):
            value: object = getattr(import_module(home, package), original)
        else:
            value = import_module(home + original, package)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(homes)
