"""The plans and schedules that the leader of sends has made as the workers of its engines did: both must be the same.

They are kept from version to version, because to make them takes longer than many versions do. But a fleet changes for
weeks, and every worker that ever came would leave its own. So those of who took no part for some versions are
forgotten; who comes back after that proposes its plan once more.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final, NamedTuple

from . import direct_wire
from .direct import Exposed
from .errors import TransferFailed
from .plan import Plan, distances, make_plan
from .recording import Recording
from .schedule import Schedule, schedule

KEPT: Final = 16
"""For so many versions that it is not used for a plan is kept."""


class _Agreed(NamedTuple):
    """A plan."""

    plan: Plan
    targets: int
    """How many its recording has."""
    turn: int
    """When it was used last, counted in versions."""


class Agreements:
    """Of one leader. Used from one thread."""

    def __init__(self) -> None:
        self._exposed: Exposed | None = None
        self._plans: dict[str, _Agreed] = {}
        """Those that were agreed to, by digest."""
        self._made: dict[tuple[bytes, int, tuple[int, ...]], tuple[Plan, int]] = {}
        """What they were taken from, by what that was made from, and how many targets its recording has."""
        self._schedules: dict[str, Schedule] = {}
        """By plan, cut as `_cut` says."""
        self._cut = (0, 0)
        self._version, self._turn = -1, 0

    def turn_to(self, exposed: Exposed, version: int) -> None:
        """It is sent next, and lies so. Plans of what lay otherwise are forgotten."""
        if self._exposed is None or exposed.layout != self._exposed.layout:
            self._plans, self._made, self._schedules = {}, {}, {}
        self._exposed = exposed
        if version != self._version:
            self._version, self._turn = version, self._turn + 1
            self._forget()

    @property
    def plans(self) -> tuple[str, ...]:
        """Digests of those that need not be proposed."""
        return tuple(self._plans)

    def plan(self, digest: str) -> Plan:
        """One of them."""
        return self._plans[digest].plan

    def agree(self, proposal: direct_wire.Proposal) -> None:
        """Make the same plan, or take that of another engine's like worker. Raises `TransferFailed` when it differs."""
        assert self._exposed is not None
        exports, reader = self._exposed.exports, proposal.reader
        like = hashlib.sha256(proposal.recording).digest(), reader.rank, distances(exports, reader)
        plan, targets = self._made[like] = self._made.get(like) or self._make(proposal)
        plan = replace(plan, reader=reader)
        found = plan.digest()
        if found != proposal.plan:
            raise TransferFailed(
                f"worker {proposal.reader.rank} planned {proposal.plan[:12]}, the trainer {found[:12]} from the same "
                "layouts: both sides must run one version of weightbus"
            )
        self._plans[found] = _Agreed(plan, targets, self._turn)

    def schedule(self, plan: str, pair_bytes: int, alone_bytes: int) -> Schedule:
        """That of a plan, cut so. Raises `TransferFailed` for one that was not agreed to."""
        if plan not in self._plans:
            raise TransferFailed(f"plan {plan[:12]} was not agreed to: propose it first")
        if self._cut != (pair_bytes, alone_bytes):
            self._cut, self._schedules = (pair_bytes, alone_bytes), {}
        known = self._plans[plan] = self._plans[plan]._replace(turn=self._turn)
        if plan not in self._schedules:
            made = self._alike(known.plan) or schedule(known.plan, known.targets, pair_bytes, alone_bytes)
            self._schedules[plan] = replace(made, plan=plan)
        return self._schedules[plan]

    def _make(self, proposal: direct_wire.Proposal) -> tuple[Plan, int]:
        assert self._exposed is not None
        recording = Recording.decode(proposal.recording, self._exposed.pieces.tensors)
        plan = make_plan(self._exposed.pieces, self._exposed.exports, recording, proposal.reader)
        return plan, len(recording.targets)

    def _alike(self, plan: Plan) -> Schedule | None:
        """That of another worker who copies the same, if there is one."""
        found = (each for name, each in self._schedules.items() if self._plans[name].plan.copies is plan.copies)
        return next(found, None)

    def _forget(self) -> None:
        old = [name for name, each in self._plans.items() if each.turn < self._turn - KEPT - 1]
        for name in old:
            del self._plans[name]
            self._schedules.pop(name, None)
        if old:
            used = {id(each.plan.copies) for each in self._plans.values()}
            self._made = {like: each for like, each in self._made.items() if id(each[0].copies) in used}
