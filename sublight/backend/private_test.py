"""The table of private names: every one is there in this version, a renamed one is named, and no other file has any."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend import private
from sublight.backend.private import PARTS, Missing, Part, find, loaded, missing

PACKAGE = Path(__file__).parents[1]
PRIVATE = re.compile(
    r"(?:torch|triton)(?:\.(?!_)\w+)*?\._(?!_)\w+|triton\.(?:runtime|compiler|backends|knobs)\b"
    r"|private\.\w+(?:\.(?!_)\w+)*?\._(?!_)\w+"  # more of a module in the table than the table names
)
LOOKS_UP = re.compile(r"(?:.*\.)?(?:import_module|find_spec|__import__|importorskip)|sys\.modules\.\w+")
MAYBE = re.compile(  # to take all files apart takes seconds
    r"(?<!\bself)(?<!\bcls)\._(?!_)\w|import _(?!_)|getattr\([\w.]+, ._"
    r"|triton[\w. ]*\b(?:runtime|compiler|backends|knobs)\b"
)
TRACED = {  # what runs while torch.compile traces has no table to look into, and names them itself
    "fix/patch/rules/causal_mask.py": ["torch.compiler._is_exporting_flag"],
    "trace/capture/steps.py": ["torch._guards"],
}
CUDA_ALONE = {"current_raw_stream", "end_allocate_to_pool"}  # a CPU's PyTorch has them not


def test_this_version_has_them_all() -> None:
    assert [name for name in PARTS if name not in CUDA_ALONE and find(name) is None] == []
    if torch.version.cuda:
        assert missing() == []


def test_a_renamed_part_is_named_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "planted", Part("triton.runtime.jit:NoSuchThing", "a test"))
    with pytest.raises(Missing, match=r"triton [\d.]+ has no triton.runtime.jit.NoSuchThing, needed for: a test"):
        _ = private.planted
    monkeypatch.setitem(PARTS, "moved", Part("torch._C._no_such_module:name", "another"))
    assert [words for words in missing() if "no_such_module" in words or "NoSuchThing" in words] != []
    with pytest.raises(AttributeError):
        _ = private.never_listed


def private_names(source: str) -> list[str]:
    """Private names of Triton and PyTorch that code imports, uses, or looks up by a string; comments, docstrings and
    advice for users may mention them."""
    if not MAYBE.search(source):
        return []
    nodes = [*ast.walk(ast.parse(source))]
    aliases: dict[str, str] = {}  # the name here -> the whole one
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
            for each in node.names:
                names.append(module + each.name)
                if each.asname or module:
                    aliases[each.asname or each.name] = module + each.name
    aliases["private"] = "private"
    for node in nodes:
        if isinstance(node, ast.Attribute):
            names.append(dotted(node, aliases))
        elif isinstance(node, ast.Subscript) and dotted(node.value, {}) == "sys.modules":
            names.append(words(node.slice))
        elif isinstance(node, ast.Compare) and dotted(node.comparators[-1], {}) == "sys.modules":
            names.append(words(node.left))
        elif isinstance(node, ast.Call) and node.args:
            function = dotted(node.func, {})
            if LOOKS_UP.fullmatch(function):
                names.append(words(node.args[0]))
            elif function == "getattr":
                names.append(f"{dotted(node.args[0], aliases)}.{words(node.args[1])}")
    return sorted({found[0] for name in names if (found := PRIVATE.match(name))})


def dotted(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """`torch.cuda._sleep`, of the nodes that it is made of; empty where it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([aliases.get(node.id, node.id), *reversed(parts)]) if isinstance(node, ast.Name) else ""


def words(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_no_other_file_has_private_names() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if path.parent.name not in ("backend", "native")]
    names = {
        str(path.relative_to(PACKAGE)): private_names(path.read_text(encoding="utf-8"))
        for path in others
        if not path.name.endswith(("_test.py", "conftest.py"))
    }
    assert {file: found for file, found in names.items() if found} == TRACED
    paths = {part.path.replace(":", ".") for part in PARTS.values()}
    assert all(any(path.startswith(name) for path in paths) for names in TRACED.values() for name in names)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch\nx = torch._C.f(torch._C.g)", ["torch._C"]),
        ("from triton.runtime.jit import JITFunction", ["triton.runtime"]),
        ("from triton import knobs", ["triton.knobs"]),
        ("from torch.utils import _pytree as pytree", ["torch.utils._pytree"]),
        (
            "from torch.autograd import forward_ad as ad\nad._current_level",
            ["torch.autograd.forward_ad._current_level"],
        ),
        ("import torch.nn as nn\nnn.modules.module._hook()", ["torch.nn.modules.module._hook"]),
        ("getattr(torch.cuda, '_sleep')(1)", ["torch.cuda._sleep"]),
        ("sys.modules.get('torch._guards')", ["torch._guards"]),
        ("x = sys.modules['torch._dynamo.utils']", ["torch._dynamo"]),
        ("x = 'torch._dynamo' in sys.modules", ["torch._dynamo"]),
        ("importlib.import_module('triton.compiler.code_generator')", ["triton.compiler"]),
        ("private.dynamo._private", ["private.dynamo._private"]),
        ("private.dynamo.config, private.JITFunction, torch.__version__, self._torch._x", []),
        ('"torch._C"\nraise BadInput("call torch.cuda.memory._snapshot() first")  # torch._C', []),
    ],
)
def test_the_checker_finds_them(code: str, names: list[str]) -> None:
    assert private_names(code) == names


def test_what_nothing_has_imported_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "planted", Part("wave:Wave_read", "a test"))
    monkeypatch.setitem(sys.modules, "wave", types.SimpleNamespace(Wave_read=1))
    assert loaded("planted") == 1
    monkeypatch.setitem(sys.modules, "wave", types.SimpleNamespace(__version__="2"))
    assert loaded("planted") is None  # this version lacks it
    monkeypatch.delitem(sys.modules, "wave")
    assert loaded("planted") is None and "wave" not in sys.modules
