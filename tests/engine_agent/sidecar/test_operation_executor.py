"""Questions to a server, and to the trainer that published, before its weights are touched."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.protocol.errors import BlobCancelled
from weightbus.control.protocol.messages import (
    AgentId,
    Channel,
    Digest,
    Endpoint,
    Epoch,
    HeldVersion,
    Policy,
    Prepare,
    PublicationSignature,
    Publish,
    RequestId,
    Role,
    Transfer,
    TransportKind,
    Version,
)
from weightbus.control.security.allow_list import AllowList
from weightbus.control.security.keys import read_secret_key
from weightbus.control.security.trust import (
    ALLOW_LIST_FILE,
    sign_digest_table,
    sign_endpoint,
    sign_publication,
)
from weightbus.control.server.metrics import Metrics, MetricSource
from weightbus.dataplane.errors import DeadlineExceeded, OutOfSharedMemory, TransferFailed, WorkerDied
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.transports.interface import Receipt, Tabled, TransferSession
from weightbus.dataplane.transports.sends.receiver import WorkerStalled
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import ServerError, ServerRefused, ServerSilent
from weightbus.engine_agent.machine.events import (
    INCOMPLETE,
    Label,
    OperationDone,
    OperationFailed,
    PauseServer,
    Receive,
    Received,
    Recognize,
    ReleaseServer,
    Validate,
    VerificationPassed,
    Verify,
)
from weightbus.engine_agent.sidecar import operation_executor as module
from weightbus.engine_agent.sidecar.operation_executor import VERIFY_S, OperationExecutor, WorkerHealth, proof_s
from weightbus.engine_agent.sidecar.settings import VerificationMode
from weightbus.engine_agent.sidecar.topology import places_on

from ...kit.waiting import until

TRANSFER = Transfer(
    channel=Channel("c"),
    epoch=Epoch(1),
    version=Version(1),
    manifest=Digest("a" * 64),
    table=Digest("b" * 64),
    offer=Endpoint(transport=TransportKind.DISTRIBUTED, address="tcp://127.0.0.1:9"),
    rank_offset=1,
    deadline_s=600.0,
)
HELD = HeldVersion(version=TRANSFER.version, manifest=TRANSFER.manifest, table=TRANSFER.table)
WHOLE = SimpleNamespace(left=(), left_names=frozenset(), copies=(), copied={})
"""A layout that leaves nothing."""
PREPARE = Prepare(
    channel=Channel("c"),
    epoch=Epoch(3),
    version=Version(5),
    manifest=Digest("a" * 64),
    table=Digest("b" * 64),
    transport=TransportKind.LOCAL,
    policy=Policy(),
    deadline_s=1.0,
)


def test_an_unbelieved_version_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Neither manifest nor server is looked at; the cause is counted, and the reason says what to do."""
    make_deployment_keys(tmp_path, [AgentKeys(AgentId("t0"), Role.TRAINER, (Channel("c"),))])
    metrics = Metrics(MetricSource.ENGINE)
    server = cast("Any", SimpleNamespace(pin=lambda _identity: None, clear_dirty=lambda: None, dirty=False))
    made = OperationExecutor(
        "e0", server, cast("Any", None), None, metrics, trust=AllowList(tmp_path / ALLOW_LIST_FILE)
    )
    prepare = PREPARE
    result = made.perform(Validate(prepare, ""))
    assert isinstance(result, OperationFailed)
    assert "version 5 is not believed (unsigned)" in result.reason
    counted = metrics.registry.get_sample_value("weightbus_sidecar_publications_refused_total", {"cause": "unsigned"})
    assert counted == 1
    signed = PublicationSignature(signer=AgentId("t0"), previous=None, signature="0" * 128)
    result = made.perform(Validate(msgspec.structs.replace(prepare, publication_signature=signed), ""))
    assert isinstance(result, OperationFailed)
    assert "(forged)" in result.reason
    offer = Endpoint(transport=TransportKind.LOCAL, address="/run/x")
    transfer = Transfer(
        channel=prepare.channel,
        epoch=prepare.epoch,
        version=prepare.version,
        manifest=prepare.manifest,
        table=prepare.table,
        offer=offer,
        rank_offset=1,
        deadline_s=1.0,
    )
    result = made.perform(Receive(transfer, ""))
    assert result == OperationFailed(result.reason, dirty=False)
    assert "(unknown_signer)" in result.reason
    (tmp_path / ALLOW_LIST_FILE).unlink()

    def reason() -> str:
        result = made.perform(Validate(msgspec.structs.replace(prepare, publication_signature=signed), ""))
        assert isinstance(result, OperationFailed)
        return result.reason

    until(lambda: "(unknown_signer)" in reason(), "the list to be read again")


