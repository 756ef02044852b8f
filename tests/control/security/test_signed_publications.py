"""Signed publications: what an engine believes when the coordinator may not be believed."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, strategies as st

from weightbus.control.bus.sockets import new_keypair
from weightbus.control.protocol.messages import (
    AgentId,
    Channel,
    Digest,
    Endpoint,
    Epoch,
    HeldVersion,
    PauseMode,
    Policy,
    Prepare,
    Publish,
    RequestId,
    Role,
    Transfer,
    TransportKind,
    Version,
)
from weightbus.control.security.trust import (
    AllowListEntry,
    VerificationFailureKind,
    sign,
    sign_digest_table,
    sign_endpoint,
    sign_publication,
    signed_by,
    signing_key_of,
    verify_digest_table,
    verify_endpoint,
    verify_publication,
)

CHANNEL = Channel("policy")
TRAINER, OTHER, ENGINE = (new_keypair() for _ in range(3))


def entry(role: Role, pair: object, *channels: str) -> AllowListEntry:
    return AllowListEntry(role, channels or (CHANNEL,), pair.public, signing_key_of(pair.secret))  # type: ignore[attr-defined]


TRUSTED = {
    AgentId("t0"): entry(Role.TRAINER, TRAINER),
    AgentId("t1"): entry(Role.TRAINER, OTHER, "another"),
    AgentId("e0"): entry(Role.ENGINE, ENGINE),
}


def digest(text: str) -> Digest:
    return Digest(hashlib.sha256(text.encode()).hexdigest())


def held(version: int, what: str = "") -> HeldVersion:
    return HeldVersion(version=Version(version), manifest=digest("manifest"), table=digest(f"table {version} {what}"))


def publication(version: int = 5, epoch: int = 9) -> Publish:
    return Publish(
        request=RequestId("k"),
        channel=CHANNEL,
        epoch=Epoch(epoch),
        version=Version(version),
        manifest=held(version).manifest,
        table=held(version).table,
        bytes=1,
        buckets=1,
    )


def offered(publish: Publish, **lies: object) -> Prepare:
    """What the coordinator makes of it, or would like to."""
    prepare = Prepare(
        channel=publish.channel,
        epoch=publish.epoch,
        version=publish.version,
        manifest=publish.manifest,
        table=publish.table,
        transport=TransportKind.LOCAL,
        policy=publish.policy,
        deadline_s=1.0,
        publication_signature=publish.publication_signature,
        rollback=publish.rollback,
    )
    return msgspec.structs.replace(prepare, **lies)


def signed_publication(previous: HeldVersion | None = None, **fields: int) -> Publish:
    return sign_publication(publication(**fields), AgentId("t0"), TRAINER.secret, previous)


def kind(prepare: Prepare, serving: HeldVersion | None = None) -> VerificationFailureKind | None:
    found = verify_publication(prepare, serving, TRUSTED)
    return found.kind if found else None


def test_what_a_trainer_signed_is_believed() -> None:
    """The first of a channel, the next of a chain, and one after some that this engine has missed (G8)."""
    assert kind(offered(signed_publication())) is None
    assert kind(offered(signed_publication(held(4))), serving=held(4)) is None
    assert kind(offered(signed_publication(held(4))), serving=held(2)) is None
    assert kind(offered(signed_publication(held(4)))) is None


@pytest.mark.parametrize(
    "lie",
    [
        {"version": 6},
        {"epoch": 10},
        {"epoch": 8},
        {"manifest": digest("evil")},
        {"table": digest("evil")},
        {"channel": Channel("another")},
        {"rollback": True},
    ],
)
def test_nothing_that_was_signed_can_be_changed(lie: dict[str, object]) -> None:
    """Not the weights, not the version, not the epoch: a statement is good for one round and never again (S9)."""
    trusted = {name: msgspec.structs.replace(each, channels=("*",)) for name, each in TRUSTED.items()}
    found = verify_publication(offered(signed_publication(), **lie), None, trusted)
    assert found is not None
    assert found.kind is VerificationFailureKind.FORGED


def test_what_is_not_signed_may_be_changed() -> None:
    """Policy, transport and deadlines are the coordinator's to choose."""
    lie = {"policy": Policy(pause=PauseMode.ABORT), "transport": TransportKind.DISK, "deadline_s": 2.0}
    assert kind(offered(signed_publication(), **lie)) is None


def test_no_seal_is_no_publication() -> None:
    """Where keys are used, an unsigned version is refused."""
    assert kind(offered(publication())) is VerificationFailureKind.UNSIGNED


def test_only_trainers_of_the_channel_are_believed() -> None:
    """Valid signatures of a stranger, an engine and a trainer of another channel are refused."""
    for name, pair in (("stranger", TRAINER), ("e0", ENGINE), ("t1", OTHER)):
        forged = sign_publication(publication(), AgentId(name), pair.secret, None)
        assert kind(offered(forged)) is VerificationFailureKind.UNKNOWN_SIGNER, name


def test_a_name_is_not_a_signature() -> None:
    """Signed with another trusted key, in the trainer's name."""
    forged = sign_publication(publication(), AgentId("t0"), OTHER.secret, None)
    assert kind(offered(forged)) is VerificationFailureKind.FORGED


