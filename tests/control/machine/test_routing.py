"""Which transport an engine gets, as a table: what is known of both ends, the choice, and the words for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from weightbus.control.machine.routing import PREFERRED, choose, objection
from weightbus.control.machine.states import TransferEnds
from weightbus.control.protocol.messages import (
    EngineInfo,
    MissingTransport,
    NetworkInterface,
    PeerAccess,
    ProcessLocation,
    RequestId,
    Topology,
    TrainerInfo,
    TransportKind,
)

from ..world import engine_info, trainer_info

DIRECT, SENDS, LOCAL, GROUP, DISK = (
    TransportKind.DIRECT,
    TransportKind.SENDS,
    TransportKind.LOCAL,
    TransportKind.DISTRIBUTED,
    TransportKind.DISK,
)
STOCK = (LOCAL, GROUP, DISK)
"""What a server without our loader takes."""
ETH = NetworkInterface(name="eth0", addresses=("10.0.0.1",), mbps=100_000)


def told(**more: Any) -> Topology:
    return Topology(request=RequestId("k"), **more)


TOY = TransportKind("toy")
"""No transport that the coordinator knows."""


def places(*devices: str, host: str = "h0", **reach: dict[str, PeerAccess]) -> tuple[ProcessLocation, ...]:
    """Processes on these GPUs; `reach` by GPU, null where it is left out."""
    return tuple(
        ProcessLocation(rank=rank, host=host, device=device, reach=reach.get(device))
        for rank, device in enumerate(devices)
    )


def trainer(**changes: Any) -> TrainerInfo:
    return trainer_info(**{"transports": PREFERRED, **changes})


def engine(**changes: Any) -> EngineInfo:
    return engine_info(**{"transports": PREFERRED, **changes})


ON_GPU: dict[str, Any] = {"device": "cuda"}
AWAY: dict[str, Any] = {"host": "h1"}
CASES: list[tuple[str, TransferEnds, TransportKind | None, str]] = [
    ("same host, loader", TransferEnds(trainer(), engine()), DIRECT, "direct: on the trainer's host"),
    ("another host, loader", TransferEnds(trainer(), engine(**AWAY)), SENDS, "different hosts"),
    ("same host, stock", TransferEnds(trainer(), engine(transports=STOCK)), LOCAL, "does not offer it"),
    (
        "another host, stock",
        TransferEnds(trainer(), engine(transports=STOCK, **AWAY)),
        GROUP,
        "local: trainer and engine",
    ),
    ("replicas", TransferEnds(trainer(), engine(dp=2)), DISK, "only disk reaches every replica"),
    ("stages", TransferEnds(trainer(), engine(pp=2)), LOCAL, "direct: pp=2"),
    ("stages elsewhere", TransferEnds(trainer(), engine(pp=2, **AWAY)), DISK, "distributed: pp=2"),
    ("other device", TransferEnds(trainer(), engine(**ON_GPU)), LOCAL, "trainer on cpu, engine on cuda"),
    ("no GPU for its GPU", TransferEnds(trainer(**ON_GPU), engine()), DISK, "cannot open the trainer's device memory"),
    ("nothing offered", TransferEnds(trainer(transports=()), engine()), None, "the trainer offers none"),
    (
        "one that is not built in",
        TransferEnds(trainer(transports=(LOCAL, TOY, DISK)), engine(transports=(DISK, TOY), **AWAY)),
        TOY,
        "local: the engine agent does not offer it",
    ),
    (
        "one that is not built in, and which the engine lacks",
        TransferEnds(trainer(transports=(TOY, DISK)), engine()),
        DISK,
        "toy: the engine agent does not offer it",
    ),
    ("nothing fits", TransferEnds(trainer(transports=(LOCAL,)), engine(**AWAY)), None, "no transport: local"),
    # the configuration wins over the preference
    ("trainer's order", TransferEnds(trainer(transports=(DISK, DIRECT)), engine()), DISK, "disk: a checkpoint"),
    ("trainer's only", TransferEnds(trainer(transports=(SENDS,)), engine()), SENDS, "sends: apart"),
    (
        "engine's only",
        TransferEnds(trainer(), engine(transports=(DISK,))),
        DISK,
        "direct: the engine agent does not offer it",
    ),
    # a snapshot is not what lies in memory
    ("snapshot", TransferEnds(trainer(), engine(), snapshot=True), LOCAL, "trained on"),
    # where the ranks are
    (
        "a rank elsewhere",
        TransferEnds(
            trainer(), engine(), told(places=(*places("cpu"), ProcessLocation(rank=1, host="h1", device="cpu")))
        ),
        SENDS,
        "rank 1 of the trainer on another host",
    ),
    # what containers share
    (
        "containers apart",
        TransferEnds(trainer(), engine(), told(files="h0/a", folder="1"), told(files="h0/b", folder="2")),
        SENDS,
        "containers that do not share the folder",
    ),
    (
        "containers with one folder",
        TransferEnds(trainer(), engine(), told(files="h0/a", folder="1"), told(files="h0/b", folder="1")),
        DIRECT,
        "direct",
    ),
    (
        "one file system, two folders",
        TransferEnds(trainer(), engine(), told(files="h0/a", folder="1"), told(files="h0/a", folder="2")),
        DIRECT,
        "direct",
    ),
    # addresses
    (
        "loopback for another host",
        TransferEnds(trainer(), engine(**AWAY), told(address="127.0.0.1", nics=(ETH,)), told()),
        DISK,
        "tells engines to come to 127.0.0.1",
    ),
    (
        "loopback for another namespace",
        TransferEnds(
            trainer(transports=(SENDS, DISK)), engine(), told(address="::1", network="h0/1"), told(network="h0/2")
        ),
        DISK,
        "cannot reach",
    ),
    (
        "loopback in one namespace",
        TransferEnds(trainer(transports=(SENDS,)), engine(), told(address="localhost", network="n"), told(network="n")),
        SENDS,
        "sends",
    ),
    (
        "every address, which is the engine's own",
        TransferEnds(trainer(), engine(**AWAY), told(address="0.0.0.0"), told()),
        DISK,
        "tells engines to come to 0.0.0.0",
    ),
    (
        "a loopback address written as another family's",
        TransferEnds(trainer(), engine(**AWAY), told(address="::ffff:127.0.0.1"), told()),
        DISK,
        "cannot reach",
    ),
    (
        "no address at all: the attempt will show",
        TransferEnds(trainer(), engine(**AWAY), told(address="tcp://[10.0.0.1"), told()),
        SENDS,
        "sends: elsewhere",
    ),
    (
        "an address of the network",
        TransferEnds(trainer(), engine(**AWAY), told(address="10.0.0.1"), told()),
        SENDS,
        "sends: elsewhere",
    ),
    # GPUs
    (
        "one GPU for both",
        TransferEnds(trainer(**ON_GPU), engine(**ON_GPU), told(places=places("a")), told(places=places("a", a={}))),
        DIRECT,
        "1 pairs share a GPU",
    ),
    (
        "two ranks on one GPU",
        TransferEnds(
            trainer(**ON_GPU), engine(**ON_GPU, **AWAY), told(places=places("a", "a")), told(places=places("b"))
        ),
        GROUP,
        "ranks 0 and 1 of the trainer are on one GPU",
    ),
    (
        "NVLink between them",
        TransferEnds(
            trainer(**ON_GPU),
            engine(**ON_GPU),
            told(places=places("a")),
            told(places=places("b", b={"a": PeerAccess.NVLINK})),
        ),
        DIRECT,
        "1 pairs over NVLink",
    ),
    (
        "no peer access",
        TransferEnds(
            trainer(**ON_GPU),
            engine(**ON_GPU),
            told(places=places("a")),
            told(places=places("b", b={"a": PeerAccess.NONE})),
        ),
        SENDS,
        "the driver gives no peer access",
    ),
    (
        "no peer access, as the trainer's driver says",
        TransferEnds(
            trainer(**ON_GPU),
            engine(**ON_GPU),
            told(places=places("a", a={"b": PeerAccess.NONE})),
            told(places=places("b")),
        ),
        SENDS,
        "the driver gives no peer access",
    ),
    (
        "a GPU that the server does not see",
        TransferEnds(trainer(**ON_GPU), engine(**ON_GPU), told(places=places("a")), told(places=places("b", b={}))),
        SENDS,
        "does not see a GPU of the trainer's",
    ),
    (
        "nobody knows",
        TransferEnds(trainer(**ON_GPU), engine(**ON_GPU), told(places=places("a")), told(places=places("b"))),
        DIRECT,
        "which GPUs reach each other was not told",
    ),
    (
        "the root is seen, another rank is not",
        TransferEnds(
            trainer(**ON_GPU),
            engine(transports=(DIRECT, LOCAL), **ON_GPU),
            told(places=places("a", "c")),
            told(places=places("b", b={"a": PeerAccess.P2P})),
        ),
        LOCAL,
        "rank 1 on GPU c",
    ),
    (
        "NCCL on a shared GPU",
        TransferEnds(
            trainer(transports=(SENDS, GROUP, DISK), **ON_GPU),
            engine(**ON_GPU),
            told(places=places("a")),
            told(places=places("a")),
        ),
        DISK,
        "NCCL takes no two ranks on one",
    ),
    (
        "two workers on one GPU",
        TransferEnds(
            trainer(transports=(SENDS, GROUP, DISK), **ON_GPU),
            engine(tp=2, **ON_GPU),
            told(places=places("a")),
            told(places=places("b", "b")),
        ),
        DISK,
        "sends: workers 0 and 1 are on one GPU",
    ),
    (
        "a group needs only the root's GPU",
        TransferEnds(
            trainer(transports=(SENDS, GROUP), **ON_GPU),
            engine(**ON_GPU),
            told(places=places("a", "b")),
            told(places=places("b")),
        ),
        GROUP,
        "sends: worker 0 and rank 1",
    ),
]


@pytest.mark.parametrize(("ends", "transport", "words"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
def test_the_choice_and_its_reason(ends: TransferEnds, transport: TransportKind | None, words: str) -> None:
    """The first of the preferences that nothing speaks against, and in the reason whatever spoke against the others."""
    route = choose(ends)
    assert route.transport is transport, route.reason
    assert words in route.reason


def test_what_an_agent_lacks_is_said_in_its_own_words() -> None:
    """With what would change it; of the trainer's too."""
    told_engine = told(lacking={DIRECT: MissingTransport(found="no loader of ours", needed="launch it with one")})
    told_trainer = told(lacking={SENDS: MissingTransport(found="left out", needed="add it")})
    offered = tuple(kind for kind in PREFERRED if kind is not SENDS)
    route = choose(TransferEnds(trainer(transports=offered), engine(transports=STOCK), told_trainer, told_engine))
    assert route.transport is LOCAL
    assert route.objections[DIRECT] == ("no loader of ours", "launch it with one")
    assert route.objections[SENDS] == ("trainer: left out", "add it")


