"""The sends transport: every rank of the trainer sends each engine worker what that worker stores."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from ...errors import Unsupported
from ...processes import default_runtime_dir
from ..interface import LoadedBy, ReceiverContext, SenderContext, Transport

if TYPE_CHECKING:
    from ..interface import Receiver, Sender


NIXL_MODULES: Final = ("nixl_cu13", "nixl_cu12", "nixl")


def _sender(context: SenderContext) -> Sender:
    import torch  # noqa: PLC0415  costs the import of torch

    from .sender import SendsSender  # noqa: PLC0415  costs the import of torch.distributed

    if context.describe is None:
        raise Unsupported("this trainer's source cannot send out of its memory: choose the distributed transport")
    device, keep_s = torch.device(context.device), context.keep_groups_s
    return SendsSender(context.host, context.channel, device, context.describe, nixl=context.nixl, keep_s=keep_s)


def _receiver(context: ReceiverContext) -> Receiver:
    from .receiver import SendsReceiver  # noqa: PLC0415  costs the import of torch.distributed

    return SendsReceiver(context.runtime_dir or default_runtime_dir(), context.ahead, beside=context.beside)


def _missing(context: SenderContext) -> str:
    if not context.nixl or nixl_is_installed():
        return ""
    return "sends_over = nixl needs NIXL on the trainer too: install weightbus[nixl]"


def nixl_is_installed() -> bool:
    """Whether NIXL is there to be imported."""
    return any(importlib.util.find_spec(module) for module in NIXL_MODULES)


TRANSPORT: Final[Transport] = Transport(
    name="sends", sender=_sender, receiver=_receiver, missing=_missing, loaded_by=LoadedBy.LOADER
)
