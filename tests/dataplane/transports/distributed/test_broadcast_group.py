"""What a group is made of, before there is one, and how one over NCCL ends, as far as that shows without a GPU."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from weightbus.dataplane.errors import DataplaneError, DeadlineExceeded, TransferFailed, Unsupported
from weightbus.dataplane.processes import process_groups as backends
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.processes.process_groups import process_group_backend
from weightbus.dataplane.transports.distributed import broadcast_group
from weightbus.dataplane.transports.distributed.broadcast_group import BroadcastGroup
from weightbus.dataplane.transports.distributed.source_watchdog import Connections


@pytest.mark.parametrize("found", [None, "1", ""])
def test_settings_with_which_nccl_would_hang_are_refused(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """SGLang's workers have 0, whatever they were started with; the first broadcast between both would never end."""
    if found is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    else:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", found)
    with pytest.raises(Unsupported, match="NCCL_CUMEM_ENABLE=0"):
        process_group_backend(torch.device("cuda"))
    assert process_group_backend(torch.device("cpu")) == "gloo"


def test_settings_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang sets it."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert process_group_backend(torch.device("cuda")) == "nccl"


class Work:
    """Of a broadcast: it never ends, or has ended and fails."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def is_completed(self) -> bool:
        """Torch's own."""
        return self._fails

    def wait(self) -> None:
        """Torch's own."""
        raise RuntimeError("NCCL error: remote process exited")


class Nccl:
    """A group of NCCL's whose first broadcast is `work`, or raises where there is none."""

    def __init__(self, work: Work | None) -> None:
        self._work = work
        self.aborted = 0

    def broadcast(self, _tensors: object, _options: object) -> Work:
        """Torch's own."""
        if self._work is None:
            raise RuntimeError("NCCL error: unhandled system error")
        return self._work

    def abort(self) -> None:
        """Torch's own."""
        self.aborted += 1


@pytest.mark.parametrize(
    ("work", "raised"),
    [(None, TransferFailed), (Work(fails=True), TransferFailed), (Work(fails=False), DeadlineExceeded)],
    ids=["does not begin", "breaks", "stands still"],
)
def test_a_group_that_does_not_connect_is_aborted(
    monkeypatch: pytest.MonkeyPatch, work: Work | None, raised: type[DataplaneError]
) -> None:
    """Over NCCL it keeps a thread, sockets and memory of the GPU until somebody does that, and nobody else has it."""
    made = Nccl(work)
    _without_a_gpu(monkeypatch, made)
    with pytest.raises(raised):
        _form()
    assert made.aborted == 1


def test_a_group_whose_gpu_has_no_room_to_connect_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter what fails."""
    made = Nccl(None)
    _without_a_gpu(monkeypatch, made)

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(TransferFailed, match="did not form: CUDA out of memory"):
        _form()
    assert made.aborted == 1


def _form() -> BroadcastGroup:
    store = c10d.HashStore()
    return BroadcastGroup.form(store, "g", "h", torch.device("cuda", 0), 3, Deadline(0.3), rank=1, connect=True)


def _without_a_gpu(monkeypatch: pytest.MonkeyPatch, made: Nccl) -> None:
    empty = torch.empty(1, dtype=torch.uint8)
    monkeypatch.setattr(backends, "make_nccl_group", lambda *_: made)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "zeros", cast("Any", lambda *_, **__: empty))


class Aborted:
    """A group of NCCL's, and its only work: an abort looks like that one's end."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def broadcast(self, *_: object) -> Aborted:
        self.begun.set()
        return self

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self, *_: object) -> bool:
        return True

    def abort(self) -> None:
        self.over.set()


@pytest.mark.parametrize("rank", [0, 1], ids=["sends", "receives"])
@pytest.mark.parametrize("aborts", [False, True], ids=["ends", "is aborted"])
def test_a_bucket_that_was_broken_off_is_not_taken(monkeypatch: pytest.MonkeyPatch, rank: int, aborts: bool) -> None:
    """Its sender would write the slot again, and its receiver load bytes that are not there."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    nccl = Aborted()
    group = BroadcastGroup("g", torch.device("cuda", 0), 2, nccl, rank=rank)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(1) as pool:
        broadcast = pool.submit(group.broadcast, torch.zeros(8, dtype=torch.uint8), Deadline(60.0))
        assert nccl.begun.wait(10.0)
        if aborts:
            group.abort()
        nccl.over.set()
        assert isinstance(broadcast.exception(10.0), TransferFailed if aborts else type(None))


class Gloo:
    """One of torch's, whose peers have ended."""

    def recv(self, *_: object) -> None:
        raise RuntimeError("connection closed by peer")


def test_what_hangs_up_for_a_source_ends_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is broken off: else a process for each such group."""
    closed = list[bool]()

    class StandIn:
        def __init__(self, *_: object) -> None:
            self.close = lambda: closed.append(True)

        def use(self, _used: bool) -> None:
            assert not closed

    monkeypatch.setattr(broadcast_group, "SourceWatchdog", StandIn)
    connections = Connections([os.open(os.devnull, os.O_RDONLY)])
    group = BroadcastGroup("g", torch.device("cpu"), 2, Gloo(), connections)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    group.use(True)
    group.abort()
    assert closed == [True]
