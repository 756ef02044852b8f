"""How much everything that an object holds has in it: to find what grows while a program runs for months."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping

OURS = "weightbus"


def sizes(root: object) -> Counter[str]:
    """The lengths of all containers below `root`, by the names of the attributes that lead there.

    Whatever lies at the same place in several elements of a container is counted together.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[tuple[str, object]] = [(type(root).__name__, root)]
    while left:
        path, each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Mapping | list | set | frozenset | tuple | deque):
            found[path] += len(each)
            within = each.values() if isinstance(each, Mapping) else each
            left += [(f"{path}[]", element) for element in within]
        elif type(each).__module__.startswith(OURS):
            left += [(f"{path}.{name}", value) for name, value in _attributes(each)]
    return found


def _attributes(each: object) -> Iterator[tuple[str, object]]:
    names = {name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())}
    names |= set(getattr(each, "__struct_fields__", ()))
    for name in names - {"__dict__", "__weakref__"}:
        if (value := getattr(each, name, None)) is not None:
            yield name, value
    yield from vars(each).items() if hasattr(each, "__dict__") else ()
