"""``weightbus trainer-agent``, a sidecar for trainers, and ``weightbus rollback``: commands that publish."""

import argparse
import re
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, TypeVar

from msgspec import Meta

from weightbus.control.bus import check_keys
from weightbus.control.cli import add_settings_flags, settings_from_args
from weightbus.control.server import LogFormat, LogLevel, configure_logging

from ..settings import TrainerSettings, Wait, check_device

ROLLBACK_SECTION: Final = "rollback"
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


WATCH_SECTION: Final = "watch"
"""Section of the settings file; environment variables begin with ``WEIGHTBUS_WATCH_``."""

_VERSION: Final = re.compile(r"\((?:\?P<\w+>)?((?:(?:\\d|\d|\[(?:\d-\d|\d)+\])(?:[+*?]|\{[\d,]+\})?)+)\)(?![?*{])")
"""A group of digits, in a pattern: what is in it, as group 1."""
_ESCAPED: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)

Port = Annotated[int, Meta(ge=0, le=65535)]


class WatchSettings(TrainerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``weightbus trainer-agent``."""

    watch: Annotated[Path, Meta(description="folder in which the trainer makes one folder for each checkpoint")]
    subfolder: Annotated[str, Meta(description="where in it the model is, for example actor/huggingface")] = ""
    pattern: Annotated[str, Meta(description="names of checkpoint folders; the one group is the version")] = (
        r"(?:.*\D)?(\d+)"
    )
    dcp: Annotated[
        bool, Meta(description="read torch DCP folders too: their metadata is a pickle, which can run code")
    ] = False
    dcp_prefix: Annotated[
        str, Meta(description="what stands before the model's names in them, if several fit: model, ema; . for nothing")
    ] = ""
    marker: Annotated[str, Meta(description="a file without which a checkpoint is not finished")] = ""
    settle_s: Annotated[Wait, Meta(description="how long nothing must have changed in a finished checkpoint")] = 5.0
    stale_s: Annotated[Wait, Meta(description="an unfinished one that did not change for so long is bad")] = 600.0
    poll_s: Annotated[Wait, Meta(description="how often the folder is looked at")] = 1.0
    device: Annotated[str, Meta(description="where buckets are staged: cpu, or a GPU for engines on this host")] = "cpu"
    http_bind: Annotated[str, Meta(description="address of the HTTP port: no secrets, no authentication")] = "127.0.0.1"
    http_port: Annotated[Port, Meta(description="/metrics, /healthz, /readyz, /status")] = 5770
    log_level: Annotated[LogLevel, Meta(description="least level that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Meta(description="auto: for people on a terminal, else JSON")] = LogFormat.AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pattern(self.pattern)
        check_device(self.device)
        check_prefix(self.dcp_prefix, dcp=self.dcp)


def check_prefix(prefix: str, *, dcp: bool) -> None:
    """Raise `ValueError` for a DCP prefix while DCP folders are not read."""
    if prefix and not dcp:
        raise ValueError(f"dcp_prefix = {prefix!r} is about torch DCP folders, which are not read: set dcp = true too")


def _check_pattern(text: str) -> None:
    """Raise `ValueError` unless the pattern has one group, and it matches digits in every matching name."""
    try:
        groups = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"pattern = {text!r} is no regular expression ({error}): give one such as step-(\\d+), or escape brackets"
        ) from error
    found = next((each for each in _VERSION.finditer(text) if not re.fullmatch(each[1], "")), None)
    whole = found and _stands_alone(text[: found.start()]) and _stands_alone(text[found.end() :])
    if groups != 1 or not whole:
        raise ValueError(
            f"pattern = {text!r} must have exactly one group, the version: digits such as (\\d+), in every name that"
            " matches. Write other groups as (?:...), and it in none of them, not optional, and no | beside it"
        )


def _stands_alone(part: str) -> bool:
    """True if `part` is a complete pattern without a top-level alternative, so that its neighbor is always matched."""
    try:
        re.compile(part)
    except re.error:
        return False
    rest = _ESCAPED.sub("", part)
    while (shorter := re.sub(r"\([^()]*\)", "", rest)) != rest:
        rest = shorter
    return "|" not in rest


Given = TypeVar("Given", bound=TrainerSettings)


class TrainerAgentCommand:
    """Publishes each finished checkpoint of a folder until SIGTERM or SIGINT."""

    help = "publish every finished checkpoint that appears in a folder"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """One flag for each setting."""
        add_settings_flags(parser, WatchSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Watch, and finish what is being published before leaving."""
        given = _settings(WatchSettings, WATCH_SECTION, args)
        if given is None:
            return 0
        # Imported here: it brings torch, for which neither the list of commands nor a check of settings should wait.
        from .watcher import Watcher  # noqa: PLC0415

        configure_logging(given.log_level.value, given.log_format.value)
        watcher = Watcher(given)

        def stop(_number: int, _frame: FrameType | None) -> None:
            watcher.stop()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
        watcher.run()
        return 0


class RollbackCommand:
    """Takes a channel back to an older committed version, once, and says what came of it."""

    help = "take a channel back to an older committed version, from the checkpoint that holds it"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """The version, and one flag for each setting."""
        parser.add_argument("version", type=_version, metavar="VERSION", help="a version that was committed before")
        add_settings_flags(parser, RollbackSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Go back, or say why not. The committed version itself is done already: exit code 0."""
        given = _settings(RollbackSettings, ROLLBACK_SECTION, args)
        if given is None:
            return 0
        from .rollback import roll_back  # noqa: PLC0415  # torch, as above

        configure_logging(given.log_level.value, given.log_format.value)
        report = roll_back(given, args.version)
        if report is None:
            print(f"channel {given.channel} is at version {args.version} already")  # noqa: T201
        else:
            print(report.line())  # noqa: T201
        return 0


def _settings(kind: type[Given], section: str, args: argparse.Namespace) -> Given | None:
    """The settings; None after ``--check-config``, which prints and checks them."""
    resolved = settings_from_args(kind, section, args)
    given = resolved.value
    if not args.check_config:
        return given
    print(resolved.render())  # noqa: T201  # no console: one would wrap lines, and the output is a file
    check_keys(given.coordinator, given.keys, given.name, insecure_loopback=given.insecure_loopback)
    return None


def _version(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a version: a whole number is expected")
    return int(text)


trainer_agent = TrainerAgentCommand()
rollback = RollbackCommand()
