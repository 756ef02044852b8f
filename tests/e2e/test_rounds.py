"""Whole rounds on real parts: Megatron ranks, the bus, SGLang servers with one and with two tensor-parallel workers.

The oracle is transformers: after every round each server must give, token by token, what transformers gives with the
checkpoint that the trainer was filled from.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weightbus.dataplane.transports.interface import JOIN_S
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.demo.child_processes import Programs
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

from ..kit.flat_module import FlatModule
from .fleet import Fleet, poll
from .models import Answers, ask_oracle, check_answers, write_checkpoints
from .plain_rank import read

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

PROMPTS = [[5, 17, 33, 64, 101, 7], [400, 3, 9], [77, 78, 79, 80], [250, 1, 250, 2, 250], [11], [301, 302]]
SEEDS = 7


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint a seed."""
    return write_checkpoints(tmp_path_factory.mktemp("fleet"), SEEDS)


@pytest.fixture(scope="module")
def expected(checkpoints: Path) -> dict[int, Answers]:
    """What each seed must answer, by transformers; no two seeds answer alike."""
    return ask_oracle(checkpoints, SEEDS, PROMPTS)


@pytest.fixture(scope="module")
def fleet(checkpoints: Path, expected: dict[int, Answers]) -> Iterator[Fleet]:
    """A coordinator, a TP1 and a TP2 engine, and a trainer."""
    del expected  # computed first: an oracle that fails should not wait for servers
    with Programs(checkpoints) as programs:
        deployment = Fleet(checkpoints, programs)
        try:
            deployment.start_coordinator()
            deployment.start_engine("one", tp=1)
            deployment.start_engine("two", tp=2)
            deployment.start_trainer()
            deployment.wait_ready("one", "two")
            yield deployment
        finally:
            deployment.close()


def _serves(fleet: Fleet, name: str, answers: Answers, label: str) -> None:
    check_answers(fleet, name, PROMPTS, answers, label)


def _recordings(fleet: Fleet, name: str) -> tuple[int, int]:
    """How often the workers of a server recorded their loader, and how often they were asked for what they had."""
    log = (fleet.folder / f"server-{name}.log").read_text(errors="replace")
    return log.count("weightbus: recorded"), log.count("recorded with these tensors before")


def _outcomes(report: dict[str, Any]) -> dict[str, str]:
    assert "error" not in report, report["error"]
    return {engine["engine"]: engine["outcome"] for engine in report["engines"]}


def test_before_the_first_version_engines_serve_what_they_were_started_with(
    fleet: Fleet, expected: dict[int, Answers]
) -> None:
    """Nothing was committed yet: both engines are ready with the weights of their launch."""
    assert fleet.channel()["committed"] is None
    for name in ("one", "two"):
        _serves(fleet, name, expected[0], "default")


def test_loaders_are_recorded_before_the_coordinator_hears_of_the_engines(fleet: Fleet) -> None:
    """By the files of the served checkpoint. The servers answer after it as before, says the test above.

    Where the CPU has AMX, SGLang packs weights for it after each call of a loader: the sidecar says why it makes none.
    """
    packs = "amx_tile" in Path("/proc/cpuinfo").read_text()
    for name, workers in (("one", 1), ("two", 2)):
        said = (fleet.folder / f"sidecar-{name}.log").read_text()
        joined = said.rfind('"joined"')  # at first without its server, where that took its time to start
        if packs:
            assert -1 < said.find("lays weights out anew") < joined, said
            assert _recordings(fleet, name) == (0, 0)
            continue
        assert -1 < said.find("recorded_ahead") < joined, said
        assert "not_recorded_ahead" not in said
        assert _recordings(fleet, name) == (workers, 0)


@pytest.mark.parametrize(
    ("version", "transport", "bucket_bytes"),
    [(1, "local", 1 << 20), (2, "local", 20_000), (3, "distributed", 50_000), (4, "disk", 1 << 20)],
)
def test_a_published_version_is_served_bit_for_bit(
    fleet: Fleet, expected: dict[int, Answers], version: int, transport: str, bucket_bytes: int
) -> None:
    """By every transport, both servers give the tokens of the trainer's weights, under the published version."""
    fleet.publish(version, version, transport, bucket_bytes=bucket_bytes)
    report = fleet.answer()

    assert _outcomes(report) == {"one": "committed", "two": "committed"}
    assert {engine["verified_by"] for engine in report["engines"]} == {"live-digest"}
    for name in ("one", "two"):
        _serves(fleet, name, expected[version], str(version))
    channel = fleet.channel()
    assert channel["committed"]["version"] == version
    assert [engine["lag"] for engine in channel["engines"].values()] == [0, 0]


