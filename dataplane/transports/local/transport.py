"""The local transport: whole buckets in memory that the server's workers map. One host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...processes import default_runtime_dir
from ..interface import LoadedBy, ReceiverContext, SenderContext, Transport

if TYPE_CHECKING:
    from ..interface import Receiver, Sender


def _sender(context: SenderContext) -> Sender:
    from .shared_buckets import LocalSender  # noqa: PLC0415  costs the import of torch

    return LocalSender(context.runtime_dir or default_runtime_dir(), context.channel)


def _receiver(context: ReceiverContext) -> Receiver:
    from .shared_buckets import LocalReceiver  # noqa: PLC0415  costs the import of torch

    return LocalReceiver(context.runtime_dir or default_runtime_dir())


TRANSPORT: Final[Transport] = Transport(
    name="local", sender=_sender, receiver=_receiver, loaded_by=LoadedBy.SHARED_MEMORY
)
