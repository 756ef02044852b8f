"""Lineage of a response (the versions that wrote its tokens), and a policy for learning from it. Pure.

SGLang puts the versions into ``meta_info``: ``weight_versions`` as runs of output tokens (from 0.5.19 on), and
``weight_version`` for the last token. A version's label is its number; weights that a server was launched with have
another label, and no version here.

    versions = Lineage.of(answer["meta_info"], len(answer["output_ids"]))
    verdict = Staleness(max_lag=1).judge(versions, current=step)  # the version in training
    if verdict.keep:
        loss_mask = verdict.mask
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import msgspec


class UnknownLineage(ValueError):
    """A response that does not name the versions that wrote it, or contradicts itself."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end`, exclusive, of one version."""

    version: int | None
    """Version number; None for the weights of the server's launch, which no trainer published."""
    start: int
    end: int


class _Run(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    weight_version: str | None = None
    weight_versions: list[_Run] | None = None


class Lineage(msgspec.Struct, frozen=True):
    """The versions that wrote one response."""

    spans: tuple[VersionSpan, ...]
    """Spans in order, without gaps; empty for a response without tokens."""
    exact: bool
    """False when only the version of the last token is known, as from servers before 0.5.19."""

    @classmethod
    def of(cls, meta_info: Mapping[str, Any], tokens: int) -> Self:
        """Read the ``meta_info`` of a response of `tokens` output tokens. Raises `UnknownLineage`."""
        if tokens < 0:
            raise UnknownLineage(f"tokens = {tokens}: the number of output tokens is expected")
        if not isinstance(meta_info, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # what a server answers
            raise UnknownLineage(f"meta_info is a {type(meta_info).__name__}, expected is the mapping of one response")
        try:
            meta = msgspec.convert(dict(meta_info), _Meta)
        except msgspec.ValidationError as error:
            raise UnknownLineage(f"meta_info is not what SGLang writes: {error}") from error
        if meta.weight_versions is None:
            if meta.weight_version is None:
                raise UnknownLineage("meta_info names no weight_version: ask an SGLang server, 0.5.11 or later")
            spans = (VersionSpan(_number(meta.weight_version), 0, tokens),) if tokens else ()
            return cls(spans, exact=False)
        runs = [run for run in meta.weight_versions if run.start < run.end]
        ends = [0, *(run.end for run in runs)]
        if [run.start for run in runs] != ends[:-1] or ends[-1] != tokens:
            found = ", ".join(f"{run.start}..{run.end}" for run in runs) or "nothing"
            raise UnknownLineage(f"weight_versions speak of tokens {found}, expected are 0..{tokens} without a gap")
        last = meta.weight_versions[-1].version if meta.weight_versions else meta.weight_version
        if meta.weight_version not in (None, last):
            raise UnknownLineage(f"weight_version is {meta.weight_version!r}, the last of weight_versions is {last!r}")
        return cls(tuple(VersionSpan(_number(run.version), run.start, run.end) for run in runs), exact=True)

    def by_token(self) -> list[int | None]:
        """The version of each output token."""
        return [span.version for span in self.spans for _ in range(span.start, span.end)]

    @property
    def versions(self) -> tuple[int | None, ...]:
        """The versions in order of their spans; a version with several spans is repeated."""
        return tuple(span.version for span in self.spans)

    @property
    def mixed(self) -> bool:
        """True if several versions wrote the response, as far as is known."""
        return len(set(self.versions)) > 1

    def lag(self, current: int) -> int | None:
        """Versions between the oldest token and `current`; None if a token's version is unknown, 0 without tokens."""
        known = [version for version in self.versions if version is not None]
        if len(known) != len(self.versions):
            return None
        return max((current - version for version in known), default=0)


class MixedPolicy(enum.StrEnum):
    """Treatment of a response that several versions wrote."""

    KEEP = "keep"
    """All tokens count if none of them is too old; otherwise the response is dropped."""
    MASK = "mask"
    """All tokens count but those that are too old."""
    DROP = "drop"
    """The response is dropped."""


class StalenessVerdict(msgspec.Struct, frozen=True):
    """Decision about learning from a response."""

    keep: bool
    """False when the response is dropped."""
    mask: tuple[bool, ...]
    """One flag for each output token: True if it is learned from. All False when the response is dropped."""
    reason: str = ""
    """Reason for dropping the response, or for masking tokens."""


class Staleness(msgspec.Struct, frozen=True):
    """A policy for the age of the responses that a trainer learns from."""

    max_lag: int
    """Largest difference between the version in training and a token's version."""
    mixed: MixedPolicy | Literal["keep", "mask", "drop"] = MixedPolicy.KEEP
    launch: bool = False
    """True to count the weights of a server's launch as the version before all others, False as unknown."""
    inexact: bool = True
    """True to count a response of which only the last version is known as that version's, False to drop it."""

    def __post_init__(self) -> None:
        MixedPolicy(self.mixed)
        if self.max_lag < 0:
            raise ValueError(f"max_lag = {self.max_lag}: 0 or more is expected")

    def judge(self, lineage: Lineage, current: int) -> StalenessVerdict:
        """Decide about a response when `current` is the version in training.

        Tokens of a version above `current` do not count: that version was withdrawn by a rollback.
        """
        size = lineage.spans[-1].end if lineage.spans else 0
        if not lineage.exact and not self.inexact:
            return _dropped(size, "only the version of its last token is known")
        mixed = MixedPolicy(self.mixed)
        if lineage.mixed and mixed is MixedPolicy.DROP:
            return _dropped(size, f"versions {_names(lineage.versions)} wrote it")
        fresh = [self._fresh(span.version, current) for span in lineage.spans]
        if all(fresh):
            return StalenessVerdict(keep=True, mask=(True,) * size)
        reason = self._reason(
            [span.version for span, good in zip(lineage.spans, fresh, strict=True) if not good], current
        )
        if mixed is not MixedPolicy.MASK or not any(fresh):
            return _dropped(size, reason)
        mask = tuple(good for span, good in zip(lineage.spans, fresh, strict=True) for _ in range(span.start, span.end))
        return StalenessVerdict(keep=True, mask=mask, reason=reason)

    def _fresh(self, version: int | None, current: int) -> bool:
        if version is None:
            return self.launch and current <= self.max_lag
        return 0 <= current - version <= self.max_lag

    def _reason(self, wrong: Sequence[int | None], current: int) -> str:
        above = [version for version in wrong if version is not None and version > current]
        old = [version for version in wrong if version is None or version <= current]
        said = [f"tokens of version {_names(old)} are more than {self.max_lag} behind {current}"] if old else []
        if above:
            said.append(
                f"tokens of version {_names(above)} are of weights that were withdrawn: {current} is in training"
            )
        return "; ".join(said)


def _dropped(size: int, reason: str) -> StalenessVerdict:
    return StalenessVerdict(keep=False, mask=(False,) * size, reason=reason)


def _names(versions: Sequence[int | None]) -> str:
    return ", ".join(dict.fromkeys("of the launch" if each is None else str(each) for each in versions))


def _number(label: str) -> int | None:
    return int(label) if label.isdecimal() and label.isascii() else None
