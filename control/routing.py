"""Which transport one engine's tensors take. A pure choice with its reason."""

from __future__ import annotations

import msgspec

from .messages import EngineInfo, TrainerInfo, TransportKind


class Route(msgspec.Struct, frozen=True):
    """The chosen transport, or None; and why."""

    transport: TransportKind | None
    reason: str


def objection(kind: TransportKind, trainer: TrainerInfo, engine: EngineInfo) -> str:  # noqa: PLR0911  # a list of reasons
    """Why `kind` cannot serve `engine`; empty when it can."""
    if kind not in engine.transports:
        return "the engine agent does not offer it, and its log says why"
    if engine.dp > 1 and kind is not TransportKind.DISK:
        return f"dp={engine.dp}: only disk reaches every replica"
    if engine.pp > 1 and kind is TransportKind.DISTRIBUTED:
        return f"pp={engine.pp}: SGLang joins a group only without pipeline stages"
    if engine.pp > 1 and kind in {TransportKind.DIRECT, TransportKind.SENDS}:
        return f"pp={engine.pp}: plans are made for servers without pipeline stages"
    if kind in {TransportKind.LOCAL, TransportKind.DIRECT} and trainer.host != engine.host:
        return "trainer and engine are on different hosts"
    if kind is TransportKind.LOCAL and (trainer.device, engine.device) == ("cuda", "cpu"):
        return "an engine without a GPU cannot open the trainer's device memory"
    if kind is TransportKind.DIRECT and trainer.device != engine.device:
        return f"trainer on {trainer.device}, engine on {engine.device}: no worker reads the other's memory"
    if kind in {TransportKind.DISTRIBUTED, TransportKind.SENDS} and trainer.device != engine.device:
        return f"trainer on {trainer.device}, engine on {engine.device}: no common collective backend"
    return ""


def choose(trainer: TrainerInfo, engine: EngineInfo) -> Route:
    """The trainer's first preference that can serve `engine`."""
    objections: list[str] = []
    for kind in trainer.transports:
        reason = objection(kind, trainer, engine)
        if not reason:
            skipped = f" ({'; '.join(objections)})" if objections else ""
            return Route(kind, f"{kind.value}{skipped}")
        objections.append(f"{kind.value}: {reason}")
    return Route(None, f"no transport: {'; '.join(objections) or 'the trainer offers none'}")
