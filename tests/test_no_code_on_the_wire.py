"""Nothing that arrives can run code: read off the syntax trees of everything that is shipped.

There is one exception, and it only writes: SGLang's update_weights_from_tensor demands a pickle, whose opcodes
`engine_agent/engines/sglang/pickle_payload.py` puts together by hand from fields that were checked. No module imports a
pickler at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_architecture import MODULES, relative

WRITES_A_PICKLE = "engine_agent/engines/sglang/pickle_payload.py"

MODULES_THAT_LOAD_CODE = (
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "copyreg"),
    *("multiprocessing", "torch.multiprocessing", "torch.package", "torch.distributed.rpc", "torch.jit"),
    *("xmlrpc", "yaml", "code", "codeop", "imp", "runpy"),
)
"""`multiprocessing` as a whole: its connections, queues and managers pickle."""

CALLS_THAT_LOAD_CODE = frozenset(
    (
        *("exec", "__import__", "execfile", "import_module"),
        *("recv_pyobj", "send_pyobj", "loads_pickle", "ForkingPickler", "Unpickler", "set_string_option_pyobj"),
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
        *("send_object_list", "recv_object_list", "load_module", "exec_module", "read_pickle", "unsafe_load"),
    )
)

LOADS_CODE = frozenset(
    ("eval", "compile", "exec", "__import__", "numpy.load", "numpy.lib.npyio.load", "numpy.lib.format.read_array")
)
"""By full name: a model has an `eval` too, and a pattern a `compile`."""

LOADS_CODE_UNLESS_TOLD = frozenset(("torch.load", "torch.serialization.load"))
"""They unpickle, but with ``weights_only=True``."""

ALLOWED = {
    (
        "control/cli/entry_point.py",
        "import_module",
    ),  # names of subcommands, from installed distributions, never from a wire
    ("dataplane/transports/sends/nixl_group.py", "import_module"),  # one library under three names, which are constants
    (
        "trainer_agent/sources/megatron/bridge_mode.py",
        "import_module",
    ),  # megatron.bridge and transformers, if they are there
    ("control/front_door/lazy_face.py", "import_module"),  # modules that a face names, on their first use
}


def nodes(text: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(text))


def names(tree: ast.AST) -> dict[str, str]:
    """What each name that a module imports, wherever in it, stands for: ``t`` for ``torch``, or for ``torch.load``."""
    found = {"np": "numpy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                found[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def resolved(node: ast.AST, known: dict[str, str]) -> str:
    """The full name behind ``a``, ``a.b`` or ``getattr(a, "b")``; a question mark for what is none of them."""
    match node:
        case ast.Name(id=name):
            return known.get(name, name).removeprefix("builtins.")
        case ast.Attribute(value=owner, attr=name):
            return f"{resolved(owner, known)}.{name}".removeprefix("builtins.")
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            return f"{resolved(owner, known)}.{name}".removeprefix("builtins.")
    return "?"


def given(node: ast.Call, name: str) -> bool:
    """Whether the call says ``name=`` anything but False, in so many words."""
    return any(
        each.arg == name and not (isinstance(each.value, ast.Constant) and each.value.value is False)
        for each in node.keywords
    )


def weights_only(node: ast.Call) -> bool:
    """Whether the call says so, in so many words."""
    return any(
        each.arg == "weights_only" and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in node.keywords
    )


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def objections(text: str) -> list[tuple[int, str]]:
    """What in a module could load code, with its line."""
    tree = ast.parse(text)
    known = names(tree)
    safe = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and weights_only(node)}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        found += [
            (line, name)
            for name in imports(node)
            if any(f"{name}.".startswith(f"{bad}.") for bad in MODULES_THAT_LOAD_CODE)
        ]
        full = resolved(node, known)  # not only where it is called: under another name it would be called unseen
        if full in LOADS_CODE or (full in LOADS_CODE_UNLESS_TOLD and id(node) not in safe):
            found.append((line, full.rpartition(".")[2]))
        if isinstance(node, ast.Call):
            name = resolved(node.func, known).rpartition(".")[2]
            if name in CALLS_THAT_LOAD_CODE or given(node, "shell") or given(node, "allow_pickle"):
                found.append((line, name))
    return found


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_can_load_code(path: Path) -> None:
    """No pickler, no evaluation, no torch.load but with weights_only, no shell; exceptions have a reason (S11)."""
    found = [each for each in objections(path.read_text("utf-8")) if (relative(path), each[1]) not in ALLOWED]
    assert found == [], f"{relative(path)}: {found}"


def test_exceptions_are_in_use() -> None:
    """An exception that no module needs any more is taken off the list."""
    used = {(relative(path), name) for path in MODULES for _, name in objections(path.read_text("utf-8"))}
    assert used == ALLOWED


def test_one_module_writes_a_pickle() -> None:
    """And no other has the opcodes to: protocol 2 or 4, by hand, at the beginning of some bytes (S11)."""
    writers = {
        relative(path)
        for path in MODULES
        for node in nodes(path.read_text("utf-8"))
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and node.value[:1] == b"\x80"
    }
    assert writers == {WRITES_A_PICKLE}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import multiprocessing.connection",
        "from multiprocessing import connection",
        "from torch import multiprocessing",
        "import torch.multiprocessing as mp",
        "from xmlrpc.server import SimpleXMLRPCServer",
        "def f(x):\n    import dill",
        "eval(x)",
        "builtins.eval(x)",
        "exec(x)",
        "compile(x, '', 'exec')",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path)",
        "read(path, allow_pickle=True)",
        "from torch import load\nload(p)",
        "from torch import load as read\nread(p, weights_only=False)",
        "from torch.serialization import load\nload(p)",
        "torch.serialization.load(p)",
        "import torch as t\nt.load(p)",
        "import torch.serialization as s\ns.load(p)",
        "import numpy as n\nn.load(p)",
        "from numpy import load\nload(p)",
        "getattr(torch, 'load')(p)",
        "import torch as t\ngetattr(t, 'load', None)",
        "read = torch.load",
        "map(torch.load, paths)",
        "run = eval\nrun(x)",
        "from builtins import eval as run\nrun(x)",
        "import builtins as b\nb.exec(x)",
        "from importlib import import_module as bring\nbring(name)",
        "read(path, allow_pickle=flag)",
        "subprocess.run(x, shell=flag)",
        "importlib.import_module(name)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_check_sees_them(text: str) -> None:
    """Each way to load code is found, wherever it stands: this check is not blind."""
    assert objections(text)


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "re.compile(x)",
        "torch.load(p, weights_only=True)",
        "tl.load(row)",
        "tomllib.load(f)",
        "from torch import load\nload(p, weights_only=True)",
        "import triton.language as np\nnp.load(row)",
        "read(path, allow_pickle=False)",
        "getattr(torch, name)",
    ],
)
def test_the_check_lets_others_be(text: str) -> None:
    """What only looks alike is no objection."""
    assert objections(text) == []
