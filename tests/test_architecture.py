"""The rules of CONTRIBUTING.md that a machine can check, read off the syntax trees of the working tree."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("control", "dataplane", "trainer_agent", "engine_agent")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

ROOT_ENTRIES = {
    *FOLDERS,
    "deploy",
    "tests",
    "requirements",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "SECURITY.md",
    "TROUBLESHOOTING.md",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute module that `path` imports, wherever in the file, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module
            yield node.lineno, node.module


def importers(*roots: str) -> dict[str, list[int]]:
    """Which modules import one of `roots` or something below, and where."""
    found: dict[str, list[int]] = {}
    for path in MODULES:
        lines = [line for line, name in imported(path) if name.split(".")[0] in roots]
        if lines:
            found[relative(path)] = lines
    return found


def test_the_modules_are_found() -> None:
    """The checks below look at something: every folder has modules."""
    assert {relative(path).split("/")[0] for path in MODULES} == set(FOLDERS)


def test_only_the_bus_speaks_zeromq() -> None:
    """Sockets live behind one module; everything else can be tested without them."""
    assert set(importers("zmq")) == {"control/bus/sockets.py"}


def test_only_the_log_knows_structlog() -> None:
    """Where lines go is decided in one place: elsewhere a line could be printed unasked."""
    assert set(importers("structlog")) == {"control/log.py", "control/server/metrics.py"}


def test_only_megatron_files_and_the_demo_import_megatron() -> None:
    """The trainer agent works without Megatron where another source is used."""
    for name in importers("megatron"):
        assert name.startswith(("trainer_agent/sources/megatron/", "trainer_agent/demo/")), name


def test_nothing_imports_sglang() -> None:
    """Servers are spoken to over HTTP, so that any installed version will do."""
    assert importers("sglang") == {}


def test_the_coordinator_has_no_tensors() -> None:
    """control/ runs where there is no torch."""
    assert not [
        name for name in importers("torch", "numpy", "safetensors", "transformers") if name.startswith("control/")
    ]


def test_modules_are_imported_by_one_name() -> None:
    """A bare `import control` would load the module a second time, from the working folder."""
    assert importers(*FOLDERS) == {}


def test_inside_a_folder_imports_are_relative() -> None:
    """`weightbus.` in an import always means that a boundary is crossed. The front door is `weightbus` itself."""
    for path in (path for path in MODULES if "front_door" not in path.parts):
        own = f"weightbus.{relative(path).split('/')[0]}"
        for line, name in imported(path):
            assert not f"{name}.".startswith(f"{own}."), f"{relative(path)}:{line} imports its own {own}"


def rooms() -> dict[str, set[str]]:
    """Dotted name of every package below the four, and the names of its face."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        if (
            path.name == "__init__.py"
            and len(path.relative_to(ROOT).parts) > 2
            and not {"cpu_shim", "front_door"} & set(path.parts)
        ):
            names = {
                alias.asname or alias.name
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.ImportFrom) and node.level
                for alias in node.names
            }
            found[dotted(path)] = names
    return found


def dotted(path: Path) -> str:
    """Name by which a module of the tree is imported."""
    if "front_door" in path.parts:
        return "weightbus" if path.name == "__init__.py" else f"weightbus.{path.stem}"
    return "weightbus." + relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def crossings(path: Path, rooms: Collection[str]) -> Iterator[tuple[str, str]]:
    """Every (module, name) that `path` imports out of a room that it is not in itself."""
    own = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if node.level:
            above = own.split(".")[: len(own.split(".")) - node.level + 1]
            module = ".".join([*above, *([module] if module else [])])
        room = module
        while room and room not in rooms:
            room = room.rpartition(".")[0]
        if room and not f"{own}.".startswith(f"{room}."):
            for alias in node.names:
                yield module, alias.name


def test_rooms_are_entered_by_their_faces() -> None:
    """Whatever a module takes from another room is in the face of that room, and is taken from there."""
    faces = rooms()
    beside = [
        f"{relative(path)}: {module} has no {name} in its face"
        for path in MODULES
        for module, name in crossings(path, faces)
        if module not in faces or name not in faces[module]
    ]
    assert len(faces) > 30
    assert beside == []


def test_every_name_of_a_face_is_somebodys() -> None:
    """A face lists what other rooms, the front door or a command take from it, and nothing else.

    But for the protocol: its messages are the language of the project, and all of them are there.
    """
    faces = rooms()
    del faces["weightbus.control.protocol"]
    taken = {(module, name) for path in MODULES for module, name in crossings(path, faces)}
    entry_points = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    idle = [
        f"{room}: {name}"
        for room, names in faces.items()
        for name in names
        if (room, name) not in taken and f"{room}:{name}" not in entry_points
    ]
    assert idle == []


def test_the_import_contracts_hold() -> None:
    """The arrows of ARCHITECTURE.md: import-linter's contracts in pyproject.toml."""
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_tree_is_the_mandated_one() -> None:
    """The top level holds four packages, deploy, tests, pins and documents, and nothing else."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if listed.returncode:
        pytest.fail(f"the tree is not a git checkout: {listed.stderr}")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= ROOT_ENTRIES


def test_deploy_holds_no_python() -> None:
    """What is deployed is the wheel."""
    assert list((ROOT / "deploy").rglob("*.py")) == []


def test_every_module_says_what_it_owns() -> None:
    """Every module has a docstring."""
    assert [
        relative(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ] == []
