"""Whether a server of this version, launched in this way, can take a manifest. Decided before it hears of a round.

There is no second chance: SGLang exits on a wrong shape or a misaligned bucket, and answers "success" to unknown names,
to half of a model and to the wrong dtype. A wrong guess about a version of its interface can end the server or leave it
with half of the weights. So a version or a manifest that is not known to be right is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from weightbus.dataplane.quantize import Element, Quantization, Scheme
from weightbus.dataplane.tensors import FLOAT_DTYPES, Manifest, TensorSpec, covering, main_dtype, shortest_prefixes
from weightbus.dataplane.transports import LoadedBy, Transport, registry as transports

from ...errors import UnfitManifest, UnknownServerVersion
from .. import checkpoint_spec
from ..checkpoint_spec import Expected
from ..interface import Limitation
from .pickle_payload import LOADER
from .server_identity import ServerFacts

_SHOWN: Final = 4
"""Names of tensors in a message."""
_ENTRIES: Final = 12
"""Entries that a message proposes for a setting."""
_CPU: Final = Path("/proc/cpuinfo")
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
_LLAMA: Final = "LlamaForCausalLM"
_SERVE_BLOCKS: Final = (
    "serve a checkpoint in fp8 blocks (weight_block_size), or the plain one with no --quantization, which any transport"
    " updates"
)
_SERVE_TRAINED: Final = "launch the server with a checkpoint of the trained model"
Release = tuple[int, int, int]


class Dialect(msgspec.Struct, frozen=True):
    """How the versions of SGLang's HTTP interface from `first` to `last`, both included, differ from others.

    Read from the wheels 0.5.11 to 0.5.23. Names, methods and required fields of every endpoint that the agent uses are
    equal in that range, and unknown JSON fields are ignored throughout.
    """

    name: str
    first: Release
    last: Release
    sessions: bool = False
    """begin_weight_update must come before tensors and end_weight_update after; without a session they get 400."""
    checksums: bool = True
    """weights_checker knows the action ``checksum``."""
    cpu_checksums: bool = False
    """... and it works where there is no GPU."""
    partial_checksums: bool = False
    """... and takes names that it leaves out."""
    tells_ready: bool = False
    """/ready answers 503 to a server that is paused, without asking its workers."""


DIALECTS: Final = (
    Dialect("0.5.11", (0, 5, 11), (0, 5, 11), checksums=False),
    Dialect("0.5.12", (0, 5, 12), (0, 5, 19)),
    Dialect("0.5.20", (0, 5, 20), (0, 5, 20), tells_ready=True),
    Dialect("0.5.21", (0, 5, 21), (0, 5, 22), sessions=True, partial_checksums=True, tells_ready=True),
    Dialect(
        "0.5.23", (0, 5, 23), (0, 5, 23), sessions=True, cpu_checksums=True, partial_checksums=True, tells_ready=True
    ),
)
_KNOWN: Final = "0.5.11 to 0.5.23"
_RELEASE: Final = re.compile(r"^(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?$")


class UnknownDialect(UnknownServerVersion):
    """The server speaks a version of SGLang's HTTP interface that was never checked."""

    def __init__(self, version: str) -> None:
        super().__init__(
            version,
            f"SGLang {version!r} is not a version this agent knows ({_KNOWN}): run one of those, or name the nearest "
            "with --dialect after trying a round on a server without users",
        )


def dialect_of(version: str, override: str = "") -> Dialect:
    """The dialect that `version` speaks, or the one named `override`. Raises `UnknownDialect`.

    Post releases speak as their release does. Development builds (``0.5.23.dev7``, ``+g1a2b``) are unknown: their
    number does not tell what is in them.
    """
    wanted = override or version
    found = _RELEASE.match(wanted)
    if found:
        release = (int(found[1]), int(found[2]), int(found[3]))
        for dialect in DIALECTS:
            if dialect.first <= release <= dialect.last:
                return dialect
    raise UnknownDialect(wanted)


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