def test_an_engine_killed_mid_round_stops_no_victim_and_comes_back_verified(
    fleet: Fleet, expected: dict[int, Answers]
) -> None:
    """The survivor serves the new version; the victim's next launch loads it from the files that the trainer kept.

    It is verified and listed without another round, and takes part in the next one.
    """
    fleet.publish(5, 5, "local", bucket_bytes=20_000, hold_at=2, save_every=1)
    assert fleet.answer()["held"] == 2
    fleet.kill("server-two")
    fleet.tell("go on")
    report = fleet.answer()

    outcomes = _outcomes(report)
    assert outcomes["one"] == "committed"
    assert outcomes["two"] in {"lost", "quarantined"}
    _serves(fleet, "one", expected[5], "5")
    fleet.wait_ready("one")

    poll("its sidecar to notice", lambda: not fleet.sidecar("two")["engine"]["up"])
    fleet.start_server("two")
    poll("the sidecar to see its new server", lambda: fleet.sidecar("two")["engine"]["up"])
    fleet.wait_ready("one", "two")
    _serves(fleet, "two", expected[5], "5")
    fleet.publish(6, 6, "local")
    assert _outcomes(fleet.answer()) == {"one": "committed", "two": "committed"}
    fleet.wait_ready("one", "two")
    for name in ("one", "two"):
        _serves(fleet, name, expected[6], "6")


def test_a_restarted_coordinator_knows_what_was_committed(fleet: Fleet) -> None:
    """After SIGKILL it lists the same version and the same ready engines, and refuses to go back."""
    fleet.kill("coordinator")
    fleet.start_coordinator()
    fleet.wait_ready("one", "two")
    assert fleet.channel()["committed"]["version"] == 6
    fleet.publish(5, 5, "local")

    answer = fleet.answer()

    assert "committed is 6" in answer["error"]
    assert fleet.channel()["committed"]["version"] == 6


@pytest.fixture(scope="class")
def module(checkpoints: Path) -> FlatModule:
    """What is trained: the parameters of a checkpoint."""
    return FlatModule(read(checkpoints, 0))


@pytest.fixture(scope="class")
def agent(fleet: Fleet, module: FlatModule) -> Iterator[TrainerAgent]:
    """A trainer in this process, which offers its memory and nothing else."""
    source = HFModuleSource(module, model="Qwen3ForCausalLM")
    with TrainerAgent.connect(
        source, channel="e2e", coordinator=fleet.coordinator, transport=("direct",), keys=fleet.keys, environ={}
    ) as connected:
        yield connected


class TestDirect:
    """A trainer that opens its memory leaves with its class: its name is the other trainer's too."""

    @pytest.mark.parametrize(("version", "seed"), [(7, 1), (8, 3), (9, 2)])
    def test_direct_rounds_copy_out_of_the_trainers_own_memory(  # noqa: PLR0917 - fixtures
        self,
        fleet: Fleet,
        expected: dict[int, Answers],
        module: FlatModule,
        agent: TrainerAgent,
        version: int,
        seed: int,
    ) -> None:
        """This process trains; the servers' workers read its parameters where they are, and both servers serve them.

        The oracles are the stock path's: transformers' tokens, and SGLang's own checksum of the live weights.
        """
        module.load_weights(read(fleet.folder, seed).items())

        report = agent.publish(version)

        assert {(each.engine, each.outcome, each.transport, each.verified_by) for each in report.engines} == {
            ("one", "committed", "direct", "live-digest"),
            ("two", "committed", "direct", "live-digest"),
        }
        for name in ("one", "two"):
            _serves(fleet, name, expected[seed], str(version))
        assert _recordings(fleet, "one") == (1, 0), "its loader was recorded, or asked for, in a round"