def test_a_server_that_is_gone_does_not_come_to_the_sender() -> None:
    """A group that waits for its ranks would hold every other engine; found out before, it holds none."""
    made: list[str] = []

    def receiver(kind: str) -> Any:
        made.append(kind)

    gone = OperationExecutor("e0", SGLangServer("http://127.0.0.1:9"), receiver, None, Metrics(MetricSource.ENGINE))
    result = gone.perform(Receive(TRANSFER, ""))
    assert isinstance(result, OperationFailed)
    assert "/model_info" in result.reason
    assert not result.dirty
    assert not made


def test_a_server_is_looked_at_ahead_of_its_pause_and_of_nothing_else() -> None:
    """Once a version is found to fit; that the server cannot be looked at is not the end of anything."""
    looks: list[str] = []

    def look() -> None:
        looks.append("look")
        raise ServerError("/model_info", "gone")

    server = cast("Any", SimpleNamespace(look_ahead=look))
    made = OperationExecutor("e0", server, cast("Any", None), None, Metrics(MetricSource.ENGINE))

    made.look_ahead(Validate(PREPARE, ""), OperationFailed("it does not fit"))
    made.look_ahead(PauseServer("in_place", 5.0), OperationDone())
    assert looks == []
    made.look_ahead(Validate(PREPARE, ""), OperationDone())
    assert looks == ["look"]


def test_what_fits_is_remembered_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that lends its memory is another one with every version, for months: nothing is kept of those before."""
    facts = SimpleNamespace(identity="")
    checks: list[str] = []
    server = cast(
        "Any", SimpleNamespace(facts=facts, check=lambda *_: checks.append(facts.identity), casts=lambda *_: {})
    )
    made = OperationExecutor("e0", server, cast("Any", None), None, Metrics(MetricSource.ENGINE))
    monkeypatch.setattr(made, "_read", lambda *_: ("layout", None))
    made._folder = "m"
    for launch in range(1000):
        facts.identity = str(launch)
        for transport in (TransportKind.LOCAL, TransportKind.DISK, TransportKind.LOCAL):
            made._fit("m", "t", transport, "", 1.0)
    assert checks == [str(launch) for launch in range(1000) for _ in range(2)]
    assert len(made._fits) == 2


def _any(value: object) -> Any:
    return value


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"
SENT = (NORM, "lm_head.weight", *(QUERY.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")))


class Casting:
    """An executor beside a server of a dense model that may cast a norm, or a part of a fused parameter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *cast: str, proof: VerificationMode) -> None:
        shapes = {name: (4,) if name == NORM else (4, 4) for name in SENT}
        layout = Manifest.of("Qwen3ForCausalLM", [TensorSpec(name, "float32", shape) for name, shape in shapes.items()])
        self.predicted = {NORM: ("1",), QKV: ("1",), "lm_head.weight": ("1",)}
        self.live = {name: digests[0] for name, digests in self.predicted.items()}
        table = SimpleNamespace(live=[SimpleNamespace(algorithm="a", tp=1, parameters=self.predicted)])
        server = SimpleNamespace(
            facts=SimpleNamespace(identity="g", model_path="m"), pin=lambda _: None, confirm=lambda _: None,
            check=lambda *_: None, casts=lambda *_: dict.fromkeys(cast, "bfloat16"), digest_algorithm="a", tp=1,
            live_digests=lambda _: [dict(self.live)], dirty=False,
        )  # fmt: skip
        self.server = server
        self.made = OperationExecutor("e0", _any(server), _any(None), None, Metrics(MetricSource.ENGINE), proof=proof)
        monkeypatch.setattr(self.made, "_read", lambda *_: (layout, table))

    def verify(self, *, checked: bool) -> str:
        """What the version is verified by, or why it is not."""
        self.made.loads += 1
        result = self.made.perform(Verify(TRANSFER, checked), "g")
        return result.verified_by if isinstance(result, VerificationPassed) else _any(result).reason

    def recognize(self) -> str:
        """As `verify`."""
        result = self.made.perform(Recognize(HELD), "g")
        return result.verified_by if isinstance(result, VerificationPassed) else _any(result).reason


