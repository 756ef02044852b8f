"""Plans that the leader of sends and its engines agree to, their schedules, and what each rank of the trainer does.

All of it follows from a plan, and is made when that is agreed to: the engine is busy with its own half then, and when
all are prepared it is not waited for. What engines that are alike take is made once, and is one part of a rank's: it is
known by what is in it, and a rank that has sent it to another engine need not be told again.

It is kept from version to version, because to make it takes longer than many versions do. But a fleet changes for
weeks, and every worker that ever came would leave its own. So plans of engines that took no part for some versions
are forgotten; an engine that comes back after that proposes its plan once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ...errors import ManifestError, TransferFailed
from ...reshard import LoadTrace, ReshardPlan, SendMessages, SendSchedule, make_plan, make_send_schedule, rank_distances
from ..interface import ExportedWeights
from ..plan_exchange import Proposal
from . import messages as wire

KEPT: Final = 16
"""For so many versions that it is not used for a plan is kept."""
_MOST_READY: Final = 256 * 1024 * 1024
"""Bytes of parts that are kept until ranks are told: further ones are made then."""


class _Agreed(NamedTuple):
    """A plan."""

    plan: ReshardPlan
    targets: int
    """How many its recording has."""
    turn: int
    """When it was used last, counted in versions."""


class PlanAgreement:
    """Of one leader. Used from one thread."""

    def __init__(self) -> None:
        self._exposed: ExportedWeights | None = None
        self._plans: dict[str, _Agreed] = {}
        """Plans that were agreed to, by digest."""
        self._made: dict[tuple[bytes, int, tuple[int, ...]], tuple[ReshardPlan, int]] = {}
        """What they were taken from, by what that was made from, and how many targets its recording has."""
        self._schedules: dict[str, SendSchedule] = {}
        """By plan, cut as `_cut` says."""
        self._cut = (0, 0)
        """What a pair moves in a turn, and what alone is a message of its own."""
        self._names: dict[tuple[SendMessages, int], str] = {}
        """Of what each holder does of a schedule."""
        self._ready: dict[tuple[SendMessages, int], tuple[bytes, bytes]] = {}
        """Parts that no rank was told yet."""
        self._room = _MOST_READY
        """Bytes that are left for them."""
        self._version, self._turn = -1, 0

    def turn_to(self, exposed: ExportedWeights, version: int) -> None:
        """It is sent next, and lies so. Plans of what lay otherwise are forgotten."""
        if self._exposed is None or exposed.layout != self._exposed.layout:
            self._plans, self._made = {}, {}
            self._cut_anew((0, 0))
        self._exposed = exposed
        if version != self._version:
            self._version, self._turn = version, self._turn + 1
            self.told()  # no rank will be: that version is over
            self._forget()

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of plans that need not be proposed."""
        return tuple(self._plans)

    def agree(self, proposal: Proposal) -> str:
        """Make the same plan, or take that of another engine's like worker; its digest.

        Raises `TransferFailed` when it differs.
        """
        assert self._exposed is not None
        exports, reader = self._exposed.exports, proposal.reader
        like = hashlib.sha256(proposal.recording).digest(), reader.rank, rank_distances(exports, reader)
        plan, targets = self._made[like] = self._made.get(like) or self._make(proposal)
        plan = replace(plan, reader=reader)
        found = plan.digest()
        if found != proposal.plan:
            raise TransferFailed(
                f"worker {proposal.reader.rank} planned {proposal.plan[:12]}, the trainer {found[:12]} from the same "
                "layouts: both sides must run one version of weightbus"
            )
        self._plans[found] = _Agreed(plan, targets, self._turn)
        return found

    def schedule(self, plan: str, pair_bytes: int, alone_bytes: int) -> SendSchedule:
        """That of a plan, cut so. Raises `TransferFailed` for one that was not agreed to."""
        if plan not in self._plans:
            raise TransferFailed(f"plan {plan[:12]} was not agreed to: propose it first")
        if self._cut != (pair_bytes, alone_bytes):
            self._cut_anew((pair_bytes, alone_bytes))
        known = self._plans[plan] = self._plans[plan]._replace(turn=self._turn)
        if plan not in self._schedules:
            made = self._alike(known.plan) or make_send_schedule(known.plan, known.targets, pair_bytes, alone_bytes)
            self._schedules[plan] = replace(made, plan=plan)
        return self._schedules[plan]

    def make_ready(self, plan: str, holders: Iterable[int], pair_bytes: int, alone_bytes: int) -> None:
        """Do now what `check` and `parts_of` would do, as far as there is room for it."""
        made = self.schedule(plan, pair_bytes, alone_bytes)
        made.digest()
        for holder in holders:
            key = made.messages, holder
            if key not in self._names and self._room > 0:
                part = self._ready[key] = self._part(plan, made, holder)
                self._room -= len(part[0]) + len(part[1])

    def check(self, prepared: wire.Prepared, workers: int, pair_bytes: int, alone_bytes: int) -> None:
        """Make the schedules that were prepared. Raises `TransferFailed` when they are others."""
        plans, schedules = len(prepared.plans), len(prepared.schedules)
        if not plans == schedules == workers:
            raise TransferFailed(f"{plans} plans and {schedules} schedules came for {workers} workers")
        for plan, theirs in zip(prepared.plans, prepared.schedules, strict=True):
            ours = self.schedule(plan, pair_bytes, alone_bytes).digest()
            if ours != theirs:
                raise ManifestError(
                    f"a worker scheduled {theirs[:12]}, the trainer {ours[:12]} from the same plan: both sides must "
                    "run one version of weightbus"
                )

    def parts_of(
        self,
        holder: int,
        known: Collection[str],
        peers: Sequence[tuple[int, str]],
        pair_bytes: int,
        alone_bytes: int,
    ) -> tuple[wire.SchedulePart, ...]:
        """What a holder sends to `peers`, each a rank of the group and its plan. What it has `known` is only named."""
        found: list[wire.SchedulePart] = []
        named = set(known)
        for peer, plan in peers:
            made = self.schedule(plan, pair_bytes, alone_bytes)
            key = made.messages, holder
            part = None if key in self._names else self._part(plan, made, holder)
            name = self._names[key]
            if name in named:
                found.append(wire.SchedulePart(peer=peer, schedule=name))
                continue
            messages, pack = self._ready.get(key) or part or self._part(plan, made, holder)
            found.append(wire.SchedulePart(peer=peer, schedule=name, messages=messages, pack=pack))
            named.add(name)
        return tuple(found)

    def told(self) -> None:
        """Every rank knows its messages."""
        self._ready, self._room = {}, _MOST_READY

    def _make(self, proposal: Proposal) -> tuple[ReshardPlan, int]:
        assert self._exposed is not None
        recording = LoadTrace.decode(proposal.recording, self._exposed.shards.tensors)
        plan = make_plan(self._exposed.shards, self._exposed.exports, recording, proposal.reader)
        return plan, len(recording.targets)

    def _alike(self, plan: ReshardPlan) -> SendSchedule | None:
        """The plan of another worker that copies the same, if there is one."""
        found = (each for name, each in self._schedules.items() if self._plans[name].plan.copies is plan.copies)
        return next(found, None)

    def _part(self, plan: str, made: SendSchedule, holder: int) -> tuple[bytes, bytes]:
        """What a holder does of a schedule, encoded. It has a name from now on."""
        messages, pack = made.of_rank(holder, self._plans[plan].plan)
        part = messages.encode(), pack.encode()
        self._names[made.messages, holder] = hashlib.sha256(hashlib.sha256(part[0]).digest() + part[1]).hexdigest()
        return part

    def _cut_anew(self, cut: tuple[int, int]) -> None:
        self._cut, self._schedules, self._names = cut, {}, {}
        self.told()

    def _forget(self) -> None:
        old = [name for name, each in self._plans.items() if each.turn < self._turn - KEPT - 1]
        for name in old:
            del self._plans[name]
            self._schedules.pop(name, None)
        if old:
            used = {id(each.plan.copies) for each in self._plans.values()}
            self._made = {like: each for like, each in self._made.items() if id(each[0].copies) in used}
            messages = {each.messages for each in self._schedules.values()}
            self._names = {key: name for key, name in self._names.items() if key[0] in messages}
