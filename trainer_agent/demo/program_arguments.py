"""What the demo tells its training program."""

from __future__ import annotations

import msgspec

from .settings import TrainerKind


class RankArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Its only argument."""

    checkpoint: str
    progress: str
    rounds: int
    trainer: TrainerKind
    seed: int
    publish: bool
    channel: str
    coordinator: str
    status_url: str
    engines: int
    transport: str
    """Empty: whatever suits each engine."""
    host: str
    """At which engines elsewhere reach the ranks."""
    runtime_dir: str
    keys: str
    asynchronous: bool = False
    environment_s: float = 0.0
    """How long the answers of a round are judged elsewhere: a sandbox, or another model. Nothing is computed here."""
    base: int = 0
    """Version under which the policy is published before the first round; 0: engines were launched with it."""
    save_every: int = 0
    save_dir: str = ""
