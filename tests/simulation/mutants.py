"""Plants one bug after the other in a copy of the source, and counts how many the simulation finds.

``python -m tests.simulation.mutants`` tries all; ``--slice 3/8`` every eighth, from the third on; ``--only NAME`` one,
and tells its story.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from .campaign import cores
from .mutations import MUTATIONS, Mutation

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("control", "dataplane", "trainer_agent", "engine_agent")
FRONT_DOOR: Final = "control/front_door"
"""Files of the package `weightbus` itself: without its `__init__` another installation would be imported."""
SEEDS: Final = 5000
"""A bug that so many storms do not find counts as missed."""
TIMEOUT_S: Final = 3600.0


class Misplanted(Exception):
    """The source has changed under a mutation."""


class Hunt(msgspec.Struct, frozen=True):
    """What became of one planted bug."""

    mutation: Mutation
    seed: int | None
    """The first one that finds it; null when none does."""

    def __str__(self) -> str:
        found = f"seed {self.seed}: {self.mutation.breaks}" if self.seed is not None else "NOT FOUND"
        return f"{self.mutation.name:<56} {found}"


def planted(mutation: Mutation, source: Path = ROOT) -> dict[str, str]:
    """The files that the bug changes, by path, as they are with it. Raises `Misplanted`."""
    texts: dict[str, str] = {}
    for name, found, instead in mutation.changes:
        text = texts.get(name) or (source / name).read_text(encoding="utf-8")
        if (count := text.count(found)) != 1:
            raise Misplanted(f"{mutation.name}: {name} holds this {count} times, expected once:\n{found}")
        texts[name] = text.replace(found, instead)
        compile(texts[name], name, "exec")
    return texts


def plant(mutation: Mutation, folder: Path) -> None:
    """Copy the source to `folder` with one bug in it. Raises `Misplanted`."""
    texts = planted(mutation)
    shutil.copytree(ROOT / FRONT_DOOR, folder / "weightbus", ignore=shutil.ignore_patterns("__pycache__"))
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "weightbus" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in texts.items():
        (folder / "weightbus" / name).write_text(text, encoding="utf-8")


def hunt(mutation: Mutation, seeds: int = SEEDS) -> Hunt:
    """Run storms over the bug until one finds it, by the invariant that it is known to break."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        plant(mutation, Path(folder))
        command = [*_simulation(mutation), "--seeds", str(seeds)]
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    found = re.search(rf"^seed (\d+) breaks {mutation.breaks}:", done.stdout, re.MULTILINE)
    if found is None and done.returncode:
        raise Misplanted(f"{mutation.name}: the simulation itself failed\n{done.stderr[-2000:]}")
    return Hunt(mutation, int(found[1]) if found else None)


def _simulation(mutation: Mutation) -> list[str]:
    """The storms that find the bug."""
    command = [sys.executable, "-m", "tests.simulation", "--first", "--breaks", mutation.breaks]
    return [*command, "--setbacks"] if mutation.setbacks else command


def tell(mutation: Mutation) -> None:
    """Show how the simulation finds the bug."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        plant(mutation, Path(folder))
        command = [*_simulation(mutation), "--tell", "--seeds", str(SEEDS)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": folder}, check=False)


def chosen(part: str) -> Sequence[Mutation]:
    """``I/N``: every N-th mutation, from number I on."""
    index, _, count = part.partition("/")
    return MUTATIONS[int(index) % int(count) :: int(count)]


def main() -> int:
    """Do what the arguments say; the last line is for machines."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--slice", default="0/1", help="I/N")
    parser.add_argument("--only", help="the story of one")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=cores())
    given = parser.parse_args()
    if given.only:
        tell(next(each for each in MUTATIONS if each.name == given.only))
        return 0
    wanted = chosen(given.slice)
    caught = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for result in pool.map(lambda each: hunt(each, given.seeds), wanted):
            caught += result.seed is not None
            print(result, flush=True)
    print(f"planted={len(wanted)} caught={caught}")
    return 0 if caught >= 0.95 * len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
