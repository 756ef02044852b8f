"""A slice of `make chaos`: real processes are killed, stopped and parted in rounds, and nothing is lost or mixed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import model
from campaign import STATES, Campaign, plan
from deployment import poll
from hammer import Hammer

from tests.kit.fake_sglang import FakeSGLang

CYCLES = 4
HERE = Path(__file__).parent


@pytest.mark.real
@pytest.mark.timeout(400)
def test_a_slice_of_the_campaign() -> None:
    """Whatever strikes, a committed version stays, every token has one maker, and all engines are ready again."""
    argv = [sys.executable, str(HERE / "campaign.py"), f"--cycles={CYCLES}", "--seed=5"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=380, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    last = ended.stdout.splitlines()[-1]
    assert last.startswith(f"cycles={CYCLES} lost_acks=0 mixed_tokens=0 worst_fault_to_safe_s=")


def test_a_half_loaded_server_is_found_out(tmp_path: Path) -> None:
    """The clients of the campaign see tokens of mixed weights, and tokens under another version's label."""
    checkpoint = model.write_checkpoint(tmp_path / "checkpoint")
    server = FakeSGLang(checkpoint).start()
    hammer = Hammer(checkpoint, lambda: [server.url], 1)
    try:
        poll("tokens", lambda: hammer.tokens > 0, 30)
        assert (hammer.wrong, hammer.versions) == ([], {model.LAUNCH})
        server.weights.load(list(model.weights(checkpoint, 5).items())[:3])
        poll("mixed tokens", lambda: bool(hammer.wrong), 30)
    finally:
        hammer.close()
        server.die()


@pytest.mark.parametrize(
    ("acks", "journalled", "seen", "verdict"),
    [
        ([1, 2], [1, 2, 3], {0, 3}, (0, 0)),
        ([1, 2, 3], [1, 2], {2}, (1, 0)),
        ([1], [1, 3, 2], {1}, (1, 0)),
        ([1], [1], {1, 9}, (0, 1)),
    ],
)
def test_what_counts_as_lost_and_as_mixed(
    acks: list[int], journalled: list[int], seen: set[int], verdict: tuple[int, int]
) -> None:
    """An answered version that the journal lacks, a journal that goes back, a token of what was never committed."""
    nothing = SimpleNamespace(close=lambda: None)
    campaign = Campaign.__new__(Campaign)
    campaign.lost = 0
    campaign.hammer = SimpleNamespace(close=lambda: None, versions=seen, wrong=[])  # type: ignore[assignment]
    campaign.deployment = SimpleNamespace(  # type: ignore[assignment]
        programs={"trainer": nothing, "coordinator": nothing}, acks=lambda: acks, journalled=lambda: journalled
    )
    assert campaign.verdict() == verdict


def test_the_plan_leaves_no_fault_out() -> None:
    """Every fault comes before any comes again, and the seed decides the order."""
    faults = [f"fault {number}" for number in range(9)]
    found = plan(faults, 18, seed=1)
    assert sorted(fault for fault, _ in found[:9]) == faults
    assert {state for _, state in found} <= set(STATES)
    assert found == plan(faults, 18, seed=1) != plan(faults, 18, seed=2)
