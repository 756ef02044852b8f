"""Where the workers of a server are: asked of the driver in that server's own environment, or not told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.kit.unreadable import loop_at, no_descriptors
from tests.kit.waiting import until
from weightbus.control.machine.routing import PREFERRED
from weightbus.control.protocol import codec
from weightbus.control.protocol.messages import PeerAccess, ProcessLocation, RequestId, TransportKind
from weightbus.dataplane.memory.gpu_topology import GpuSurveyFailed, VisibleGpu, gpus_visible_to
from weightbus.dataplane.processes import host_facts
from weightbus.dataplane.processes.host_facts import host_identity, network_interfaces
from weightbus.engine_agent.engines import local_process
from weightbus.engine_agent.engines.local_process import ProcessesUnread
from weightbus.engine_agent.engines.sglang.compatibility import missing
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.engines.sglang.server_identity import facts_of
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.sidecar import topology as whereabouts
from weightbus.engine_agent.sidecar.topology import opened_by, places_of, topology_of

from ..engines.sglang.test_compatibility import facts

SEEN = (
    VisibleGpu("gpu-a", {"gpu-b": "nvlink", "gpu-c": "none"}),
    VisibleGpu("gpu-b", {"gpu-a": "nvlink", "gpu-c": "none"}),
    VisibleGpu("gpu-c", {"gpu-a": "none", "gpu-b": "none"}),
)
INFO = {"version": "0.5.23", "tp_size": 2, "pp_size": 1, "dp_size": 1, "device": "cuda", "nnodes": 1}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """A driver that sees three GPUs in any environment; the environments in which it was asked."""
    asked: list[dict[str, str]] = []

    def seen(environment: dict[str, str]) -> tuple[VisibleGpu, ...]:
        asked.append(environment)
        return SEEN

    monkeypatch.setattr(whereabouts, "gpus_visible_to", seen)
    return asked


def test_workers_lie_on_the_gpus_that_sglang_numbers(driver: list[dict[str, str]]) -> None:
    """From --base-gpu-id on, by --gpu-id-step, among those that the server's own process sees."""
    given = facts_of({**INFO, "base_gpu_id": 0, "gpu_id_step": 2}, {}, "http://elsewhere:1")
    assert given.gpus == (0, 2)
    with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "OF": "the server"}) as server:
        until(Path(f"/proc/{server.pid}/environ").read_bytes)  # the kernel has it a moment after the program began
        found = places_of(msgspec.structs.replace(given, process=(server.pid, 1)))
        server.kill()
    assert [(each.rank, each.device, each.reach) for each in found] == [
        (0, "gpu-a", {"gpu-b": PeerAccess.NVLINK, "gpu-c": PeerAccess.NONE}),
        (1, "gpu-c", {"gpu-a": PeerAccess.NONE, "gpu-b": PeerAccess.NONE}),
    ]
    assert driver[0]["OF"] == "the server", "asked in the environment of that process"


@pytest.mark.usefixtures("driver")
def test_a_worker_that_sees_only_its_own_gpu_reaches_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang can hide the others from each of its processes."""
    monkeypatch.setattr(whereabouts, "environment_of", lambda _pid: {"SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "true"})
    assert [each.reach for each in places_of(facts(device="cuda", gpus=(1,), process=(1, 1)))] == [{}]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("told", "gpu_id"), [({}, ""), ({"NCCL_HOSTID": "far"}, "far/gpu-a")])
def test_what_nccl_takes_for_another_host_is_said(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], gpu_id: str
) -> None:
    """By the server's own environment: two such servers on one GPU are in one group."""
    monkeypatch.setattr(whereabouts, "environment_of", lambda _pid: told)
    assert [each.nccl_gpu_id for each in places_of(facts(device="cuda", gpus=(0,), process=(1, 1)))] == [gpu_id]


@pytest.mark.parametrize(
    "changes",
    [
        {"process": None},
        {"gpus": ()},
        {"gpus": (5,)},
        {"pp": 2},
        {"process": (2**22 + 1, 1)},
    ],
    ids=["not seen", "not numbered", "not there", "stages", "ended"],
)
@pytest.mark.usefixtures("driver")
def test_what_cannot_be_found_out_is_not_told(changes: dict[str, object]) -> None:
    """A guess would be taken for what the driver says."""
    assert places_of(facts(**{"device": "cuda", "gpus": (0,), "process": (os.getpid(), 1), **changes})) == ()


