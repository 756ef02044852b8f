"""The pages of the project: every path and name in them exists, every link leads somewhere, every example runs."""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

import weightbus
from weightbus.control.cli import entry_point, settings

ROOT = Path(__file__).parents[1]
FOLDERS = ("control", "dataplane", "trainer_agent", "engine_agent", "deploy", "tests", "requirements")
FILES = [*ROOT.glob("*.*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))]
NAMES = {path.name for path in FILES}
PAGES = sorted(path for path in FILES if path.suffix == ".md")
STATED = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages that speak of the tree as it is."""

QUOTED = {
    '"Qwen3VLForConditionalGeneration": Family(': "trainer_agent/sources/megatron/model_families.py",
    '"qwen3_vl": Tiny(': "tests/kit/tiny_families.py",
}
"""Beginning of a Python example that is an entry of a table -> file in which it stands, but for comments."""

GIVEN: dict[str, Any] = {
    "steps": 2,
    "step": 1,
    "version": 1,
    "restore": lambda _module: 1,
    "answer": {"output_ids": [5, 6], "meta_info": {"weight_versions": [{"version": "1", "start": 0, "end": 2}]}},
}
"""Names that examples use and a user has: an SGLang response among them. All others are mocks."""

FAKED = (
    "MegatronSource",
    "FSDPSource",
    "HFModuleSource",
    "FullTensorSource",
    "ExportedSource",
    "TrainerAgent",
    "Fleet",
)
"""Public names that need ranks or a coordinator: examples call fakes with the same signatures."""

SETTINGS = {
    "engine-agent": ("weightbus.engine_agent.sidecar.settings:EngineAgentSettings", "engine_agent"),
    "demo": ("weightbus.trainer_agent.demo.commands:DemoSettings", "demo"),
    "trainer-agent": ("weightbus.trainer_agent.cli.commands:WatchSettings", "watch"),
    "rollback": ("weightbus.trainer_agent.cli.commands:RollbackSettings", "rollback"),
}
"""Commands that carry no `kind` and `section` of their own."""

SUFFIXES = "py|md|toml|json|yml|yaml|txt|sh|pml"
_PATH = re.compile(rf"(?:\.\./)*(?:[\w.-]+/)*[\w.-]+\.(?:{SUFFIXES})|(?:\.\./)*(?:{'|'.join(FOLDERS)})/[\w./-]*")
_DOTTED = re.compile(r"(?:weightbus\.)?(?:control|dataplane|trainer_agent|engine_agent)(?:\.\w+)+(?::[\w.]+)?")
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_FENCE = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0] if self.text else ''}"


def examples(*languages: str) -> list[Example]:
    """Every fenced block in one of these languages."""
    return [
        Example(relative(page), language, textwrap.dedent(text))
        for page in PAGES
        for _, language, text in _FENCE.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def inline(page: Path) -> Iterator[str]:
    """What stands in backticks in the prose of a page."""
    yield from _CODE.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def commands(block: str) -> Iterator[list[str]]:
    """The commands of a block: words, with continuation lines joined and comments and variables taken off."""
    for line in block.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:&&|&|\|)(?:\s|$)|;\s", line.strip().removeprefix("$ ")):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue  # a quotation that goes on in the next line: no command of ours
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


# -- names and links --------------------------------------------------------------------------------------------------


def _exists(name: str, page: Path) -> bool:
    """Whether a path that a page names is there: from the root, from the page, or as the name of one file."""
    if any((base / name).exists() for base in (ROOT, page.parent, ROOT / "tests")):
        return True
    return name in NAMES


WRITTEN = {"trust.toml", "keys/trust.toml", "config.json", "latest_checkpointed_iteration.txt"}
"""Files that users have, or that programs write: named in pages, in no tree."""


@pytest.mark.parametrize("page", STATED, ids=relative)
def test_every_path_of_a_page_exists(page: Path) -> None:
    """A page names no file or folder of the project that is not there."""
    wrong = []
    for text in inline(page):
        name = text.partition("::")[0]
        if _PATH.fullmatch(name) and name not in WRITTEN and not _exists(name, page):
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    """Links to files of the project, from the page's own folder."""
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", STATED, ids=relative)
def test_every_dotted_name_of_a_page_exists(page: Path) -> None:
    """Modules, and names in them, are importable as they stand: `weightbus.x.y`, and `x.y:Class.method`."""
    wrong = [name for name in inline(page) if _DOTTED.fullmatch(name) and not _resolves(name)]
    assert not wrong


def _resolves(name: str) -> bool:
    module, _, qualified = name.partition(":")
    module = f"weightbus.{module.removeprefix('weightbus.')}"
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            for part in (*parts[length:], *(qualified.split(".") if qualified else ())):
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def test_every_room_is_on_the_map() -> None:
    """ARCHITECTURE.md has a line for each sub-package, those of one transport apart."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for package in FOLDERS[:4]:
        for face in (ROOT / package).glob("*/__init__.py"):
            assert f"`{face.parent.name}`" in page, face


def test_figures_are_those_of_their_files() -> None:
    """Each row of README.md's table of speed has the rounded values of the result file that it names."""
    rows = re.findall(
        r"^\|(.+)\|.*`([\w-]+\.json)` \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 3
    for row, file in rows:
        found = json.loads((ROOT / "tests/gpu/results" / file).read_text())
        keys = {"copy": "replay_s", "proof": "verify_s", "wire": "shard_to_shard_s", "`publish()`": "normal_round_s"}
        part = found.get("parts", {}).get("speed", found)
        for word, milliseconds in re.findall(r"([\w`()]+) (\d+) ms", row):
            if word in keys:
                assert round(part[keys[word]] * 1000) == int(milliseconds), f"{file}: {word}"
        if "of_plain_copy" in found:
            assert f"{found['of_plain_copy']:.2f} of a plain copy" in row
        assert f"| {found.get('sglang_bucket_s') or found['flattened_distributed_s']:.2f} s |" in f"{row}|", file


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", examples("python"), ids=str)
def test_python_examples_run(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python example runs against fakes with the signatures of the product; names that a user has are mocks."""
    for beginning, file in QUOTED.items():
        if example.text.lstrip().startswith(beginning):
            assert _code(example.text) in _code((ROOT / file).read_text(encoding="utf-8"))
            return
    for name in FAKED:
        monkeypatch.setattr(weightbus, name, _fake(getattr(weightbus, name)))
    tree = ast.parse(example.text)
    names: dict[str, Any] = {"__name__": "example", **GIVEN}
    bound = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    for each in ast.walk(tree):
        if isinstance(each, ast.Name) and not hasattr(builtins, each.id) and each.id not in bound:
            names.setdefault(each.id, getattr(weightbus, each.id, mock.MagicMock()))
    exec(compile(tree, str(example), "exec"), names)


def _code(text: str) -> str:
    """`text` without comments and white space."""
    return "".join(re.sub(r"#.*", "", text).split())


def _fake(kind: type) -> Any:
    """`kind` with its signatures and without its effects; an agent that is connected is one of these, too."""
    fake = mock.create_autospec(kind)
    if kind is weightbus.TrainerAgent:
        connected = mock.create_autospec(kind, instance=True)
        connected.__enter__.return_value = connected
        connected.committed = 1
        fake.connect.return_value = connected
    return fake


@pytest.mark.parametrize("example", examples("bash", "sh", "console", ""), ids=str)
def test_command_examples_are_understood(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weightbus` lines are parsed by the real parser and their settings read; targets, programs and modules exist."""
    for key in ("WEIGHTBUS_CONFIG",):
        monkeypatch.delenv(key, raising=False)
    for words in commands(example.text):
        match words:
            case ["weightbus", *arguments]:
                _read_settings(arguments)
            case ["docker", "compose", "run", "--rm", service, *arguments]:
                assert re.search(rf"^  {service}:$", (ROOT / "deploy/compose.yaml").read_text(), re.MULTILINE), service
                _read_settings([service, *arguments])
            case ["make", *arguments]:
                _check_make(arguments)
            case _:
                _check_program(words)


def _check_program(words: list[str]) -> None:
    """A program or module of the tests' tree is there, and has the flags that are given to it."""
    if not re.fullmatch(r"(\.venv/bin/)?python3?", words[0]):
        return
    path = f"{words[2].replace('.', '/')}.py" if words[1:2] == ["-m"] and len(words) > 2 else words[1]
    if path.startswith("tests/"):
        file = ROOT / path if (ROOT / path).exists() else (ROOT / path).with_suffix("") / "__main__.py"
        assert file.exists(), path
        known = "".join(each.read_text(encoding="utf-8") for each in file.parent.glob("*.py"))
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert not [flag for flag in flags if f'"{flag}"' not in known], words


def _read_settings(arguments: list[str]) -> None:
    """Parse a command line; read the settings that it gives, unless "…" leaves some out. Raises where it is refused."""
    whole = "…" not in arguments
    arguments = arguments if whole else arguments[: arguments.index("…")]
    needed = entry_point._needed(arguments)
    try:
        args = entry_point.build_parser(needed).parse_args(arguments)
    except SystemExit as refused:
        raise AssertionError(f"weightbus {shlex.join(arguments)}: refused by the parser") from refused
    command: Any = needed[arguments[0]]
    if arguments[0] in SETTINGS:
        target, section = SETTINGS[arguments[0]]
        module, _, name = target.partition(":")
        kind = getattr(importlib.import_module(module), name)
    else:
        kind, section = getattr(command, "kind", None), getattr(command, "section", "")
    if kind is not None and whole:
        settings.settings_from_args(kind, section, args)


def _check_make(arguments: list[str]) -> None:
    """Targets have a rule, and variables are read by it."""
    rules = (ROOT / "Makefile").read_text()
    for word in arguments:
        variable = word.partition("=")[0]
        if "=" in word:
            assert re.search(rf"\$\({variable}\)|^{variable} \?=", rules, re.MULTILINE), word
        elif not word.startswith("-"):
            assert re.search(rf"^{re.escape(word)}:", rules, re.MULTILINE), word


@pytest.mark.parametrize("page", STATED, ids=relative)
def test_commands_in_the_prose_exist(page: Path) -> None:
    """Targets of make, commands of `weightbus`, programs of the tests, and their flags, wherever a page names them."""
    for text in inline(page):
        words = text.split()
        if words[:1] == ["make"] and len(words) > 1:
            _check_make([word for word in words[1:] if re.fullmatch(r"[a-z-]+|[A-Z]+=.*", word)][:1])
        if words[:1] in (["python"], ["python3"]) and len(words) > 1:
            _check_program(words)
        if words[:1] == ["weightbus"] and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            assert words[1] in entry_point.BUILT_IN, text
            flags = _flags_of(words[1])
            assert not [word for word in words if re.fullmatch(r"--[a-z-]+", word) and word not in flags], text


def _flags_of(name: str) -> set[str]:
    parser = argparse.ArgumentParser()
    entry_point.load_command(name, entry_point.BUILT_IN[name]).configure(parser)
    return {flag for action in parser._actions for flag in action.option_strings} | {"--debug"}


def test_texts_that_help_in_trouble_are_those_of_the_programs() -> None:
    """Each text that TROUBLESHOOTING.md quotes for a user who looks for it is in the source, in one piece."""
    section = (ROOT / "TROUBLESHOOTING.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith('| "')]
    quoted = [text for row in rows for text in re.findall(r'"([^"]+)"', row)]
    assert len(quoted) > 10
    modules = [path for path in FILES if path.suffix == ".py" and "tests" not in path.relative_to(ROOT).parts]
    said = {
        node.value
        for module in modules
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [text for text in quoted if not any(text in each for each in said)] == []


def test_settings_examples_are_read(tmp_path: Path) -> None:
    """Each section of an example of a settings file is read by the command that has it."""
    kinds: dict[str, Any] = {"trainer": weightbus.TrainerSettings}
    for name, target in entry_point.BUILT_IN.items():
        command: Any = entry_point.load_command(name, target)
        if hasattr(command, "kind"):
            kinds[command.section] = command.kind
    for target, section in SETTINGS.values():
        module, _, name = target.partition(":")
        kinds[section] = getattr(importlib.import_module(module), name)
    for example in examples("toml"):
        file = tmp_path / "weightbus.toml"
        file.write_text(example.text)
        for section in tomllib.loads(example.text):
            assert section in kinds, f"{example}: no command reads [{section}]"
            settings.load_settings(kinds[section], section, file=file)
