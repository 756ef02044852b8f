"""Tiny checkpoints that differ in their seed, and what each of them must answer, by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from weightbus.engine_agent.engines.sglang import cpu_server

from .fleet import ROOT, Fleet

Answers = list[list[int]]
"""The tokens that must be answered to each prompt."""


def write_checkpoints(folder: Path, seeds: int) -> Path:
    """One a seed, as ``folder/seed0`` and on; returns `folder`."""
    for seed in range(seeds):
        maker = [sys.executable, str(ROOT / "tests/kit/tiny_model.py"), str(folder / f"seed{seed}"), f"--seed={seed}"]
        subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
    return folder


def ask_oracle(folder: Path, seeds: int, prompts: list[list[int]]) -> dict[int, Answers]:
    """By seed. No two seeds answer alike, and none says next to nothing."""
    shim = Path(cpu_server.__file__).with_name("cpu_shim")
    path = os.pathsep.join([str(shim), os.environ.get("PYTHONPATH", "")])
    oracle = [sys.executable, str(ROOT / "tests/e2e/oracle.py"), str(folder), str(seeds), json.dumps(prompts)]
    done = subprocess.run(oracle, check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    answers = {int(seed): tokens for seed, tokens in json.loads(done.stdout).items()}
    assert all(sum(map(len, tokens)) >= 5 for tokens in answers.values()), answers
    assert len({json.dumps(tokens) for tokens in answers.values()}) == seeds
    return answers


def check_answers(fleet: Fleet, name: str, prompts: list[list[int]], answers: Answers, label: str) -> None:
    """The server gives these tokens, under this version."""
    for prompt, tokens in zip(prompts, answers, strict=True):
        if tokens:
            assert fleet.generate(name, prompt, len(tokens)) == (tokens, label)
