"""Picks a transport by its name on the control plane: `KINDS`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import torch

from ..errors import Unsupported
from ..processes import default_runtime_dir
from .direct import DirectReceiver, DirectSender, ExportedWeights
from .interface import Receiver, Sender
from .local import LocalReceiver, LocalSender
from .prerecorded_traces import PrerecordedTraces

KINDS: Final = ("direct", "local", "sends", "distributed", "disk")


def sender(
    kind: str,
    *,
    channel: str,
    runtime_dir: Path | None = None,
    device: torch.device | str = "cpu",
    host: str = "127.0.0.1",
    checkpoint_dir: Path | None = None,
    hf_config_dir: Path | None = None,
    expose: Callable[[], ExportedWeights] | None = None,
    describe: Callable[[], ExportedWeights] | None = None,
    nixl: bool = False,
    keep_groups_s: float = 900.0,
) -> Sender:
    """The trainer's half of transport `kind`; nothing is opened before `offer`.

    `host` is the address under which engines reach this machine (distributed, sends), `checkpoint_dir` a folder that
    both sides see, `hf_config_dir` where config.json and the tokenizer of every checkpoint are copied from (disk),
    `expose` says what can be read in place (direct), `describe` what the ranks send out of (sends), `nixl` whether over
    NIXL, and `keep_groups_s` how long a group of theirs stays when nobody uses it. Raises `Unsupported` when the kind
    is unknown or lacks what it needs.
    """
    match kind:
        case "direct":
            if expose is None:
                raise Unsupported("this trainer's source cannot expose its memory: choose the local transport")
            return DirectSender(runtime_dir or default_runtime_dir(), channel, expose)
        case "local":
            return LocalSender(runtime_dir or default_runtime_dir(), channel)
        case "sends":
            from .sends import SendsSender  # noqa: PLC0415  costs the import of torch.distributed

            if describe is None:
                raise Unsupported(
                    "this trainer's source cannot send out of its memory: choose the distributed transport"
                )
            return SendsSender(host, channel, torch.device(device), describe, nixl=nixl, keep_s=keep_groups_s)
        case "distributed":
            from .distributed import DistributedSender  # noqa: PLC0415  costs the import of torch.distributed

            return DistributedSender(host, channel, torch.device(device))
        case "disk":
            from .disk import DiskSender  # noqa: PLC0415  beside its sibling

            if checkpoint_dir is None:
                raise Unsupported("the disk transport needs checkpoint_dir, a folder that trainer and engines both see")
            return DiskSender(checkpoint_dir, channel, hf_config_dir)
        case _:
            raise Unsupported(f"there is no transport {kind!r}; choose one of {', '.join(KINDS)}")


def receiver(
    kind: str,
    *,
    runtime_dir: Path | None = None,
    beside: bool = True,
    hands_on: bool = True,
    ahead: PrerecordedTraces | None = None,
) -> Receiver:
    """The engine agent's half of transport `kind`; keep it from round to round, it owns what outlives them.

    `beside`: what is sent may be taken while the server generates. `hands_on`: this process may take part in broadcasts
    itself, and hand on what it takes. `ahead`: what was worked out before it.
    """
    match kind:
        case "direct":
            return DirectReceiver(runtime_dir or default_runtime_dir(), ahead)
        case "local":
            return LocalReceiver(runtime_dir or default_runtime_dir())
        case "sends":
            from .sends import SendsReceiver  # noqa: PLC0415  costs the import of torch.distributed

            return SendsReceiver(runtime_dir or default_runtime_dir(), ahead, beside=beside)
        case "distributed":
            from ..processes import warm_up_name_resolution  # noqa: PLC0415  the same
            from .distributed import DistributedReceiver  # noqa: PLC0415  costs the import of torch.distributed

            warm_up_name_resolution()
            return DistributedReceiver(runtime_dir or default_runtime_dir(), hands_on=hands_on)
        case "disk":
            from .disk import DiskReceiver  # noqa: PLC0415  beside its sibling

            return DiskReceiver()
        case _:
            raise Unsupported(f"there is no transport {kind!r}; choose one of {', '.join(KINDS)}")


def load(kinds: Iterable[str]) -> None:
    """Import what receivers of these kinds are made of, so that no server stands still for it.

    What cannot be imported is missed when it is asked for.
    """
    for kind in kinds:
        with contextlib.suppress(ImportError, Unsupported):
            receiver(kind)
