"""Every way of installing gives the public names: `from weightbus import Lineage` in a fresh virtual environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .test_wheel import ROOT, tree

CHECK = "from weightbus import Lineage, PublishFailed; import weightbus, sys; assert 'torch' not in sys.modules"
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")
"""What is installed here builds it: nothing is downloaded."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree: an editable install writes into it."""
    folder = tmp_path_factory.mktemp("source")
    for path in tree():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without weightbus, which sees what else is installed here. Its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    # Not as a .pth file: those of here would be read too, and with them an editable install of this tree.
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path += {here!r}\n")
    return python


def run(*command: str | Path) -> None:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=110, check=False, cwd="/")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def by_pip(python: Path, *what: str | Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--ignore-installed", *OFFLINE, *what)


def by_uv(python: Path, *what: str | Path) -> None:
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).exists():
        pytest.skip("uv is not installed here")
    run(uv, "pip", "install", "--quiet", "--python", python, *OFFLINE, *what)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "wheel": by_pip,
    "editable": lambda python, source: by_pip(python, "--editable", source),
    "strict editable": lambda python, source: by_pip(
        python, "--config-settings", "editable_mode=strict", "--editable", source
    ),
    "uv": by_uv,
    "uv, editable": lambda python, source: by_uv(python, "--editable", source),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_install_has_the_public_names(way: str, source: Path, environment: Path) -> None:
    """The package is put together from four folders and a front door, which every kind of install must follow."""
    WAYS[way](environment, source)
    run(environment, "-c", CHECK)
    where = f"import weightbus; assert not weightbus.__file__.startswith({str(ROOT)!r}), weightbus.__file__"
    run(environment, "-c", where)
