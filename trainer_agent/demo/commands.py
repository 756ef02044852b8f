"""``weightbus demo``: its flags, its command, and the arguments that the demo passes to its training program.

Found through the entry points of the distribution, so that control imports nothing of it.
"""

from __future__ import annotations

import argparse
import enum
from pathlib import Path
from typing import Annotated, Final

import msgspec

from weightbus.control.cli import add_settings_flags, settings_from_args
from weightbus.control.protocol import TransportKind

SECTION: Final = "demo"
ENGINES: Final = 2
RANKS: Final = 2
CHANNEL: Final = "demo"
SAVED: Final = "saved"
"""Subfolder of the checkpoints of ``--save-every``."""


class Sync(enum.StrEnum):
    """Whether the trained weights are published."""

    ON = "on"
    OFF = "off"


class TrainerKind(enum.StrEnum):
    """The framework that trains the policy, on two ranks."""

    MEGATRON = "megatron"
    """Megatron-core, tensor parallel."""
    MEGATRON_MOE = "megatron-moe"
    """Megatron-core, a policy of experts, expert parallel."""
    FSDP2 = "fsdp2"
    """transformers and torch's fully_shard, with float32 masters; needs transformers."""


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the demo."""

    rounds: Annotated[int, msgspec.Meta(ge=1, le=1000, description="rounds of generate, learn, publish")] = 20
    transport: Annotated[
        TransportKind | None, msgspec.Meta(description="how the weights travel; none: local, or as mixed has it")
    ] = None
    mixed: Annotated[
        bool, msgspec.Meta(description="one engine elsewhere: it is sent what the other one reads in place")
    ] = False
    trainer: Annotated[TrainerKind, msgspec.Meta(description="what trains the policy")] = TrainerKind.MEGATRON
    asynchronous: Annotated[
        bool, msgspec.Meta(description="then again, each round generated while the one before is trained; compared")
    ] = False
    environment_s: Annotated[
        float,
        msgspec.Meta(ge=0, le=60, description="with asynchronous: how long a round's answers are judged elsewhere"),
    ] = 1.0
    save_every: Annotated[int, msgspec.Meta(ge=0, description="keep every n-th version as a checkpoint; 0: none")] = 0
    sync: Annotated[Sync, msgspec.Meta(description="off: train, but publish nothing; the reward stays flat")] = Sync.ON
    seed: Annotated[int, msgspec.Meta(ge=0, description="of the first weights and of the prompts")] = 1
    port_base: Annotated[
        int, msgspec.Meta(ge=0, le=65000, description="first of eight ports on the loopback; 0: whichever are free")
    ] = 0
    keep_logs: Annotated[bool, msgspec.Meta(description="keep logs and checkpoint after a run that went well")] = False
    json: Annotated[bool, msgspec.Meta(description="print every round as a line of JSON instead of a table")] = False

    def __post_init__(self) -> None:
        if self.asynchronous and self.sync is Sync.OFF:
            raise ValueError("asynchronous rounds are published: leave sync on")
        if self.asynchronous and self.mixed:
            raise ValueError("asynchronous rounds publish snapshots, which no engine reads in place: leave mixed off")
        if self.mixed and self.transport is not None:
            raise ValueError(
                f"transport = {self.transport} is one way for all engines, and mixed takes two: leave one of them out"
            )
        if self.mixed and self.sync is Sync.OFF:
            raise ValueError("mixed shows two ways of what is published: leave sync on")
        if self.asynchronous and self.transport in (TransportKind.DIRECT, TransportKind.SENDS):
            raise ValueError(f"transport = {self.transport} gives the weights in training, and no snapshot: take local")


class RankArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of training_rank.py, as JSON."""

    settings: DemoSettings
    folder: str
    """Folder of the demo, with the initial policy."""
    coordinator: str
    status_url: str
    host: str
    """Address at which engines of another host reach the ranks."""
    asynchronous: bool = False
    base: int = 0
    """Version under which the policy is published before the first round; 0 when engines were launched with it."""

    @property
    def checkpoint(self) -> Path:
        """Folder of the initial policy."""
        return Path(self.folder, "checkpoint")

    @property
    def progress(self) -> Path:
        """File to which rank 0 appends a line a round."""
        return Path(self.folder, "progress-async.jsonl" if self.asynchronous else "progress.jsonl")

    @property
    def environment_s(self) -> float:
        """Seconds a round that its answers are judged elsewhere, by a sandbox or another model; nothing is computed."""
        return self.settings.environment_s if self.settings.asynchronous else 0.0


class Demo:
    """The command. torch is imported only when it runs."""

    help: Final = "train a toy policy with real Megatron ranks and two real SGLang servers, on the CPU"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Give `parser` the demo's flags."""
        add_settings_flags(parser, DemoSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Run the demo, or show its settings."""
        resolved = settings_from_args(DemoSettings, SECTION, args)
        if args.check_config:
            print(resolved.render())  # noqa: T201 - what the flag asks for
            return 0
        from .demo_run import run  # noqa: PLC0415 - the coordinator's machine has no torch

        return run(resolved.value)


demo = Demo()
