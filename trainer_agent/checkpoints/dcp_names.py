"""Which keys of a torch DCP checkpoint are the tensors of a model: one prefix and its names, or no answer. Pure.

Trainers save more than the model: an optimizer, an average of the weights (EMA), a reference model. What has all the
model's names and nothing more below its prefix is a copy of the model; which of several copies is meant is not guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

_SHOWN: Final = 5


class NoSuchModel(Exception):
    """The keys do not say, or do not hold, the model. The message says what was found, and what to do."""


def normal(prefix: str) -> str:
    """A prefix as it was given, as it stands in keys: ``model`` and ``model.`` are the same, ``.`` is none."""
    bare = prefix.strip(".")
    return f"{bare}." if bare else ""


def chosen(forms: Sequence[Collection[str]], keys: Collection[str], wanted: str) -> tuple[int, str]:
    """Which of `forms`, each all names of the model, stands among `keys`, and below which prefix.

    `wanted` is the prefix that was asked for; without it there must be one only. Of two forms below the same prefix
    the earlier counts. Raises `NoSuchModel`.
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
    """Everything that stands before every one of `names` among `keys`."""
    first = next(iter(names))
    candidates = {key.removesuffix(first) for key in keys if key == first or key.endswith("." + first)}
    return sorted(each for each in candidates if all(each + name in keys for name in names))


def check_complete(keys: Iterable[str], prefix: str, known: Collection[str]) -> None:
    """A model with more layers, or with another head, than its config says must not lose them.

    Without a prefix others may be saved beside the model, so there only what begins like its own names is looked at.
    Raises `NoSuchModel`.
    """
    inside = (prefix,) if prefix else tuple({name.split(".")[0] + "." for name in known})
    odd = sorted({key for key in keys if key.startswith(inside)} - {prefix + name for name in known})
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise NoSuchModel(f"{', '.join(map(repr, odd[:_SHOWN]))}{more}: not in the model of its config")


def _listed(prefixes: Iterable[str]) -> str:
    return ", ".join(repr(each or ".") for each in sorted(prefixes)) or "none"
