"""Starts the coordinator, the servers, their sidecars and the trainer; follows the rounds; judges; stops everything.

Programs are started by their commands: the trainer's side imports nothing of the engines'.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import httpx
import msgspec

from weightbus.control.cli import AgentKeys, make_deployment_keys
from weightbus.control.protocol import AgentId, Channel, Role
from weightbus.control.terminal_text import terminal_safe

from . import toy_task as task
from .child_processes import EngineHost, Program, ProgramEnded, Programs, choose_ports, handling_signals, second_host
from .commands import CHANNEL, ENGINES, RANKS, SAVED, DemoSettings, RankArguments, Sync
from .round_records import DemoRound, Follower, ProgressView, RoundVerdict, compare, verdict
from .toy_task import policy_of

START_S: Final = 300.0
"""Seconds that the servers may take to start; two of them take 20 to 60 s on two idle cores."""
ROUND_S: Final = 120.0
"""Seconds that a round may take, the trainer's own start included."""
TWO_TRANSPORTS: Final = {"e0": "direct", "e1": "sends"}
"""Transport of each engine in a run with ``--mixed``."""
LOADER: Final = "weightbus.engine_agent.worker_loader.load"
"""Loader that both transports of ``--mixed`` need in the server; other runs do without."""
_POLL_S: Final = 0.1
_ANSWER_S: Final = 10.0
"""Seconds that one answer may take: a starting server is slow with its first token."""


class DemoFailed(Exception):
    """The demo could not be carried through; the message says where to look."""


class DemoRun:
    """One run."""

    def __init__(self, settings: DemoSettings, folder: Path, programs: Programs, view: ProgressView) -> None:
        self._settings = settings
        self._folder = folder
        self._programs = programs
        self._view = view
        self._ports = choose_ports(settings.port_base)
        self._here = "127.0.0.1"
        self._hosts = [EngineHost() for _ in range(ENGINES)]

    def run(self) -> bool:
        """Run the demo from the first process to the last line. True for success."""
        weights = task.write_checkpoint(
            self._folder / "checkpoint", self._settings.seed, policy_of(self._settings.trainer)
        )
        if self._settings.mixed:
            other = second_host(self._programs, self._folder)
            self._here, self._hosts[-1] = other.here, other.host
            self._view.say(f"e0 runs beside the trainer; e{ENGINES - 1} {other.description}")
        self._start_services(weights)
        if self._settings.asynchronous:
            judged = f"answers are judged elsewhere for {self._settings.environment_s:g} s a round, in both runs"
            self._view.say(f"first one round after another, for comparison; {judged}")
            before, _ = self._train(base=1)
            self._view.say("now each round is generated while the one before is judged and trained")
            result, rounds = self._train(base=self._settings.rounds + 2, asynchronous=True)
            trained = f"of {result.train_s:.1f} s of training, {result.overlap_s:.1f} s while engines wrote"
            self._view.say(
                f"{trained} the next round's answers; {result.spanning_versions} answers were written by two versions"
            )
            result = compare(before, result)
        else:
            result, rounds = self._train()
        self._programs.end()
        self._view.table(rounds, result)
        self._view.last(result.line)
        return not result.complaint

    def _train(self, *, base: int = 0, asynchronous: bool = False) -> tuple[RoundVerdict, list[DemoRound]]:
        """All rounds of one training program, from the initial weights on, and their verdict."""
        arguments = RankArguments(
            settings=self._settings,
            folder=str(self._folder),
            coordinator=self._coordinator,
            status_url=f"http://127.0.0.1:{self._ports.status}",
            host=self._here,
            asynchronous=asynchronous,
            base=base,
        )
        rounds = self._follow(self._start_ranks(arguments), arguments.progress)
        published = self._settings.sync is Sync.ON
        max_lag = 1 if asynchronous else 0
        expected, transports = self._settings.rounds, TWO_TRANSPORTS if self._settings.mixed and published else None
        if transports and rounds:
            self._view.say(f"transports of the last round: {rounds[-1].transports}")
        judged = verdict(
            rounds, ENGINES, expected_rounds=expected, published=published, max_lag=max_lag, transports=transports
        )
        return judged, rounds

    def _start_services(self, weights: Path) -> None:
        ports, keys = self._ports, str(self._make_keys())
        self._weightbus(
            "coordinator",
            *("coordinator", "--bind", self._here, "--router-port", str(ports.router)),
            *("--http-port", str(ports.status), "--journal", str(self._folder / "journal.sqlite"), "--keys", keys),
        )
        for index, port in enumerate(ports.servers):
            module, host = "weightbus.engine_agent.engines.sglang.cpu_server", self._hosts[index]
            arguments = ("--model-path", str(weights), "--port", str(port), "--skip-tokenizer-init")
            loader = ("--custom-weight-loader", LOADER, "--host", host.address) if self._settings.mixed else ()
            self._programs.start(
                f"server{index}", [*host.command_prefix, sys.executable, "-m", module, *arguments, *loader]
            )
        self._view.say(f"logs are in {self._folder / 'logs'}")
        with self._view.awaiting("starting the coordinator"):
            self._wait(f"http://127.0.0.1:{ports.status}/healthz", START_S)
        with self._view.awaiting(f"starting {ENGINES} SGLang servers on the CPU (20 to 60 s)"):
            for index, port in enumerate(ports.servers):
                self._wait(f"http://{self._hosts[index].address}:{port}/health_generate", START_S)
                self._view.say(f"server{index} generates")
        for index, (server, http) in enumerate(zip(ports.servers, ports.sidecars, strict=True)):
            self._weightbus(
                f"engine-agent{index}",
                *("engine-agent", "--name", f"e{index}", "--channel", CHANNEL, "--coordinator", self._coordinator),
                *("--server", f"http://{self._hosts[index].address}:{server}", "--http-port", str(http)),
                *("--keys", keys, "--state-dir", str(self._folder / "state")),
                *("--runtime-dir", str(self._folder / "run"), *self._hosts[index].sidecar_flags),
                before=self._hosts[index].command_prefix,
            )
        with self._view.awaiting("starting their sidecars"):
            for host, http in zip(self._hosts, ports.sidecars, strict=True):
                self._wait(f"http://{host.address}:{http}/readyz", START_S)

    def _make_keys(self) -> Path:
        """Create keys, as in production: the bus is encrypted, and every agent is authenticated by its key."""
        channels = (Channel(CHANNEL),)
        engines = [AgentKeys(AgentId(f"e{index}"), Role.ENGINE, channels) for index in range(ENGINES)]
        make_deployment_keys(self._folder / "keys", [AgentKeys(AgentId("trainer"), Role.TRAINER, channels), *engines])
        return self._folder / "keys"

    def _start_ranks(self, arguments: RankArguments) -> list[Program]:
        self._view.say(f"starting {RANKS} ranks of {self._settings.trainer.value}")
        argument = msgspec.json.encode(arguments).decode()
        suffix = "-async" if arguments.asynchronous else ""
        group = {
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._ports.ranks),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "weightbus.trainer_agent.demo.training_rank", argument]
        return [
            self._programs.start(f"rank{rank}{suffix}", command, group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(RANKS)
        ]

    @property
    def _coordinator(self) -> str:
        """Endpoint of the coordinator."""
        return f"tcp://{self._here}:{self._ports.router}"

    def _weightbus(self, name: str, *arguments: str, before: Sequence[str] = ()) -> None:
        self._programs.start(name, [*before, sys.executable, "-m", "weightbus.control.cli.entry_point", *arguments])

    def _wait(self, url: str, deadline_s: float) -> None:
        """Until `url` answers 200. Raises as soon as any program ended, also while an answer is awaited."""
        asking = ThreadPoolExecutor(1, "demo-wait")
        answer = asking.submit(_answers, url)

        def answered() -> bool:
            nonlocal answer
            if answer.done() and not answer.result():
                answer = asking.submit(_answers, url)
            return answer.done() and answer.result()

        try:
            self._poll(answered, deadline_s, url)
        finally:
            asking.shutdown(wait=False)

    def _follow(self, ranks: Sequence[Program], progress: Path) -> list[DemoRound]:
        follower = Follower(progress)
        rounds: list[DemoRound] = []

        def moved() -> bool:
            ended = all(rank.process.poll() is not None for rank in ranks)
            fresh = list(follower.new())
            for each in fresh:
                self._view.round(each, self._settings.rounds)
            rounds.extend(fresh)
            return bool(fresh) or ended

        while any(rank.process.poll() is None for rank in ranks):
            self._poll(moved, ROUND_S, "the next round", may_end=ranks)
        moved()
        self._programs.check(may_end=ranks)
        self._programs.dismiss(ranks)
        return rounds

    def _poll(self, done: Callable[[], bool], deadline_s: float, what: str, may_end: Sequence[Program] = ()) -> None:
        until = time.monotonic() + deadline_s
        while not done():
            self._programs.check(may_end)
            if time.monotonic() >= until:
                raise DemoFailed(f"waited {deadline_s:.0f} s for {what}; logs are in {self._folder / 'logs'}")
            time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=_ANSWER_S, trust_env=False).is_success
    except httpx.TransportError:  # not listening yet
        return False


