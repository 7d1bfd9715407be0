"""The table of private names: every one is there in this version, a renamed one is named, and no other file has any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend import private
from sublight.backend.private import PARTS, Missing, Part, find, missing

PACKAGE = Path(__file__).parents[1]
PRIVATE = re.compile(
    r"torch\._(?!_)\w+|triton\._(?!_)\w+|triton\.(?:runtime|compiler|backends)\b|triton import knobs"
    r"|(?<!private\.)\bknobs\.|forward_ad\._\w+"
)
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
    """Private names of Triton and PyTorch in code; comments, docstrings and advice for users may mention them."""
    code = re.sub(r'"""(?:.|\n)*?"""|#.*|"(?:[^"\\\n]|\\.)*"', "", source)
    return PRIVATE.findall(code)


def test_no_other_file_has_private_names() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if path.parent.name not in ("backend", "native")]
    names = {
        str(path.relative_to(PACKAGE)): private_names(path.read_text(encoding="utf-8"))
        for path in others
        if not path.name.endswith(("_test.py", "conftest.py"))
    }
    assert {file: found for file, found in names.items() if found} == {}


def test_the_checker_finds_them() -> None:
    code = 'import torch\nx = torch._C.f()\nfrom triton.runtime.jit import JITFunction\n"torch._dynamo"  # torch._x\n'
    assert private_names(code) == ["torch._C", "triton.runtime"]