@pytest.mark.parametrize(("cast", "parameter"), [(NORM, NORM), (QUERY, QKV)])
def test_digests_of_tensors_that_the_server_casts_are_not_compared(
    cast: str, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of bytes that no trainer had: these tensors are proven by their buckets, all others by live digests."""
    made = Casting(monkeypatch, cast, proof=VerificationMode.REQUIRED)
    made.live[parameter] = "2"
    assert made.verify(checked=True) == "live-digest; cast tensors by bucket-digest: 1"
    assert made.made.cast == 1
    assert f"its digests of 1 tensors ({cast}) are of another dtype" in made.verify(checked=False)
    for other in made.predicted.keys() - {parameter}:
        made.live[other] = "2"
        assert f"parameter '{other}' on rank 0 is 2" in made.verify(checked=True)
        made.live[other] = "1"
    made.server.casts = lambda *_: {}  # another launch is asked again
    made.server.facts.identity = "h"
    assert f"parameter '{parameter}' on rank 0 is 2" in made.verify(checked=True)


def test_a_server_that_casts_all_tensors_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its digests tells anything: buckets do, or nothing does."""
    made = Casting(monkeypatch, *SENT, proof=VerificationMode.AVAILABLE)
    made.server.live_digests = None
    assert made.verify(checked=True) == "bucket-digest"
    assert not made.verify(checked=False)


def test_what_was_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where unproven versions are taken (`verify` = available), `verified_by` names the reach of the check (G5)."""
    made = Casting(monkeypatch, NORM, proof=VerificationMode.AVAILABLE)
    assert made.verify(checked=False) == "live-digest; cast tensors not compared: 1"


def test_weights_that_the_server_casts_are_recognized_by_their_own_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """By those that it gave after the version was proven, in this life of the sidecar or an earlier one (N58)."""
    made = Casting(monkeypatch, NORM, proof=VerificationMode.REQUIRED)
    made.live[NORM] = "2"
    assert "its digests of them after the proof of the version are lost" in made.recognize()
    made.verify(checked=True)
    assert made.recognize() == "live-digest"
    kept = made.made.kept
    assert kept is not None
    made.live[NORM] = "3"
    assert f"parameter '{NORM}' on rank 0 is 3, its digest is 2" in made.recognize()
    made.live[NORM] = "2"
    for other in (
        None,
        msgspec.structs.replace(kept, identity="f"),
        msgspec.structs.replace(kept, held=msgspec.structs.replace(HELD, version=HELD.version + 1)),
        msgspec.structs.replace(kept, ranks=({QKV: "1"},)),
        msgspec.structs.replace(kept, ranks=()),
    ):
        made.made.kept = other
        assert made.recognize() != "live-digest"
    made.made.kept = kept
    assert made.recognize() == "live-digest"
    made.live[QKV] = "2"
    assert f"parameter '{QKV}' on rank 0 is 2" in made.recognize()


@pytest.mark.parametrize("flush", [False, True])
def test_the_cache_is_flushed_where_it_is_asked_for_and_before_anything_is_generated(flush: bool) -> None:
    """KV of other weights is kept where the policy says so, and dropped where it does not."""
    calls: list[str] = []

    def noting(call: str) -> Callable[..., None]:
        return lambda *_: calls.append(call)

    names = ("pin", "set_label", "resume_memory", "flush", "resume")
    server = cast("Any", SimpleNamespace(**{name: noting(name) for name in names}))
    made = OperationExecutor("e0", server, cast("Any", None), None, Metrics(MetricSource.ENGINE))

    made.perform(ReleaseServer(7, flush=flush, deadline_s=5.0))

    assert calls[1:] == ["set_label", "resume_memory", *(["flush"] if flush else []), "resume"]


@pytest.mark.parametrize(
    "problem",
    [OutOfSharedMemory(1 << 40, 1 << 20), torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no room")],
    ids=lambda problem: type(problem).__name__,
)
@pytest.mark.parametrize("touched", [False, True])
def test_memory_that_runs_out_leaves_untouched_weights_as_they_are(
    problem: Exception, touched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging that cannot be had ends the transfer, not the agent; dirty are only weights that were begun with.

    (F15)
    """
    calls: list[str] = []

    def end_update(_: float) -> None:
        calls.append("end_update")

    class Full:
        def __init__(self) -> None:
            self.touched = False

        def receive(self, *_: object) -> object:
            self.touched = touched
            raise problem

    server = SimpleNamespace(
        dirty=False,
        last_label="1",
        pin=lambda _identity: None,
        clear_dirty=lambda: None,
        resume_weights_memory=lambda _deadline_s: None,
        end_update=end_update,
    )
    agent = OperationExecutor(
        "e0", cast("Any", server), cast("Any", lambda _kind: Full()), None, Metrics(MetricSource.ENGINE)
    )
    monkeypatch.setattr(agent, "_fit", lambda *_: (WHOLE, None))
    local = Endpoint(transport=TransportKind.LOCAL, address="/run/x")
    result = agent.perform(Receive(msgspec.structs.replace(TRANSFER, offer=local), ""))
    assert isinstance(result, OperationFailed)
    assert str(problem) in result.reason
    assert result.dirty is touched
    assert calls == ["end_update"]


class Early:
    """A receiver that is done before the server has returned from its call."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.touched, self.wrong = calls, True, ""

    def receive(self, *_: object) -> Receipt:
        self.calls.append("receive")
        return Receipt(1, 1, checked=True)

    def returned(self, deadline_s: float) -> None:
        assert deadline_s > 0
        self.calls.append("returned")
        if self.wrong:
            raise TransferFailed(self.wrong)


class Returns:
    """A worker with such a receiver, and the calls that it makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, session: bool) -> None:
        self.calls: list[str] = []
        self.receiver = Early(self.calls)
        names = ("pin", "clear_dirty", "resume_weights_memory", "set_label", "resume_memory", "resume", "end_update")
        quiet = {name: self.noting(name) for name in names}
        server = SimpleNamespace(dirty=False, last_label="1", updating=session, pause=self.noting("pause"), **quiet)
        self.worker = OperationExecutor(
            "e0", cast("Any", server), cast("Any", lambda _kind: self.receiver), None, METERS
        )
        monkeypatch.setattr(self.worker, "_fit", lambda *_: (WHOLE, None))
        self.take()

    def noting(self, call: str) -> Callable[..., None]:
        return lambda *_: (
            self.calls.append(call) if call not in {"pin", "clear_dirty", "resume_weights_memory"} else None
        )

    def take(self, launch: str = "one") -> object:
        direct = Endpoint(transport=TransportKind.DIRECT, address="/run/x")
        return self.worker.perform(Receive(msgspec.structs.replace(TRANSFER, offer=direct), ""), launch)

    def did(self, operation: Any, launch: str = "one") -> tuple[object, list[str]]:
        """How it ended, and which calls it made."""
        self.calls.clear()
        return self.worker.perform(operation, launch), list(self.calls)


