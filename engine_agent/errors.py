"""Errors between the engine agent and its server, by the party at fault.

A `ConfigurationError` ends the start of a sidecar, a `ServerError` is the server's, the others are of one operation.
`UnknownDialect` (engines/sglang) is one more.
"""

from pathlib import Path

from weightbus.control.protocol import ConfigurationError
from weightbus.control.security import VerificationFailure
from weightbus.dataplane.errors import TransferFailed


class EngineAgentError(Exception):
    """Root of the engine agent's errors."""


class NotTrusted(EngineAgentError):
    """No trainer that this engine trusts has published that, or not as what follows the version it serves."""

    def __init__(self, version: int, doubt: VerificationFailure) -> None:
        self.version = version
        self.kind = doubt.kind
        super().__init__(f"version {version} is not believed ({doubt.kind.value}): {doubt.reason}")


class NothingToGive(EngineAgentError):
    """The server cannot give memory back, or must not now. It was not asked."""


class CalledOff(EngineAgentError):
    """The operation was cancelled before it asked anything more of the server."""

    def __init__(self) -> None:
        super().__init__("called off: the round has gone on without this engine, or its server is gone")


class UnknownServerVersion(EngineAgentError):
    """The server is of a version whose interface was never checked."""

    def __init__(self, version: str, reason: str) -> None:
        super().__init__(reason)
        self.version = version


class UnfitManifest(EngineAgentError):
    """The manifest does not fit the server. Nothing was sent to the server."""


class StateUnreadable(EngineAgentError):
    """The state folder cannot be used, or holds something that this version did not write."""


class StateUnwritable(EngineAgentError, ConfigurationError):
    """Nothing can be kept in the state folder."""

    def __init__(self, folder: Path, problem: OSError) -> None:
        super().__init__(
            f"state folder {folder} cannot be written ({problem.strerror or problem}): make it writable for this agent,"
            " or name another with --state-dir"
        )


class StateInUse(EngineAgentError, ConfigurationError):
    """Another agent keeps the record of this engine."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(
            f"another agent with the name {name!r} runs on the state folder {folder}: end it, or give this one another"
            " --name"
        )


class KeyFileUnusable(EngineAgentError, ConfigurationError):
    """A file that was named for one of the server's keys does not hold one. Its content is not repeated."""

    def __init__(self, setting: str, path: Path, problem: str) -> None:
        super().__init__(
            f"{setting} = {str(path)!r}: {problem}; expected a file that this agent may read, with the key as its only"
            " line"
        )


class KeyRefused(EngineAgentError, ConfigurationError):
    """The server does not take the key that this agent was given for it. Keys are not repeated."""

    def __init__(self, url: str, found: str, advice: str) -> None:
        super().__init__(f"the server at {url} refuses this agent ({found}): {advice}")


class ServerInUse(EngineAgentError, ConfigurationError):
    """Another agent of this host stands beside this server."""

    def __init__(self, url: str, holder: str) -> None:
        super().__init__(
            f"the agent {holder or 'of another process'} stands beside the server at {url} already, and one server has"
            " one agent: end that one, or name another --server"
        )


class ServerError(EngineAgentError, TransferFailed):
    """The server did not do what it was asked."""

    def __init__(self, call: str, reason: str) -> None:
        self.call = call
        self.reason = reason
        super().__init__(f"{call}: {reason}")


class ServerUnreachable(ServerError):
    """No connection, or it broke before an answer came."""


class ServerSilent(ServerError):
    """No answer within the deadline. The request may still be carried out."""


class ServerDoubted(ServerError):
    """The server may be another one than was meant, or did not stay as it was told."""


class PauseEnded(ServerDoubted):
    """The server generates, and was paused."""

    def __init__(self, call: str) -> None:
        super().__init__(call, "another party let the server generate while it was paused for a version")


class AnotherGeneration(ServerDoubted):
    """The server was launched anew since the operation began, or another one answers at its address.

    Unless `asked`, nothing was asked of the other one.
    """

    def __init__(self, call: str, *, asked: bool = False) -> None:
        what = "in doubt whom it met" if asked else "not made"
        super().__init__(call, f"{what}: the server was launched anew since this operation began")


class ServerRefused(ServerError):
    """The server answered, and did not do it."""

    def __init__(self, call: str, status: int, reason: str) -> None:
        self.status = status
        super().__init__(call, f"HTTP {status}, {reason}")


class WrongWeights(ServerError):
    """The server's live weights are not the ones that were sent."""
