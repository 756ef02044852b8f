"""Whether a manifest fits a server, decided before the server hears of a round. Pure.

There is no second chance: SGLang exits on a wrong shape or a misaligned bucket, and answers "success" to unknown names,
to half of a model and to the wrong dtype. So a manifest that is not known to be right is refused here.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from weightbus.dataplane.tensors import Manifest, TensorSpec
from weightbus.dataplane.transports import LoadedBy, Transport, registry as transports

from ...errors import UnfitManifest
from ..checkpoint_spec import Expected
from ..interface import Limitation
from .api_versions import Dialect
from .pickle_payload import LOADER
from .quantized_reload import objections
from .server_identity import ServerFacts

_SHOWN: Final = 4
"""Names of tensors in a message."""


def transports_of(facts: ServerFacts) -> tuple[str, ...]:
    """Transports that can serve this layout. Replicas (dp) answer tensors with 500; stages (pp) share ranks.

    A load trace holds the places of experts at the time of tracing, and no server tells when it has moved them: such
    servers load through their own loader, which looks the places up every time.
    """
    return tuple(name for name in transports.names() if _serves(transports.by_name(name), facts))


def _serves(transport: Transport, facts: ServerFacts) -> bool:
    by, unread = transport.loaded_by, transport.reads_memory and bool(facts.misset)
    if facts.dp > 1:
        return by is LoadedBy.FILES
    if facts.speculative and LOADER in facts.loaders:
        return transport.reads_memory and not unread
    if facts.pp > 1:
        return by in {LoadedBy.SHARED_MEMORY, LoadedBy.FILES}
    recordable = LOADER in facts.loaders and not facts.moves_experts and not facts.unrecordable
    return by is not LoadedBy.LOADER or (recordable and not unread)


def limits(facts: ServerFacts) -> Iterator[Limitation]:
    """Why `transports_of` has fewer than it might have, and what would help."""
    if facts.dp > 1:
        yield Limitation(
            f"its {facts.dp} plain replicas (--dp-size) load files alone",
            "for others launch a server for each, with a sidecar each, or share their experts (--enable-dp-attention)",
        )
    elif facts.speculative:
        yield Limitation(
            f"it speculates ({facts.speculative}), and only direct copies reach and prove its draft models",
            f"they need --custom-weight-loader {LOADER} and the trainer's host",
        )
    elif facts.pp > 1:
        yield Limitation(
            f"its {facts.pp} pipeline stages (--pp-size) claim the same ranks of a group, and no plan spans them",
            "local and disk need neither",
        )
    if facts.moves_experts and LOADER in facts.loaders:
        yield Limitation(
            f"it moves experts while it serves ({facts.moves_experts}), and what was recorded of them would not hold",
            "launch it without that flag, with fixed places (--init-expert-location), or take local or distributed",
        )
    elif facts.unrecordable:
        yield Limitation(
            facts.unrecordable, "local, distributed and disk go through its own loader; a new launch is tried again"
        )
    if _barred(facts):
        yield _misset(facts)


def missing(facts: ServerFacts) -> dict[str, Limitation]:
    """The transports that cannot serve it: by name, why, and what would change that."""
    able = transports_of(facts)
    stock = Limitation("the server was launched without our loader", f"launch it with --custom-weight-loader {LOADER}")
    lacks = {name: next(limits(facts), stock) for name in transports.names() if name not in able}
    return lacks | dict.fromkeys(_barred(facts), _misset(facts))


def _misset(facts: ServerFacts) -> Limitation:
    return Limitation(facts.misset, "no other transport needs it")


def _barred(facts: ServerFacts) -> tuple[str, ...]:
    """Transports that copy directly, and that the server's environment alone rules out."""
    otherwise = transports_of(msgspec.structs.replace(facts, misset="")) if facts.misset else ()
    return tuple(name for name in otherwise if transports.by_name(name).reads_memory)


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
    if facts.speculative and not transports.by_name(transport).reads_memory:
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
    """Faults of its tensors. Looked for only where they are not just those of the checkpoint."""
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


def tensors_of(facts: ServerFacts, expected: Expected) -> tuple[TensorSpec, ...]:
    """The checkpoint's tensors as a trainer serves them. Raises `UnfitManifest` where a dtype is not known."""
    served = served_dtype(facts, expected)
    found = [TensorSpec(name, expected.dtypes.get(name, served), shape) for name, shape in expected.shapes.items()]
    if odd := next((spec.name for spec in found if not spec.dtype), ""):
        raise UnfitManifest(f"nothing says in which dtype {odd!r} is served")
    return tuple(found)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{len(ordered)} tensors ({', '.join(ordered[:_SHOWN])}{more})"