METERS = Metrics(MetricSource.ENGINE)
RELEASE = ReleaseServer(7, flush=False, deadline_s=5.0, labeled=True)


def test_what_comes_after_the_call_waits_for_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label does not; that the server generates does, and is waited for once."""
    made = Returns(monkeypatch, session=False)
    assert made.calls == ["receive"]
    assert made.did(Label(7, 5.0))[1] == ["set_label"]
    assert made.did(RELEASE)[1] == ["returned", "end_update", "resume_memory", "resume"]
    assert made.did(RELEASE)[1] == ["resume_memory", "resume"]


def test_where_there_are_sessions_the_label_comes_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang does not promise that one may be set while an update is open."""
    made = Returns(monkeypatch, session=True)
    assert made.did(Label(7, 5.0))[1] == ["returned", "end_update", "set_label"]


def test_a_server_that_returned_badly_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked for, until another version is taken, or another launch is there."""
    made = Returns(monkeypatch, session=False)
    made.receiver.wrong = "it said no"
    for _ in range(2):
        result, calls = made.did(RELEASE)
        assert isinstance(result, OperationFailed)
        assert "it said no" in result.reason
        assert calls == ["returned"]
    assert made.did(RELEASE, "another")[1] == ["resume_memory", "resume"]

    made = Returns(monkeypatch, session=False)
    made.receiver.wrong = "it said no"
    made.calls.clear()
    made.take()
    assert made.calls == ["returned", "end_update", "receive"]
    made.receiver.wrong = ""
    assert made.did(RELEASE)[1] == ["returned", "end_update", "resume_memory", "resume"]


def test_a_transfer_is_called_off_while_it_still_fetches_its_blobs() -> None:
    """Cancelled in mid-fetch, before any connection to the sender is there to be taken, it ends without one."""
    made: list[str] = []
    fetching, go_on = threading.Event(), threading.Event()

    class SlowBlobs:
        def get_blob(self, digest: Digest, deadline_s: float = 60.0, unwanted: Callable[[], bool] = bool) -> bytes:
            assert deadline_s > 0
            fetching.set()
            assert go_on.wait(60.0)
            if unwanted():
                raise BlobCancelled(digest, 0)
            return b""

    def receiver(kind: str) -> Any:
        made.append(kind)

    server = cast(
        "Any",
        SimpleNamespace(
            pin=lambda _identity: None, clear_dirty=lambda: None, dirty=False, label=lambda _deadline_s: "default"
        ),
    )
    busy = OperationExecutor("e0", server, receiver, None, Metrics(MetricSource.ENGINE))
    busy.blobs = SlowBlobs()
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(busy.perform, Receive(TRANSFER, ""), "", 7)
        assert fetching.wait(60.0)
        busy.cancel(6)  # of an operation that is over
        busy.cancel(7)
        go_on.set()
        result = ended.result(60.0)
    assert isinstance(result, OperationFailed)
    assert "called off" in result.reason
    assert (result.dirty, made) == (False, [])


def test_an_operation_that_was_called_off_before_it_began_asks_nothing() -> None:
    """The cancellation may overtake the operation on its way to the worker's thread."""
    asked: list[str] = []
    server = cast(
        "Any",
        SimpleNamespace(
            pin=lambda _identity: None,
            clear_dirty=lambda: None,
            dirty=False,
            label=lambda _deadline_s: asked.append("label"),
        ),
    )
    late = OperationExecutor("e0", server, cast("Any", None), None, Metrics(MetricSource.ENGINE))
    late.cancel(3)
    result = late.perform(Receive(TRANSFER, ""), "", 3)
    assert isinstance(result, OperationFailed)
    assert "called off" in result.reason
    assert asked == ["label"], "one harmless question, and nothing after it"


