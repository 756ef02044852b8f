"""What a trainer signs when it publishes, and what makes an engine agent believe it. Pure, but for the arithmetic.

The statement names the channel, the epoch that was granted for it, the version with its manifest and digest table, and
the version that was committed before: a chain. The coordinator carries the seal and cannot make one. So it cannot

* have engines load what no trainer published: the digest table decides every byte, and is signed;
* have an old version loaded again: its statement is of an old epoch, and engines take no lower one than they have seen;
* show different histories to different engines: the next statement contradicts one of them;
* slip them another table where a publication leaves it open: the trainer signs the same statement once more, with the
  table in it, and engines prove nothing by a table without that signature;
* send engines elsewhere for the bytes: where a trainer offers them is signed as well, for each epoch. That matters
  because the digests are made for speed, and do not resist somebody who may choose all bytes of a tensor.

A statement that says rollback may name a version below the one it follows; that too is signed, so the coordinator
cannot ask for it. An engine that was away has not seen every link. It checks those that it can: a statement may follow
a version that is newer than the one it serves, never one that is older, nor another one of the same number.
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
from .allow_list import TrustEntry

_DOMAIN: Final = "weightbus publication 1"
_OFFER_DOMAIN: Final = "weightbus offer 1"
"""What is signed begins with what it is, so that the one is never taken for the other."""
_PACK: Final = msgspec.msgpack.Encoder().encode


class Distrust(enum.StrEnum):
    """Why an engine does not believe a publication."""

    UNSIGNED = "unsigned"
    """It carries no seal, and keys are used."""
    UNKNOWN_SIGNER = "unknown_signer"
    """The allow-list knows no trainer of that name in this channel."""
    FORGED = "forged"
    """The signature is not the signer's, or something was changed after it."""
    ROLLED_BACK = "rolled_back"
    """It follows a version older than the one this engine serves."""
    FORKED = "forked"
    """It follows another version of the number that this engine serves."""
    REDIRECTED = "redirected"
    """The bytes are to come from where its trainer did not say."""


class Doubt(msgspec.Struct, frozen=True):
    """One objection: its kind for the metric, its words for people."""

    kind: Distrust
    reason: str


def seal_publication(message: Publish, signer: AgentId, secret: str, previous: HeldVersion | None) -> Publish:
    """`message` with the seal of `signer`, to whom `previous` was named as committed when the lease was granted."""
    bare = PublicationSignature(signer=signer, previous=previous, signature="0" * 128)
    sealed = msgspec.structs.replace(bare, signature=sign(secret, _statement(message, bare)))
    return msgspec.structs.replace(message, seal=sealed)


def seal_table(message: Publish, table: Digest, secret: str) -> str:
    """The signature for `table`, which the sealed `message` left open: under the same statement, with it filled in."""
    assert message.seal is not None, "what is not sealed has nothing to be filled in"
    return sign(secret, _statement(msgspec.structs.replace(message, table=table), message.seal))


def doubt_table(
    message: Prepare | None, table: Digest, signature: str, trusted: Mapping[AgentId, TrustEntry]
) -> Doubt | None:
    """What speaks against `table`, which `message`, believed already, left open, and which came with `signature`."""
    if message is None or message.seal is None:
        return Doubt(Distrust.UNKNOWN_SIGNER, "nothing was believed for which a digest table could follow")
    seal = message.seal
    entry = _trainer(seal.signer, message.channel, trusted)
    if isinstance(entry, Doubt):
        return entry
    filled_in = msgspec.structs.replace(message, table=table)
    if not signed_by(entry.signing_key, _statement(filled_in, seal), signature):
        return Doubt(Distrust.FORGED, f"digest table {table[:12]} is not what {seal.signer!r} signed for it")
    return None


def doubt(message: Prepare, serving: HeldVersion | None, trusted: Mapping[AgentId, TrustEntry]) -> Doubt | None:
    """What speaks against `message` for an engine that serves `serving`; None when it is to be believed."""
    seal = message.seal
    if seal is None:
        return Doubt(Distrust.UNSIGNED, "it is not signed: does its trainer use keys?")
    entry = _trainer(seal.signer, message.channel, trusted)
    if isinstance(entry, Doubt):
        return entry
    if not signed_by(entry.signing_key, _statement(message, seal), seal.signature):
        return Doubt(Distrust.FORGED, f"it is not what {seal.signer!r} signed for epoch {message.epoch}")
    return _broken_chain(seal.previous, message, serving)


def seal_offer(offer: Endpoint, channel: Channel, epoch: Epoch, secret: str) -> Endpoint:
    """`offer` with the signature of whoever holds `secret`, for one epoch."""
    return msgspec.structs.replace(offer, signature=sign(secret, _offer_statement(offer, channel, epoch)))


def doubt_offer(message: Transfer, signer: AgentId | None, trusted: Mapping[AgentId, TrustEntry]) -> Doubt | None:
    """What speaks against taking the bytes from where `message` says; `signer` is who signed what was prepared."""
    entry = _trainer(signer, message.channel, trusted)
    if isinstance(entry, Doubt):
        return entry
    statement = _offer_statement(message.offer, message.channel, message.epoch)
    if not signed_by(entry.signing_key, statement, message.offer.signature or ""):
        reason = f"{signer!r} did not offer it at {message.offer.address!r} in epoch {message.epoch}"
        return Doubt(Distrust.REDIRECTED, reason)
    return None


def _trainer(signer: AgentId | None, channel: Channel, trusted: Mapping[AgentId, TrustEntry]) -> TrustEntry | Doubt:
    """Asked for every signature: the list may have changed since the last one."""
    entry = trusted.get(signer) if signer is not None else None
    if entry is None or entry.role is not Role.TRAINER or not entry.covers(channel):
        reason = f"{signer!r} is no trainer that is trusted in {channel!r}; see `weightbus trust list`"
        return Doubt(Distrust.UNKNOWN_SIGNER, reason)
    return entry


def _offer_statement(offer: Endpoint, channel: Channel, epoch: Epoch) -> bytes:
    """All of it, whatever fields an offer may get."""
    bare = msgspec.structs.replace(offer, signature=None)
    return _PACK((_OFFER_DOMAIN, channel, epoch, msgspec.structs.astuple(bare)))


def _broken_chain(previous: HeldVersion | None, message: Prepare, serving: HeldVersion | None) -> Doubt | None:
    if serving is None:
        return None
    found = previous.version if previous else None
    goes_on = message.version > serving.version or message.rollback
    if found is None or found < serving.version or not goes_on:
        reason = f"it follows version {found}, and this engine serves {serving.version} already"
        return Doubt(Distrust.ROLLED_BACK, reason)
    if found == serving.version and previous != serving:
        return Doubt(Distrust.FORKED, f"it follows another version {found} than the one this engine serves")
    return None


def _statement(message: Publish | Prepare, seal: PublicationSignature) -> bytes:
    """The bytes that are signed. A list of a fixed length, so that nothing can be read as something else."""
    before = seal.previous
    return _PACK(
        (
            _DOMAIN,
            message.channel,
            message.epoch,
            message.version,
            message.manifest,
            message.table,
            (before.version, before.manifest, before.table) if before else None,
            seal.signer,
            message.rollback,
        )
    )
