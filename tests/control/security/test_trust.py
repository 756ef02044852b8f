"""The allow-list file, and what an engine believes of signed publications."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from tests.kit.disk_calls import DiskCalls
from weightbus.control.bus.sockets import new_keypair
from weightbus.control.protocol.errors import PeerKeyError
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
    ALLOW_LIST_FILE,
    MOST_BYTES,
    AllowListEntry,
    AllowListUnusable,
    VerificationFailureKind,
    edit_allow_list,
    read_allow_list,
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

HERE = (Channel("policy"),)


def new_entry(role: Role = Role.ENGINE, channels: tuple[str, ...] = HERE) -> AllowListEntry:
    pair = new_keypair()
    return AllowListEntry(role, channels, pair.public, signing_key_of(pair.secret))


E0 = new_entry()
T0 = new_entry(Role.TRAINER, ("policy", "*"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A list that trusts e0 and t0."""
    with edit_allow_list(tmp_path / ALLOW_LIST_FILE) as agents:
        agents.update(e0=E0, t0=T0)
    return tmp_path / ALLOW_LIST_FILE


def test_what_is_written_is_read(path: Path) -> None:
    """Every key that Z85 allows survives the file; other users may not write it."""
    assert read_allow_list(path).agents == {"e0": E0, "t0": T0}
    assert path.stat().st_mode & 0o777 == 0o600
    for number in range(200):
        with edit_allow_list(path) as agents:
            agents["e0"] = new_entry()
            wanted = agents["e0"]
        assert read_allow_list(path).agents["e0"] == wanted, number


def test_an_edit_survives_a_power_cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal survives a crash: the file's bytes are synced before its name, and its name before the answer."""
    disk = DiskCalls(monkeypatch)
    with edit_allow_list(path) as agents:
        del agents["e0"]
    assert disk.calls == [("sync file", "trust.new"), ("rename to", ALLOW_LIST_FILE), ("sync folder", path.parent.name)]
    assert disk.synced["trust.new"] == path.read_bytes()


def test_no_change_writes_nothing(path: Path) -> None:
    """Saying the same again leaves the file as it is, comments of its owner included."""
    path.write_text(path.read_text() + "# ours\n")
    before = path.stat()
    with edit_allow_list(path) as agents:
        agents["e0"] = E0
    after = path.stat()  # but for the time of the last look
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


def _add(path: Path, name: str) -> None:
    with edit_allow_list(path) as agents:
        agents[name] = new_entry()


def test_editors_at_the_same_time_lose_nothing(path: Path) -> None:
    """Two that add agents wait for each other."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(path, f"n{index}")) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert set(read_allow_list(path).agents) == {"e0", "t0", *(f"n{index}" for index in range(8))}


def test_an_edit_that_fails_changes_nothing(path: Path) -> None:
    """The old list stays, whole, and the next editor is not locked out."""
    before = path.read_bytes()
    with pytest.raises(RuntimeError), edit_allow_list(path) as agents:
        agents.clear()
        raise RuntimeError
    assert path.read_bytes() == before
    _add(path, "e1")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('role = "engine"', 'role = "king"', "'king'.*; expected one of trainer, engine, observer"),
        ('channels = ["policy"]', "channels = []", "length"),
        (
            'channels = ["policy"]',
            'channels = ["../x"]',
            'expected a channel: up to 64 of .* or "\\*", any - at .*channels',
        ),
        (E0.key, E0.key[:-1], "expected the key in the agent's .pub: 40 characters"),
        (E0.key, T0.key, "same key"),
        (E0.signing_key, E0.signing_key[:-1] + "X", 'expected what follows "ed25519:"'),
        ('role = "engine"', 'role = "engine"\nmore = 1', "more"),
        ("[agents", "[names", "names"),
        ('"e0"', '"e 0"', "expected a name: up to 64"),
        ('"e0"', '"e0', "line"),
        ("[agents", "\xff", "decode|Invalid|line"),
        ("[agents", "a = " + "[" * 100_000, "recursion"),
    ],
    ids=(
        "role",
        "no-channels",
        "channel",
        "short",
        "same",
        "signing",
        "field",
        "section",
        "name",
        "line",
        "bytes",
        "deep",
    ),
)
def test_what_is_wrong_is_named(path: Path, old: str, new: str, problem: str) -> None:
    """Nothing is guessed: one wrong entry spoils the list, and the message says which."""
    path.write_bytes(path.read_text().replace(old, new, 1).encode("latin-1"))
    with pytest.raises(PeerKeyError, match=problem) as refused:
        read_allow_list(path)
    assert "move it away, and then run `weightbus trust add`" in str(refused.value)
    assert "regex" not in str(refused.value)


def test_a_list_that_was_cut_is_no_list(path: Path) -> None:
    """Wherever it was cut, behind a whole entry too: no operator removed the agents that are missing (S7)."""
    whole = path.read_text().rstrip("\n")
    for length in range(len(whole)):
        path.write_text(whole[:length])
        with pytest.raises(AllowListUnusable):
            read_allow_list(path)
    entries = whole.split("\n[")
    assert len(entries) == 3
    path.write_text("\n[".join(entries[:2]))
    with pytest.raises(AllowListUnusable, match=r"is cut: found no line '# End of the list\.'"):
        read_allow_list(path)


def test_a_list_that_is_edited_by_hand_needs_no_end(path: Path) -> None:
    """One of an earlier release announces none; in one that does, an entry may also stand behind its end (N45)."""
    written = path.read_text()
    by_hand = "\n".join(line for line in written.splitlines() if not line.startswith("#"))
    path.write_text(by_hand)
    assert set(read_allow_list(path).agents) == {"e0", "t0"}
    path.write_text(written + written.split("\n\n")[1].replace("e0", "e1").replace(E0.key, new_entry().key))
    assert set(read_allow_list(path).agents) == {"e0", "e1", "t0"}
    with edit_allow_list(path) as agents:
        del agents["e1"]
    assert path.read_text() == written


def test_a_list_that_others_may_write_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write access to the file decides which trainer may publish (S7)."""
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(PeerKeyError, match="chmod"):
            read_allow_list(path)
    path.chmod(0o644)
    assert read_allow_list(path).agents
    os.chown(path, 65534, 65534)
    with pytest.raises(PeerKeyError, match="belongs to user 65534"):
        read_allow_list(path)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert read_allow_list(path).agents


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (os.mkfifo, "a folder, a pipe or a device, expected a regular file"),
        (Path.mkdir, "a folder, a pipe or a device, expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "a folder, a pipe or a device, expected a regular file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels"),
        (lambda path: path.write_bytes(b"# x\n" * (MOST_BYTES // 4 + 1)), "bytes, expected at most"),
        (lambda path: path.write_bytes(b""), "is empty"),
    ],
    ids=("pipe", "folder", "device", "loop", "huge", "empty"),
)
def test_what_is_no_file_is_not_waited_for(path: Path, spoil: Callable[[Path], object], problem: str) -> None:
    """A pipe without a writer, a device without an end and a huge file are refused at once, with the reason."""
    path.unlink()
    spoil(path)
    with pytest.raises(AllowListUnusable, match=problem):
        read_allow_list(path)


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    """The message says how one is made."""
    with pytest.raises(PeerKeyError, match="weightbus trust add"):
        read_allow_list(tmp_path / ALLOW_LIST_FILE)


# Signed publications: what an engine believes when the coordinator may not be believed.


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
