"""The subcommand ``check``: what a trainer of a checkpoint would publish, and whether a server would take it.

It is the one module that knows both kinds of agents. Each half is the agents' own code: the trainer's manifest
(`planned_version`) and the check that a sidecar makes before a round (`Engine.check`). Nothing is changed anywhere.

Exit codes: 0 at least one transport fits, 1 every version would be refused, 2 it cannot be told.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from weightbus.control.cli import SettingsCommand, load_settings
from weightbus.control.protocol import ConfigurationError
from weightbus.control.terminal_text import byte_size
from weightbus.dataplane.tensors import FLOAT_DTYPES
from weightbus.engine_agent.sidecar import ServerSettings

if TYPE_CHECKING:  # both bring torch, for which neither the list of commands nor a check of settings should wait
    from weightbus.dataplane.tensors import Manifest
    from weightbus.engine_agent.engines import Engine
    from weightbus.trainer_agent import TrainerSettings
    from weightbus.trainer_agent.publish import PlannedVersion

_SHOWN: Final = 4
_KINDS: Final = ("", "files", "exported", "megatron")
_WHERE: Final = {
    "direct": "where the trainer runs on the server's host",
    "local": "where the trainer runs on the server's host",
    "disk": "where the server sees the trainer's checkpoint_dir",
}
"""Conditions of transports that only a running trainer tells."""


class CheckSettings(ServerSettings, frozen=True, kw_only=True):
    """Settings of ``weightbus check``."""

    model: Annotated[Path, Meta(description="folder of the checkpoint that is trained; its config may be enough")]
    trainer_config: Annotated[
        Path | None, Meta(description="the trainer's settings file (its section [trainer]); none: defaults")
    ] = None
    source: Annotated[
        str,
        Meta(
            description="how the trainer presents the model: files (FSDP2, a module), exported (Megatron-Bridge,"
            " trainer-agent) or megatron; unset: files where there are some"
        ),
    ] = ""
    dtype: Annotated[str, Meta(description="the dtype= that the trainer's source is given; unset: none")] = ""
    served: Annotated[
        Path | None, Meta(description="the served= that it is given; unset: none (MegatronSource: its hf_config)")
    ] = None
    json: Annotated[bool, Meta(description="print the document as JSON")] = False
    timeout_s: Annotated[float, Meta(description="how long an answer may take", gt=0, le=86400)] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in _KINDS:
            raise ValueError(f"source = {self.source!r}: files, exported or megatron is expected")
        if self.dtype and self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: {', '.join(FLOAT_DTYPES)} is expected")


class ServerSide(msgspec.Struct, frozen=True):
    """The server, as it describes itself."""

    url: str
    version: str
    architectures: tuple[str, ...]
    checkpoint: str
    device: str
    tp: int
    pp: int
    dp: int


class Sent(msgspec.Struct, frozen=True):
    """What every version carries."""

    model: str
    source: str
    """How the trainer presents it: files, exported or megatron."""
    tensors: int
    bytes: int
    dtypes: dict[str, int]
    """Tensors by dtype."""


class LeftEntry(msgspec.Struct, frozen=True):
    """A tensor, or a prefix that ends in a dot, that engines keep as they were launched with it."""

    name: str
    reason: str


class CastEntry(msgspec.Struct, frozen=True):
    """Tensors that are converted, by the trainer before they travel, or by the server once they have come."""

    found: str
    """Dtype in the trainer's checkpoint; of tensors that the server casts, the dtype in which they travel."""
    served: str
    """Dtype in which the tensors travel; where the server casts them, the dtype in which it holds them."""
    tensors: int
    names: tuple[str, ...]
    """Some of them."""


class Way(msgspec.Struct, frozen=True):
    """One transport."""

    fits: bool
    reason: str
    """Why not; for one that fits, what it takes beside."""
    needed: str = ""
    """The change that would make it fit; empty where the reason says it, or there is none."""
    checked: bool = False
    """True if the version itself was checked: trainer and server have the transport."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``weightbus check --json``."""

    fits: bool
    server: ServerSide
    sent: Sent | None
    """Null where the trainer's side is refused."""
    left: tuple[LeftEntry, ...] = ()
    copies: dict[str, str] = {}
    """Tensors that follow one that is sent, by name; they do not travel."""
    cast: tuple[CastEntry, ...] = ()
    """By the trainer."""
    cast_by_server: tuple[CastEntry, ...] = ()
    """As at its launch: values that its parameters cannot hold are rounded."""
    refused: tuple[str, ...] = ()
    """Why every version would be refused; empty where one transport fits."""
    transports: dict[str, Way] = {}


class CheckCommand(SettingsCommand[CheckSettings]):
    """``weightbus check``: prints one page, or the document, and exits with 0, 1 or 2."""

    help: str = (
        "say before training what a server would be sent, what is left, cast or refused, and over which transports"
    )
    section: str = "check"
    kind = CheckSettings

    def do(self, given: CheckSettings) -> int:
        """Ask the server who it is, read headers and configs, and print."""
        result = _checked(given)
        print(msgspec.json.encode(result).decode() if given.json else "\n".join(_page(result)))  # noqa: T201
        return 0 if result.fits else 1