@pytest.mark.parametrize("kind", [TransportKind.SENDS, TransportKind.DIRECT])
def test_a_server_of_which_a_worker_has_died_is_asked_nothing_more(
    monkeypatch: pytest.MonkeyPatch, kind: TransportKind
) -> None:
    """It takes seconds to end, in which it answers no call; its next launch is another one (F30)."""
    made = Returns(monkeypatch, session=True)
    monkeypatch.setattr(made.receiver, "receive", lambda *_: (_ for _ in ()).throw(WorkerDied(1)))
    receive = Receive(msgspec.structs.replace(TRANSFER, offer=Endpoint(transport=kind, address="/run/x")), "")
    result, calls = made.did(receive, "two")
    assert isinstance(result, OperationFailed)
    assert result.dirty
    assert not calls
    for operation in (PauseServer("retract", 60.0), RELEASE, Label(7, 5.0)):
        assert made.did(operation, "two") == (OperationFailed("worker 1 of the server has died"), [])
    assert made.did(RELEASE, "three")[1] == ["resume_memory", "resume"]


class Minds(Early):
    """A worker of its server stands still, or goes on; it takes nothing beside what is served."""

    stands = True

    def require_moving(self) -> None:
        if self.stands:
            raise WorkerStalled(1)

    def receive(self, *_: object) -> Receipt:
        self.require_moving()
        return super().receive()

    def close(self) -> None:
        self.calls.append("close")

    def shutdown(self) -> None:
        self.close()


class Still(Minds):
    """... or does."""

    mode = ""

    def can_stage(self, *_: object) -> bool:
        return False

    def stage(self, *_: object) -> bool:
        return False


@pytest.mark.parametrize("kind", [Still, Minds])
def test_a_server_of_which_a_worker_stands_still_is_asked_nothing_before_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, kind: type[Minds]
) -> None:
    """No call of it would be answered in time, and the other engines wait for this one (F30)."""
    made = Returns(monkeypatch, session=True)
    still = kind(made.calls)
    monkeypatch.setattr(made.worker, "_make", lambda _kind: still)
    offer = Endpoint(transport=TransportKind.SENDS, address="/run/x")
    receive = Receive(msgspec.structs.replace(TRANSFER, offer=offer), "")
    found, calls = made.did(receive, "two")
    assert isinstance(found, OperationFailed)
    assert calls == []
    for operation in (PauseServer("retract", 60.0), RELEASE):
        found, calls = made.did(operation, "two")
        assert isinstance(found, OperationFailed)
        assert "worker 1 of the server stands still" in found.reason
        assert calls == []
    still.stands = False
    assert made.did(PauseServer("retract", 60.0), "two") == (OperationDone(), ["pause"])
    closed = ["close"] if kind is Still else []
    assert made.did(RELEASE, "two")[1] == [*closed, "resume_memory", "resume"]


class Placed:
    """A receiver whose workers came, said where they are, and took nothing."""

    touched, most_bytes = False, 1

    def __init__(self) -> None:
        self.devices: tuple[str, ...] = ()
        self.come: tuple[str, ...] | None = None

    def receive(self, *_: object) -> Receipt:
        self.devices = self.devices if self.come is None else self.come
        raise TransferFailed("they are on one GPU")


