"""Live host memory, exported and opened by other processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from weightbus.dataplane.errors import ManifestError, NotExportable, PeerLost, StaleSession, TransferFailed
from weightbus.dataplane.memory import exports
from weightbus.dataplane.memory.export_map import ArenaParts, ArenaRegion, ExportedTensor, ExportMap, Region
from weightbus.dataplane.memory.exports import RegionExporter, RegionImporter
from weightbus.dataplane.processes.connections import Deadline, Frames

OPEN_S = 60.0


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[RegionExporter]:
    """Of one rank."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    made = RegionExporter(runtime, "c", 3)
    yield made
    made.close()


@pytest.fixture
def importer() -> Iterator[RegionImporter]:
    """Of one worker."""
    made = RegionImporter()
    yield made
    made.close()


def wait_until(condition: object, deadline_s: float = 60.0) -> None:
    assert callable(condition)
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_reader_sees_what_the_trainer_writes(exporter: RegionExporter, importer: RegionImporter) -> None:
    """The very memory, not a copy: views and parameters keep it, and later writes are seen."""
    weight = torch.nn.Parameter(torch.arange(64, dtype=torch.float32).view(8, 8))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    view = weight.detach()[2:]

    found = exporter.export([weight.detach(), view, torch.ones(3)])
    importer.open(exporter.address(), 3, exporter.generation, [0], OPEN_S)
    seen = importer.region(3, 0).view(torch.float32)

    assert [region.nbytes for region in found.regions] == [256 + 64]
    assert [(place.region, place.offset) for place in found.places] == [(0, 0), (0, 64), (0, 256)]
    assert seen[:64].tolist() == list(range(64))
    weight.sum().backward()
    optimizer.step()
    assert seen[:64].tolist() == list(range(-1, 63))
    assert view[0, 0] == 15


def test_generations_change_with_the_memory_only(exporter: RegionExporter, importer: RegionImporter) -> None:
    """The same storages again are the same generation; another is refused under the old number."""
    first, second = torch.zeros(8), torch.zeros(8)

    exporter.export([first])
    exporter.export([first])
    assert exporter.generation == 1
    importer.open(exporter.address(), 3, 1, [0], OPEN_S)
    exporter.export([first, second])

    assert exporter.generation == 2
    late = RegionImporter()
    with pytest.raises(StaleSession, match="epoch 2"):
        late.open(exporter.address(), 3, 1, [0], OPEN_S)
    late.close()
    importer.open(exporter.address(), 3, 2, [1], OPEN_S)
    assert importer.region(3, 1).numel() == 64


def test_memory_that_was_replaced_lives_while_it_is_read(exporter: RegionExporter, importer: RegionImporter) -> None:
    """A trainer may free what it exported; a reader of that generation still has it (F11)."""
    exporter.export([torch.full((8,), 7.0)])
    importer.open(exporter.address(), 3, 1, [0], OPEN_S)
    exporter.export([torch.zeros(8)])

    assert importer.region(3, 0).view(torch.float32)[:8].tolist() == [7.0] * 8


def test_what_a_reader_has_open_is_held_for_it(exporter: RegionExporter, importer: RegionImporter) -> None:
    """Replaced or not: only the exporter keeps a GPU's memory from being given to another tensor."""
    exporter.export([torch.zeros(8)])
    importer.open(exporter.address(), 3, 1, [0], OPEN_S)
    (granted,) = exporter._held.values()

    exporter.export([torch.ones(8)])

    assert exporter._server is not None
    assert granted not in exporter._held.values()
    assert [reader for reader in exporter._server.readers if granted in reader.regions]
    importer.close()
    wait_until(lambda: not exporter.readers)


def test_many_regions_are_opened_in_batches(exporter: RegionExporter, importer: RegionImporter) -> None:
    """More than one packet can carry."""
    tensors = [torch.full((4,), float(number)).share_memory_() for number in range(300)]
    exporter.export(tensors)

    importer.open(exporter.address(), 3, 1, range(300), OPEN_S)

    assert [importer.region(3, at).view(torch.float32)[0].item() for at in (0, 127, 128, 299)] == [0, 127, 128, 299]


