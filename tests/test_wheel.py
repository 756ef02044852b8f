"""The wheel, not the checkout, is what people install: it holds every module of the tree and imports on its own."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("control", "dataplane", "trainer_agent", "engine_agent")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, built with what is installed and without a network."""
    source = tmp_path_factory.mktemp("source")
    for path in tree():
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", out, source], check=True, capture_output=True, timeout=500)
    (built,) = out.glob("*.whl")
    return built


def tree() -> Iterator[str]:
    """The files of the tree that a build needs, by path from the root."""
    yield from ("pyproject.toml", "README.md", "LICENSE")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as an installer lays it out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_of_the_tree(wheel: Path) -> None:
    """A sub-package that was not listed in pyproject.toml would be missing, as would a typing marker."""
    kept = [
        path for path in tree() if path.endswith((".py", "py.typed", "PROTOCOL.md")) or "/forecast/configs/" in path
    ]
    expected = {f"weightbus/{path.removeprefix('control/front_door/')}" for path in kept}
    assert {name for name in names(wheel) if not name.startswith("weightbus-")} == expected


def test_the_wheel_touches_no_other_packages_names(wheel: Path) -> None:
    """Its only top-level name is weightbus."""
    top = {name.split("/")[0] for name in names(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {"weightbus"}


def test_every_module_of_control_imports_from_the_wheel_without_torch(wheel: Path, unpacked: Path) -> None:
    """The coordinator's machine has no torch and no numpy: none of control/ asks for them."""
    modules = [
        "weightbus." + name.removeprefix("weightbus/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in sorted(names(wheel))
        if name.startswith("weightbus/control/") and name.endswith(".py") and not name.endswith("__main__.py")
    ]
    script = (
        "import importlib, sys\n"
        "site, *modules = sys.argv[1:]\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'numpy', 'httpx', 'sglang', 'megatron'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.path = [site, *(p for p in sys.path if '__editable__' not in p)]\n"
        "for name in modules:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__file__.startswith(site), module.__file__\n"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", script, str(unpacked), *modules],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert modules
    assert result.returncode == 0, result.stderr
