"""The diff: lines land after what made the model, arguments inside the call, and the file stays as it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sublight.fix.cure.diff import edited, unified
from sublight.fix.cure.place import assigned
from sublight.fix.cure.record import Edit

SOURCE = '''\
"""Words."""
import torch

def main():
    model = make(
        4,
    )
    batch = data.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if True:
        torch.cuda.empty_cache()
'''


def edit(kind: str, line: int, text: str, call: str = "") -> Edit:
    return Edit(kind=kind, file="train.py", line=line, text=text, call=call)  # type: ignore[arg-type]


def test_every_kind_of_edit_at_once() -> None:
    edits = [
        edit("after", 7, "sublight.patch(model)"),
        edit("chained", 8, ".pin_memory()", "to"),
        edit("argument", 8, "non_blocking=True", "to"),
        edit("argument", 8, "non_blocking=True", "cuda"),  # there is no such call: nothing happens
        edit("argument", 9, "fused=True", "SGD"),
        edit("instead", 11, "pass  # left out"),
        edit("import", 0, "torch.set_float32_matmul_precision('high')"),
    ]
    after = edited(SOURCE, edits)
    ast.parse(after)
    assert "    )\n    sublight.patch(model)\n" in after
    assert "data.pin_memory().to(device, non_blocking=True)\n" in after
    assert "torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)\n" in after
    assert "        pass  # left out\n" in after
    assert after.count("import sublight\n") == 1 and after.count("set_float32_matmul_precision") == 1
    assert after.index("import torch\n") < after.index("import sublight") < after.index("def main")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = f()", "x = f(a=1)"),
        ("x = f(é)", "x = f(é, a=1)"),  # columns are counted in bytes
        ("x = f(\n    2,\n)", "x = f(\n    2,\n    a=1,\n)"),
        ("x = f(\n    2\n)", "x = f(\n    2,\n    a=1,\n)"),
        ("x = f(a=2)", "x = f(a=2)"),  # it has one already
        ("x = g(2)", "x = g(2)"),
    ],
)
def test_an_argument(before: str, after: str) -> None:
    line = 1 + before.count("\n")
    assert edited(before, [edit("argument", line, "a=1", "f")]) == after


def test_no_import_is_added_twice_or_without_need() -> None:
    assert edited("import sublight\nm = 1\n", [edit("after", 2, "sublight.patch(m)")]).count("import sublight") == 1
    assert "import sublight" not in edited("m = f()\n", [edit("argument", 1, "fused=True", "f")])
    assert edited("m = 1\n", [edit("after", 1, "sublight.patch(m)")]) == "import sublight\nm = 1\nsublight.patch(m)\n"


def test_a_diff_names_the_file_from_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    text = unified([Edit(kind="after", file=str(file), line=7, text="sublight.patch(model)")], folder=str(tmp_path))
    assert text.startswith("--- a/train.py\n+++ b/train.py\n") and "+    sublight.patch(model)" in text
    assert file.read_text() == SOURCE
    gone = Edit(kind="after", file=str(tmp_path / "gone.py"), line=1, text="x")
    assert unified([gone], folder=str(tmp_path)) == ""


def test_the_last_assignment_before_a_line() -> None:
    source = "a = 1\na, b = 2, 3\nself.c: int = 4\na = 5\n"
    assert assigned(source, "a", 1, 4) == 2 and assigned(source, "b", 1, 9) == 2
    assert assigned(source, "self.c", 1, 9) == 3 and assigned(source, "d", 1, 9) == 0
    assert assigned("a = (", "a", 1, 9) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = y.to(d)", "x = y.b().to(d)"),
        ("x = é[0].to(d)", "x = é[0].b().to(d)"),
        ("x = (\n    y\n    .to(d)\n)", "x = (\n    y.b()\n    .to(d)\n)"),
        ("x = to(d)", "x = to(d)"),  # no object's method
    ],
)
def test_a_call_before_another(before: str, after: str) -> None:
    line = next(number for number, words in enumerate(before.splitlines(), 1) if "to(" in words)
    assert edited(before, [edit("chained", line, ".b()", "to")]) == after
