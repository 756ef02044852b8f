"""SGLang's ``--custom-weight-loader``: what it calls in every worker when the sidecar asks it to load by our loader.

The dotted path ``weightbus.engine_agent.worker_loader.load`` stands in users' launch flags. The call carries one name,
which tells the socket of the sidecar; the exchange over it is the room `worker`'s. Imports nothing of SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from .engines.sglang import PREFIX
from .worker import serve_sidecar

_log = logging.getLogger(__name__)


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Serve the sidecar at the socket that the one name of `named_tensors` tells. Never raises: SGLang would end."""
    names = [name for name, _ in named_tensors]
    if len(names) == 1 and names[0].startswith(PREFIX):
        serve_sidecar(model, names[0].removeprefix(PREFIX))
    else:
        _log.error("weightbus: loader called with %s, expected one name that begins with %r", names[:2], PREFIX)