def test_an_exporter_that_closes_hangs_up(tmp_path: Path) -> None:
    """Closing waits for no reader; the reader notices, and what it has mapped stays valid."""
    exporter, importer = RegionExporter(tmp_path / "run", "c", 0), RegionImporter()
    exporter.export([torch.full((8,), 3.0)])
    importer.open(exporter.address(), 0, 1, [0], OPEN_S)
    importer.check()

    exporter.close()

    with pytest.raises(PeerLost):
        importer.check()
    assert importer.region(0, 0).view(torch.float32)[:8].tolist() == [3.0] * 8
    importer.close()
    exporter.close()


def test_a_thread_that_serves_no_more_holds_no_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left, with a line in the log."""
    released = threading.Event()
    monkeypatch.setattr(exports, "_END_S", 0.2)
    monkeypatch.setattr(exports._LeaseServer, "_turn_away", lambda _: released.wait(OPEN_S))
    exporter = RegionExporter(tmp_path / "run", "c", 0)
    exporter.export([torch.full((8,), 3.0)])
    began = time.monotonic()
    exporter.close()
    assert time.monotonic() - began < OPEN_S / 2
    assert "has not ended within 0.2 s" in caplog.text
    released.set()


def test_an_exporter_that_does_not_answer_leaves_nothing_behind(tmp_path: Path, importer: RegionImporter) -> None:
    """A trainer dies while its successor is waited for: what was open of it is closed, and not asked again."""
    first = RegionExporter(tmp_path / "run", "c", 0)
    first.export([torch.zeros(8)])
    address = first.address()
    importer.open(address, 0, 1, [0], OPEN_S)
    first.close()

    for _ in range(2):
        with pytest.raises(PeerLost, match="does not answer"):
            importer.open(address, 0, 1, [0], OPEN_S)

    assert importer.alive()
    importer.check()
    second = RegionExporter(tmp_path / "run", "c", 0)
    second.export([torch.full((8,), 2.0)])
    importer.open(second.address(), 0, 1, [0], OPEN_S)
    assert importer.region(0, 0).view(torch.float32)[:8].tolist() == [2.0] * 8
    second.close()


def test_memory_of_another_user_is_not_opened(
    exporter: RegionExporter, importer: RegionImporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that listens at that name may not be the trainer."""
    exporter.export([torch.zeros(8)])
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)

    with pytest.raises(PeerLost, match=f"belongs to user {own}, expected {own + 1}"):
        importer.open(exporter.address(), 3, 1, [0], OPEN_S)


