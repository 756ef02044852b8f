"""What each agent may do and say, and by which key: the allow-list, Ed25519 signatures, and signed publications.

``trust.toml`` in the folder of keys, written by ``weightbus trust``, may also be edited by hand::

    [agents.e0]
    role = "engine"
    channels = ["policy"]       # "*" is any
    key = "..."                 # both keys of e0.pub: with this one it connects,
    signing_key = "..."         # with this one it would sign what it publishes

The file holds public keys only, so it may be readable by all. Write access to it decides which trainer may publish, so
a file that other users can write is refused. `allow_list.AllowList` follows the file while a process runs.

A trainer signs a statement of the channel, the epoch that was granted for it, the version with its manifest and digest
table, and the version that was committed before: a hash chain. The coordinator carries the signature and cannot make
one. So a coordinator cannot

* have engines load bytes that no trainer published: the digest table decides every byte, and is signed;
* replay an old version: its statement is of an old epoch, and engines take no epoch below the highest they have seen;
* show different histories to different engines: the next statement contradicts one of them;
* replace a deferred digest table: the trainer signs the same statement once more, with the table in it, and engines
  verify nothing by a table without that signature;
* redirect engines to another source: the endpoint at which a trainer offers the bytes is signed too, for each epoch.
  That matters because the digests are made for speed, and do not resist an attacker that chooses all bytes of a tensor.

A statement with `rollback` may name a version below the one it follows; the flag is signed, so the coordinator cannot
ask for one. An engine that was away has not seen every link of the chain. It verifies the links that it can: a
statement may follow a version newer than the one the engine serves, never an older one, nor another version of the
same number.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import os
import stat
import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..machine import ANY_CHANNEL, Principal
from ..protocol import (
    NAME_PATTERN,
    AgentId,
    AgentName,
    Channel,
    ConfigurationError,
    Digest,
    Endpoint,
    Epoch,
    HeldVersion,
    PeerKeyError,
    Prepare,
    PublicationSignature,
    Publish,
    Role,
    Transfer,
)

PUBLIC_PATTERN: Final = r"^[0-9a-f]{64}\Z"
SigningKey = Annotated[str, Meta(pattern=PUBLIC_PATTERN)]
"""Public signing key, as in the allow-list."""

_DERIVED_FOR: Final = b"weightbus sign 1"


def signing_key_of(secret: str) -> str:
    """Public signing key that belongs to a CURVE `secret`."""
    from nacl.signing import SigningKey as Key  # noqa: PLC0415  the coordinator neither signs nor verifies

    return bytes(Key(_seed(secret)).verify_key).hex()


def sign(secret: str, statement: bytes) -> str:
    """Signature of `statement` by the signing key of a CURVE `secret`, in hexadecimal."""
    from nacl.signing import SigningKey as Key  # noqa: PLC0415  the coordinator neither signs nor verifies

    return Key(_seed(secret)).sign(statement).signature.hex()


def signed_by(signing_key: str, statement: bytes, signature: str) -> bool:
    """True if `signature` is `signing_key`'s for exactly these bytes."""
    from nacl.exceptions import BadSignatureError  # noqa: PLC0415  the coordinator neither signs nor verifies
    from nacl.signing import VerifyKey  # noqa: PLC0415

    try:
        VerifyKey(bytes.fromhex(signing_key)).verify(statement, bytes.fromhex(signature))
    except (BadSignatureError, ValueError):
        return False
    return True


def _seed(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode("ascii"), digest_size=32, person=_DERIVED_FOR).digest()


ALLOW_LIST_FILE: Final = "trust.toml"
MOST_BYTES: Final = 4 << 20
"""Size of the largest file that is read: some ten thousand agents."""
Z85_PATTERN: Final = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z"
_CHANNEL: Final = r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,63})\Z"
_END: Final = "# End of the list."
_ANNOUNCED: Final = f"# It ends with the line {_END!r}: without that line it counts as cut."
_HEAD: Final = (
    "# Who may connect to the coordinator, as what and where. Written by `weightbus trust`; a restart is not needed.\n"
    f"# Public keys only. Keep it writable by its owner alone.\n{_ANNOUNCED}\n"
)
"""Announces the last line: a file that was cut behind a whole entry looks complete otherwise. In comments, so that
earlier releases read the file, and that an entry may be added by hand before or behind it."""
_MEND: Final = (
    "mend it by hand, or move it away, and then run `weightbus trust add` anew for each agent, or put back a copy that"
    " was right"
)


class AllowListEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Role, channels and keys of one trusted agent."""

    role: Role
    channels: Annotated[tuple[Annotated[str, Meta(pattern=_CHANNEL)], ...], Meta(min_length=1, max_length=64)]
    key: Annotated[str, Meta(pattern=Z85_PATTERN)]
    """Public CURVE key of the agent, in Z85."""
    signing_key: SigningKey

    def covers(self, channel: str) -> bool:
        """True if the agent may act in `channel`."""
        return ANY_CHANNEL in self.channels or channel in self.channels


class AllowListDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    agents: dict[AgentName, AllowListEntry] = {}

    def principals(self) -> dict[str, Principal]:
        """Principal of each CURVE key. Raises `ValueError` when two agents share a key."""
        found: dict[str, Principal] = {}
        for name, entry in self.agents.items():
            other = found.setdefault(
                entry.key, Principal(AgentId(name), entry.role, tuple(map(Channel, entry.channels)))
            )
            if other.name != name:
                raise ValueError(f"{other.name!r} and {name!r} have the same key")
        return found


class AllowListUnusable(PeerKeyError):
    """The file cannot be read, or its content is no allow-list: it does not say which agents are trusted."""


def read_allow_list(path: Path) -> AllowListDocument:
    """Read and check the file at `path`, without waiting for a writer of it.

    Raises `AllowListUnusable` if it cannot be read or is invalid, and another `PeerKeyError` if it is missing or other
    users may write it.
    """
    try:
        text = _read(path).decode()
        document = tomllib.loads(text)
        if "agents" not in document:
            cut = "empty" if not text.strip() else "without [agents]"
            raise AllowListUnusable(path, f"is {cut}, as after a write that was interrupted, expected [agents]", _MEND)
        lines = [line.strip() for line in text.splitlines()]
        if _ANNOUNCED in lines and _END not in lines:
            raise AllowListUnusable(path, f"is cut: found no line {_END!r}, which its head announces", _MEND)
        trust = msgspec.convert(document, AllowListDocument)
        trust.principals()
    except FileNotFoundError as problem:
        raise PeerKeyError(path, "is not there", "make it with `weightbus trust add NAME --role ROLE ...`") from problem
    except OSError as problem:
        raise AllowListUnusable(path, f"cannot be read: {problem.strerror}", _MEND) from problem
    except (ValueError, RecursionError) as problem:  # not TOML, not UTF-8, or not what we know
        raise AllowListUnusable(path, explain_invalid_entry(problem), _MEND) from problem
    return trust


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise AllowListUnusable(path, "is a folder, a pipe or a device, expected a regular file", _MEND)
        _check_owner(path, found)
        if found.st_size > MOST_BYTES:
            raise AllowListUnusable(path, f"has {found.st_size} bytes, expected at most {MOST_BYTES}", _MEND)
        content = bytearray()
        while len(content) <= MOST_BYTES and (more := os.read(descriptor, MOST_BYTES)):
            content += more
        return bytes(content)
    finally:
        os.close(descriptor)


_ALLOWED: Final[Mapping[str, str]] = {
    _CHANNEL: 'expected a channel: up to 64 of A-Z, a-z, 0-9, ".", "_" and "-", not beginning with a mark; or "*", any',
    NAME_PATTERN: 'expected a name: up to 64 of A-Z, a-z, 0-9, ".", "_" and "-", not beginning with a mark',
    Z85_PATTERN: "expected the key in the agent's .pub: 40 characters",
    PUBLIC_PATTERN: 'expected what follows "ed25519:" in the agent\'s .pub: 64 of 0-9 and a-f',
}


def explain_invalid_entry(problem: Exception) -> str:
    """`problem` with an entry as text: regular expressions become words, and an unknown role lists the valid ones."""
    text = str(problem)
    for pattern, words in _ALLOWED.items():
        text = text.replace(f"Expected `str` matching regex {pattern!r}", words)
    return f"{text}; expected one of {', '.join(Role)}" if "Invalid enum value" in text else text


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in {0, os.geteuid()}:
        problem = f"belongs to user {found.st_uid}, expected {os.geteuid()} or root"
        raise PeerKeyError(path, problem, f"run: chown {os.geteuid()} {path}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others may write it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise PeerKeyError(path, problem, f"run: chmod go-w {path}")


@contextmanager
def edit_allow_list(path: Path) -> Generator[dict[str, AllowListEntry]]:
    """Context in which the entries, by name, may be changed; the file is replaced atomically if they were.

    A lock file serializes concurrent edits. Raises `ConfigurationError`, and changes nothing, if the result would be
    invalid.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_allow_list(path).agents if path.exists() else {}
        agents = {str(name): entry for name, entry in before.items()}
        yield agents
        if agents != before or not path.exists():
            _replace(path, _usable(path, render_allow_list(agents)))
    finally:
        os.close(lock)