_LONGEST_TEMP = 50
"""Characters of a folder for temporary files: sockets lie below it, and their names hold 107 bytes."""


def run(settings: DemoSettings) -> int:
    """Run the demo; the exit status."""
    view = ProgressView(as_json=settings.json)
    deep = len(tempfile.gettempdir()) > _LONGEST_TEMP
    folder = Path(tempfile.mkdtemp(prefix="weightbus-demo-", dir="/tmp" if deep else None))  # noqa: S108 - made for us
    for name in ("logs", "run"):
        (folder / name).mkdir(mode=0o700)
    good = False
    try:
        with handling_signals(_unwind, signal.SIGTERM, signal.SIGHUP), Programs(folder / "logs") as programs:
            good = DemoRun(settings, folder, programs, view).run()
    except ProgramEnded as ended:
        view.say(f"the end of {ended.log}:\n{ended.tail}")
        view.last(f"demo: failed: {terminal_safe(str(ended))}")
    except (DemoFailed, ValueError) as error:
        view.last(f"demo: failed: {terminal_safe(str(error))}")
    except KeyboardInterrupt:
        view.last("demo: interrupted")
        return 130
    finally:
        saved = sorted((folder / SAVED / CHANNEL).glob("checkpoint-*"), key=lambda each: each.stat().st_mtime)
        if saved:
            names = ", ".join(each.name for each in saved)
            print(f"demo: kept {names} in {saved[0].parent}", file=sys.stderr)  # noqa: T201 - the last line stays last
        if good and not settings.keep_logs and not saved:
            shutil.rmtree(folder)
        else:
            print(f"demo: logs are in {folder / 'logs'}", file=sys.stderr)  # noqa: T201 - the last line stays last
    return 0 if good else 1


def _unwind(_number: int, _frame: FrameType | None) -> NoReturn:
    """End the demo as Ctrl-C does: by unwinding, so that everything it started ends too."""
    raise KeyboardInterrupt