def test_another_users_reader_is_hung_up_on(exporter: RegionExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given nothing, however well it asks."""
    exporter.export([torch.zeros(8)])
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    packet = exports.READER.encode(exports.Ask(generation=1, regions=(0,)))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(OPEN_S)
        stranger.connect(exporter.address())

        with contextlib.suppress(ConnectionError):  # it may have hung up by then
            stranger.send(struct.pack("<Q", len(packet)) + packet)
            assert stranger.recv(4096) == b""

    wait_until(lambda: not exporter.readers)


def test_an_exporter_that_died_is_noticed(tmp_path: Path, importer: RegionImporter) -> None:
    """SIGKILL, in the middle of anything: the reader's next look says so, and its mapping stays valid (F12)."""
    program = textwrap.dedent(f"""
        import sys, torch
        from pathlib import Path
        from weightbus.dataplane.memory.exports import RegionExporter
        exporter = RegionExporter(Path({str(tmp_path / "run")!r}), "c", 0)
        exporter.export([torch.full((8,), 5.0)])
        print(exporter.address(), flush=True)
        sys.stdin.read()
    """)
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    importer.open(trainer.stdout.readline().strip(), 0, 1, [0], OPEN_S)
    importer.check()

    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert trainer.stdin is not None
    trainer.stdin.close()

    def noticed() -> bool:
        try:
            importer.check()
        except PeerLost:
            return True
        return False

    wait_until(noticed)
    assert importer.region(0, 0).view(torch.float32)[:8].tolist() == [5.0] * 8


def test_an_exporter_that_died_is_noticed_while_its_child_lives(tmp_path: Path, importer: RegionImporter) -> None:
    """A child that was forked, as workers of data loaders are, holds the connection open: the process itself counts."""
    program = textwrap.dedent(f"""
        import os, sys, time, torch
        from pathlib import Path
        from weightbus.dataplane.memory.exports import RegionExporter
        exporter = RegionExporter(Path({str(tmp_path / "run")!r}), "c", 0)
        exporter.export([torch.full((8,), 5.0)])
        print(exporter.address(), flush=True)
        sys.stdin.readline()  # the connection is there
        if child := os.fork():
            print(child, flush=True)
        while True:
            time.sleep(1)
    """)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        importer.open(trainer.stdout.readline().strip(), 0, 1, [0], OPEN_S)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        child = int(trainer.stdout.readline())
        try:
            assert importer.alive()
            trainer.kill()
            wait_until(lambda: not importer.alive())
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_reader_that_died_holds_nothing_up(tmp_path: Path) -> None:
    """Its lease ends with it (F13)."""
    exporter = RegionExporter(tmp_path / "run", "c", 0)
    exporter.export([torch.zeros(8)])
    program = textwrap.dedent(f"""
        import os, signal
        from weightbus.dataplane.memory.exports import RegionImporter
        RegionImporter().open({exporter.address()!r}, 0, 1, [0], 60.0)
        os.kill(os.getpid(), signal.SIGKILL)
    """)

    subprocess.run([sys.executable, "-c", program], check=False)

    wait_until(lambda: not exporter.readers)
    exporter.close()


def test_a_reader_that_reads_no_answers_keeps_no_other_waiting(
    exporter: RegionExporter, importer: RegionImporter
) -> None:
    """It is hung up on as soon as an answer does not fit into its socket."""
    exporter.export([torch.zeros(8) for _ in range(128)])
    ask = exports.READER.encode(exports.Ask(generation=1, regions=tuple(range(128))))
    began = time.monotonic()
    for _ in range(6):
        silent = Frames.connect(exporter.address(), Deadline(OPEN_S))
        with pytest.raises(PeerLost):
            while True:
                silent.send(ask, Deadline(OPEN_S))
        silent.close()
    importer.open(exporter.address(), 3, exporter.generation, [0], OPEN_S)
    assert time.monotonic() - began < 4.0


def test_too_many_open_files_keep_no_processor_busy(
    exporter: RegionExporter, importer: RegionImporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that could not be accepted waits in the socket, and is tried again after a pause, not at once."""
    exporter.export([torch.ones(8)])
    until, tried, accept = time.monotonic() + 0.3, [0], socket.socket.accept

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        tried[0] += 1
        if time.monotonic() < until:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    importer.open(exporter.address(), 3, exporter.generation, [0], OPEN_S)
    assert tried[0] < 40


def test_memory_of_a_gpu_is_not_for_this_exporter(exporter: RegionExporter) -> None:
    """It says which memory it shares."""
    with pytest.raises(NotExportable, match="meta"):
        exporter.export([torch.empty(4, device="meta")])


ASK = exports.Ask(generation=1, regions=(0,))


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        exports.READER.encode(ASK)[:-1],
        exports.READER.encode(msgspec.structs.replace(ASK, regions=())),
        exports.READER.encode(msgspec.structs.replace(ASK, regions=(-1,))),
        exports.READER.encode(msgspec.structs.replace(ASK, regions=(0,) * 129)),
        exports.EXPORTER.encode(exports.Grant(generation=1, regions=(exports.GrantedRegion(0, 4),))),
    ],
)
def test_what_is_no_request_is_hung_up_on(exporter: RegionExporter, packet: bytes) -> None:
    """Kind, length and numbers are checked before anything is granted."""
    exporter.export([torch.zeros(8)])
    frames = Frames.connect(exporter.address(), Deadline(OPEN_S))
    frames.send(packet, Deadline(OPEN_S))
    with pytest.raises(PeerLost):
        frames.receive(Deadline(OPEN_S), "nothing")
    frames.close()
    wait_until(lambda: not exporter.readers)


@pytest.mark.parametrize(
    "region",
    [
        {"region": 0, "nbytes": 0},
        {"region": 0, "nbytes": 1 << 49},
        {"region": 0, "nbytes": 8, "uuid": "GPU-12345678"},
        {"region": 0, "nbytes": 8, "uuid": "GPU-12345678", "handle": b"h" * 63},
        {"region": 0, "nbytes": 8, "uuid": "../1", "handle": b"h" * 64},
        {"region": 0, "nbytes": 8, "handle": b"h" * 64},
    ],
)
def test_a_grant_out_of_bounds_is_refused(region: dict[str, object]) -> None:
    """Sizes, names and handles that no exporter writes."""
    good = {"region": 9, "nbytes": 8, "uuid": "GPU-12345678", "handle": b"h" * 64}
    message = {"type": "Grant", "generation": 7, "regions": [good]}
    found = exports.READER.decode(msgspec.msgpack.encode(message))
    assert found == exports.Grant(generation=7, regions=(exports.GrantedRegion(9, 8, "GPU-12345678", b"h" * 64),))
    with pytest.raises(TransferFailed, match="not a message"):
        exports.READER.decode(msgspec.msgpack.encode({**message, "regions": [region]}))


def test_memory_on_another_gpu_is_a_peers(
    exporter: RegionExporter, importer: RegionImporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the GPU that was exported: the driver calls both the reader's own, once they are opened."""
    exporter.export([torch.zeros(8)])
    importer.open(exporter.address(), 3, 1, [0], OPEN_S)
    assert not importer.remote(3, 0)
    monkeypatch.setattr(exports, "device_name", lambda _: "mine")
    opened = importer._exporters[3]
    monkeypatch.setattr(opened.__class__, "_opened", lambda _, granted: torch.zeros(granted.nbytes, dtype=torch.uint8))
    handle = b"h" * 64
    regions = tuple(exports.GrantedRegion(at, 64, uuid, handle) for at, uuid in ((1, "mine"), (2, "its")))
    grant = exports.Grant(generation=1, regions=regions)

    opened._take(grant, (1, 2), [])

    assert [importer.remote(3, region) for region in (1, 2)] == [False, True]


def test_descriptors_are_closed_behind_mappings(exporter: RegionExporter, importer: RegionImporter) -> None:
    """Opening and closing leaves no descriptor open in the reader."""
    exporter.export([torch.zeros(8)])
    importer.open(exporter.address(), 3, 1, [0], OPEN_S)
    before = descriptors()

    for _ in range(5):
        importer.close()
        importer.open(exporter.address(), 3, 1, [0], OPEN_S)

    wait_until(lambda: descriptors() <= before)


MADE = ExportMap(
    0,
    "here",
    (Region(100, "cpu"), Region(4096, "cpu")),
    (ExportedTensor(0, 0), ExportedTensor(1, 64)),
    ArenaParts(1, (8, 32), 64),
)


@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.lists(
        st.tuples(st.sampled_from([-1, 0, 1, 2, 3, 1 << 63]), st.sampled_from([-1, 0, 3, 8, 9, 1 << 63])), max_size=4
    ),
)
def test_maps_with_tensors_outside_of_their_regions_are_refused(
    sizes: list[int], places: list[tuple[int, int]]
) -> None:
    """Whatever the numbers."""
    regions = tuple(Region(size, "cpu") for size in sizes)
    blob = ExportMap(0, "h", regions, tuple(ExportedTensor(*each) for each in places)).encode()
    if all(0 <= region < len(sizes) and 0 <= offset < sizes[region] for region, offset in places):
        columns = ExportMap.decode(blob).columns()
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == places
        return
    with pytest.raises(ManifestError, match="outside of its region"):
        ExportMap.decode(blob)


def test_parts_travel_with_their_map() -> None:
    """In bytes of their region, too; a map without any is what it was before there were parts."""
    found = ExportMap.decode(MADE.encode())

    assert found == MADE
    assert found.made == ArenaRegion(1, 64, (72, 96), 128)
    assert ExportMap(0, "here", MADE.regions, MADE.places).made is None
    assert b"parts" not in ExportMap(0, "here", MADE.regions, MADE.places).encode()


@pytest.mark.parametrize(
    "parts",
    [
        ArenaParts(2, (8,), 64),
        ArenaParts(-1, (8,), 64),
        ArenaParts(1, (), 64),
        ArenaParts(1, tuple(range(1, 66)), 128),
        ArenaParts(1, (8, 8), 64),
        ArenaParts(1, (0, 8), 64),
        ArenaParts(1, (8, 5000), 64),
        ArenaParts(1, (8,), 60),
        ArenaParts(1, (8,), 4096 - 64),
        ArenaParts(1, (8,), -128),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: ArenaParts) -> None:
    """A reader would read other memory by them."""
    wrong = msgspec.structs.replace(MADE, parts=parts)
    with pytest.raises(ManifestError, match="part"):
        ExportMap.decode(wrong.encode())