HeldDtypes = Mapping[str, frozenset[str]]
"""By served tensor, the dtypes of the parameters that the server's loader was recorded to write it to."""
_UNKNOWN: Final[HeldDtypes] = MappingProxyType({})
_FLOATS: Final = frozenset(FLOAT_DTYPES)
_EXACT: Final = {
    "bfloat16": frozenset({"float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
}
"""By dtype, others that have all of its values."""
_DTYPE_WORDS: Final = {"half": "float16", "float": "float32"}
"""Words of ``--dtype`` that are not torch's."""


def check(
    manifest: Manifest,
    facts: ServerFacts,
    dialect: Dialect,
    expected: Expected,
    transport: str,
    *,
    held: HeldDtypes = _UNKNOWN,
) -> None:
    """Raise `UnfitManifest` with everything that speaks against loading `manifest` by `transport`.

    `held` are the dtypes of the server's parameters, as far as its loader was recorded.
    """
    problems = [
        *_server(facts, dialect, transport),
        *objections(expected.quantization, expected.shapes, facts, dialect),
        *(list(_model(manifest, facts)) or _layout(manifest, facts, expected, held)),
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
        served = ", ".join(facts.architectures)
        yield f"the manifest is of {manifest.model}, the server serves {served}: {_SERVE_TRAINED}"


def _layout(manifest: Manifest, facts: ServerFacts, expected: Expected, held: HeldDtypes = _UNKNOWN) -> Iterator[str]:
    """Faults of its tensors. Names and shapes are looked at only where they are not just those of the checkpoint."""
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    if shapes != expected.shapes or manifest.left or manifest.copies:
        yield from _names(manifest, expected)
        yield from _shapes(manifest, expected)
    yield from _dtypes(manifest, facts, expected, held)


def _names(manifest: Manifest, expected: Expected) -> Iterator[str]:
    """What is sent and what is left must be complete, and hold nothing that the server would skip in silence."""
    sent = {tensor.name for tensor in manifest.tensors}
    unsent = expected.shapes.keys() - sent - expected.optional - manifest.copied.keys()
    missing = {name for name in unsent if not manifest.leaves(name)}
    if missing:
        known = [*sent, *(each.name for each in manifest.left)]
        entries = ", ".join(f'"{each}"' for each in shortest_prefixes(sorted(missing), known)[:_ENTRIES])
        yield (
            f"{_some(missing)} missing: the server would keep its old values and report success; if they are not"
            f" trained, add to the trainer's settings: left = [{entries}]"
        )
    covered = {covering(manifest.left_names, name) for name in expected.shapes} if manifest.left else set[str]()
    if idle := manifest.left_names - covered:
        yield (
            f"left covers nothing of the served checkpoint: {_some(idle, 'entries')}; take them out of the trainer's"
            " settings"
        )
    apart = [
        each.name
        for each in manifest.copies
        if each.name not in expected.shapes or _form(expected, each.name) != _form(expected, each.of)
    ]
    if apart:
        yield (
            f"{_some(apart, 'copies')} cannot follow what is sent, by the served checkpoint's names, dtypes and shapes:"
            " give trainers and engines the same checkpoint"
        )
    unknown = sent - expected.shapes.keys() - expected.optional
    if unknown:
        yield (
            f"{_some(unknown)} unknown to the served model: the server would skip them and report success;"
            f" {_SERVE_TRAINED}"
        )


def _form(expected: Expected, name: str) -> tuple[str, tuple[int, ...]]:
    return expected.dtypes.get(name, ""), expected.shapes.get(name, ())


def _shapes(manifest: Manifest, expected: Expected) -> Iterator[str]:
    wrong = [
        f"{tensor.name!r} has shape {tensor.shape}, the server's has {expected.shapes[tensor.name]}"
        for tensor in manifest.tensors
        if tensor.shape != expected.shapes.get(tensor.name, tensor.shape)
    ]
    yield from wrong[:_SHOWN]
    if len(wrong) > _SHOWN:
        yield f"{len(wrong) - _SHOWN} more shapes differ"
    if wrong:
        yield f"another model is trained than the served one: {_SERVE_TRAINED}"


def _dtypes(manifest: Manifest, facts: ServerFacts, expected: Expected, held: HeldDtypes) -> Iterator[str]:
    """Tensors that the server would cast to values that are neither the version's nor what a launch makes of them."""
    rule = _DtypeRule(facts, expected, held)
    wrong = [tensor for tensor in manifest.tensors if not rule.takes(tensor)]
    if not wrong:
        return
    alike: dict[tuple[str, ...], list[TensorSpec]] = {}
    for tensor in wrong:
        alike.setdefault((tensor.dtype, *rule.found(tensor.name)), []).append(tensor)
    shown = [
        f"{rule.told(each[0])}{f', as for {len(each) - 1} more' if len(each) > 1 else ''}"
        for each in list(alike.values())[:_SHOWN]
    ]
    yield (
        f"{len(wrong)} tensors are in a dtype that this server would cast in silence, to other values: "
        f"{'; '.join(shown)}: {rule.advice(wrong, manifest)}"
    )


class _DtypeRule:
    """The dtypes in which one server takes each tensor.

    SGLang makes parameters in the dtype of its launch, except where a model's code makes one in float32 (routers,
    biases of experts, A_log), and its loader casts to them. So a tensor is taken as the checkpoint's files have it,
    because then it becomes what the launch made of it; or, where the files keep it in another dtype than most, in one
    whose values all survive in the files' dtype and in the server's: bfloat16 for a float32 tensor. Where the launch
    has another dtype than most of the files, their tensors are taken in that dtype alone. What the loader was recorded
    to write to (`held`) decides before these rules.
    """

    def __init__(self, facts: ServerFacts, expected: Expected, held: HeldDtypes) -> None:
        self._facts, self._expected, self._held = facts, expected, held
        self._launched = launch_dtype(facts, expected)
        stored = (TensorSpec(name, dtype, expected.shapes[name]) for name, dtype in expected.dtypes.items())
        self._main = main_dtype(stored) or expected.dtype or self._launched

    def takes(self, tensor: TensorSpec) -> bool:
        """Whether the server may load it."""
        sent, wanted = tensor.dtype, self.wanted(tensor.name)
        held = self._held.get(tensor.name, frozenset())
        if sent in _FLOATS and held and held <= _FLOATS:
            if all(_exact(sent, each) for each in held):
                return sent in {*held, wanted} or not self._is_cast_at_launch(tensor.name)
            as_launched = sent == wanted and self._launched == self._main
            return as_launched and not ("float16" in held and sent != "float16")  # infinities
        if sent == wanted:
            return True
        apart = self._file(tensor.name) != self._main
        return apart and _exact(sent, self._file(tensor.name)) and _exact(sent, self._launched)

    def wanted(self, name: str) -> str:
        """The dtype in which a trainer serves the tensor: of its file, or of the launch where that is another."""
        return self._launched if self._is_cast_at_launch(name) else self._file(name)

    def found(self, name: str) -> tuple[str, ...]:
        """The dtypes of a tensor in the files, at the launch, and in the parameters as they were recorded."""
        return self._file(name), self._launched, *sorted(self._held.get(name, ()))

    def told(self, tensor: TensorSpec) -> str:
        """The dtypes of a tensor, each with the place that it comes from."""
        name, expected = tensor.name, self._expected
        file = expected.files.get(name, "")
        stored = f"{self._file(name)} in {file or Path(expected.folder) / 'config.json'}"
        held = self._held.get(name)
        if self._file(name) not in _FLOATS:
            served = "as there in the server"
        elif held:
            served = f"{' and '.join(sorted(held))} in the server (its parameters, as its loader was recorded)"
        else:
            served = f"{self._launched} in the server ({self._why()})"
        return f"{name!r} is {tensor.dtype} in the manifest (as the trainer's source serves it), {stored}, {served}"

    def advice(self, wrong: Sequence[TensorSpec], manifest: Manifest) -> str:
        """The setting to change.

        Where some tensors are taken, one dtype is not what is missing: the source keeps others beside it, as those that
        transformers keeps in float32.
        """
        wanted = {self.wanted(name) for name in self._expected.shapes} & _FLOATS
        sent = {tensor.dtype for tensor in wrong}
        some_fit = len(wrong) < sum(tensor.dtype in _FLOATS for tensor in manifest.tensors)
        if len(wanted) == 1 and not some_fit:
            change = f"build the trainer's source with dtype=torch.{next(iter(wanted))}"
        else:
            dtype = f", dtype=torch.{self._launched}" if self._launched != self._main else ""
            change = (
                f"build the trainer's source with served={self._expected.folder or 'the served checkpoint'!r}{dtype},"
                " which gives each tensor its own dtype"
            )
        if len(sent) == 1 and sent <= _FLOATS and self._launched not in sent and not some_fit:
            change += f", or launch the server with --dtype {next(iter(sent))}"
        return change

    def _why(self) -> str:
        if self._facts.dtype != "auto":
            return f"--dtype {self._facts.dtype}"
        config = self._expected.dtype
        return (
            "its config.json" if config == self._launched else f"--dtype auto, for a config of {config or 'no dtype'}"
        )

    def _file(self, name: str) -> str:
        return self._expected.dtypes.get(name) or self._main

    def _is_cast_at_launch(self, name: str) -> bool:
        """True for a tensor in the dtype of most, where the launch has another."""
        return self._launched != self._main and self._file(name) == self._main


def _exact(sent: str, held: str) -> bool:
    """Whether all values of one dtype are values of the other."""
    return sent == held or held in _EXACT.get(sent, ())


def launch_dtype(facts: ServerFacts, expected: Expected) -> str:
    """The dtype in which the server makes its parameters, unless its model's code names another.

    ``auto`` is the config's; for a config of float32, or of none, SGLang takes float16, and bfloat16 for Gemma
    (`_get_and_verify_dtype`, which differs from 0.5.11 to 0.5.23 in what it logs alone).
    """
    if facts.dtype != "auto":
        return _DTYPE_WORDS.get(facts.dtype, facts.dtype)
    if expected.dtype not in {"float32", ""}:
        return expected.dtype
    return "bfloat16" if expected.model_type.startswith("gemma") else "float16"


def casts(manifest: Manifest, facts: ServerFacts, expected: Expected, held: HeldDtypes) -> dict[str, str]:
    """Tensors that the server holds in another dtype than `manifest` has them in, and that dtype, as far as known."""
    if expected.quantization is not None:  # its scales are float32 by their scheme
        return {}
    launched, found = frozenset({launch_dtype(facts, expected)}), dict[str, str]()
    for tensor in manifest.tensors:
        dtypes = held.get(tensor.name, launched)
        if tensor.dtype in _FLOATS and dtypes != frozenset({tensor.dtype}):
            found[tensor.name] = " and ".join(sorted(dtypes))
    return found


def tensors_of(facts: ServerFacts, expected: Expected) -> tuple[TensorSpec, ...]:
    """The checkpoint's tensors as a trainer serves them."""
    rule = _DtypeRule(facts, expected, _UNKNOWN)
    return tuple(TensorSpec(name, rule.wanted(name), shape) for name, shape in expected.shapes.items())


def _some(names: Iterable[str], what: str = "tensors") -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{len(ordered)} {what} ({', '.join(ordered[:_SHOWN])}{more})"


def objections(
    quantization: Quantization | None, names: Iterable[str], facts: ServerFacts, dialect: Dialect
) -> Iterator[str]:
    """Objections to updating a server of a quantized checkpoint, whose tensors have these names.

    A server loads every update through the loader that its launch used. That works as long as the live parameters still
    have the checkpoint's layout, or SGLang can give it back (begin_weight_update). Read from SGLang 0.5.11 to 0.5.23:

        fp8 in blocks           stays as it was loaded on Hopper; scales are packed anew at a session's end elsewhere
        fp8 by tensor, channel  transposed, and put into new parameters without a loader
        mxfp8                   scales are swizzled, and not given back
        int4, experts           repacked for Marlin; given back at the beginning of a session
        int4, other layers      repacked for Marlin, and not given back
        anything on a CPU       packed for AMX, and not given back
        Llama, fp8 in blocks    its loader takes ``weight_scale_inv`` for ``weight_scale``, finds none, and goes on
    """
    asked = facts.quantization.replace("_", "-")
    if quantization is None:
        if asked:
            yield (
                f"the server quantizes a plain checkpoint while it loads (--quantization {facts.quantization}), which"
                " cannot be compared: launch it without the flag from a checkpoint that is quantized already, and name"
                " that to the trainer (served)"
            )
        return
    if asked and asked != quantization.method:
        yield (
            f"the server was launched with --quantization {facts.quantization}, its checkpoint is"
            f" {quantization.method}: launch it without the flag"
        )
    if facts.device == "cpu":
        yield "SGLang packs quantized weights for its CPU and cannot unpack them: serve the plain checkpoint there"
        return
    names = tuple(names)
    if _LLAMA in facts.architectures and any(name.endswith(".weight_scale_inv") for name in names):
        yield "SGLang's Llama drops scales called weight_scale_inv in silence: serve a compressed-tensors checkpoint"
    packed = [name for name in names if name.endswith(".weight_packed")]
    for rule in quantization.rules:
        reason = _reason(rule.scheme, packed, dialect)
        if reason:
            yield f"weights in {rule.scheme.name} cannot be loaded into a running server: {reason}"


def _reason(scheme: Scheme, packed: Iterable[str], dialect: Dialect) -> str:
    if scheme.element is Element.INT4:
        if any(not _EXPERT.search(name) for name in packed):
            return f"SGLang repacks them and unpacks experts only; {_SERVE_BLOCKS}, or quantize nothing but experts"
        if not dialect.sessions:
            return "SGLang unpacks experts from 0.5.21 on: launch a newer server"
        return ""
    if scheme.scale_dtype == "uint8":
        return f"SGLang swizzles their scales; {_SERVE_BLOCKS}"
    if not all(scheme.block):
        return f"SGLang transposes them; {_SERVE_BLOCKS}"
    return ""


def refusals(facts: ServerFacts, dialect: Dialect, checkpoint: Path) -> Iterator[str]:
    """Why `Prepare` will refuse every version, as far as the files in `checkpoint` tell when the sidecar joins."""
    try:
        expected = checkpoint_spec.expected(checkpoint)
    except (UnfitManifest, OSError, ValueError) as error:
        yield str(error)
        return
    yield from objections(expected.quantization, expected.shapes, facts, dialect)


def prerecording_objection(facts: ServerFacts, dialect: Dialect, expected: Expected) -> str:
    """Why this server's loader must not be called outside of a round; empty when it may be."""
    plain = not facts.quantization and expected.quantization is None and checkpoint_spec.dense(facts.architectures)
    packed = facts.device == "cpu" and "amx_tile" in _CPU.read_text(encoding="utf-8")
    if dialect.sessions and (packed or not plain):
        return (
            f"SGLang {facts.version} lays weights out anew after a loader was called, as if all had been loaded: those"
            " that were not would be laid out twice"
        )
    return ""