def test_where_workers_are_is_known_of_the_launch_that_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nothing came of it; of another launch nothing is known until its own workers have come."""
    receiver = Placed()
    quiet = {name: lambda *_: None for name in ("pin", "clear_dirty", "resume_weights_memory", "end_update")}
    server = SimpleNamespace(
        dirty=False, last_label="1", updating=False, facts=SimpleNamespace(identity="one"), **quiet
    )
    made = OperationExecutor("e0", cast("Any", server), cast("Any", lambda _kind: receiver), None, METERS)
    monkeypatch.setattr(made, "_fit", lambda *_: (WHOLE, None))
    offer = Endpoint(transport=TransportKind.SENDS, address="/run/x")
    receive = Receive(msgspec.structs.replace(TRANSFER, offer=offer), "")
    assert made.devices == ()
    receiver.come = ("gpu-0",)
    assert isinstance(made.perform(receive), OperationFailed)
    assert made.devices == ("gpu-0",)
    assert [each.device for each in places_on(made.devices)] == ["gpu-0"]
    server.facts.identity, receiver.come = "another", None
    assert isinstance(made.perform(receive), OperationFailed)
    assert made.devices == ()
    receiver.come = ("gpu-1",)
    made.perform(receive)
    assert made.devices == ("gpu-1",)


class Following:
    """A receiver that was given a table on its way, and proved by it."""

    def __init__(self, tabled: Tabled | None) -> None:
        self.tabled, self.touched, self.sessions = tabled, True, list[TransferSession]()

    def receive(self, session: TransferSession, *_: object) -> Receipt:
        self.sessions.append(session)
        return Receipt(1, 1, checked=True, tabled=self.tabled)


def taken(folder: Path, monkeypatch: pytest.MonkeyPatch, *, signed: str, version: int = 5) -> tuple[object, Following]:
    """What comes of a version whose table followed, `signed` by its trainer, by nobody, or not needing to be."""
    make_deployment_keys(folder, [AgentKeys(AgentId("t0"), Role.TRAINER, (Channel("c"),))])
    secret = read_secret_key(folder / "agents" / "t0.key")
    table = DigestTable(manifest=PREPARE.manifest, version=version, algorithm="mix64x2", tensors=b"")
    publish = Publish(
        request=RequestId("k"),
        channel=PREPARE.channel,
        epoch=PREPARE.epoch,
        version=PREPARE.version,
        manifest=PREPARE.manifest,
        bytes=1,
        buckets=1,
    )
    publish = sign_publication(publish, AgentId("t0"), secret, None)
    signature = sign_digest_table(publish, Digest(table.digest()), secret)
    seal = {"by its trainer": signature.encode(), "by nobody": b"0" * 128, "as no text": b"\xff\xfe"}.get(signed, b"")
    receiver = Following(None if signed == "never" else Tabled(table, seal))
    quiet = {name: lambda *_: None for name in ("pin", "clear_dirty", "resume_weights_memory", "end_update", "answers")}
    server = SimpleNamespace(dirty=False, last_label="1", updating=False, **quiet)
    trust = None if signed == "without keys" else AllowList(folder / ALLOW_LIST_FILE)
    made = OperationExecutor("e0", cast("Any", server), cast("Any", lambda _kind: receiver), None, METERS, trust=trust)
    monkeypatch.setattr(made, "_fit", lambda *_: (WHOLE, None))
    prepare = msgspec.structs.replace(PREPARE, table=Digest(""), publication_signature=publish.publication_signature)
    assert isinstance(made.perform(Validate(prepare, "")), OperationDone)
    offer = sign_endpoint(
        Endpoint(transport=TransportKind.DIRECT, address="/run/x"), publish.channel, publish.epoch, secret
    )
    transfer = msgspec.structs.replace(
        TRANSFER, epoch=PREPARE.epoch, version=PREPARE.version, table=Digest(""), offer=offer
    )
    return made.perform(Receive(transfer, "")), receiver


@pytest.mark.parametrize("signed", ["by its trainer", "without keys"])
def test_a_table_that_followed_names_what_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: str
) -> None:
    """Its digest is computed here, of what came; the session was begun without one."""
    result, receiver = taken(tmp_path, monkeypatch, signed=signed)
    assert receiver.tabled is not None
    assert [session.table for session in receiver.sessions] == [None]
    assert result == Received(1, 1, True, "live-digest", receiver.tabled.table.digest())


@pytest.mark.parametrize("signed", ["by nobody", "as no text"])
def test_an_unsigned_table_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: str) -> None:
    """The transfer has failed, the weights are unknown, and the cause is counted (G8, F25)."""
    cause = {"cause": "forged"}
    name = "weightbus_sidecar_publications_refused_total"
    before = METERS.registry.get_sample_value(name, cause) or 0.0
    result, _ = taken(tmp_path, monkeypatch, signed=signed)
    assert isinstance(result, OperationFailed)
    assert result.dirty
    assert "(forged)" in result.reason
    assert METERS.registry.get_sample_value(name, cause) == before + 1


def test_a_table_of_another_version_or_none_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is signed, too."""
    result, _ = taken(tmp_path / "a", monkeypatch, signed="without keys", version=6)
    assert isinstance(result, OperationFailed)
    assert result.dirty
    result, _ = taken(tmp_path / "b", monkeypatch, signed="never")
    assert isinstance(result, OperationFailed)
    assert result.dirty
    assert "did not come" in result.reason


