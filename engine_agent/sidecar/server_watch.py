"""Looks at a server that is listed: whether another party has changed its weights or its label, or paused it.

A look changes nothing. One that overlaps an operation of this sidecar is thrown away: it might take the sidecar's own
work for another party's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from weightbus.control.log import get_log
from weightbus.control.protocol import HeldVersion

from ..engines import Engine, Sight
from ..errors import ServerError
from ..machine import ServerWatched
from ..state_file import StateWriter, write_durably

_SHARE: Final = 0.4
"""Of `watch_s`: the time between two looks. A look, and the heartbeat that tells of it, take up to two seconds."""
_SAMPLES_COST: Final = 0.005
"""Digests may take at most this share of the server's time."""
_SAMPLE_S: Final = 60.0
_LAYER: Final = re.compile(r"\.\d+\.")
_WEIGHTS: Final = ("weight", "bias", "scale")
"""Parts of the names of parameters that no server changes by itself; some have counters and tables beside them."""

_log = get_log(__name__)


class Calm(NamedTuple):
    """A moment at which no operation of this sidecar runs."""

    operations: int
    """Operations that the machine had begun."""
    errands: int
    """Errands of the worker thread for other parts of the sidecar, begun and ended."""
    identity: str
    """The process generation that the sidecar knows."""
    serves: bool
    """Whether the server is meant to generate, from clean weights."""
    held: HeldVersion | None = None
    """Version of those weights; None for those of the launch."""


class KeptDigests(msgspec.Struct, frozen=True, kw_only=True):
    """What one life of a sidecar leaves to the next: digests of the weights that its server had."""

    identity: str
    """Process generation of the server."""
    held: HeldVersion | None
    ranks: tuple[dict[str, str], ...]
    """Digests by parameter, for each rank."""


class DigestFile:
    """The file of `KeptDigests`. It is written late, on a thread of its own: a disk that hangs stops no look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = StateWriter(self._write)

    def read(self) -> KeptDigests | None:
        """What an earlier life left; None without it. The next life learns the digests anew then."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=KeptDigests)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("digests_of_weights_not_read", file=str(self._path), reason=str(error))
            return None

    def write(self, kept: KeptDigests) -> None:
        """Begin to write `kept`, and return."""
        if (lost := self._writer.failure()) is not None:
            _log.warning("digests_of_weights_not_written", file=str(self._path), reason=str(lost[1]))
        self._writer.later(kept)

    def close(self) -> None:
        """Wait for the write that was begun, for a limited time."""
        self._writer.close()

    def _write(self, kept: KeptDigests) -> None:
        write_durably(self._path, msgspec.json.encode(kept))


class ServerWatch:
    """The watch over one server. `look` is called from one thread."""

    def __init__(
        self,
        server: Engine,
        calm: Callable[[], Calm | None],
        report: Callable[[ServerWatched], None],
        watch_s: float,
        sampler: WeightSampler | None,
    ) -> None:
        """`calm` returns None while an operation runs. Without a `sampler` weights are not looked at."""
        self._server, self._calm, self._report, self._sampler = server, calm, report, sampler
        self.period_s = watch_s * _SHARE
        self._looked_at = float("-inf")

    @property
    def due(self) -> bool:
        """Whether it is time for a look."""
        return self.period_s > 0 and time.monotonic() >= self._looked_at + self.period_s * 0.75

    def look(self, timeout_s: float) -> Sight | None:
        """Look once; None while an operation runs. Raises `ServerError`."""
        before = self._calm()
        if before is None:
            return None
        self._looked_at = time.monotonic()
        sight = self._server.look(timeout_s)
        changed = ""
        if sight.label != self._server.last_label:
            changed = f"labeled {sight.label!r} by another party, expected {self._server.last_label!r}"
        elif before.serves and sight.generates is not False and sight.identity == before.identity and self._sampler:
            changed = self._sampler.look(before.identity, before.held)
        if self._calm() == before and sight.identity in {"", before.identity}:
            self._report(ServerWatched(before.operations, sight.generates, changed))
            if self._sampler and before.serves and not changed:
                self._sampler.keep()
        return sight