def render_allow_list(agents: Mapping[str, AllowListEntry]) -> str:
    """The file with these entries. Nothing in an entry needs escaping: patterns bound all fields."""
    blocks = "".join(_block(name, agents[name]) for name in sorted(agents)) or "\n[agents]\n"
    return f"{_HEAD}{blocks}\n{_END}\n"


def _usable(path: Path, text: str) -> str:
    """`text`, if it is valid: an invalid file would end every session."""
    try:
        msgspec.convert(tomllib.loads(text), AllowListDocument).principals()
    except ValueError as problem:
        raise ConfigurationError(f"{path} stays as it was: {explain_invalid_entry(problem)}") from problem
    return text


def _block(name: str, entry: AllowListEntry) -> str:
    channels = ", ".join(f'"{channel}"' for channel in entry.channels)
    lines = [f'[agents."{name}"]', f'role = "{entry.role.value}"', f"channels = [{channels}]"]
    return "\n".join(["", *lines, f'key = "{entry.key}"', f'signing_key = "{entry.signing_key}"', ""])


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: the coordinator may read, and the host may stop, at any moment."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def allow_list_rows(agents: Mapping[AgentId, AllowListEntry]) -> list[tuple[str, str, str, str]]:
    """Rows for a table: name, role, channels, CURVE key."""
    return [(name, entry.role.value, ", ".join(entry.channels), entry.key) for name, entry in sorted(agents.items())]


_DOMAIN: Final = "weightbus publication 1"
_ENDPOINT_DOMAIN: Final = "weightbus offer 1"
"""Domain separation: each signed text begins with its kind, so that no signature is valid for the other kind."""
_PACK: Final = msgspec.msgpack.Encoder().encode


class VerificationFailureKind(enum.StrEnum):
    """Why a publication is refused; the ``cause`` of ``weightbus_sidecar_publications_refused_total``."""

    UNSIGNED = "unsigned"
    """The publication carries no signature, and keys are used."""
    UNKNOWN_SIGNER = "unknown_signer"
    """The allow-list has no trainer of the signer's name in this channel."""
    FORGED = "forged"
    """The signature is not the signer's, or a signed field was changed afterwards."""
    ROLLED_BACK = "rolled_back"
    """The publication follows a version older than the one this engine serves."""
    FORKED = "forked"
    """The publication follows another version of the number that this engine serves."""
    REDIRECTED = "redirected"
    """The endpoint of the bytes is not the one that the trainer signed."""


class VerificationFailure(msgspec.Struct, frozen=True):
    """Result of a failed verification: a kind for the metric, a reason for people."""

    kind: VerificationFailureKind
    reason: str


def sign_publication(message: Publish, signer: AgentId, secret: str, previous: HeldVersion | None) -> Publish:
    """`message` with the signature of `signer`. `previous`: the committed version that the lease's grant named."""
    unsigned = PublicationSignature(signer=signer, previous=previous, signature="0" * 128)
    signed = msgspec.structs.replace(unsigned, signature=sign(secret, _statement(message, unsigned)))
    return msgspec.structs.replace(message, publication_signature=signed)


def sign_digest_table(message: Publish, table: Digest, secret: str) -> str:
    """Signature for the deferred `table` of the signed `message`: under the same statement, with the table in it."""
    signed = message.publication_signature
    assert signed is not None, "only a signed publication has a deferred table to sign"
    return sign(secret, _statement(msgspec.structs.replace(message, table=table), signed))


def verify_digest_table(
    message: Prepare | None, table: Digest, signature: str, trusted: Mapping[AgentId, AllowListEntry]
) -> VerificationFailure | None:
    """Verify the deferred `table` of `message`, a publication that was verified before. None: it is genuine."""
    if message is None or message.publication_signature is None:
        reason = "nothing was believed for which a digest table could follow"
        return VerificationFailure(VerificationFailureKind.UNKNOWN_SIGNER, reason)
    signed = message.publication_signature
    entry = _trusted_trainer(signed.signer, message.channel, trusted)
    if isinstance(entry, VerificationFailure):
        return entry
    filled_in = msgspec.structs.replace(message, table=table)
    if not signed_by(entry.signing_key, _statement(filled_in, signed), signature):
        reason = f"digest table {table[:12]} is not what {signed.signer!r} signed for it"
        return VerificationFailure(VerificationFailureKind.FORGED, reason)
    return None