@given(st.integers(0, 127), st.sampled_from("0123456789abcdef"))
def test_every_digit_of_a_signature_counts(at: int, digit: str) -> None:
    """There is one signature for a statement."""
    good = signed_publication()
    assert good.publication_signature is not None
    signature = good.publication_signature.signature[:at] + digit + good.publication_signature.signature[at + 1 :]
    signed = msgspec.structs.replace(good.publication_signature, signature=signature)
    believed = kind(offered(good, publication_signature=signed)) is None
    assert believed is (signature == good.publication_signature.signature)


@pytest.mark.parametrize("previous", [None, held(3), held(7)])
def test_the_chain_is_signed_too(previous: HeldVersion | None) -> None:
    """What a statement follows cannot be told differently afterwards."""
    good = signed_publication(held(4))
    signed = msgspec.structs.replace(good.publication_signature, previous=previous)
    assert kind(offered(good, publication_signature=signed)) is VerificationFailureKind.FORGED


@pytest.mark.parametrize(
    ("previous", "version", "serving", "found"),
    [
        (held(4), 5, held(5), VerificationFailureKind.ROLLED_BACK),
        (held(4), 5, held(9), VerificationFailureKind.ROLLED_BACK),
        (None, 5, held(4), VerificationFailureKind.ROLLED_BACK),
        (held(3), 5, held(4), VerificationFailureKind.ROLLED_BACK),
        (held(9), 5, held(6), VerificationFailureKind.ROLLED_BACK),
        (held(4, "other"), 5, held(4), VerificationFailureKind.FORKED),
        (
            HeldVersion(version=Version(4), manifest=digest("other"), table=held(4).table),
            5,
            held(4),
            VerificationFailureKind.FORKED,
        ),
    ],
)
def test_history_is_one_line(
    previous: HeldVersion | None, version: int, serving: HeldVersion, found: VerificationFailureKind
) -> None:
    """A coordinator that lies to a trainer about what is committed makes it sign what engines refuse (S9)."""
    assert kind(offered(signed_publication(previous, version=version)), serving) is found


def test_an_engine_goes_back_only_where_its_trainer_said_so() -> None:
    """By the trainer's signature under the rollback: the coordinator can neither ask for one nor hide that one is."""
    bare, serving = publication(3), held(5)
    plain = sign_publication(bare, AgentId("t0"), TRAINER.secret, serving)
    back = sign_publication(msgspec.structs.replace(bare, rollback=True), AgentId("t0"), TRAINER.secret, serving)
    assert kind(offered(back), serving) is None
    assert kind(offered(plain), serving) is VerificationFailureKind.ROLLED_BACK
    assert kind(offered(plain, rollback=True), serving) is VerificationFailureKind.FORGED
    assert kind(offered(back, rollback=False), serving) is VerificationFailureKind.FORGED


def test_signatures_are_of_one_key_and_one_statement() -> None:
    """The signing key is derived from the connection's secret, and is not the connection's."""
    assert signing_key_of(TRAINER.secret) == signing_key_of(TRAINER.secret) != signing_key_of(OTHER.secret)
    signature = sign(TRAINER.secret, b"statement")
    assert signed_by(signing_key_of(TRAINER.secret), b"statement", signature)
    assert not signed_by(signing_key_of(OTHER.secret), b"statement", signature)
    assert not signed_by(signing_key_of(TRAINER.secret), b"statement.", signature)
    assert not signed_by(signing_key_of(TRAINER.secret), b"statement", "00" * 64)
    assert not signed_by("00" * 31, b"statement", signature)
    assert not signed_by("zz" * 32, b"statement", signature)


OFFER_FIELDS = {"transport", "address", "group", "backend", "world_size", "token", "signature"}
OFFER = Endpoint(
    transport=TransportKind.DISTRIBUTED,
    address="tcp://10.0.0.1:6000",
    group="g",
    backend="gloo",
    world_size=3,
    token="t",
)


def transfer(offer: Endpoint, epoch: int = 9) -> Transfer:
    return Transfer(
        channel=CHANNEL,
        epoch=Epoch(epoch),
        version=Version(5),
        manifest=held(5).manifest,
        table=held(5).table,
        offer=offer,
        rank_offset=1,
        deadline_s=1.0,
    )


def test_bytes_come_from_where_the_trainer_said() -> None:
    """The offer of its trainer, in its epoch, is believed; the rank and the deadline are the coordinator's to tell."""
    offer = sign_endpoint(OFFER, CHANNEL, Epoch(9), TRAINER.secret)
    assert verify_endpoint(transfer(offer), AgentId("t0"), TRUSTED) is None