# What is known of a server that does not answer, and when it is asked again.


class Server:
    """Answers, or does not."""

    def __init__(self) -> None:
        self.stands = True
        self.patience_s = 2.0
        self.asked: list[str] = []

    def pin(self, _identity: str) -> None: ...

    def pause(self, _mode: str, _deadline_s: float) -> None:
        self._asked("pause")

    def answers(self, deadline_s: float) -> None:
        assert deadline_s <= self.patience_s
        self._asked("answers")

    def _asked(self, call: str) -> None:
        self.asked.append(call)
        if self.stands:
            raise ServerSilent(call, "no answer")


def test_a_server_that_was_silent_has_to_answer_before_it_is_paused() -> None:
    """A pause has a deadline of half a minute, in which all engines of a round would wait for this one (F30)."""
    server = Server()
    worker = OperationExecutor("e0", cast("Any", server), cast("Any", None), None, Metrics(MetricSource.ENGINE))
    pause = PauseServer("retract", 60.0)
    assert isinstance(worker.perform(pause, "launch"), OperationFailed)
    assert isinstance(worker.perform(pause, "launch"), OperationFailed)
    assert server.asked == ["pause", "answers"]
    server.stands = False
    for _ in range(2):
        assert worker.perform(pause, "launch") == OperationDone()
    assert server.asked == ["pause", "answers", "answers", "pause", "pause"]


def test_a_server_that_was_silent_is_refused_before_any_engine_stands_still() -> None:
    """In its pause the engines that move would stand still for it, in every version."""
    server = Server()
    worker = OperationExecutor("e0", cast("Any", server), cast("Any", None), None, Metrics(MetricSource.ENGINE))
    validate = Validate(cast("Any", None), "", None)
    assert isinstance(worker.perform(PauseServer("retract", 60.0), "launch"), OperationFailed)
    assert worker.perform(validate, "launch") == OperationFailed("answers: no answer", dirty=False)
    assert server.asked == ["pause", "answers"]