def _checked(given: CheckSettings) -> CheckResult:
    """Raises `ConfigurationError` where it cannot be told."""
    from weightbus.dataplane.errors import ManifestError  # noqa: PLC0415
    from weightbus.engine_agent.errors import UnknownServerVersion  # noqa: PLC0415
    from weightbus.trainer_agent import SourceError  # noqa: PLC0415
    from weightbus.trainer_agent.machine import BadCheckpoint  # noqa: PLC0415
    from weightbus.trainer_agent.publish import SourceKind, planned_version  # noqa: PLC0415

    settings = _trainer_settings(given.trainer_config)
    if objection := _no_checkpoint(given.model, settings):
        raise ConfigurationError(objection)
    try:
        engine = _identified(given)
    except UnknownServerVersion as error:
        unknown = ServerSide(given.server, error.version, (), "", "", 0, 0, 0)
        return CheckResult(fits=False, server=unknown, sent=None, refused=(str(error),))
    try:
        served = given.model_path or Path(engine.facts.model_path)
        if not (served / "config.json").is_file():
            raise ConfigurationError(
                f"{served} is what {given.server} serves, and its config.json is not seen here: name the folder's place"
                " on this machine with --model-path"
            )
        kind = SourceKind(given.source) if given.source else None
        try:
            planned = planned_version(given.model, settings, kind, given.dtype, given.served)
        except BadCheckpoint as error:
            raise ConfigurationError(f"{error}: mend it, or name another folder with --model") from error
        except (SourceError, ManifestError) as error:
            return CheckResult(fits=False, server=_server_side(given, engine), sent=None, refused=(str(error),))
        return _result(given, engine, served, planned, settings)
    finally:
        engine.close()


def _no_checkpoint(model: Path, settings: TrainerSettings) -> str:
    """Why `model` is no folder of a checkpoint, and what to do; empty if it may be one."""
    wanted = "--model names the folder of the checkpoint that is trained"
    if model.is_file():
        return f"{model} is a file: {wanted}, as {model.parent}"
    if not model.is_dir():
        return f"there is no folder {model} here: {wanted}; names of a hub are not looked up, so download it first"
    beside = settings.hf_config_dir
    if not (model / "config.json").is_file() and not (beside is not None and (beside / "config.json").is_file()):
        return (
            f"{model} has no config.json: {wanted}. Copy its config.json there, or name the folder that has it as"
            " hf_config_dir in the trainer's settings (--trainer-config)"
        )
    return ""


def _trainer_settings(file: Path | None) -> TrainerSettings:
    from weightbus.trainer_agent import TrainerSettings  # noqa: PLC0415

    flags = {"channel": "check"} if file is None else {}
    settings = load_settings(TrainerSettings, "trainer", file=file, flags=flags).value
    try:
        settings.transports()
    except ValueError as error:
        raise ConfigurationError(f"{file}: {error}") from error
    return settings


def _identified(given: CheckSettings) -> Engine:
    """The engine, which was asked who it is, and whether it takes these keys."""
    from weightbus.engine_agent.engines import EngineConnection, open_engine  # noqa: PLC0415
    from weightbus.engine_agent.errors import ServerError  # noqa: PLC0415
    from weightbus.engine_agent.sidecar import read_keys  # noqa: PLC0415

    keys, exposed = read_keys(given)
    for setting, advice in exposed.items():
        print(f"{setting}: {advice}", file=sys.stderr)  # noqa: T201
    engine = open_engine(given.engine, EngineConnection(given.server, keys, given.dialect))
    try:
        engine.identify(given.timeout_s)
        engine.check_keys(given.timeout_s)
    except ServerError as error:
        engine.close()
        raise ConfigurationError(f"{engine.explain(error)}. Then run `weightbus check` again") from error
    except BaseException:
        engine.close()
        raise
    return engine


def _result(
    given: CheckSettings, engine: Engine, served: Path, planned: PlannedVersion, settings: TrainerSettings
) -> CheckResult:
    manifest = planned.manifest
    ways = dict(_ways(engine, served, planned, settings))
    fits = any(way.fits for way in ways.values())
    faults = [way.reason for way in ways.values() if way.checked]
    faults = faults or [f"{name}: {way.reason}" for name, way in ways.items()]
    refused = () if fits else tuple(dict.fromkeys(chain(engine.refusals(served), faults)))
    return CheckResult(
        fits=fits,
        server=_server_side(given, engine),
        sent=Sent(
            manifest.model,
            planned.source.value,
            len(manifest.tensors),
            manifest.nbytes,
            dict(Counter(spec.dtype for spec in manifest.tensors)),
        ),
        left=tuple(LeftEntry(each.name, each.reason.value) for each in manifest.left),
        copies=manifest.copied,
        cast=tuple(_casts(planned)),
        cast_by_server=tuple(_casts_of_server(engine.casts(manifest, served), manifest)) if fits else (),
        refused=refused,
        transports=ways,
    )