@pytest.mark.parametrize(
    "lie",
    [
        {"address": "tcp://10.6.6.6:6000"},
        {"group": "other"},
        {"backend": "nccl"},
        {"world_size": 4},
        {"token": "u"},
        {"transport": TransportKind.DISK},
        {"signature": None},
        {"signature": "0" * 128},
    ],
)
def test_engines_cannot_be_redirected(lie: dict[str, object]) -> None:
    """Digests made for speed do not resist an attacker that chooses the bytes: so only the trainer names the sender.

    (S10)
    """
    offer = msgspec.structs.replace(sign_endpoint(OFFER, CHANNEL, Epoch(9), TRAINER.secret), **lie)
    found = verify_endpoint(transfer(offer), AgentId("t0"), TRUSTED)
    assert found is not None
    assert found.kind is VerificationFailureKind.REDIRECTED


def test_every_field_of_an_offer_is_signed() -> None:
    """A field that is added is signed with the others, and is tried above."""
    assert {field.name for field in msgspec.structs.fields(Endpoint)} == OFFER_FIELDS


def test_an_offer_is_of_one_epoch_and_one_trainer() -> None:
    """Not the one of the attempt before, not another trainer's, and none of a trainer that is not trusted any more."""
    offer = sign_endpoint(OFFER, CHANNEL, Epoch(9), TRAINER.secret)
    for message, signer, found in (
        (transfer(offer, epoch=10), AgentId("t0"), VerificationFailureKind.REDIRECTED),
        (
            transfer(sign_endpoint(OFFER, CHANNEL, Epoch(9), OTHER.secret)),
            AgentId("t0"),
            VerificationFailureKind.REDIRECTED,
        ),
        (transfer(offer), AgentId("t9"), VerificationFailureKind.UNKNOWN_SIGNER),
        (transfer(offer), None, VerificationFailureKind.UNKNOWN_SIGNER),
    ):
        objection = verify_endpoint(message, signer, TRUSTED)
        assert objection is not None
        assert objection.kind is found


def left_open(previous: HeldVersion | None = None) -> Publish:
    """A publication whose table follows."""
    bare = msgspec.structs.replace(publication(), table=Digest(""))
    return sign_publication(bare, AgentId("t0"), TRAINER.secret, previous)


def test_a_table_that_follows_is_believed_by_its_own_signature() -> None:
    """Of the same statement with the table in it; the one that left it open says nothing of any table."""
    publish, table = left_open(held(4)), held(5).table
    prepare = offered(publish)
    signature = sign_digest_table(publish, table, TRAINER.secret)
    assert kind(prepare, serving=held(4)) is None
    assert verify_digest_table(prepare, table, signature, TRUSTED) is None
    assert publish.publication_signature is not None
    for forged in (publish.publication_signature.signature, "0" * 128, "", "not hexadecimal"):
        found = verify_digest_table(prepare, table, forged, TRUSTED)
        assert found is not None
        assert found.kind is VerificationFailureKind.FORGED


def test_a_signature_under_a_table_is_good_for_one_table_of_one_publication() -> None:
    """Not for other bits, not for a later epoch, and not by a trainer that is not trusted any more."""
    publish, table = left_open(), held(5).table
    signature = sign_digest_table(publish, table, TRAINER.secret)
    prepare = offered(publish)
    later = msgspec.structs.replace(prepare, epoch=Epoch(10))
    for about, name in ((prepare, digest("evil")), (later, table)):
        found = verify_digest_table(about, name, signature, TRUSTED)
        assert found is not None
        assert found.kind is VerificationFailureKind.FORGED
    for unsigned in (None, msgspec.structs.replace(prepare, publication_signature=None), prepare):
        trusted = TRUSTED if unsigned is not prepare else {}
        found = verify_digest_table(unsigned, table, signature, trusted)
        assert found is not None
        assert found.kind is VerificationFailureKind.UNKNOWN_SIGNER


@pytest.mark.parametrize(
    "now", [entry(Role.TRAINER, TRAINER, "another"), entry(Role.ENGINE, TRAINER), None], ids=["channel", "role", "gone"]
)
def test_every_signature_is_judged_by_the_list_as_it_is_now(now: AllowListEntry | None) -> None:
    """A signer whose entry changed since `Prepare` is believed neither a table nor an endpoint any more."""
    publish, table = left_open(), held(5).table
    offer = sign_endpoint(Endpoint(transport=TransportKind.LOCAL, address="a"), CHANNEL, Epoch(9), TRAINER.secret)
    transfer = Transfer(
        channel=CHANNEL,
        epoch=Epoch(9),
        version=Version(5),
        manifest=publish.manifest,
        offer=offer,
        rank_offset=0,
        deadline_s=1.0,
    )
    trusted = {AgentId("t0"): now} if now else {}
    for found in (
        verify_publication(offered(publish), None, trusted),
        verify_digest_table(offered(publish), table, sign_digest_table(publish, table, TRAINER.secret), trusted),
        verify_endpoint(transfer, AgentId("t0"), trusted),
    ):
        assert found is not None
        assert found.kind is VerificationFailureKind.UNKNOWN_SIGNER
        assert "'t0' is no trainer that is trusted in 'policy'" in found.reason


def test_an_open_publication_is_not_that_of_any_table() -> None:
    """The coordinator can neither fill a table in nor take one out."""
    assert kind(offered(left_open(), table=digest("evil"))) is VerificationFailureKind.FORGED
    assert kind(offered(signed_publication(), table=Digest(""))) is VerificationFailureKind.FORGED
