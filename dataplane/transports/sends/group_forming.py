"""Joining the group of an epoch, or one of which it is not known yet whether it will be used.

A group takes longer to form than most versions to move. Where only one engine takes part, it can begin to form as soon
as both ends are known (`GroupForming`), while the engine still records, plans and binds: nobody else waits in it if
that fails. A member that is told in the end to use it has it, or waits for the rest of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import torch

from ...errors import DeadlineExceeded, PeerLost, TransferFailed
from ...processes import Deadline, connect_store, local_address_towards, parse_tcp_address, start_thread
from ..interface import Group
from .nixl_group import NixlGroup
from .p2p_group import NOBODY, P2PGroup

_MOST_PAIRS: Final = 64
"""Of a rank and a worker, that are connected before it is known which of them exchange anything."""


def join(
    where: Group,
    device: torch.device,
    *,
    to: frozenset[int] = NOBODY,
    from_: frozenset[int] = NOBODY,
    memory: Sequence[torch.Tensor] = (),
) -> P2PGroup | NixlGroup:
    """The group, formed under its own deadline. Raises `TransferFailed`."""
    deadline = Deadline(where.form_s)
    store = connect_store(where.store, deadline)
    mine = local_address_towards(*parse_tcp_address(where.store))
    if where.nixl:
        return NixlGroup.form(
            store, where.name, mine, device, where.rank, where.size, deadline, to=to, from_=from_, memory=memory
        )
    return P2PGroup.form(store, where.name, mine, device, where.rank, where.size, deadline, to=to, from_=from_)


class GroupForming:
    """Joins a group on a thread of its own, for a transfer that asks for it later. May be used from several threads."""

    def __init__(self, where: Group, device: torch.device) -> None:
        """`where.ranks` of its members are the trainer's, and come first; they send to the others."""
        self.name = where.name
        self.form_s = where.form_s
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._group: P2PGroup | None = None
        self._error: Exception | None = None
        self._unwanted = False
        ranks, workers = frozenset(range(where.ranks)), frozenset(range(where.ranks, where.size))
        sends = where.rank < where.ranks
        pairs = len(ranks) * len(workers) <= _MOST_PAIRS
        to, from_ = (workers, NOBODY) if sends else (NOBODY, ranks)
        self._arguments = where, device, to if pairs else NOBODY, from_ if pairs else NOBODY
        start_thread(self._form, "weightbus-forming")

    def result(self) -> P2PGroup:
        """The group, which is the caller's now. Raises what kept it from forming, `DeadlineExceeded`."""
        if not self._over.wait(self.form_s):
            self.discard()
            raise DeadlineExceeded("the group to form", self.form_s)
        with self._lock:
            group, self._group = self._group, None
        if self._error is not None:
            raise self._error
        if group is None:
            raise PeerLost(f"group {self.name} is not here any more")
        return group

    def discard(self) -> None:
        """It will not be used. Does not wait."""
        with self._lock:
            self._unwanted = True
            group, self._group = self._group, None
        if group is not None:
            group.drop()

    def _form(self) -> None:
        where, device, to, from_ = self._arguments
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            found = join(where, device, to=to, from_=from_)
            assert isinstance(found, P2PGroup)
            with self._lock:
                self._group = None if self._unwanted else found
            if self._unwanted:
                found.drop()
        except TransferFailed as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  it is raised where the group is asked for
            self._error = TransferFailed(f"{type(error).__name__}: {error}")
        self._over.set()
