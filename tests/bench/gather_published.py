"""The published ways to gather Megatron weights, re-implemented from what slime does (THUDM/slime, read 2026-08).

`Synchronous`: its path to engines on other hosts. One blocking all-gather for each tensor-parallel parameter on every
rank, converted on the source rank, collected up to the size of a bucket; experts afterwards, collected up to a bucket
divided by the expert-parallel size, their names exchanged as objects, one all-gather each, waited for together.

`Batched`: its path to engines on the same host. Parameters in buckets by their full size; in each bucket all experts
are broadcast by their owners asynchronously, then all parameters all-gathered asynchronously, waited for together,
concatenated and converted on every rank.

Both are favored: nothing is uploaded from a backup on the CPU, nothing is sent on, and converted tensors need not be
packed into one buffer, which ours does. In both an expert passes an all-gather over its expert-tensor-parallel group
of one, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gather_model import Param, Rule, Shape, to_served

Take = Callable[[list[tuple[str, torch.Tensor]]], None]
"""What is done with the converted tensors of a bucket."""


class Counter:
    """Collective calls, and bytes that this rank receives from others."""

    def __init__(self) -> None:
        self.calls = 0
        self.nbytes = 0

    def count(self, tensor: torch.Tensor, senders: int) -> None:
        self.calls += 1
        self.nbytes += tensor.numel() * tensor.element_size() * senders


class Groups:
    """Tensor and expert parallelism over all ranks, expert tensor parallelism over one."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.world = dist.group.WORLD
        alone: list[Any] = [dist.new_group([each]) for each in range(ranks)]
        self.alone = alone[rank]


def _group(param: Param, groups: Groups) -> tuple[Any, int]:
    return (groups.alone, 1) if param.rule is Rule.EXPERT else (groups.world, groups.ranks)


def _joined(param: Param, parts: list[torch.Tensor]) -> torch.Tensor:
    if ".linear_fc1." in param.name:
        halves = [part.chunk(2, dim=0) for part in parts]
        parts = [half[0] for half in halves] + [half[1] for half in halves]
    return torch.cat(parts, dim=1 if param.rule is Rule.COLUMNS else 0)


class Synchronous:
    """One parameter after another."""

    def __init__(self, held: list[Param], shape: Shape, groups: Groups, bucket_bytes: int) -> None:
        self._held, self._shape, self._groups, self._limit = held, shape, groups, bucket_bytes
        self.counter = Counter()

    def run(self, take: Take) -> None:
        self._dense(take)
        dist.barrier()
        self._experts(take)
        dist.barrier()

    def _gather(self, param: Param) -> torch.Tensor:
        if param.rule is Rule.COPY:
            return param.data
        group, size = _group(param, self._groups)
        parts = [torch.empty_like(param.data) for _ in range(size)]
        dist.all_gather(parts, param.data, group=group)
        self.counter.count(param.data, size - 1)
        return _joined(param, parts)

    def _dense(self, take: Take) -> None:
        converted: list[tuple[str, torch.Tensor]] = []
        size = 0
        for param in self._held:
            if param.rule is Rule.EXPERT:
                continue
            full = self._gather(param)
            if self._groups.rank:
                continue
            nbytes = full.numel() * full.element_size()
            if size + nbytes > self._limit and converted:
                take(converted)
                converted, size = [], 0
            converted += to_served(param.name, full, self._shape)
            size += nbytes
        if converted:
            take(converted)

    def _experts(self, take: Take) -> None:
        named: list[tuple[str, torch.Tensor]] = []
        size = 0
        for param in self._held:
            if param.rule is not Rule.EXPERT:
                continue
            full = self._gather(param)
            nbytes = full.numel() * full.element_size()
            if (size + nbytes) * self._groups.ranks > self._limit and named:
                self._flush(named, take)
                named, size = [], 0
            named.append((param.name, full))
            size += nbytes
        if named:
            self._flush(named, take)

    def _flush(self, named: list[tuple[str, torch.Tensor]], take: Take) -> None:
        names: list[Any] = [None] * self._groups.ranks
        dist.all_gather_object(names, [name for name, _ in named])
        self.counter.calls += 1
        gathered: list[list[tuple[str, torch.Tensor]]] = [[] for _ in names]
        handles = []
        for index, (_, tensor) in enumerate(named):
            parts = [torch.empty_like(tensor) for _ in names]
            handles.append(dist.all_gather(parts, tensor, async_op=True))
            self.counter.count(tensor, self._groups.ranks - 1)
            for rank, part in enumerate(parts):
                gathered[rank].append((names[rank][index], part))
        for handle in handles:
            handle.wait()
        if self._groups.rank:
            return
        take([each for part in gathered for name, full in part for each in to_served(name, full, self._shape)])


