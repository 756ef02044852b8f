"""The watch over a listed server: what another party does shows, and what the sidecar does itself never looks so."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from weightbus.control.protocol import Digest, HeldVersion
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.machine.events import ServerFound, ServerGone, ServerWatched
from weightbus.engine_agent.sidecar import server_watch
from weightbus.engine_agent.sidecar.driver import ServerMonitor
from weightbus.engine_agent.sidecar.server_watch import Calm, DigestFile, ServerWatch, WeightSampler

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang


class Bench:
    """A server, the watch over it, and what was reported."""

    def __init__(self, folder: Path, version: str = "0.5.23") -> None:
        self.fake = FakeSGLang(tiny_model.write(folder / "a", 1), version).start()
        self.other = tiny_model.write(folder / "b", 2)
        self.server = SGLangServer(self.fake.url)
        self.identity = self.server.identify(5).identity
        self.loads, self.operations, self.doing = 0, 0, False
        self.held: HeldVersion | None = None
        self.told: list[ServerWatched] = []
        self.file = DigestFile(folder / "e0.digests.json")
        self.begin()

    def begin(self) -> None:
        """A life of the sidecar."""
        self.loads = 0
        self.sampler = WeightSampler(self.server, lambda: (self.loads, (0, [])), self.file)
        self.watch = ServerWatch(self.server, self.calm, self.told.append, 5.0, self.sampler)

    def begin_anew(self) -> None:
        """Another life, once what this one has begun to write is written."""
        self.file.close()
        self.file = DigestFile(self.file._path)
        self.begin()

    def calm(self) -> Calm | None:
        return None if self.doing else Calm(self.operations, 0, self.identity, serves=True, held=self.held)

    def look(self) -> ServerWatched:
        self.watch.look(5)
        return self.told.pop()

    def rotation(self) -> list[str]:
        """What shows in one turn over all parts."""
        return [self.look().changed for _ in range(8)]

    def close(self) -> None:
        self.server.close()
        self.fake.stop()
        self.file.close()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look is at the weights, too."""
    monkeypatch.setattr(server_watch, "_SAMPLES_COST", 1e9)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """The newest dialect."""
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_server_that_is_left_alone_shows_nothing(bench: Bench) -> None:
    """Also after a version of this sidecar's own: digests of before it are forgotten (N57)."""
    assert not any(bench.rotation())
    bench.loads += 1
    bench.fake.update_weights_from_disk({"model_path": str(bench.other)})
    assert not any(bench.rotation())
    assert bench.look() == ServerWatched(0, generates=True)


@pytest.mark.parametrize("version", ["0.5.23"])
def test_weights_of_another_party_show_at_the_next_look(bench: Bench, version: str) -> None:
    """Under the same label (F35); and so does memory that was released and taken again."""
    assert version
    bench.look()
    bench.fake.update_weights_from_disk({"model_path": str(bench.other)})
    assert "another party changed its weights" in bench.look().changed
    bench.loads += 1
    bench.rotation()
    bench.fake.release_memory_occupation({"tags": ["weights"]})
    bench.fake.resume_memory_occupation({"tags": ["weights"]})
    assert any(bench.rotation())


