"""Plans that the leader of sends and its engines agree to, their schedules, and what each rank of the trainer does.

All of it follows from a plan, and is made when that is agreed to: the engine is busy with its own half then, and when
all are prepared nobody waits for it. What engines that are alike take is made once, and is one part of a rank's: it is
known by what is in it, and a rank that has sent it to another engine need not be told again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from . import direct_wire
from . import sends_wire as wire
from .direct import Exposed
from .errors import ManifestError, TransferFailed
from .plan import Plan, distances, make_plan
from .recording import Recording
from .schedule import Messages, Schedule, schedule
from .sends_ends import alike

_MOST_READY: Final = 256 * 1024 * 1024
"""Bytes of parts that are kept until ranks are told: further ones are made then."""


class AgreedPlans:
    """Of one layout of the trainer. Used from one thread."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[Plan, int]] = {}
        """By digest, and how many targets their recordings have."""
        self._made: dict[tuple[bytes, int, tuple[int, ...]], tuple[Plan, int]] = {}
        """The same, by what they were made from."""
        self._schedules: dict[tuple[str, int], Schedule] = {}
        """By plan, and what a pair moves in a turn."""
        self._names: dict[tuple[Messages, int], str] = {}
        """Of what each holder does of a schedule."""
        self._ready: dict[tuple[Messages, int], tuple[bytes, bytes]] = {}
        """The parts that nobody was told yet."""

    def clear(self) -> None:
        """The layout is another."""
        for known in (self._plans, self._made):
            known.clear()
        self.cut_anew()

    def cut_anew(self) -> None:
        """Turns are of another size."""
        for known in (self._schedules, self._names, self._ready):
            known.clear()

    @property
    def digests(self) -> tuple[str, ...]:
        """Of all plans."""
        return tuple(self._plans)

    def agree(self, exposed: Exposed, proposal: direct_wire.Proposal) -> str:
        """Make the same plan, or take that of another engine's like worker; its digest.

        Raises `TransferFailed` when it differs.
        """
        exports, reader = exposed.exports, proposal.reader
        like = hashlib.sha256(proposal.recording).digest(), reader.rank, distances(exports, reader)
        plan, targets = self._made.get(like) or _plan(exposed, proposal)
        self._made[like] = plan, targets
        plan = replace(plan, reader=reader)
        found = plan.digest()
        if found != proposal.plan:
            raise TransferFailed(
                f"worker {proposal.reader.rank} planned {proposal.plan[:12]}, the trainer {found[:12]} from the same "
                "layouts: both sides must run one version of weightbus"
            )
        self._plans[found] = plan, targets
        return found

    def schedule(self, plan: str, pair_bytes: int, alone_bytes: int) -> Schedule:
        """Of the plan of that digest."""
        key = plan, pair_bytes
        if key not in self._schedules:
            like = alike(self._schedules, self._plans, key)
            self._schedules[key] = like or schedule(*self._plans[plan], pair_bytes, alone_bytes)
        return self._schedules[key]

    def make_ready(self, plan: str, holders: Iterable[int], pair_bytes: int, alone_bytes: int) -> None:
        """Do now what `check` and `letters` would do, as far as there is room for it."""
        made = self.schedule(plan, pair_bytes, alone_bytes)
        made.digest()
        for holder in holders:
            key = made.messages, holder
            if key not in self._names and sum(map(_nbytes, self._ready.values())) < _MOST_READY:
                self._ready[key] = self._part(plan, made, holder)

    def check(self, prepared: wire.Prepared, workers: int, pair_bytes: int, alone_bytes: int) -> None:
        """Make the schedules that were prepared. Raises `TransferFailed` when they are others."""
        plans, schedules = len(prepared.plans), len(prepared.schedules)
        if not plans == schedules == workers:
            raise TransferFailed(f"{plans} plans and {schedules} schedules came for {workers} workers")
        for plan, theirs in zip(prepared.plans, prepared.schedules, strict=True):
            if plan not in self._plans:
                raise TransferFailed(f"plan {plan[:12]} was not agreed to: propose it first")
            ours = self.schedule(plan, pair_bytes, alone_bytes).digest()
            if ours != theirs:
                raise ManifestError(
                    f"a worker scheduled {theirs[:12]}, the trainer {ours[:12]} from the same plan: both sides must "
                    "run one version of weightbus"
                )

    def letters(
        self,
        holder: int,
        known: Collection[str],
        peers: Sequence[tuple[int, str]],
        pair_bytes: int,
        alone_bytes: int,
    ) -> tuple[wire.Letters, ...]:
        """What a holder sends to `peers`, each a rank of the group and its plan. What it has `known` is only named."""
        found: list[wire.Letters] = []
        named = set(known)
        for peer, plan in peers:
            made = self.schedule(plan, pair_bytes, alone_bytes)
            key = made.messages, holder
            part = None if key in self._names else self._part(plan, made, holder)
            name = self._names[key]
            if name in named:
                found.append(wire.Letters(peer=peer, schedule=name))
                continue
            messages, pack = self._ready.get(key) or part or self._part(plan, made, holder)
            found.append(wire.Letters(peer=peer, schedule=name, messages=messages, pack=pack))
            named.add(name)
        return tuple(found)

    def told(self) -> None:
        """Everybody knows its letters."""
        self._ready.clear()

    def _part(self, plan: str, made: Schedule, holder: int) -> tuple[bytes, bytes]:
        """What a holder does of a schedule, encoded. It has a name from now on."""
        messages, pack = made.of_holder(holder, self._plans[plan][0])
        part = messages.encode(), pack.encode()
        self._names[made.messages, holder] = hashlib.sha256(hashlib.sha256(part[0]).digest() + part[1]).hexdigest()
        return part


def _plan(exposed: Exposed, proposal: direct_wire.Proposal) -> tuple[Plan, int]:
    recording = Recording.decode(proposal.recording, exposed.pieces.tensors)
    return make_plan(exposed.pieces, exposed.exports, recording, proposal.reader), len(recording.targets)


def _nbytes(part: tuple[bytes, bytes]) -> int:
    return len(part[0]) + len(part[1])