@pytest.mark.usefixtures("driver")
def test_a_process_without_an_environment_is_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about to begin, or to end: with another environment than its own it would see other GPUs."""
    (tmp_path / "7").mkdir()
    environ = tmp_path / "7" / "environ"
    monkeypatch.setattr(local_process, "_PROC", tmp_path)
    environ.write_bytes(b"PATH=/bin\0")
    assert places_of(facts(device="cuda", gpus=(0,), process=(7, 1)))
    environ.write_bytes(b"")
    assert places_of(facts(device="cuda", gpus=(0,), process=(7, 1))) == ()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_could_not_be_looked_at_is_no_finding(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: list[dict[str, str]]
) -> None:
    """Where workers are is found out once for each process generation: an error then would hold as long as that."""
    given = facts(device=device, gpus=(0,), process=(os.getpid(), 1))
    places = (ProcessLocation(rank=0, host=host_identity(), device=device),)
    monkeypatch.setattr(whereabouts, "_PROC", loop_at(tmp_path / "proc"))
    monkeypatch.setattr(local_process, "_PROC", tmp_path / "proc")
    with pytest.raises(ProcessesUnread):
        opened_by(given, places)
    if device == "cuda":
        with pytest.raises(ProcessesUnread):
            places_of(given)
        assert not driver


def test_a_driver_that_could_not_be_asked_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike one that says that there is no GPU, or that is not there."""
    given = facts(device="cuda", gpus=(0,), process=(os.getpid(), 1))
    with no_descriptors(), pytest.raises(GpuSurveyFailed) as failed:
        gpus_visible_to({})

    def unasked(_environment: object) -> object:
        raise failed.value

    def without(_environment: object) -> object:
        raise GpuSurveyFailed("cuInit answered 100")

    monkeypatch.setattr(whereabouts, "gpus_visible_to", unasked)
    with pytest.raises(ProcessesUnread):
        places_of(given)
    monkeypatch.setattr(whereabouts, "gpus_visible_to", without)
    assert places_of(given) == ()


def test_a_host_whose_name_cannot_be_read_is_not_another_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes of one host would be taken for ones that share nothing."""
    known = host_identity()
    host_identity.cache_clear()
    with monkeypatch.context() as broken:
        broken.setattr(host_facts, "_BOOT_ID", loop_at(tmp_path / "boot_id"))
        with pytest.raises(OSError, match="symbolic links"):
            host_identity()
    assert host_identity() == known


def test_several_nodes_are_not_numbered() -> None:
    """Workers of the others are elsewhere."""
    assert facts_of({**INFO, "base_gpu_id": 0, "gpu_id_step": 1, "nnodes": 2}, {}, "http://x:1").gpus == ()


def test_without_a_gpu_every_worker_is_on_this_host() -> None:
    """The host's processor stands for a device."""
    assert [(each.host, each.device) for each in places_of(facts(tp=2))] == [(host_identity(), "cpu")] * 2


@pytest.mark.parametrize(
    ("changes", "lacking", "words"),
    [
        ({}, {"direct", "sends"}, "--custom-weight-loader"),
        ({"loaders": (LOADER,)}, set(), ""),
        ({"loaders": (LOADER,), "pp": 2}, {"direct", "sends", "distributed"}, "local and disk"),
        ({"loaders": (LOADER,), "dp": 2}, {"direct", "sends", "local", "distributed"}, "a sidecar each"),
        (
            {"loaders": (LOADER,), "speculative": "EAGLE"},
            {"sends", "local", "distributed", "disk"},
            "--custom-weight-loader",
        ),
    ],
    ids=["stock", "loader", "stages", "replicas", "drafts"],
)
def test_what_a_server_cannot_take_is_said_with_advice(
    tmp_path: Path, changes: dict[str, object], lacking: set[str], words: str
) -> None:
    """For `plan --explain`; and the whole can travel."""
    told = topology_of(missing(facts(**changes)), PREFERRED, tmp_path, (), {"direct": 7})
    assert {kind.value for kind in told.lacking} == lacking
    assert all(words in each.needed for each in told.lacking.values())
    assert told.takes == {TransportKind.DIRECT: 7}
    assert told.supports_deferred_digests
    assert told.files
    assert told.folder
    sent = msgspec.structs.replace(told, request=RequestId("k"))
    assert codec.TO_COORDINATOR.decode(codec.TO_COORDINATOR.encode(sent)) == (sent, None)


def test_what_the_sidecar_may_not_use_is_its_own_setting(tmp_path: Path) -> None:
    """And not the server's fault."""
    told = topology_of(missing(facts(loaders=(LOADER,))), (TransportKind.DISK,), tmp_path, (), {})
    assert "setting transports" in told.lacking[TransportKind.DIRECT].found


def test_interfaces_are_those_that_others_may_come_through() -> None:
    """No loopback, no addresses of the link alone."""
    for each in network_interfaces():
        assert each.addresses
        assert not any(address.startswith(("127.", "fe80:")) or address == "::1" for address in each.addresses)