def test_megatron_ranks_are_read_where_they_are(fleet: Fleet, expected: dict[int, Answers]) -> None:
    """No bucket is made; SGLang's own checksums are those that the stock path gave for the same weights."""
    fleet.publish(10, 5, "local")
    assert _outcomes(fleet.answer()) == {"one": "committed", "two": "committed"}
    stock = {name: fleet.checksums(name) for name in ("one", "two")}

    for version, seed in ((11, 6), (12, 5)):
        fleet.publish(version, seed, "direct")
        report = fleet.answer()
        assert _outcomes(report) == {"one": "committed", "two": "committed"}
        assert {(each["transport"], each["verified_by"]) for each in report["engines"]} == {("direct", "live-digest")}
        assert "assemble" not in report["seconds"]
        for name in ("one", "two"):
            _serves(fleet, name, expected[seed], str(version))
        assert ({name: fleet.checksums(name) for name in ("one", "two")} == stock) is (seed == 5)


def test_megatron_ranks_send_to_every_worker_what_it_stores(fleet: Fleet, expected: dict[int, Answers]) -> None:
    """Over TCP, out of the ranks' memories and into the parameters of TP1 and TP2; the second time beside them.

    The trainer's ranks are processes that say nothing to the servers but over the group.
    """
    for version, seed in ((13, 6), (14, 5)):
        fleet.publish(version, seed, "sends")
        report = fleet.answer()
        assert _outcomes(report) == {"one": "committed", "two": "committed"}
        assert {(each["transport"], each["verified_by"]) for each in report["engines"]} == {("sends", "live-digest")}
        assert "assemble" not in report["seconds"]
        for name in ("one", "two"):
            _serves(fleet, name, expected[seed], str(version))


@pytest.mark.parametrize(
    ("version", "victim", "transport"),
    [(15, "sidecar", "local"), (17, "sidecar", "distributed"), (19, "server", "direct")],
)
def test_an_engine_lost_before_it_connects_is_not_waited_for(
    fleet: Fleet, expected: dict[int, Answers], version: int, victim: str, transport: str
) -> None:
    """No party waits `JOIN_S` for it, no retry is needed for that, and the victim comes back verified."""
    seed = version % SEEDS
    fleet.publish(version, seed, transport, hold_at=0, redrives=0)
    assert fleet.answer()["held"] == 0
    fleet.kill(f"{victim}-two")
    fleet.tell("go on")
    report = fleet.answer()

    assert report["seconds"]["transfer"] < JOIN_S
    assert _outcomes(report) == {"one": "committed", "two": "lost" if victim == "sidecar" else "quarantined"}
    _serves(fleet, "one", expected[seed], str(version))
    fleet.wait_ready("one")

    if victim == "server":
        poll("its sidecar to notice", lambda: not fleet.sidecar("two")["engine"]["up"])
    (fleet.start_sidecar if victim == "sidecar" else fleet.start_server)("two")
    poll(
        "the victim to be there again",
        lambda: fleet.sidecar("two")["connected"] and fleet.sidecar("two")["engine"]["up"],
    )
    assert fleet.channel()["ready"] == [fleet.engines["one"].url]
    fleet.publish(version + 1, version % SEEDS, transport)
    assert _outcomes(fleet.answer()) == {"one": "committed", "two": "committed"}
    fleet.wait_ready("one", "two")
    _serves(fleet, "two", expected[seed], str(version + 1))


