"""Does this manifest fit this server? Pure; asked before the server hears of a round.

There is no second chance: SGLang exits on a wrong shape or a misaligned bucket, and says "success" to names it does not
know, to half of a model and to the wrong dtype. So whatever is not known to be right is refused here.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from weightbus.dataplane.tensors import Manifest

from ...errors import UnfitManifest
from .api_versions import Dialect
from .checkpoint_spec import Expected
from .pickle_payload import LOADER
from .quantized_reload import objections
from .server_identity import ServerFacts

_ALL: Final = ("direct", "sends", "local", "distributed", "disk")
_SHOWN: Final = 4
"""Names of tensors in a message."""


def transports_of(facts: ServerFacts) -> tuple[str, ...]:
    """Transports that can serve this layout. Replicas (dp) answer tensors with 500; stages (pp) share ranks.

    A recording says where experts lay when it was made, and no server says when it has moved them: such servers load by
    themselves, which asks for the places every time.
    """
    if facts.dp > 1:
        return ("disk",)
    direct = () if facts.misset else ("direct",)
    if facts.speculative and LOADER in facts.loaders:
        return direct
    if facts.pp > 1:
        return ("local", "disk")
    recordable = LOADER in facts.loaders and not facts.moves_experts and not facts.unrecordable
    in_place = (*direct, "sends") if recordable else ()
    return (*in_place, "local", "distributed", "disk")


def limits(facts: ServerFacts) -> Iterator[tuple[str, str]]:
    """Why `transports_of` has fewer than it might have, and what would help."""
    if facts.dp > 1:
        yield (
            f"its {facts.dp} plain replicas (--dp-size) load files alone",
            "for others launch a server for each, with a sidecar each, or share their experts (--enable-dp-attention)",
        )
    elif facts.speculative:
        yield (
            f"it speculates ({facts.speculative}), and only direct copies reach and prove its draft models",
            f"they need --custom-weight-loader {LOADER} and the trainer's host",
        )
    elif facts.pp > 1:
        yield (
            f"its {facts.pp} pipeline stages (--pp-size) claim the same ranks of a group, and no plan spans them",
            "local and disk need neither",
        )
    if facts.moves_experts and LOADER in facts.loaders:
        yield (
            f"it moves experts while it serves ({facts.moves_experts}), and what was recorded of them would not hold",
            "launch it without that flag, with fixed places (--init-expert-location), or take local or distributed",
        )
    elif facts.unrecordable:
        yield facts.unrecordable, "local, distributed and disk go through its own loader; a new launch is tried again"
    if _barred(facts):
        yield _misset(facts)


def lacking(facts: ServerFacts) -> dict[str, tuple[str, str]]:
    """The transports that cannot serve it: by name, why, and what would change that."""
    able = transports_of(facts)
    stock = "the server was launched without our loader", f"launch it with --custom-weight-loader {LOADER}"
    lacks = {kind: next(limits(facts), stock) for kind in _ALL if kind not in able}
    return {**lacks, "direct": _misset(facts)} if _barred(facts) else lacks


def _misset(facts: ServerFacts) -> tuple[str, str]:
    return facts.misset, "no other transport needs it"


def _barred(facts: ServerFacts) -> bool:
    """Nothing but the server's environment speaks against direct copies."""
    return bool(facts.misset) and "direct" in transports_of(msgspec.structs.replace(facts, misset=""))


def check(manifest: Manifest, facts: ServerFacts, dialect: Dialect, expected: Expected, transport: str) -> None:
    """Raise `UnfitManifest` with everything that speaks against loading `manifest` by `transport`."""
    problems = [
        *_server(facts, dialect, transport),
        *objections(expected.quantization, expected.shapes, facts, dialect),
        *_model(manifest, facts),
        *_layout(manifest, facts, expected),
    ]
    if problems:
        raise UnfitManifest("; ".join(problems) + ". Nothing was sent to the server")


def _server(facts: ServerFacts, dialect: Dialect, transport: str) -> Iterator[str]:
    if transport not in transports_of(facts):
        able = ", ".join(transports_of(facts)) or "none"
        layout = f"dp={facts.dp}, pp={facts.pp}"
        why = "".join(f"; {found}: {needed}" for found, needed in limits(facts))
        yield f"transport {transport!r} cannot serve an engine with {layout}; these can: {able}{why}"
    if facts.speculative and transport != "direct":
        yield (
            f"the server speculates ({facts.speculative}), and {transport!r} cannot prove what its draft model holds; "
            f"launch it with --custom-weight-loader {LOADER} for the direct transport, or without speculation"
        )
    if facts.tp < 1:
        yield f"{dialect.name}: the server says it has {facts.tp} tensor-parallel ranks"


def _model(manifest: Manifest, facts: ServerFacts) -> Iterator[str]:
    if facts.architectures and manifest.model not in facts.architectures:
        yield f"the manifest is of {manifest.model}, the server serves {', '.join(facts.architectures)}"


def _layout(manifest: Manifest, facts: ServerFacts, expected: Expected) -> Iterator[str]:
    """What is wrong with its tensors. Looked for only where they are not just those of the checkpoint."""
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    dtypes = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    if shapes != expected.shapes or dtypes != expected.dtypes:
        yield from _names(manifest, expected)
        yield from _tensors(manifest, facts, expected)


def _names(manifest: Manifest, expected: Expected) -> Iterator[str]:
    """The set must be complete, and hold nothing that the server would skip in silence."""
    sent = {tensor.name for tensor in manifest.tensors}
    missing = expected.shapes.keys() - sent - expected.optional
    if missing:
        yield f"{_some(missing)} missing: the server would keep its old values and report success"
    unknown = sent - expected.shapes.keys() - expected.optional
    if unknown:
        yield f"{_some(unknown)} unknown to the served model: the server would skip them and report success"


def _tensors(manifest: Manifest, facts: ServerFacts, expected: Expected) -> Iterator[str]:
    wrong = [
        f"{tensor.name!r} has shape {tensor.shape}, the server's has {expected.shapes[tensor.name]}"
        for tensor in manifest.tensors
        if tensor.shape != expected.shapes.get(tensor.name, tensor.shape)
    ]
    yield from wrong[:_SHOWN]
    if len(wrong) > _SHOWN:
        yield f"{len(wrong) - _SHOWN} more shapes differ"
    served = served_dtype(facts, expected)
    cast = {
        f"{tensor.name!r} ({tensor.dtype})"
        for tensor in manifest.tensors
        if tensor.dtype != expected.dtypes.get(tensor.name, served or tensor.dtype)
    }
    if cast:
        wanted = served or "see its checkpoint"
        yield f"{_some(cast)} not of the server's dtype ({wanted}): it would cast them in silence"


def served_dtype(facts: ServerFacts, expected: Expected) -> str:
    """The dtype asked for at launch, in torch's words, or the checkpoint's."""
    words = {"auto": expected.dtype, "half": "float16", "float": "float32"}
    return words.get(facts.dtype, facts.dtype)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{len(ordered)} tensors ({', '.join(ordered[:_SHOWN])}{more})"
