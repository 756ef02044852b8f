"""Authorization: which agents may join, and which roles may send which messages. Pure decisions with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..protocol import (
    PROTOCOL,
    Abandon,
    Acquire,
    Bye,
    Channel,
    Failed,
    GetBlob,
    GetStatus,
    Heartbeat,
    Hello,
    Offered,
    Paused,
    Prepared,
    Publish,
    PutBlob,
    RefusalCode,
    Release,
    Role,
    Sent,
    Serving,
    ToCoordinator,
    Topology,
    Transferred,
    Verified,
)
from .events import Principal
from .membership import Agent
from .reply_cache import YES, Decision

_ANY: Final = frozenset(Role)
_TRAINER: Final = frozenset({Role.TRAINER})
_ENGINE: Final = frozenset({Role.ENGINE})
ALLOWED: Final[Mapping[type, frozenset[Role]]] = {
    Hello: _ANY,
    Heartbeat: _ANY,
    Topology: frozenset({Role.TRAINER, Role.ENGINE}),
    Bye: _ANY,
    GetBlob: frozenset({Role.TRAINER, Role.ENGINE}),
    GetStatus: _ANY,
    Acquire: _TRAINER,
    Release: _TRAINER,
    PutBlob: _TRAINER,
    Publish: _TRAINER,
    Offered: _TRAINER,
    Sent: _TRAINER,
    Abandon: _TRAINER,
    Prepared: _ENGINE,
    Paused: _ENGINE,
    Transferred: _ENGINE,
    Verified: _ENGINE,
    Serving: _ENGINE,
    Failed: _ENGINE,
}
"""The roles that may send each message. A message type without a row fails a test."""


def may_say(agent: Agent, message: ToCoordinator, principal: Principal | None) -> Decision:
    """Whether `agent` may send `message`: its role allows it, and the message is about its own channel.

    With keys, `principal` is the owner of the connection's key by the allow-list of now. Its name and role must be
    those of the agent's `Hello`; the comparison is skipped while the principal is the one of the `Hello`.
    """
    channel: Channel = getattr(message, "channel", agent.channel)
    if principal is agent.principal and agent.role in ALLOWED[type(message)] and channel == agent.channel:
        return YES
    if reason := _not_the_agents_key(agent, principal):
        return Decision(RefusalCode.NOT_ALLOWED, reason)
    if agent.role not in ALLOWED[type(message)]:
        return Decision(RefusalCode.NOT_ALLOWED, f"not for the role {agent.role.value}")
    if channel != agent.channel:
        return Decision(RefusalCode.NOT_ALLOWED, f"{agent.name} joined channel {agent.channel!r}, not {channel!r}")
    if principal and not principal.covers(channel):
        return Decision(RefusalCode.NOT_ALLOWED, f"{agent.name}'s key is not trusted in channel {channel!r}")
    return YES


def _not_the_agents_key(agent: Agent, principal: Principal | None) -> str:
    if not principal and not agent.principal:
        return ""
    if principal is None or principal.name != agent.name:
        found = f"{principal.name!r}'s" if principal else "not on the allow-list"
        return f"the connection's key is {found}, not {agent.name!r}'s"
    if principal.role is not agent.role:
        return f"{agent.name!r} is trusted as {principal.role.value} now, and joined as {agent.role.value}"
    return ""


def may_join(
    message: Hello, principal: Principal | None, current: Agent | None, known: Agent | None, *, keyed: bool = False
) -> Decision:
    """Whether an agent may join.

    `principal` is the owner of the connection's key, `current` the agent that joined on this connection before, `known`
    the agent that has the name. With `keyed` every agent needs a trusted key.
    """
    if message.protocol != PROTOCOL:
        older = "agent" if message.protocol < PROTOCOL else "coordinator"
        reason = f"found protocol {message.protocol}, expected {PROTOCOL}: upgrade the {older}"
        return Decision(RefusalCode.PROTOCOL_MISMATCH, reason)
    if keyed and not principal:
        return Decision(RefusalCode.NOT_ALLOWED, f"{message.agent!r} came without a key that is trusted")
    return (
        Decision(RefusalCode.NOT_ALLOWED, reason) if (reason := _objection(message, principal, current, known)) else YES
    )


def _objection(message: Hello, principal: Principal | None, current: Agent | None, known: Agent | None) -> str:
    if principal and (reason := _not_by_key(message, principal)):
        return reason
    if (message.engine is not None) is not (message.role is Role.ENGINE):
        return "an engine, and no other role, describes an engine in Hello"
    if (message.trainer is not None) is not (message.role is Role.TRAINER):
        return "a trainer, and no other role, describes a trainer in Hello"
    if current and current.name != message.agent:
        return f"this connection is {current.name!r}'s: one connection, one agent"
    same = known is not None and known.incarnation == message.incarnation
    if known and same and (known.role, known.channel) != (message.role, message.channel):
        return f"{message.agent!r} is {known.role.value} of channel {known.channel!r}"
    return ""


def _not_by_key(message: Hello, principal: Principal) -> str:
    """Why the key does not cover this agent: a key is valid for one name, in one role, in its channels."""
    if principal.name != message.agent:
        return f"the connection's key is {principal.name!r}'s, not {message.agent!r}'s"
    if principal.role is not message.role:
        return f"{message.agent!r} is trusted as {principal.role.value}, not as {message.role.value}"
    if not principal.covers(message.channel):
        return f"{message.agent!r} is trusted in {', '.join(principal.channels)}, not in {message.channel!r}"
    return ""