class Client(threading.Thread):
    """Asks one engine for the first token to each of `PROMPTS`, over and over, until it is told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/generate"
        self.answers: list[tuple[int, int, str]] = []
        """Which prompt, the token, and the version that it says."""
        self.failure: Exception | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        try:
            with httpx.Client(timeout=120.0, trust_env=False) as http:
                for number, prompt in itertools.cycle(enumerate(PROMPTS)):
                    if self.stop.wait(0.02):
                        return
                    answer = http.post(self._url, json={"input_ids": prompt, "sampling_params": sampling})
                    found = answer.raise_for_status().json()
                    self.answers.append((number, found["output_ids"][0], found["meta_info"]["weight_version"]))
        except Exception as failure:  # noqa: BLE001 - the test reads it
            self.failure = failure


@pytest.fixture
def clients(fleet: Fleet) -> Iterator[dict[str, Client]]:
    """One for each engine; a test starts them."""
    made = {name: Client(engine.url) for name, engine in fleet.engines.items()}
    yield made
    for each in made.values():
        each.stop.set()
    for each in made.values():
        if each.is_alive():
            each.join(20)


def _answered_again(clients: dict[str, Client]) -> None:
    """Until every client has been answered to all prompts once more."""
    wanted = {name: len(client.answers) + len(PROMPTS) + 1 for name, client in clients.items()}
    poll("clients to be answered", lambda: all(len(clients[name].answers) >= wanted[name] for name in clients), 120)


def _killed_while_it_is_read(fleet: Fleet, version: int, *, half_copied: bool) -> int:
    """Process id of a trainer that died when all engines stood still for `version`; copies that were begun wait."""
    if half_copied:
        fleet.hold.touch()
    trainer = fleet.start_plain_trainer(version, 2, hold=not half_copied)
    if half_copied:
        poll("every worker to be half-way", lambda: len(list(fleet.folder.glob("hold.*"))) == 3)
        reads = [fleet.reads_memory_of(f"server-{name}", trainer.process.pid) for name in fleet.engines]
        assert reads == [[True], [True, True]]
    poll(
        "engines to stand", lambda: {each["state"] for each in fleet.channel()["engines"].values()} == {"transferring"}
    )
    fleet.kill("plain")
    return trainer.process.pid


@pytest.mark.parametrize(("version", "half_copied"), [(41, False), (44, True)])
def test_a_trainer_is_killed_while_its_memory_is_read(
    fleet: Fleet, expected: dict[int, Answers], clients: dict[str, Client], version: int, half_copied: bool
) -> None:
    """Before a byte is copied engines go on with what they had; half-new ones stand still until the next version.

    No client is given a token of other weights than those of the version that it is told, and every worker lets go of
    the dead trainer's memory.
    """
    fleet.publish(version, 1, "direct")
    assert _outcomes(fleet.answer()) == {"one": "committed", "two": "committed"}
    for client in clients.values():
        client.start()
    _answered_again(clients)

    pid = _killed_while_it_is_read(fleet, version + 1, half_copied=half_copied)
    stood = {name: len(client.answers) for name, client in clients.items()}
    for held in fleet.folder.glob("hold*"):
        held.unlink()
    poll("the dead trainer's lease to end", lambda: not fleet.channel()["lease"])
    assert fleet.channel()["committed"]["version"] == version
    if half_copied:
        poll(
            "both to be quarantined",
            lambda: {fleet.sidecar(name)["engine"]["weights"] for name in clients} == {"dirty"},
            60,
        )
        assert fleet.channel()["ready"] == []
    else:
        fleet.wait_ready("one", "two")
        _answered_again(clients)
        for name in clients:
            _serves(fleet, name, expected[1], str(version))
    for name in clients:
        server = f"server-{name}"
        poll("its memory to be let go of", lambda at=server: not any(fleet.reads_memory_of(at, pid)), 60)
    if half_copied:
        assert {name: len(client.answers) for name, client in clients.items()} == stood, "who asks is not answered"

    fleet.publish(version + 2, 3, "direct")
    assert _outcomes(fleet.answer()) == {"one": "committed", "two": "committed"}
    fleet.wait_ready("one", "two")
    _answered_again(clients)
    seeds = {str(version): 1, str(version + 2): 3}
    for name, client in clients.items():
        _serves(fleet, name, expected[3], str(version + 2))
        assert client.failure is None
        assert {label for _, _, label in client.answers} == set(seeds)
        clear = {label: [tokens[:1] for tokens in expected[seed]] for label, seed in seeds.items()}
        assert not [each for each in client.answers if clear[each[2]][each[0]] not in ([], [each[1]])]


def test_fsdp2_ranks_publish_live_and_from_a_snapshot_and_their_checkpoints_follow(
    fleet: Fleet, expected: dict[int, Answers]
) -> None:
    """Two ranks of fully_shard reach the same servers, read in place and from a snapshot; their checkpoints do too."""
    (fleet.folder / "watched").mkdir()
    reports = fleet.run_fsdp_ranks()
    for report, (version, mode) in zip(reports, [(101, "live"), (102, "snapshot")], strict=True):
        assert (report["version"], report["mode"]) == (version, mode)
        assert {each["transport"] for each in report["engines"]} == {"direct" if mode == "live" else "local"}
        assert _outcomes(report) == {"one": "committed", "two": "committed"}
    fleet.wait_ready("one", "two")
    for name in ("one", "two"):
        _serves(fleet, name, expected[4], "102")
    fleet.start_watcher(fleet.folder / "watched")
    poll("the checkpoint to be published", lambda: fleet.channel()["committed"]["version"] == 103)
    fleet.wait_ready("one", "two")
    for name in ("one", "two"):
        _serves(fleet, name, expected[5], "103")


def _there(fleet: Fleet, name: str) -> None:
    poll("the sidecar", lambda: fleet.sidecar(name)["connected"] and fleet.sidecar(name)["engine"]["up"])


def test_one_round_takes_the_way_that_suits_each_engine(fleet: Fleet, expected: dict[int, Answers]) -> None:
    """One engine reads the ranks' memory, one is sent to and one is in a broadcast group, and all commit together.

    The death of one in the middle stops nobody, and the next round brings it back. The last test: its last victim's
    server is not started again.
    """
    fleet.end("watcher")
    fleet.start_engine("three", tp=1)
    _there(fleet, "three")
    for version, way, joined in ((104, "local", ("--no-hands-on",)), (105, "sends", ())):
        for name, flags in (("two", (f"--transports={way}",)), ("three", ("--transports=distributed", *joined))):
            fleet.kill(f"sidecar-{name}")
            fleet.start_sidecar(name, *flags)
            _there(fleet, name)
        fleet.publish(version, version - 103, "any")
        report = fleet.answer()
        assert set(_outcomes(report).items()) == {(name, "committed") for name in ("one", "two", "three")}
        ways = {each["engine"]: (each["transport"], each["verified_by"]) for each in report["engines"]}
        assert ways == {
            "one": ("direct", "live-digest"),
            "two": (way, "live-digest"),
            "three": ("distributed", "live-digest"),
        }
        assert fleet.checksums("three") == fleet.checksums("one")
        for name in ("one", "two", "three"):
            _serves(fleet, name, expected[version - 103], str(version))
    poll("its sidecar to tell what it takes", lambda: fleet.plan()["engines"]["two"]["bytes_per_gpu"] is not None)
    plan = fleet.plan()
    planned = {name: each["transport"] for name, each in plan["engines"].items()}
    assert planned == {"one": "direct", "two": "sends", "three": "distributed"}
    assert 0 < plan["engines"]["two"]["bytes_per_gpu"] < plan["trainer"]["bytes"], "TP2: each takes what it stores"

    fleet.publish(106, 3, "any", hold_at=2, bucket_bytes=20_000)
    assert fleet.answer()["held"] == 2
    fleet.kill("sidecar-three")
    fleet.tell("go on")
    assert _outcomes(fleet.answer()) == {"one": "committed", "two": "committed", "three": "lost"}
    fleet.wait_ready("one", "two")
    for name in ("one", "two"):
        _serves(fleet, name, expected[3], "106")
    fleet.start_sidecar("three", "--transports=distributed")
    _there(fleet, "three")
    fleet.wait_ready("one", "two")
    fleet.publish(107, 4, "any")
    assert set(_outcomes(fleet.answer()).values()) == {"committed"}
    fleet.wait_ready("one", "two", "three")
    for name in ("one", "two", "three"):
        _serves(fleet, name, expected[4], "107")

    fleet.publish(108, 5, "any", hold_at=0)
    assert fleet.answer()["held"] == 0
    fleet.kill("server-two")
    fleet.tell("go on")
    outcomes = _outcomes(fleet.answer())
    assert (outcomes["one"], outcomes["three"]) == ("committed", "committed")
    assert outcomes["two"] in {"lost", "quarantined"}, "never `aborted`: a dead server serves nothing"
    fleet.wait_ready("one", "three")
    for name in ("one", "three"):
        _serves(fleet, name, expected[5], "108")