class WeightSampler:
    """Digests a part of the live weights at each look, in turn, and compares it with the digests from before.

    The digests of a version are those of its proof, where the server proved it by live digests; else those of the first
    look at each part after the version was received. A layer is a part; of an older SGLang all layers are one.

    A new life of the sidecar begins with the digests of its last one, if the server and its version are still the same:
    what another party did meanwhile shows, too.
    """

    def __init__(
        self,
        server: Engine,
        loads: Callable[[], tuple[int, tuple[int, Sequence[dict[str, str]]]]],
        file: DigestFile | None = None,
    ) -> None:
        """`loads` returns the number of receptions begun, and that at the last proof with its digests."""
        self._server, self._loads, self._file = server, loads, file
        self._kept = file.read() if file else None
        """Digests as an earlier life left them."""
        self._held: HeldVersion | None = None
        self._marked: tuple[object, ...] = ()
        """Weights and number of digests of the last write: the digests of one version only become more."""
        self._identity = ""
        self._parts: list[str] = []
        """Each is a piece of the names of one part's parameters, and of no other's."""
        self._next = 0
        self._of: tuple[str, int] = "", -1
        self._known: dict[tuple[int, str], str] = {}
        """Digests by rank and parameter."""
        self._seconds: list[float] = []
        """Of the last looks at the parts; a busy server makes some of them wait."""
        self._not_before = float("-inf")
        self._failed = ""

    def look(self, identity: str, held: HeldVersion | None = None) -> str:
        """Look at the next part of the weights of `held`; what shows that it changed, or nothing."""
        if not self._server.samples:
            return ""
        self._follow(identity, held)
        if time.monotonic() < self._not_before:
            return ""
        if identity != self._identity:
            self._identity, self._parts, self._next, self._seconds = identity, [], 0, []
        began, first = time.monotonic(), not self._parts
        try:
            found = dict(_weights(self._server.sample(self._others(), _SAMPLE_S)))
        except ServerError as error:
            if self._failed != str(error):
                _log.warning("weights_not_watched", reason=str(error))
            self._failed = str(error)
            self._not_before = time.monotonic() + _SAMPLE_S
            return ""
        if self._server.samples > 1 and first:  # of all parts: that is not what a look costs
            self._parts = list(dict.fromkeys(_part(name) for _, name in found))
        else:
            self._next = (self._next + 1) % max(1, len(self._parts))
            self._spent(time.monotonic() - began)
        wrong = [
            (rank, name) for (rank, name), digest in found.items() if self._known.get((rank, name), digest) != digest
        ]
        self._known = found | self._known
        if not wrong:
            return ""
        rank, name = wrong[0]
        return f"another party changed its weights: {name!r} on rank {rank} is not what it was ({len(wrong)} such)"

    def _follow(self, identity: str, held: HeldVersion | None) -> None:
        """Begin with the digests that are known of other weights, once there are any."""
        loads, (proven_at, proven) = self._loads()
        self._held = held
        if self._of == (identity, loads):
            return
        self._of, self._known = (identity, loads), {}
        if proven_at == loads and proven:
            self._known = dict(_weights(proven))
        elif loads == 0 and self._kept and (self._kept.identity, self._kept.held) == (identity, held):
            self._known = dict(_weights(self._kept.ranks))

    def keep(self) -> None:
        """Leave the digests that are known to the next life: after a look that no operation overlapped."""
        mark = self._of, self._held, len(self._known)
        if self._file is None or not self._known or mark == self._marked:
            return
        self._marked = mark
        ranks: list[dict[str, str]] = [{} for _ in range(1 + max(rank for rank, _ in self._known))]
        for (rank, name), digest in self._known.items():
            ranks[rank][name] = digest
        self._file.write(KeptDigests(identity=self._of[0], held=self._held, ranks=tuple(ranks)))

    def _others(self) -> list[str]:
        """The parts that are left out this time."""
        return [part for part in self._parts if part != self._parts[self._next]]

    def _spent(self, seconds: float) -> None:
        """Put the next look off until this one is worth its share; the fastest of the last ones tells its cost."""
        self._seconds = [*self._seconds[-7:], seconds]
        self._not_before = time.monotonic() + min(self._seconds) / _SAMPLES_COST


def _part(name: str) -> str:
    """Up to the number of the layer, with both of its points: no part of the name of another layer's parameter."""
    found = _LAYER.search(name)
    return name[: found.end()] if found else name


def _weights(ranks: Sequence[dict[str, str]]) -> list[tuple[tuple[int, str], str]]:
    return [
        ((rank, name), digest)
        for rank, digests in enumerate(ranks)
        for name, digest in digests.items()
        if any(part in name for part in _WEIGHTS)
    ]