def test_a_survey_sees_what_the_environment_lets_it_or_says_why_not() -> None:
    """In a process of its own: where there is no driver it ends with one line."""
    found: object
    try:
        found = gpus_visible_to({"CUDA_VISIBLE_DEVICES": ""})
    except GpuSurveyFailed as failed:
        found = str(failed)
    assert found == () or "CUDA driver" in str(found) or "cuInit" in str(found), found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_open_what_lies_where_the_first_of_them_is(device: str) -> None:
    """A server of this host that shares our folders, and our IPC namespace."""
    places = placed("cpu", "cpu") if device == "cpu" else placed("gpu-a", "gpu-b", reach={"gpu-a": PeerAccess.P2P})
    found = facts(device=device, process=(os.getpid(), 1))
    assert opened_by(found, places) == places[0].device
    assert opened_by(found, ()) == "", "where they are is not known"
    assert opened_by(msgspec.structs.replace(found, process=None), places) == "", "it may be elsewhere"
    assert opened_by(msgspec.structs.replace(found, process=(2**22 + 1, 1)), places) == "", "it has ended"
    assert opened_by(msgspec.structs.replace(found, pp=2), places) == ""


def placed(*devices: str, reach: dict[str, PeerAccess] | None = None) -> tuple[ProcessLocation, ...]:
    """Workers; `reach` is the last one's, all others reach the first one's GPU over NVLink."""
    ways: list[dict[str, PeerAccess] | None] = [{devices[0]: PeerAccess.NVLINK}] * (len(devices) - 1) + [reach]
    workers = enumerate(zip(devices, ways, strict=True))
    return tuple(
        ProcessLocation(rank=rank, host=host_identity(), device=each, reach=way) for rank, (each, way) in workers
    )


@pytest.mark.parametrize(
    ("devices", "reach", "opens"),
    [
        (("gpu-a",), {}, "gpu-a"),
        (("gpu-a", "gpu-b"), {"gpu-a": PeerAccess.NVLINK}, "gpu-a"),
        (("gpu-a", "gpu-b"), {"gpu-a": PeerAccess.NONE}, ""),
        (("gpu-a", "gpu-b", "gpu-c"), {"gpu-a": PeerAccess.NONE, "gpu-b": PeerAccess.NVLINK}, ""),
        (("gpu-a", "gpu-b"), {}, ""),
        (("gpu-a", "gpu-b"), None, ""),
    ],
    ids=["one", "linked", "not peers", "not the last", "sees its own alone", "unknown"],
)
def test_a_worker_that_does_not_reach_the_first_one_s_gpu_is_given_nothing_there(
    devices: tuple[str, ...], reach: dict[str, PeerAccess] | None, opens: str
) -> None:
    """It would raise in SGLang's scheduler, which ends the server."""
    found = facts(device="cuda", process=(os.getpid(), 1), tp=len(devices))
    assert opened_by(found, placed(*devices, reach=reach)) == opens


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("ids", "same"),
    [((0, 0, 0, 0), True), ((1, 1, 1, 1), False), ((0, 0, 0, 1), False), ((1, 0, 0, 0), False), ((), False)],
    ids=["ours", "another's", "files by another's", "begun by another", "not said"],
)
def test_a_server_of_another_user_opens_nothing_though_root_looks_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, ids: tuple[int, ...], same: bool
) -> None:
    """What is shared is its owner's alone. `ids`: how far the server's are from ours."""
    (tmp_path / "7/ns").mkdir(parents=True)
    (tmp_path / "7/root").symlink_to("/")
    (tmp_path / "7/ns/ipc").symlink_to("/proc/self/ns/ipc")
    monkeypatch.setattr(whereabouts, "_PROC", tmp_path)
    write_status(tmp_path / "7", *(os.geteuid() + each for each in ids))
    assert opened_by(facts(device=device, process=(7, 1)), placed("here")) == ("here" if same else "")


def write_status(process: Path, *ids: int) -> None:
    """As the kernel has it, as far as it is read."""
    lines = [
        "Name:\tpython3",
        "Umask:\t0022",
        *(["Uid:\t" + "\t".join(map(str, ids))] if ids else []),
        "Gid:\t0\t0\t0\t0",
    ]
    (process / "status").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("device", "unlike"), [("cpu", "root"), ("cuda", "ns")])
def test_an_engine_that_shares_no_folder_or_namespace_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, unlike: str
) -> None:
    """A container of its own: the server's files are others under the same names."""
    (tmp_path / "7/root/dev/shm").mkdir(parents=True)
    (tmp_path / "7/root/tmp").mkdir()
    (tmp_path / "7/ns").mkdir()
    (tmp_path / "7/ns/ipc").touch()
    write_status(tmp_path / "7", *[os.geteuid()] * 4)
    assert (tmp_path / "7" / unlike).exists()
    monkeypatch.setattr(whereabouts, "_PROC", tmp_path)
    places = (ProcessLocation(rank=0, host=host_identity(), device=device),)
    assert opened_by(facts(device=device, process=(7, 1)), places) == ""


def test_what_was_found_of_one_launch_says_nothing_of_the_next() -> None:
    """That may run on another GPU."""
    server = SGLangServer("http://127.0.0.1:1")
    server._facts = facts(identity="first")
    assert server.opens == ""
    server.set_reachable_memory("first", "gpu-a")
    assert server.opens == "gpu-a"
    server._facts = facts(identity="second")
    assert server.opens == ""
