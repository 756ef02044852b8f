"""What programs of this folder conclude, in which order they go to work, and with which weights. No GPU, no servers."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import engines, int4, quantized_rounds, stages
from weightbus.control.machine.routing import PREFERRED, choose
from weightbus.control.machine.states import TransferEnds
from weightbus.control.protocol.messages import TransportKind
from weightbus.engine_agent.engines.sglang.compatibility import missing
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.sidecar.topology import topology_of
from weightbus.trainer_agent.source import PipelineSource

from ..control.world import engine_info, trainer_info
from ..engine_agent.engines.sglang.test_compatibility import facts


class Fleet:
    """A server, by the probabilities that it gives one time after the other."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self._probabilities = list(probabilities)

    def logprobs(self, _place: str, _prompt: Sequence[int]) -> list[float]:
        return [self._probabilities.pop(0)]

    def tokens(self, _place: str) -> list[int]:
        return [3]

    def load(self, _place: str, _folder: Path) -> None:
        pass


def check(monkeypatch: pytest.MonkeyPatch, name: str, *probabilities: float) -> int4.Check:
    """Of unpacked weights, of those before, and of the server with INT4."""
    fleet = Fleet(probabilities)

    @contextlib.contextmanager
    def server(*_: Any) -> Generator[Fleet]:
        yield fleet

    monkeypatch.setattr(int4.Check, "_server", server)
    return int4.Check(argparse.Namespace(device="cpu", out=None), name, Path())


@pytest.mark.parametrize("before", [-1.0, float("nan")])
def test_what_makes_no_difference_is_no_proof(monkeypatch: pytest.MonkeyPatch, before: float) -> None:
    """Equal probabilities say nothing where other weights give the same."""
    made = check(monkeypatch, "experts", -1.0, before)
    with pytest.raises(RuntimeError, match="do not depend on what was quantized"):
        made.plain()
    assert made.found["equal"] is False


@pytest.mark.parametrize(("packed", "equal"), [(-1.02, True), (-1.03, False), (float("nan"), False)])
def test_kernels_may_differ_by_less_than_quantizing(
    monkeypatch: pytest.MonkeyPatch, packed: float, equal: bool
) -> None:
    """A quarter of it is the limit."""
    made = check(monkeypatch, "experts", -1.0, -1.1, packed)
    made.plain()
    assert made.found["equal"] is False
    made.int4()
    assert made.found["equal"] is equal


def test_a_speculating_server_is_refused_in_the_words_that_its_case_asks_for(tmp_path: Path) -> None:
    """From what its sidecar tells, through what the coordinator makes of it."""
    speculates = facts(speculative="EAGLE", loaders=(LOADER,))
    told = topology_of(missing(speculates), PREFERRED, tmp_path, (), {})
    route = choose(TransferEnds(trainer_info(transports=(TransportKind.LOCAL,)), engine_info(), None, told))
    assert route.transport is None
    assert engines.CASES["draft"].refused in route.reason


def test_rounds_that_are_read_while_they_are_made_are_told_apart() -> None:
    """By the steps that their sidecars counted, also where one took no time; the wait is no part of the copy."""
    both = ["step:transfer_copy", "step:transfer_table", "step:transfer_wait"]
    steady: list[dict[str, Any]] = [
        {
            "steps": both,
            "sidecar_s": {"step:transfer_copy": 0.1, "step:transfer_table": 0.2, "step:transfer_wait": 0.4},
        },
        {"steps": both, "sidecar_s": {"step:transfer_copy": 0.1, "step:transfer_table": 0.4}},
        {"steps": both[:1], "sidecar_s": {"step:transfer_copy": 0.1}},
    ]

    assert quantized_rounds.ways(steady) == {
        "rounds": 3, "open": 2, "transfer_table_s": pytest.approx(0.3), "pipelined": 2, "transfer_wait_s": 0.2,
    }  # fmt: skip
    assert quantized_rounds.ways(steady[2:]) == {
        "rounds": 1, "open": 0, "transfer_table_s": None, "pipelined": 0, "transfer_wait_s": None,
    }  # fmt: skip


class StagedSource:
    """Of three tensors in two stages, as far as it is asked."""

    model, root, device, head_dim, rank = "m", True, torch.device("cpu"), None, 0

    def tensors(self) -> list[Any]:
        return []

    def roots(self) -> list[int]:
        return [0, 1, 1]

    def assemble(self, *_: Any) -> None:
        pass

    def agree(self, blob: bytes | None) -> bytes:
        return blob or b""

    def collect(self, blob: bytes) -> list[bytes]:
        return [blob]


def test_a_source_that_is_to_be_gathered_has_no_stages() -> None:
    """Else the two ways of the comparison would be one, and equal."""
    assert isinstance(StagedSource(), PipelineSource)
    assert not isinstance(stages.Gathered(StagedSource()), PipelineSource)


def test_members_of_a_group_share_no_gpu() -> None:
    """A stage with the worker; who gathers with the other rank; and with enough GPUs nobody with anybody."""
    for devices in (2, 3, 8):
        engine, by_stage, gathered = stages.seats(devices).values()
        assert engine not in by_stage
        assert gathered[0] not in (engine, gathered[1])
        assert max(engine, *by_stage, *gathered) < devices
    assert len({engine, *by_stage}) == len({engine, *gathered}) == 3
    with pytest.raises(ValueError, match="1 GPUs"):
        stages.seats(1)


FILLED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import rig, torch
rig.play_cuda("cpu")
from shards import LayoutShards
told = []
for layout in ({"tp": 2}, {"ep": 2, "etp": 1, "dp": 2}):
    source = LayoutShards(rig.TINY_MOE, torch.device("cpu"), 2, **layout)
    source.refill(1)
    held = []
    for rank in source._ranks:
        pieces = rank.shards
        boxes = [*zip(pieces.boxes.space.tolist(), pieces.boxes.start.tolist(), pieces.boxes.stop.tolist())]
        held.append([[box for box, at in zip(boxes, pieces.storage.tolist()) if at == index]
                     for index in range(len(rank.parameters))])
    first, second = (rank.parameters for rank in source._ranks)
    alike = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
    means = [(one.dim(), round(float(one.float().mean()), 1)) for one in [*first, *second]]
    told.append([alike, [one == other for one, other in zip(*held, strict=True)], sorted(set(means))])
print(json.dumps(told))
"""


@pytest.mark.real
def test_ranks_hold_other_weights_where_they_hold_other_parts() -> None:
    """Of the same part the same; and no matrix has another mean than 0, which would drown what comes after it."""
    argv = [sys.executable, "-c", FILLED, os.fspath(Path(engines.__file__).parent)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr[-2000:]
    for alike, same_part, means in json.loads(done.stdout.splitlines()[-1]):
        assert alike == same_part
        assert 0 < sum(same_part) < len(same_part)
        assert means == [[1, 1.0], [2, 0.0]]