def test_what_was_found_out_since_the_hello_counts() -> None:
    """An engine that offered a transport says later that it cannot: the next one of the trainer's is taken."""
    told_engine = told(lacking={DIRECT: MissingTransport(found="its loader begins threads", needed="another model")})
    route = choose(TransferEnds(trainer(), engine(), None, told_engine))
    assert route.transport not in {None, DIRECT}
    assert route.objections[DIRECT] == ("its loader begins threads", "another model")


def test_the_advice_for_a_loopback_address_names_the_interfaces() -> None:
    """So that the address to set need not be looked for."""
    found = objection(SENDS, TransferEnds(trainer(), engine(**AWAY), told(address="127.0.0.1", nics=(ETH,))))
    assert found is not None
    assert "10.0.0.1 (eth0)" in found.needed


_topologies = st.none() | st.builds(
    told,
    network=st.sampled_from(["", "n1", "n2"]),
    files=st.sampled_from(["", "f1", "f2"]),
    folder=st.sampled_from(["", "d1", "d2"]),
    address=st.sampled_from(["", "127.0.0.1", "10.0.0.1", "::1", "not a host", "[10.0.0.1", "tcp://[x]"]),
    places=st.lists(
        st.builds(
            ProcessLocation,
            rank=st.integers(0, 3),
            host=st.sampled_from(["h0", "h1"]),
            device=st.sampled_from(["cpu", "a", "b"]),
            reach=st.none() | st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(PeerAccess), max_size=2),
        ),
        max_size=3,
    ).map(tuple),
)
_kinds = st.lists(st.sampled_from(TransportKind), unique=True, max_size=5).map(tuple)


