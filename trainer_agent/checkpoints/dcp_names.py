"""Finds the prefix of a model's tensors among the keys of a torch DCP checkpoint. Pure.

Trainers save more than the model: an optimizer, an average of the weights (EMA), a reference model. A prefix with all
of the model's names below it, and no others, is a copy of the model; among several copies the user must choose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

_SHOWN: Final = 5


class NoSuchModel(Exception):
    """The keys do not hold the model, or several of it. The message has the keys found, and advice."""


def normal(prefix: str) -> str:
    """A user's prefix in the form of the keys: ``model`` and ``model.`` are the same, ``.`` is the empty prefix."""
    bare = prefix.strip(".")
    return f"{bare}." if bare else ""


def chosen(forms: Sequence[Collection[str]], keys: Collection[str], wanted: str) -> tuple[int, str]:
    """Index of the form whose names are among `keys`, and the prefix of these names.

    Each of `forms` has all names of the model. `wanted` is the user's prefix; without it there must be one prefix only.
    Of two forms below the same prefix the earlier is chosen. Raises `NoSuchModel`.
    """
    fitting: dict[str, int] = {}
    for index, names in enumerate(forms):
        for prefix in prefixes(names, keys):
            fitting.setdefault(prefix, index)
    if wanted:
        if (prefix := normal(wanted)) in fitting:
            return fitting[prefix], prefix
        raise NoSuchModel(
            f"the model of its config is not below the prefix {wanted!r}; below these it is: {_listed(fitting)}"
        )
    if len(fitting) > 1:
        raise NoSuchModel(
            f"the model of its config is found below {len(fitting)} prefixes ({_listed(fitting)}):"
            " say which is to be served with --dcp-prefix"
        )
    if not fitting:
        names = forms[0]
        raise NoSuchModel(
            f"the model of its config has {len(names)} tensors, such as {next(iter(names))!r}, and they are not all"
            f" among its keys ({', '.join(sorted(keys)[:3])} and so on)"
        )
    prefix, index = fitting.popitem()
    return index, prefix


def prefixes(names: Collection[str], keys: Collection[str]) -> list[str]:
    """Prefixes below which `keys` hold all of `names`."""
    first = next(iter(names))
    candidates = {key.removesuffix(first) for key in keys if key == first or key.endswith("." + first)}
    return sorted(each for each in candidates if all(each + name in keys for name in names))


def check_complete(keys: Iterable[str], prefix: str, known: Collection[str]) -> None:
    """Raise `NoSuchModel` for keys of the model beyond `known`: more layers, or another head, than in its config.

    Without a prefix other models may be saved beside it: then only keys that begin like its own names are checked.
    """
    inside = (prefix,) if prefix else tuple({name.split(".")[0] + "." for name in known})
    odd = sorted({key for key in keys if key.startswith(inside)} - {prefix + name for name in known})
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise NoSuchModel(f"{', '.join(map(repr, odd[:_SHOWN]))}{more}: not in the model of its config")


def _listed(prefixes: Iterable[str]) -> str:
    return ", ".join(repr(each or ".") for each in sorted(prefixes)) or "none"
