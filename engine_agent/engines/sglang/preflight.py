"""What a server will not take, said when its sidecar joins: the first round would be late to hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weightbus.control.log import Log

from ...errors import UnfitManifest
from . import checkpoint_spec as checkpoint
from .api_versions import Dialect
from .compatibility import limits, transports_of
from .quantized_reload import objections
from .server_identity import ServerFacts


def refusals(facts: ServerFacts, dialect: Dialect, folder: Path) -> Iterator[str]:
    """Why `Prepare` will refuse every version, as far as the checkpoint in `folder` tells."""
    try:
        expected = checkpoint.expected(folder)
    except (UnfitManifest, OSError, ValueError) as error:
        yield str(error)
        return
    yield from objections(expected.quantization, expected.shapes, facts, dialect)


def tell(log: Log, facts: ServerFacts, dialect: Dialect, folder: Path | None) -> None:
    """Warn of transports that cannot serve it, and of versions that it cannot be given.

    `folder` is that of its checkpoint where the server's own name of it does not do.
    """
    for found, needed in limits(facts):
        log.warning("transports_limited", reason=f"{found}: {needed}", transports=transports_of(facts))
    for reason in refusals(facts, dialect, folder or Path(facts.model_path)):
        log.warning("every_version_will_be_refused", reason=reason)