class Batched:
    """A bucket at a time, everything in it at once."""

    def __init__(self, held: list[Param], shape: Shape, groups: Groups, bucket_bytes: int) -> None:
        self._shape, self._groups = shape, groups
        self._mine = {param.name: param for param in held}
        self.counter = Counter()
        self._buckets = list(self._cut(self._everyones(held), bucket_bytes))

    def _everyones(self, held: list[Param]) -> list[tuple[str, tuple[int, ...], Rule, int]]:
        """What all ranks hold, in one order: name, local shape, rule, lowest owner."""
        mine = [(param.name, tuple(param.data.shape), param.rule, self._groups.rank) for param in held]
        lists: list[Any] = [None] * self._groups.ranks
        dist.all_gather_object(lists, mine)
        first: dict[str, tuple[str, tuple[int, ...], Rule, int]] = {}
        for each in lists:
            for info in each:
                first.setdefault(info[0], info)
        return sorted(first.values())

    def _cut(
        self, infos: list[tuple[str, tuple[int, ...], Rule, int]], limit: int
    ) -> Iterator[list[tuple[str, tuple[int, ...], Rule, int]]]:
        bucket: list[tuple[str, tuple[int, ...], Rule, int]] = []
        size = 0
        for info in infos:
            copies = 1 if info[2] is Rule.EXPERT else self._groups.ranks
            nbytes = torch.Size(info[1]).numel() * 2 * copies
            if bucket and size + nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(info)
            size += nbytes
        yield bucket

    def run(self, take: Take) -> None:
        for bucket in self._buckets:
            local = [self._local(info) for info in bucket]
            handles = []
            for (_, _, rule, owner), param in zip(bucket, local, strict=True):
                if rule is Rule.EXPERT:
                    handles.append(dist.broadcast(param.data, src=owner, async_op=True))
                    self.counter.count(param.data, owner != self._groups.rank)
            for handle in handles:
                handle.wait()
            full = self._gather(local)
            converted: list[tuple[str, torch.Tensor]] = []
            for param, tensor in zip(local, full, strict=True):
                converted += to_served(param.name, tensor, self._shape)
            take(converted)

    def _local(self, info: tuple[str, tuple[int, ...], Rule, int]) -> Param:
        name, size, rule, _ = info
        if name in self._mine:
            return self._mine[name]
        device = next(iter(self._mine.values())).data.device
        return Param(name, torch.empty(size, dtype=torch.bfloat16, device=device), rule)

    def _gather(self, local: list[Param]) -> list[torch.Tensor]:
        tasks: list[tuple[Param, list[torch.Tensor], Any]] = []
        for param in local:
            if param.rule is Rule.COPY:
                tasks.append((param, [param.data], None))
                continue
            group, size = _group(param, self._groups)
            parts = [torch.empty_like(param.data) for _ in range(size)]
            tasks.append((param, parts, dist.all_gather(parts, param.data, group=group, async_op=True)))
            self.counter.count(param.data, size - 1)
        for _, _, handle in tasks:
            if handle is not None:
                handle.wait()
        return [parts[0] if handle is None else _joined(param, parts) for param, parts, handle in tasks]