def _ways(
    engine: Engine, served: Path, planned: PlannedVersion, settings: TrainerSettings
) -> Iterator[tuple[str, Way]]:
    """Every transport that the trainer's settings allow, in their order."""
    from weightbus.dataplane.transports import registry as transports  # noqa: PLC0415
    from weightbus.engine_agent.errors import UnfitManifest  # noqa: PLC0415

    able, missing = engine.transports(), engine.missing_transports()
    offered = settings.transports()
    for kind in settings.preferences():
        name = kind.value
        if kind not in offered:
            yield name, Way(False, "the trainer names no checkpoint_dir", "set it to a folder that both sides see")
        elif transports.by_name(kind).in_place and not planned.source.in_place:
            yield (
                name,
                Way(False, "an exporter does not say where its tensors lie", "others carry buckets"),
            )
        elif name not in able:
            limitation = missing[name]
            yield name, Way(False, limitation.found, limitation.needed)
        else:
            try:
                engine.check(planned.manifest, name, served)
            except UnfitManifest as error:
                yield name, Way(False, str(error), checked=True)
            else:
                yield name, Way(True, _WHERE.get(name, ""), checked=True)


def _casts(planned: PlannedVersion) -> Iterator[CastEntry]:
    sent = {spec.name: spec.dtype for spec in planned.manifest.tensors}
    found = ((spec.dtype, sent.get(spec.name, "quantized"), spec.name) for spec in planned.trained)
    return _cast_entries(each for each in found if each[0] != each[1])


def _casts_of_server(held: Mapping[str, str], manifest: Manifest) -> Iterator[CastEntry]:
    return _cast_entries((spec.dtype, held[spec.name], spec.name) for spec in manifest.tensors if spec.name in held)


def _cast_entries(casts: Iterable[tuple[str, str, str]]) -> Iterator[CastEntry]:
    """Of dtypes before and after the cast, and the tensor's name."""
    names: dict[tuple[str, str], list[str]] = {}
    for found, served, name in casts:
        names.setdefault((found, served), []).append(name)
    for (found, served), each in names.items():
        yield CastEntry(found, served, len(each), tuple(each[:_SHOWN]))


def _server_side(given: CheckSettings, engine: Engine) -> ServerSide:
    facts = engine.facts
    return ServerSide(
        given.server, facts.version, facts.architectures, facts.model_path, facts.device, facts.tp, facts.pp, facts.dp
    )


def _page(result: CheckResult) -> Iterator[str]:
    """One page for people."""
    server, sent = result.server, result.sent
    ranks = ", ".join(f"{name} {getattr(server, name)}" for name in ("tp", "pp", "dp") if getattr(server, name) > 1)
    on = f" on {server.device}{f', {ranks}' if ranks else ''}" if server.device else ""
    yield _row("server", f"{server.url}: version {server.version}{on}")
    if server.checkpoint:
        yield _row("", f"serves {', '.join(server.architectures)} from {server.checkpoint}")
    if sent is not None:
        kinds = ", ".join(f"{count} {dtype}" for dtype, count in sent.dtypes.items())
        yield _row("sent", f"{sent.model}, {sent.tensors} tensors, {byte_size(sent.bytes)} ({kinds}); by {sent.source}")
        yield from _rows("left", (f"{each.name} ({each.reason}): as launched" for each in result.left))
        yield from (_row("", f"{name}: follows {of}") for name, of in result.copies.items())
        by_server = (f"{_cast_line(each)} (by the server, as at its launch)" for each in result.cast_by_server)
        yield from _rows("cast", chain(map(_cast_line, result.cast), by_server))
    yield from _rows("refused", result.refused)
    for at, (name, way) in enumerate(result.transports.items()):
        yes = f"fits{f', {way.reason}' if way.reason else ''}"
        no = "refused as above" if way.checked else way.reason
        needed = f"; {way.needed}" if way.needed else ""
        yield _row("transports" if not at else "", f"{name:<11} {yes if way.fits else f'no: {no}{needed}'}")
    yield _row("answer", "fits" if result.fits else "every version would be refused; mend the first line of refused")


def _rows(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = list(lines) or ["nothing"]
    yield from (_row(title if not at else "", line) for at, line in enumerate(found))


def _row(title: str, line: str) -> str:
    return f"{title:<10} {line}".rstrip()


def _cast_line(entry: CastEntry) -> str:
    more = f" and {entry.tensors - len(entry.names)} more" if entry.tensors > len(entry.names) else ""
    return f"{entry.tensors} from {entry.found} to {entry.served}: {', '.join(entry.names)}{more}"


check = CheckCommand()
