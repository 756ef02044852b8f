"""The console command ``weightbus``: finds its subcommands, parses, runs, and turns errors into one clear line.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted, 141 broken pipe, as shells count.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from ..protocol import ConfigurationError
from ..terminal_text import terminal_safe

ENTRY_POINT_GROUP: Final = "weightbus.commands"
BUILT_IN: Final[Mapping[str, str]] = {
    "coordinator": "weightbus.control.cli.commands:coordinator",
    "status": "weightbus.control.cli.commands:status",
    "plan": "weightbus.control.cli.plan_command:plan",
    "check": "weightbus.check_command:check",
    "forget-channel": "weightbus.control.cli.commands:forget_channel",
    "forget-engine": "weightbus.control.cli.commands:forget_engine",
    "keygen": "weightbus.control.cli.key_commands:keygen",
    "trust": "weightbus.control.cli.key_commands:trust",
    "version": "weightbus.control.cli.commands:version",
    "engine-agent": "weightbus.engine_agent.sidecar.commands:engine_agent",
    "trainer-agent": "weightbus.trainer_agent.cli.commands:trainer_agent",
    "rollback": "weightbus.trainer_agent.cli.commands:rollback",
    "simulate-fleet": "weightbus.trainer_agent.forecast.commands:simulate_fleet",
    "demo": "weightbus.trainer_agent.demo.commands:demo",
}
"""The same table as in pyproject.toml: it holds when weightbus runs from a tree that is not installed."""

EXTRAS: Final[Mapping[str, str]] = {
    "check": "engine",
    "engine-agent": "engine",
    "trainer-agent": "trainer",
    "rollback": "trainer",
    "simulate-fleet": "trainer",
    "demo": "demo",
}
"""Extra of the distribution that a command needs, for commands that need one."""


@runtime_checkable
class Command(Protocol):
    """One subcommand."""

    @property
    def help(self) -> str:
        """One line for the list of commands."""
        ...

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add flags to `parser`."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit code."""
        ...


def command_table() -> dict[str, str]:
    """Subcommand -> ``module:object``. Entry points of installed distributions override the built-in table."""
    installed = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return {**BUILT_IN, **installed}


def load_command(name: str, target: str) -> Command:
    """Import one subcommand. Raises `ConfigurationError` if a package it needs is not installed."""
    module, _, attribute = target.partition(":")
    try:
        command: object = getattr(importlib.import_module(module), attribute)
    except ImportError as problem:
        extra = EXTRAS.get(name)
        advice = f"; install it: pip install 'weightbus[{extra}]'" if extra else ""
        raise ConfigurationError(f"`weightbus {name}` cannot be loaded: {problem}{advice}") from problem
    if not isinstance(command, Command):
        raise ConfigurationError(f"{target} is not a weightbus command: it needs help, configure and run")
    return command


def build_parser(commands: Mapping[str, Command | str]) -> argparse.ArgumentParser:
    """A parser with one sub-parser for each command. A str is the reason why a command could not be loaded."""
    # No abbreviations: a script that relies on one breaks when a setting is added, and takes another for it until then.
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of any error"
    )
    parser = argparse.ArgumentParser(
        prog="weightbus",
        parents=[debug],
        allow_abbrev=False,
        description="Moves the weights of a model in training into the engines that serve it, while they serve.",
        epilog="Settings come from flags, then WEIGHTBUS_<SECTION>_<FIELD>, then the file of --config, then defaults;"
        " every subcommand shows them with --check-config.",
    )
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        if isinstance(command, str):
            choices.add_parser(name, help=command.replace("%", "%%"))
            continue
        child = choices.add_parser(
            name, help=command.help, description=command.help, parents=[debug], allow_abbrev=False
        )
        command.configure(child)
        child.set_defaults(command_to_run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser(_needed(arguments)).parse_args(arguments)
        code: int = args.command_to_run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `weightbus status | head`: the reader has seen enough
        return 141
    except Exception as error:  # noqa: BLE001  # the edge of the program: every error becomes a line and a code
        return _explain(error, _chosen(arguments), debug="--debug" in arguments)
    return code


def _chosen(arguments: Sequence[str]) -> str:
    return next((word for word in arguments if not word.startswith("-")), "")


def _needed(arguments: Sequence[str]) -> dict[str, Command | str]:
    """The requested command, so that no other is imported; all of them for the list."""
    known = command_table()
    chosen = _chosen(arguments)
    if chosen in known:
        return {chosen: load_command(chosen, known[chosen])}
    commands: dict[str, Command | str] = {}
    for name, target in known.items():
        try:
            commands[name] = load_command(name, target)
        except Exception as problem:  # noqa: BLE001  # a command that is broken must not hide the others
            commands[name] = f"(not available: {problem})"
    return commands


def _explain(error: Exception, command: str, *, debug: bool) -> int:
    if debug:
        print(terminal_safe("".join(traceback.format_exception(error)), lines=True), end="", file=sys.stderr)  # noqa: T201
    text = _foreseen(error, command)
    more = "" if debug or text else "\nThis was not foreseen. Run it again with --debug for the traceback."
    shown = text or f"{type(error).__name__}: {error}"
    print(f"weightbus: error: {terminal_safe(shown, lines=True)}{more}", file=sys.stderr)  # noqa: T201
    return 2 if isinstance(error, ConfigurationError | ModuleNotFoundError) else 1


def _foreseen(error: Exception, command: str) -> str:
    """Text of an error that explains itself; empty for one that needs its traceback."""
    # Agents have roots of their own, which control must not import: where a class is defined says that it is ours.
    if any(base.__module__.startswith("weightbus.") for base in type(error).__mro__):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        extra = f"[{EXTRAS[command]}]" if command in EXTRAS else ""
        return f"`weightbus {command}` needs {error.name}, which is not installed: pip install 'weightbus{extra}'"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"`weightbus {command}`: {where}{error.strerror}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