@settings(deadline=None, max_examples=300)
@given(
    st.builds(trainer, host=st.sampled_from(["h0", "h1"]), device=st.sampled_from(["cpu", "cuda"]), transports=_kinds),
    st.builds(
        engine,
        device=st.sampled_from(["cpu", "cuda"]),
        transports=_kinds,
        pp=st.integers(1, 2),
        dp=st.integers(1, 2),
    ),
    _topologies,
    _topologies,
    st.booleans(),
)
def test_every_choice_is_allowed_and_explained(
    ours: TrainerInfo, theirs: EngineInfo, from_trainer: Topology | None, from_engine: Topology | None, snapshot: bool
) -> None:
    """Both sides offer what is chosen, nothing speaks against it, and everything faster has its reason in words.

    Whatever agents say of their addresses, too: the coordinator must not fall over a setting of theirs.
    """
    ends = TransferEnds(ours, theirs, from_trainer, from_engine, snapshot)
    route = choose(ends)
    faster = PREFERRED if route.transport is None else PREFERRED[: PREFERRED.index(route.transport)]
    assert set(route.objections) == set(faster)
    assert all(each.found for each in route.objections.values())
    if route.transport is None:
        assert all(objection(kind, ends) for kind in ours.transports)
    else:
        assert route.transport in ours.transports
        assert route.transport in theirs.transports
        assert objection(route.transport, ends) is None
        before = ours.transports[: ours.transports.index(route.transport)]
        assert all(objection(kind, ends) for kind in before)
    nothing_known = msgspec.structs.replace(ends, from_trainer=None, from_engine=None)
    if choose(nothing_known).transport is None:
        assert route.transport is None, "what agents tell of where they are only ever speaks against a transport"


@pytest.mark.parametrize(
    ("ranks", "workers", "shares"),
    [
        (("gpu-0", "gpu-1"), ("gpu-1", "gpu-2"), True),
        (("gpu-0", "gpu-1"), ("gpu-2", "gpu-3"), False),
        (("cpu",), ("cpu",), False),
        (("gpu-0",), (), False),
    ],
)
def test_engines_that_share_a_gpu_with_the_trainer_are_known(
    ranks: tuple[str, ...], workers: tuple[str, ...], shares: bool
) -> None:
    """Any rank with any worker; what was not told is not guessed."""
    ends = TransferEnds(trainer(**ON_GPU), engine(**ON_GPU), told(places=places(*ranks)), told(places=places(*workers)))
    assert choose(ends).shares_gpu is shares
