"""One rank of a real two-rank Megatron trainer that a test drives: commands on rank 0's stdin, answers on its stdout.

    {"seed": 3, "version": 7, "transport": "local", "bucket_bytes": 65536, "hold_at": 2}

loads the checkpoint of `seed` into the ranks, publishes it as `version` and answers with the report as one line of
JSON; with `again`, it publishes so many versions more by the same agent. The transport ``any`` is whatever suits each
engine. The ranks are tensor-parallel, or with ``STAGES=2`` a pipeline.

With `hold_at`, the sender stops before that bucket (0: before it opens, when all engines are paused), says
``{"held": 2}`` and goes on at the next line on stdin: a test then has all the time it needs to kill something in the
middle of a transfer. With `hold_source` the second stage stops for good before it broadcasts that bucket of its own,
and writes the file ``source-held``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state

from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.transports.distributed.source_rank import SourceSession
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.demo import megatron_learner as model, toy_task as task
from weightbus.trainer_agent.publish.driver import Progress
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource


def command() -> dict[str, Any] | None:
    """The next command, on every rank; None when there are no more."""
    line = [sys.stdin.readline() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(line, src=0)
    return json.loads(line[0]) if line[0].strip() else None


def say(answer: object) -> None:
    """One line to the test."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def hold(at: int) -> Any:
    """A progress callback that waits for the test before bucket `at`."""
    waiting = True

    def progress(where: Progress) -> None:
        nonlocal waiting
        if waiting and where.state == "sending" and where.buckets_sent == at:
            waiting = False
            say({"held": at, "of": where.buckets})
            sys.stdin.readline()

    return progress


@contextlib.contextmanager
def source_held(place: int, folder: Path) -> Iterator[None]:
    """The second stage waits before it broadcasts bucket `place` of its own, for good."""
    plain = SourceSession._broadcast
    places = itertools.count()

    def broadcast(session: SourceSession, memory: torch.Tensor, deadline: Deadline) -> None:
        if next(places) == place:
            (folder / "source-held").touch()
            threading.Event().wait()
        plain(session, memory, deadline)

    SourceSession._broadcast = broadcast  # type: ignore[method-assign]
    try:
        yield
    finally:
        SourceSession._broadcast = plain  # type: ignore[method-assign]


def publish(policy: Any, folder: Path, coordinator: str, asked: dict[str, Any]) -> object:
    """Carry one command out."""
    shape = task.TINY
    model.load(policy, task.read_checkpoint(folder / f"seed{asked['seed']}"), shape)
    source = MegatronSource(policy, hf_config=folder / "seed0", timeout_s=180)
    try:
        with (
            source_held(asked["hold_source"], folder) if "hold_source" in asked else contextlib.nullcontext(),
            TrainerAgent.connect(
                source,
                channel="e2e",
                coordinator=coordinator,
                transport=None if asked["transport"] == "any" else (asked["transport"],),
                bucket_bytes=asked.get("bucket_bytes", 1 << 20),
                redrives=asked.get("redrives", 1),
                save_every=asked.get("save_every", 0),
                save_dir=folder / "saved",
                checkpoint_dir=folder / "checkpoints",
                hf_config_dir=folder / "seed0",
                progress=hold(asked["hold_at"]) if "hold_at" in asked else None,
            ) as agent,
        ):
            report = agent.publish(asked["version"])
            for again in range(1, asked.get("again", 0) + 1):
                report = agent.publish(asked["version"] + again)
            return msgspec.to_builtins(report)
    except Exception as error:  # noqa: BLE001 - the test reads what went wrong
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        source.close()


def main() -> None:
    """Serve commands until stdin ends."""
    folder, coordinator = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, stages = int(os.environ["WORLD_SIZE"]), int(os.environ.get("STAGES", "1"))
    parallel_state.initialize_model_parallel(world // stages, stages)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    policy = model.build(task.TINY)
    say({"ready": True})
    while (asked := command()) is not None:
        say(publish(policy, folder, coordinator, asked))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
