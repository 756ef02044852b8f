"""Bytes on the wire, pinned for every message by tests/control/golden.

``python -m tests.control.protocol.test_codec --regen`` writes that folder anew. Do it for a new message (its case is in
`TO_COORDINATOR` or `TO_AGENT` below) or a new field with a default, and review the difference: only the new message's
file and new lines of ``defaults.txt`` may appear. Other bytes change only together with a raised `PROTOCOL`: older
agents would misread them under the same number. Names of fields are pinned too, in tests/golden/fields.json, which is
edited by hand (tests/test_wire_tags.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from weightbus.control import protocol as m
from weightbus.control.protocol import codec
from weightbus.control.protocol.codec import MessageCodec
from weightbus.control.protocol.errors import Malformed, Oversize, ProtocolError, UnknownMessage, WrongProtocol
from weightbus.control.protocol.messages import AgentId, Channel, Digest, Epoch, Incarnation, RequestId, Version

GOLDEN = Path(__file__).parents[1] / "golden"

KEY = RequestId("k-1")
CHANNEL = Channel("policy")
EPOCH = Epoch(7)
VERSION = Version(41)
MANIFEST = Digest("a" * 64)
TABLE = Digest("b" * 64)
ENGINE = AgentId("e0")
HELD = m.HeldVersion(version=VERSION, manifest=MANIFEST, table=TABLE)
INFO = m.EngineInfo(
    url="http://127.0.0.1:30000",
    server_version="0.5.23",
    tp=2,
    pp=1,
    dp=1,
    device="cpu",
    host="boot-1",
    transports=(m.TransportKind.LOCAL, m.TransportKind.DISK),
    live_digest="mix64x2",
    health=m.EngineHealth.PENDING,
    held=HELD,
)
TRAINER = m.TrainerInfo(host="boot-1", device="cpu", ranks=4, transports=(m.TransportKind.DISTRIBUTED,))
POLICY = m.Policy(pause=m.PauseMode.IN_PLACE, flush=False, min_engines=2, retries=3, transfer_timeout_s=9.5)
SIGNATURE = m.PublicationSignature(signer=AgentId("t0"), previous=HELD, signature="c" * 128)
OFFER = m.Endpoint(
    transport=m.TransportKind.DISTRIBUTED,
    address="tcp://10.0.0.1:6000",
    group="g",
    backend="gloo",
    world_size=5,
    token="t",
    signature="d" * 128,
)
RECEIVER = m.ReceivingEngine(engine=ENGINE, transport=m.TransportKind.LOCAL, tp=2, url="http://127.0.0.1:30000")
REPORT = m.EngineReport(
    engine=ENGINE,
    outcome=m.Outcome.QUARANTINED,
    transport=m.TransportKind.DISK,
    version=VERSION,
    bytes=1024,
    buckets=2,
    seconds={"transfer": 0.5},
    verified_by="live-digest",
    reason="lost a bucket",
)

_ROUND = {"request": KEY, "channel": CHANNEL, "epoch": EPOCH}
_ORDER = {"channel": CHANNEL, "epoch": EPOCH, "version": VERSION, "manifest": MANIFEST, "table": TABLE}

TO_COORDINATOR: tuple[tuple[m.ToCoordinator, bytes | None], ...] = (
    (
        m.Hello(
            request=KEY,
            agent=ENGINE,
            role=m.Role.ENGINE,
            channel=CHANNEL,
            incarnation=Incarnation("life-2"),
            engine=INFO,
            trainer=TRAINER,
        ),
        None,
    ),
    (m.Heartbeat(seq=3, epoch=EPOCH, health=m.EngineHealth.DIRTY, held=HELD), None),
    (
        m.Topology(
            request=KEY,
            network="boot-1/net:[1]",
            files="boot-1/mnt:[2]",
            folder="fe01:2a",
            address="10.0.0.1",
            places=(m.ProcessLocation(rank=0, host="boot-1", device="gpu-0", reach={"gpu-1": m.PeerAccess.NVLINK}),),
            nics=(m.NetworkInterface(name="eth0", addresses=("10.0.0.1", "fd00::2"), mbps=100_000),),
            lacking={m.TransportKind.SENDS: m.MissingTransport(found="no loader", needed="launch it with ours")},
            takes={m.TransportKind.DIRECT: 4096},
        ),
        None,
    ),
    (m.Bye(reason="closed"), None),
    (m.GetBlob(request=KEY, digest=MANIFEST, page=1), None),
    (m.GetStatus(request=KEY), None),
    (m.Acquire(request=KEY, channel=CHANNEL, version=VERSION), None),
    (m.Release(**_ROUND), None),
    (m.PutBlob(request=KEY, digest=MANIFEST, page=1, pages=2), b"page"),
    (
        m.Publish(
            **_ROUND,
            version=VERSION,
            manifest=MANIFEST,
            table=TABLE,
            bytes=2048,
            buckets=3,
            policy=POLICY,
            publication_signature=SIGNATURE,
        ),
        None,
    ),
    (m.Offered(**_ROUND, offers=(OFFER,), failed={"e0": "no space left"}), None),
    (m.Sent(**_ROUND, failed={"e0": "gone"}, spared=(ENGINE,)), None),
    (m.Abandon(**_ROUND, reason="out of memory"), None),
    (m.Prepared(**_ROUND, seconds=0.25), None),
    (m.Paused(**_ROUND, seconds=0.25), None),
    (m.Transferred(**_ROUND, bytes=2048, buckets=3, seconds=0.25), None),
    (m.Verified(**_ROUND, version=VERSION, table=TABLE, verified_by="live-digest", seconds=0.25), None),
    (m.Serving(**_ROUND, version=VERSION, seconds=0.25, paused_s=1.5), None),
    (m.Failed(**_ROUND, step=m.Step.TRANSFER, health=m.EngineHealth.DIRTY, reason="bucket 2 never came"), None),
)
TO_AGENT: tuple[tuple[m.ToAgent, bytes | None], ...] = (
    (m.Welcome(request=KEY, boot=2, epoch=EPOCH, committed=HELD, heartbeat_s=1.0, silence_s=10.0), None),
    (m.Alive(seq=3, boot=2, committed=VERSION), None),
    (m.Ack(request=KEY), None),
    (m.Refused(request=KEY, code=m.RefusalCode.LEASE_HELD, reason="held by t1", retry_after_s=2.5), None),
    (m.BlobPage(request=KEY, digest=MANIFEST, page=0, pages=2), b"page"),
    (m.Status(request=KEY), b"{}"),
    (m.Granted(**_ROUND, lease_s=10.0, committed=HELD, engines={"e0": INFO}), None),
    (m.Send(channel=CHANNEL, epoch=EPOCH, version=VERSION, receivers=(RECEIVER,), deadline_s=60.0), None),
    (m.Withdraw(channel=CHANNEL, epoch=EPOCH, engines={"e0": "its connection is gone"}), None),
    (
        m.RoundDone(
            channel=CHANNEL,
            epoch=EPOCH,
            version=VERSION,
            outcome=m.Outcome.COMMITTED,
            reason="",
            engines=(REPORT,),
            seconds={"total": 2.0},
        ),
        None,
    ),
    (
        m.Prepare(
            **_ORDER, transport=m.TransportKind.LOCAL, policy=POLICY, deadline_s=60.0, publication_signature=SIGNATURE
        ),
        None,
    ),
    (m.Pause(channel=CHANNEL, epoch=EPOCH, mode=m.PauseMode.ABORT, lease_s=10.0, deadline_s=60.0), None),
    (m.Transfer(**_ORDER, offer=OFFER, rank_offset=1, deadline_s=600.0), None),
    (m.Commit(channel=CHANNEL, epoch=EPOCH, version=VERSION, table=TABLE, flush=True, deadline_s=60.0), None),
    (m.Abort(channel=CHANNEL, epoch=EPOCH, reason="trainer left", deadline_s=60.0), None),
)

CASES = [
    *((codec.TO_COORDINATOR, message, blob) for message, blob in TO_COORDINATOR),
    *((codec.TO_AGENT, message, blob) for message, blob in TO_AGENT),
]
_NAMES = [type(message).__name__ for _, message, _ in CASES]
FUZZ = settings(deadline=None, max_examples=100)  # the machine may be busy
BYE = codec.TO_COORDINATOR.encode(m.Bye())


def frames_of(content: bytes) -> codec.Frames:
    """The frames that `wire_bytes` put into one file."""
    frames: codec.Frames = []
    while content:
        size = int.from_bytes(content[:4], "big")
        frames.append(content[4 : 4 + size])
        content = content[4 + size :]
    return frames


def defaults() -> str:
    """Every field with a default, and what it is."""
    lines = [
        f"{each.__name__}.{field.encode_name} = {field.default!r}"
        if field.default is not msgspec.NODEFAULT
        else f"{each.__name__}.{field.encode_name} = {cast('Callable[[], object]', field.default_factory)()!r}"
        for each in sorted((*m.Message.__subclasses__(), *m.Fragment.__subclasses__()), key=lambda kind: kind.__name__)
        for field in msgspec.structs.fields(each)
        if not field.required
    ]
    return "\n".join(lines) + "\n"


def wire_bytes(frames: codec.Frames) -> bytes:
    """Frames in one file: each behind its length, four bytes, big-endian."""
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


@pytest.mark.parametrize(("wire", "message", "blob"), CASES, ids=_NAMES)
def test_golden(wire: MessageCodec[m.Message], message: m.Message, blob: bytes | None) -> None:
    """Every message has the bytes it always had, and comes back from them as it went."""
    frames = wire.encode(message, blob)
    assert wire_bytes(frames) == (GOLDEN / f"{type(message).__name__}.bin").read_bytes()
    assert wire.decode(frames) == (message, blob)


@pytest.mark.parametrize(
    ("wire", "message", "blob"),
    [case for case in CASES if (GOLDEN / "full" / f"{type(case[1]).__name__}.bin").exists()],
    ids=lambda each: type(each).__name__,
)
def test_defaults_may_be_written_out(wire: MessageCodec[m.Message], message: m.Message, blob: bytes | None) -> None:
    """What has its default is not sent, and a sender that does send it means the same."""
    full = frames_of((GOLDEN / "full" / f"{type(message).__name__}.bin").read_bytes())
    assert wire.decode(full) == (message, blob)
    assert len(wire.encode(message, blob)[1]) < len(full[1])


@pytest.mark.parametrize(("wire", "message", "blob"), CASES, ids=_NAMES)
def test_header_and_payload_travel_in_one_frame(
    wire: MessageCodec[m.Message], message: m.Message, blob: bytes | None
) -> None:
    """What travels is one frame, or two with a blob, and is taken apart again as it was."""
    parts = wire.encode(message, blob)
    packed = codec.pack(parts)
    assert len(packed) == len(parts) - 1
    assert len(packed[0]) == len(parts[0]) + len(parts[1])
    assert codec.unpack(packed) == parts


@pytest.mark.parametrize(("wire", "message", "blob"), CASES, ids=_NAMES)
def test_the_short_way_reads_what_the_long_one_does(
    wire: MessageCodec[m.Message], message: m.Message, blob: bytes | None
) -> None:
    """Also when the same comes again, and what follows it is something else."""
    packed = codec.pack(wire.encode(message, blob))
    for _ in range(2):
        assert wire.read(packed) == (message, blob)
    header, payload = packed[0][:4], packed[0][4:]
    for wrong in (
        [payload],
        [b"XX" + packed[0][2:]],
        [header],
        [header + b"\xc1"],
        [*packed, b"more", b"of it"],
        [b""],
    ):
        with pytest.raises(ProtocolError) as refused:
            wire.read(wrong)
        with pytest.raises(type(refused.value), match=re.escape(str(refused.value))):
            wire.decode(codec.unpack(wrong))
    assert wire.read(packed) == (message, blob)


@pytest.mark.parametrize(
    ("wire", "message", "blob"), [case for case in CASES if case[2] is None], ids=lambda each: type(each).__name__
)
def test_a_blob_too_many_is_refused_though_the_rest_was_read_before(
    wire: MessageCodec[m.Message], message: m.Message, blob: bytes | None
) -> None:
    """What was read last is known by its only frame."""
    packed = codec.pack(wire.encode(message, blob))
    wire.read(packed)
    with pytest.raises(Malformed, match="must not have"):
        wire.read([*packed, b"blob"])


def test_what_an_older_side_sends_is_told_from_noise() -> None:
    """Before protocol 3 the header was a frame of its own: it is refused for its number."""
    header, payload = BYE
    with pytest.raises(WrongProtocol):
        codec.TO_COORDINATOR.decode(codec.unpack([header[:2] + b"\x02" + header[3:], payload]))


def test_no_default_ever_changes() -> None:
    """A reader takes the default for a field that was not sent. `--regen` adds fields that are new.

    (N44)
    """
    pinned = (GOLDEN / "defaults.txt").read_text(encoding="utf-8")
    assert pinned == defaults(), "a default has changed: restore it; if only fields are new, run this file with --regen"


def test_a_reader_that_is_older_than_a_field() -> None:
    """It understands what it could be asked before, and refuses what it is asked in the field it does not know.

    (N44)
    """
    known = [(each.name, each.type) for each in msgspec.structs.fields(m.Acquire) if each.required]
    older = msgspec.defstruct("Acquire", known, tag_field="type", tag="Acquire", forbid_unknown_fields=True)
    reader = msgspec.msgpack.Decoder(older)
    plain = m.Acquire(request=KEY, channel=CHANNEL, version=VERSION)
    understood = reader.decode(codec.TO_COORDINATOR.encode(plain)[1])
    assert msgspec.structs.asdict(understood) == {"request": KEY, "channel": CHANNEL, "version": VERSION}
    going_back = codec.TO_COORDINATOR.encode(msgspec.structs.replace(plain, rollback=True))[1]
    with pytest.raises(msgspec.ValidationError, match="unknown field `rollback`"):
        reader.decode(going_back)


def test_every_message_and_fragment_keeps_the_rule() -> None:
    """No type accepts unknown fields, and none sends a field that has its default."""
    for each in (*m.Message.__subclasses__(), *m.Fragment.__subclasses__()):
        config = each.__struct_config__
        assert config.forbid_unknown_fields, each
        assert config.omit_defaults, each


def test_every_message_has_a_golden() -> None:
    """A message type without a golden file, or a file without a type, fails here."""
    declared = {each.__name__ for each in m.Message.__subclasses__()}
    assert set(_NAMES) == declared
    assert {path.stem for path in GOLDEN.glob("*.bin")} == declared


def test_every_message_travels_in_one_direction() -> None:
    """Each type belongs to exactly one union, so a header decides how a payload is read."""
    unions = [set(wire.members) for wire in (codec.TO_COORDINATOR, codec.TO_AGENT)]
    assert sum(len(union) for union in unions) == len(set().union(*unions)) == len(m.Message.__subclasses__())


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([], Malformed),
        ([b"WB\x01>"], Malformed),
        ([*BYE, b"", b""], Malformed),
        ([b"", BYE[1]], Malformed),
        ([b"XX\x01>", BYE[1]], Malformed),
        ([b"WB%c<" % m.PROTOCOL, BYE[1]], Malformed),
        ([b"WB%c>more" % m.PROTOCOL, BYE[1]], Malformed),
        ([b"WB%c>" % (m.PROTOCOL + 1), BYE[1]], WrongProtocol),
        ([b"WB\x00>", BYE[1]], WrongProtocol),
        ([BYE[0], b""], Malformed),
        ([BYE[0], b"\xc1"], Malformed),
        ([BYE[0], b"\x91" * 100_000], Malformed),
        ([BYE[0], b"\x81\xa4type\xa7Unheard"], UnknownMessage),
        ([BYE[0], b"\x81\xa4type\xa7Welcome"], UnknownMessage),
        ([BYE[0], b"\x82\xa4type\xa3Bye\xa6reason\xa2\xff\xff"], Malformed),
        ([BYE[0], b"\x82\xa4type\xa3Bye\xa5other\x01"], Malformed),
        ([BYE[0], b"\x82\xa4type\xa3Bye\xa6reason\x01"], Malformed),
        ([BYE[0], b"\0" * (codec.MAX_FRAME_BYTES + 1)], Oversize),
        ([*BYE, b"\0" * (codec.MAX_FRAME_BYTES + 1)], Oversize),
        ([*BYE, b"blob"], Malformed),
        (codec.TO_COORDINATOR.encode(m.PutBlob(request=KEY, digest=MANIFEST, page=0, pages=1), b"")[:2], Malformed),
    ],
)
def test_refused_by_kind(frames: list[bytes], error: type[ProtocolError]) -> None:
    """Each way of being wrong has its own error."""
    with pytest.raises(ProtocolError) as found:
        codec.TO_COORDINATOR.decode(frames)
    assert type(found.value) is error


@pytest.mark.parametrize("field", ["tp", "pp", "dp"])
def test_no_server_is_of_a_size_that_cannot_be(field: str) -> None:
    """Ranks are added up over the engines of a group: the sum has to fit a message."""
    hello = next(message for _, message, _ in CASES if isinstance(message, m.Hello) and message.engine is not None)

    def sized(size: int) -> m.Hello:
        return msgspec.structs.replace(hello, engine=msgspec.structs.replace(INFO, **{field: size}))

    for size in (1, 4096):
        assert codec.TO_COORDINATOR.decode(codec.TO_COORDINATOR.encode(sized(size))) == (sized(size), None)
    header, _ = codec.TO_COORDINATOR.encode(hello)
    for size in (0, 4097, 2**62):
        with pytest.raises(Malformed, match=rf"Hello: Expected `int` .*engine\.{field}"):
            codec.TO_COORDINATOR.encode(sized(size))
        with pytest.raises(Malformed, match=rf"Hello: Expected `int` .*engine\.{field}"):
            codec.TO_COORDINATOR.decode([header, msgspec.msgpack.encode(sized(size))])


def test_sender_refuses_what_no_receiver_would_read() -> None:
    """A value out of bounds fails where it was made, with the name of the field."""
    with pytest.raises(Malformed, match=r"Acquire: .*channel"):
        codec.TO_COORDINATOR.encode(m.Acquire(request=KEY, channel=Channel("a b"), version=VERSION))
    with pytest.raises(Malformed, match="blob"):
        codec.TO_COORDINATOR.encode(m.PutBlob(request=KEY, digest=MANIFEST, page=0, pages=1))
    with pytest.raises(Oversize):
        codec.TO_COORDINATOR.encode(
            m.PutBlob(request=KEY, digest=MANIFEST, page=0, pages=1), b"x" * (codec.MAX_FRAME_BYTES + 1)
        )
    with pytest.raises(Malformed, match="Bye"):
        codec.TO_COORDINATOR.encode(m.Bye(reason="\ud800"))


def test_long_reasons_are_cut_not_lost() -> None:
    """A failure whose text is too long still arrives, with both ends of the text."""
    long = "begin" + "x" * 10_000 + "end"
    failed = m.Failed(**_ROUND, step=m.Step.PAUSE, health=m.EngineHealth.CLEAN, reason=long)
    got, _ = codec.TO_COORDINATOR.decode(codec.TO_COORDINATOR.encode(failed))
    assert isinstance(got, m.Failed)
    assert len(got.reason) <= codec.MAX_TEXT_CHARACTERS
    assert got.reason.startswith("begin")
    assert got.reason.endswith("end")
    for message in (m.Sent(**_ROUND, failed={"e0": long}), m.Offered(**_ROUND, offers=(), failed={"e0": long})):
        came, _ = codec.TO_COORDINATOR.decode(codec.TO_COORDINATOR.encode(message))
        assert isinstance(came, m.Sent | m.Offered)
        assert len(came.failed["e0"]) <= codec.MAX_TEXT_CHARACTERS


@FUZZ
@given(wire=st.sampled_from([codec.TO_COORDINATOR, codec.TO_AGENT]), frames=st.lists(st.binary(), max_size=4))
def test_any_bytes_are_refused_with_a_typed_error(wire: MessageCodec[m.Message], frames: list[bytes]) -> None:
    """Random frames raise nothing but `ProtocolError` (F20)."""
    with pytest.raises(ProtocolError):
        wire.decode(frames)


@FUZZ
@given(data=st.data())
def test_mutated_messages_decode_or_are_refused(data: st.DataObject) -> None:
    """A real message with bytes changed, cut or added either still is one or raises `ProtocolError`."""
    wire, message, blob = data.draw(st.sampled_from(CASES))
    frames = wire.encode(message, blob)
    payload = bytearray(frames[1])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    payload = payload[:cut] + data.draw(st.binary(max_size=8)) if data.draw(st.booleans()) else payload
    try:
        decoded, _ = wire.decode([frames[0], bytes(payload), *frames[2:]])
    except ProtocolError:
        return
    assert isinstance(decoded, wire.members)


@FUZZ
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
        max_leaves=8,
    )
)
def test_well_formed_msgpack_that_is_no_message(value: object) -> None:
    """Valid msgpack of any shape is refused with a typed error."""
    with pytest.raises(ProtocolError):
        codec.TO_COORDINATOR.decode([BYE[0], msgspec.msgpack.encode(value)])


def _regenerate() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for wire, message, blob in CASES:
        (GOLDEN / f"{type(message).__name__}.bin").write_bytes(wire_bytes(wire.encode(message, blob)))
    (GOLDEN / "defaults.txt").write_text(defaults(), encoding="utf-8")
    print(f"{len(CASES)} files in {GOLDEN}")  # noqa: T201


if __name__ == "__main__" and sys.argv[1:] == ["--regen"]:
    _regenerate()
