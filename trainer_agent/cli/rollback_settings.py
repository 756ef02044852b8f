"""Settings of ``weightbus rollback``: those of a trainer, and the folder of the older checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from weightbus.control.server import LogFormat, LogLevel

from ..settings import TrainerSettings, check_device
from .watch_settings import check_prefix

SECTION: Final = "rollback"
"""Section of the settings file; environment variables begin with ``WEIGHTBUS_ROLLBACK_``."""


class RollbackSettings(TrainerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``weightbus rollback``."""

    checkpoint: Annotated[
        Path | None,
        Meta(description="folder of the checkpoint that was published as that version; by default the one in save_dir"),
    ] = None
    dcp: Annotated[
        bool, Meta(description="it may be a torch DCP folder: their metadata is a pickle, which can run code")
    ] = False
    dcp_prefix: Annotated[
        str, Meta(description="what stands before the model's names in it, if several fit: model, ema; . for nothing")
    ] = ""
    marker: Annotated[str, Meta(description="a file without which the checkpoint is not finished")] = ""
    device: Annotated[str, Meta(description="where buckets are staged: cpu, or a GPU for engines on this host")] = "cpu"
    log_level: Annotated[LogLevel, Meta(description="least level that is logged")] = LogLevel.WARNING
    log_format: Annotated[LogFormat, Meta(description="auto: for people on a terminal, else JSON")] = LogFormat.AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        check_prefix(self.dcp_prefix, dcp=self.dcp)

    def trainer(self) -> TrainerSettings:
        """Settings of the trainer agent."""
        names = (field.name for field in msgspec.structs.fields(TrainerSettings))
        return TrainerSettings(**{name: getattr(self, name) for name in names})