def test_one_spoiled_tensor_shows_in_one_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look digests one layer; in a turn all of them are seen (N57)."""
    bench.look()
    asked: list[tuple[str, ...]] = []
    sample = bench.server.sample

    def note(without: Sequence[str], deadline_s: float) -> list[dict[str, str]]:
        asked.append(tuple(without))
        return sample(without, deadline_s)

    monkeypatch.setattr(bench.server, "sample", note)
    bench.rotation()
    assert len(set(asked)) > 2
    assert all(asked)
    bench.fake.weights.spoil()
    assert any(bench.rotation())


def version_of(number: int) -> HeldVersion:
    return HeldVersion(version=number, manifest=Digest("0" * 64), table=Digest(f"{number:064x}"))


@pytest.mark.parametrize("held", [None, version_of(1)], ids=["launch weights", "version"])
def test_weights_that_were_replaced_between_two_lives_show(bench: Bench, held: HeldVersion | None) -> None:
    """Right before the last life died, or while no agent ran, under the same label (N57, F35)."""
    bench.held, bench.loads = held, int(held is not None)
    assert not any(bench.rotation())
    bench.begin_anew()
    assert not any(bench.rotation()), "nothing has changed"
    bench.fake.update_weights_from_disk({"model_path": str(bench.other)})
    bench.begin_anew()
    assert "another party changed its weights" in bench.look().changed
    bench.begin_anew()
    assert "another party changed its weights" in bench.look().changed, "what is wrong is not kept as right"


@pytest.mark.parametrize("anew", ["version", "launch", "reception", "torn"])
def test_digests_of_other_weights_are_not_taken_from_an_earlier_life(bench: Bench, anew: str) -> None:
    """Of another version or launch, of before a version that this life took, or of a torn file: a false alarm (N57)."""
    bench.held, bench.loads = version_of(1), 1
    bench.rotation()
    bench.fake.update_weights_from_disk({"model_path": str(bench.other)})
    bench.begin_anew()
    match anew:
        case "version":
            bench.held = version_of(2)
        case "launch":
            bench.fake.replace()
            bench.fake.update_weights_from_disk({"model_path": str(bench.other)})
            bench.identity = bench.server.identify(5).identity
        case "reception":
            bench.loads = 1
        case _:
            bench.file._path.write_bytes(bench.file._path.read_bytes()[:-9])
            bench.begin_anew()
    assert not any(bench.rotation())


def test_a_look_that_an_operation_overlaps_is_not_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have met a half-loaded version (N57)."""
    sample = bench.server.sample

    def overlapped(without: Sequence[str], deadline_s: float) -> list[dict[str, str]]:
        bench.operations += 1
        return sample(without, deadline_s)

    monkeypatch.setattr(bench.server, "sample", overlapped)
    for _ in range(4):
        bench.watch.look(5)
    bench.file.close()
    assert bench.file.read() is None


def test_a_label_of_another_party_shows(bench: Bench) -> None:
    """Clients would be told a version that no process published here (F35)."""
    bench.fake.label = "77"
    assert "labeled '77' by another party, expected 'default'" in bench.look().changed


def test_a_pause_of_another_party_shows(bench: Bench) -> None:
    """Its weights are not asked for: they may be released (N57)."""
    bench.look()
    bench.fake.pause_generation({"mode": "retract"})
    bench.fake.lent.add("weights")
    assert bench.look() == ServerWatched(0, generates=False)


@pytest.mark.parametrize("when", ["before", "meanwhile", "begun anew"])
def test_a_look_that_an_operation_overlaps_tells_nothing(
    bench: Bench, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar's own label, pause or load would look like another party's (N57)."""
    bench.doing = when == "before"
    look = bench.server.look

    def late(deadline_s: float) -> object:
        seen = look(deadline_s)
        bench.doing = when == "meanwhile"
        bench.operations += when == "begun anew"
        return seen

    monkeypatch.setattr(bench.server, "look", late)
    bench.fake.label = "8"
    bench.watch.look(5)
    assert not bench.told


def test_a_launch_behind_a_proxy_is_found_without_a_version_in_between(bench: Bench) -> None:
    """Both launches have the label of a launch, and no process of it is seen (F33)."""
    told: queue.SimpleQueue[ServerFound | ServerGone] = queue.SimpleQueue()
    monitor = ServerMonitor(bench.server, told.put, watch=bench.watch)
    monitor.poll()
    first = told.get_nowait()
    bench.fake.replace()
    bench.watch._looked_at = float("-inf")
    monitor.poll()
    second = told.get_nowait()
    assert isinstance(first, ServerFound)
    assert isinstance(second, ServerFound)
    assert first.identity != second.identity


def test_an_earlier_launch_that_is_back_is_another_server(bench: Bench) -> None:
    """A balancer leads there: for half a minute of one answer nothing is believed of that address (F34)."""
    told: queue.SimpleQueue[ServerFound | ServerGone] = queue.SimpleQueue()
    monitor = ServerMonitor(bench.server, told.put, watch=bench.watch)
    seeds = {}
    for turn in ("a", "b", "a"):
        bench.fake.seed = seeds.setdefault(turn, len(seeds))
        bench.watch._looked_at = float("-inf")
        monitor.poll()
    found = [told.get_nowait() for _ in range(3)]
    assert [type(each) for each in found] == [ServerFound, ServerFound, ServerGone]
    assert isinstance(found[2], ServerGone)
    assert "several servers answer at its address" in found[2].reason
    monitor.poll()
    assert isinstance(told.get_nowait(), ServerGone)
    monitor._several = monitor._several[0], 0.0
    monitor.poll()
    assert isinstance(told.get_nowait(), ServerFound)