def verify_publication(
    message: Prepare, serving: HeldVersion | None, trusted: Mapping[AgentId, AllowListEntry]
) -> VerificationFailure | None:
    """Verify `message` for an engine that serves `serving`. None: it is genuine, and may follow that version."""
    signed = message.publication_signature
    if signed is None:
        reason = "it is not signed: does its trainer use keys?"
        return VerificationFailure(VerificationFailureKind.UNSIGNED, reason)
    entry = _trusted_trainer(signed.signer, message.channel, trusted)
    if isinstance(entry, VerificationFailure):
        return entry
    if not signed_by(entry.signing_key, _statement(message, signed), signed.signature):
        reason = f"it is not what {signed.signer!r} signed for epoch {message.epoch}"
        return VerificationFailure(VerificationFailureKind.FORGED, reason)
    return _verify_chain(signed.previous, message, serving)


def sign_endpoint(endpoint: Endpoint, channel: Channel, epoch: Epoch, secret: str) -> Endpoint:
    """`endpoint` with the signature of the holder of `secret`, valid for one epoch."""
    return msgspec.structs.replace(endpoint, signature=sign(secret, _endpoint_statement(endpoint, channel, epoch)))


def verify_endpoint(
    message: Transfer, signer: AgentId | None, trusted: Mapping[AgentId, AllowListEntry]
) -> VerificationFailure | None:
    """Verify the endpoint in `message`; `signer` signed the publication that was prepared. None: it is genuine."""
    entry = _trusted_trainer(signer, message.channel, trusted)
    if isinstance(entry, VerificationFailure):
        return entry
    statement = _endpoint_statement(message.offer, message.channel, message.epoch)
    if not signed_by(entry.signing_key, statement, message.offer.signature or ""):
        reason = f"{signer!r} did not offer it at {message.offer.address!r} in epoch {message.epoch}"
        return VerificationFailure(VerificationFailureKind.REDIRECTED, reason)
    return None


def _trusted_trainer(
    signer: AgentId | None, channel: Channel, trusted: Mapping[AgentId, AllowListEntry]
) -> AllowListEntry | VerificationFailure:
    """Looked up for every signature: the allow-list may have changed since the last one."""
    entry = trusted.get(signer) if signer is not None else None
    if entry is None or entry.role is not Role.TRAINER or not entry.covers(channel):
        reason = f"{signer!r} is no trainer that is trusted in {channel!r}; see `weightbus trust list`"
        return VerificationFailure(VerificationFailureKind.UNKNOWN_SIGNER, reason)
    return entry


def _endpoint_statement(endpoint: Endpoint, channel: Channel, epoch: Epoch) -> bytes:
    """The bytes that are signed: every field of the endpoint, future ones included."""
    unsigned = msgspec.structs.replace(endpoint, signature=None)
    return _PACK((_ENDPOINT_DOMAIN, channel, epoch, msgspec.structs.astuple(unsigned)))


def _verify_chain(
    previous: HeldVersion | None, message: Prepare, serving: HeldVersion | None
) -> VerificationFailure | None:
    if serving is None:
        return None
    found = previous.version if previous else None
    goes_on = message.version > serving.version or message.rollback
    if found is None or found < serving.version or not goes_on:
        reason = f"it follows version {found}, and this engine serves {serving.version} already"
        return VerificationFailure(VerificationFailureKind.ROLLED_BACK, reason)
    if found == serving.version and previous != serving:
        reason = f"it follows another version {found} than the one this engine serves"
        return VerificationFailure(VerificationFailureKind.FORKED, reason)
    return None


def _statement(message: Publish | Prepare, signed: PublicationSignature) -> bytes:
    """The bytes that are signed: a list of fixed length, so that no field can be read as another."""
    before = signed.previous
    return _PACK(
        (
            _DOMAIN,
            message.channel,
            message.epoch,
            message.version,
            message.manifest,
            message.table,
            (before.version, before.manifest, before.table) if before else None,
            signed.signer,
            message.rollback,
        )
    )