def test_whether_a_server_moves_is_looked_at_before_any_engine_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it did something lately: rounds that follow each other do not ask. A refusal is an answer."""
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    server = Server()
    server.stands, server.patience_s = False, 10.0
    vitals = WorkerHealth(cast("Any", server))
    for _ in range(2):
        vitals.look("one")
    assert server.asked == ["answers"]
    vitals.look("two")
    assert server.asked == ["answers"] * 2
    clock[0] += 1.5
    vitals.moved("two")
    clock[0] += 1.5
    vitals.look("two")
    assert server.asked == ["answers"] * 2
    clock[0] += 1.0
    refused: list[float] = []
    monkeypatch.setattr(server, "answers", lambda seconds: (refused.append(seconds), refuse()))
    vitals.look("two")
    assert refused, "what it did is too long ago"
    monkeypatch.undo()
    server.stands = True
    vitals.learn(ServerRefused("/x", 400, "no"), "two")
    with pytest.raises(ServerSilent):
        vitals.look("two")


def refuse() -> None:
    raise ServerRefused("/server_info", 500, "no")


def test_what_another_launch_did_not_answer_is_forgotten() -> None:
    """And a refusal is an answer."""
    server = Server()
    vitals = WorkerHealth(cast("Any", server))
    vitals.learn(ServerRefused("/x", 400, "no"), "one")
    vitals.ask("one")
    vitals.learn(ServerSilent("/x", "no answer"), "one")
    vitals.ask("two")
    assert server.asked == []
    vitals.learn(ServerSilent("/x", "no answer"), "two")
    with pytest.raises(ServerSilent):
        vitals.ask("two")


def test_an_engine_that_kept_a_transfer_to_its_deadline_is_asked_before_the_next_one() -> None:
    """It may have been the trainer: then the server answers, and nothing is lost."""
    server = Server()
    vitals = WorkerHealth(cast("Any", server))
    vitals.learn(DeadlineExceeded("worker 0 to copy", 30.0), "one")
    with pytest.raises(ServerSilent):
        vitals.ask("one")


def test_digests_take_as_long_as_their_bytes() -> None:
    """A tiny model whose workers stand still is given up within the time of a death; a large one gets all there is."""
    assert proof_s(1_000_000) < 16.0
    assert proof_s(10_000_000_000) > 100.0
    assert proof_s(10**12) == VERIFY_S


LOCAL = msgspec.structs.replace(TRANSFER, offer=Endpoint(transport=TransportKind.LOCAL, address="/run/x"))


def marked(label: str, *, broken: bool = False) -> tuple[OperationExecutor, SimpleNamespace, list[str]]:
    """An executor of a server labeled `label`, and what is called on it by `Receive`."""
    calls: list[str] = []

    def set_label(to: str, _deadline_s: float) -> None:
        calls.append(f"label {to}")
        if broken:
            raise ServerSilent("/update_weight_version", 1.0)
        server.last_label = to

    def receive(*_: object) -> None:
        calls.append("receive")
        raise TransferFailed("no byte came")

    receiver = SimpleNamespace(receive=receive, touched=False)
    quiet = {name: lambda *_: None for name in ("pin", "clear_dirty", "resume_weights_memory", "end_update", "resume")}
    quiet |= {"resume_memory": lambda *_: None, "confirm_label": lambda *_: None}
    server = SimpleNamespace(dirty=False, updating=False, last_label=label, set_label=set_label, **quiet)
    made = OperationExecutor("e0", cast("Any", server), cast("Any", lambda _kind: receiver), None, METERS)
    made._fit = lambda *_: (WHOLE, None)  # type: ignore[assignment,method-assign,return-value]
    return made, server, calls


def test_launch_weights_are_marked_before_their_first_change() -> None:
    """By a label that outlives sidecar, record and name; a server that keeps its weights gets its own back (N58)."""
    made, server, calls = marked("default")
    assert isinstance(made.perform(Receive(LOCAL, "")), OperationFailed)
    assert calls == [f"label {INCOMPLETE}default", "receive"]
    assert made.perform(ReleaseServer(None, flush=False, deadline_s=5.0)) == OperationDone()
    assert server.last_label == "default"


@pytest.mark.parametrize("unknown", [False, True])
def test_a_server_that_another_party_changed_is_not_as_launched(*, unknown: bool) -> None:
    """Whatever its label says and an earlier proof said: what a version leaves was changed, too (N57, N64, F39)."""
    made, _, _ = marked("default")
    begun: list[str] = []
    made.left = cast(
        "Any",
        SimpleNamespace(
            begin=lambda _layout, _folder, label, _left: begun.append(label), doubt=lambda: begun.append("doubted")
        ),
    )
    made.perform(Receive(LOCAL, "", unknown))
    assert begun == (["doubted", INCOMPLETE] if unknown else ["default"])


def test_a_version_needs_no_mark() -> None:
    """Its label says that it is no launch's: a steady round makes no call more (N58)."""
    made, _, calls = marked("7")
    made.perform(Receive(LOCAL, ""))
    assert calls == ["receive"]


def test_without_its_mark_nothing_is_changed() -> None:
    """A call that is lost may still come: the transfer fails, and no byte moves (N58)."""
    made, _, calls = marked("default", broken=True)
    result = made.perform(Receive(LOCAL, ""))
    assert isinstance(result, OperationFailed)
    assert (result.dirty, calls) == (False, [f"label {INCOMPLETE}default"])


@pytest.mark.parametrize("found", ["the same", "others", "none"])
def test_what_a_server_of_no_record_holds_is_read_from_it(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of live parameters, against the table of the committed version; without them nothing is proven (N58)."""
    table = SimpleNamespace(live=[SimpleNamespace(algorithm="a", tp=1, parameters={"w": ("1",)})])
    digests = {"the same": [{"w": "1"}], "others": [{"w": "2"}], "none": []}[found]
    algorithm = "" if found == "none" else "a"
    server = SimpleNamespace(
        pin=lambda _: None, digest_algorithm=algorithm, tp=1, live_digests=lambda _s: digests, dirty=False,
        facts=SimpleNamespace(identity="a", model_path="m"), casts=lambda *_: {},
    )  # fmt: skip
    server.confirm = lambda _call: None
    made = OperationExecutor("e0", cast("Any", server), cast("Any", None), None, METERS)
    monkeypatch.setattr(made, "_read", lambda *_: (SimpleNamespace(nbytes=4, left=()), table))
    held = HeldVersion(version=Version(7), manifest=Digest("a" * 64), table=Digest("b" * 64))
    result = made.perform(Recognize(held))
    assert isinstance(result, VerificationPassed) is (found == "the same")
    if found != "the same":
        assert isinstance(result, OperationFailed)
        assert ("'w' on rank 0 is 2" if found == "others" else "cannot report digests") in result.reason
