"""Signed publications: what a trainer signs, and how an engine agent verifies it. Pure, but for the arithmetic.

The statement names the channel, the epoch that was granted for it, the version with its manifest and digest table, and
the version that was committed before: a hash chain. The coordinator carries the signature and cannot make one. So a
coordinator cannot

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
from collections.abc import Mapping
from typing import Final

import msgspec

from ..protocol import (
    AgentId,
    Channel,
    Digest,
    Endpoint,
    Epoch,
    HeldVersion,
    Prepare,
    PublicationSignature,
    Publish,
    Role,
    Transfer,
    sign,
    signed_by,
)
from .allow_list import AllowListEntry

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
