"""Bad input: a slice of each campaign, small enough for every run of the tests. `make fuzz` runs the long ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from weightbus.control.protocol import codec
from weightbus.control.protocol.errors import Malformed

from ..control.protocol.test_codec import TO_COORDINATOR
from . import data_plane, live
from .decoder import campaign
from .hostile_agents import HostileAgents
from .mutations import Mutator

ROOT = Path(__file__).parents[2]
INPUTS = 1_000_000


def test_a_million_hostile_frames_crash_nothing() -> None:
    """Every one is refused with a `ProtocolError`, or accepted and the same when it is sent again (S12)."""
    command = [sys.executable, "-m", "tests.fuzz.decoder", str(INPUTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"inputs=(\d+) refused=(\d+) accepted=(\d+) crashes=0", done.stdout.splitlines()[-1])
    assert found
    inputs, refused, accepted = map(int, found.groups())
    assert inputs == INPUTS == refused + accepted
    assert accepted > INPUTS / 100, "hardly anything comes through: the inputs are too wild to reach the types"
    assert refused > INPUTS / 2


def test_hostile_bytes_crash_no_decoder_of_the_data_plane() -> None:
    """Every decoder refuses with an error of its own, or accepts what can be sent again and stays inside of memory."""
    tally = data_plane.campaign(1, 30_000)
    assert not tally.crashes, "\n".join(tally.crashes[:5])
    assert tally.inputs == 30_000 == tally.refused + tally.accepted
    assert tally.accepted > 1000, "hardly anything comes through: the inputs are too wild to reach the types"


def test_the_campaign_finds_a_table_that_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that leave 64 bits and come back inside of a region pass every comparison: found in our own code."""
    monkeypatch.setattr("weightbus.dataplane.copy.copy_table.check_no_overflow", lambda *_: None)
    crashes = data_plane.campaign(1, 30_000).crashes
    assert any("copy table" in each and "reaches bytes" in each for each in crashes)


def test_inputs_are_reproducible() -> None:
    """A crash is found again by its seed."""
    good = [codec.TO_COORDINATOR.encode(message, blob) for message, blob in TO_COORDINATOR]
    one, same, other = (Mutator(good, seed) for seed in (5, 5, 6))
    first = [one.next() for _ in range(500)]
    assert first == [same.next() for _ in range(500)]
    assert first != [other.next() for _ in range(500)]


def test_the_campaign_finds_a_decoder_that_lets_errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catching msgspec's own errors is not enough: bad UTF-8 is another. The campaign notices at once."""

    def careless(wire: codec.MessageCodec[object], payload: bytes) -> object:
        try:
            return wire._decoder.decode(payload)
        except msgspec.MsgspecError as problem:
            raise Malformed(str(problem)) from problem

    monkeypatch.setattr(codec.MessageCodec, "_decode_payload", careless)
    crashes = campaign(1, 3000).crashes
    assert any("UnicodeDecodeError" in each for each in crashes)


def test_a_coordinator_under_attack_stays_well() -> None:
    """It answers an honest agent all the while, counts every refusal, and ends when it is told to (S13)."""
    found = live.campaign(4000)
    assert found.garbage > 3000
    assert found.flood in {0, 2000}
    assert found.refused >= found.garbage + 50 + found.flood
    assert found.turned_away >= found.connections == 250
    assert found.pings > 10
    assert found.slowest_ping_s < 20  # a machine that runs the whole suite


@pytest.mark.parametrize("seed", range(2))
def test_hostile_agents_break_no_invariant(seed: int) -> None:
    """Ten thousand well-formed messages in any order, from anybody, with a journal that fails now and then (S12)."""
    world = HostileAgents(seed)
    for _ in range(10_000):
        world.step()
    assert world.answers > 5000


def test_hostile_agents_break_no_invariant_of_young_worlds() -> None:
    """Before anybody has a name: forty beginnings, of which one in a hundred met what two long lives did not."""
    for seed in range(100, 140):
        world = HostileAgents(seed)
        for _ in range(300):
            world.step()
