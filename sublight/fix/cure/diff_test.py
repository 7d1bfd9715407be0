"""The diff: lines land after what made the model, arguments inside the call, and the file stays as it is."""

from __future__ import annotations

import ast
import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from sublight.fix.cure.diff import applied, check_with_git, edited, unified
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
        edit("before", 8, "sublight.patch(model)"),
        edit("chained", 8, ".pin_memory()", "to"),
        edit("argument", 8, "non_blocking=True", "to"),
        edit("argument", 8, "non_blocking=True", "cuda"),  # there is no such call: nothing happens
        edit("argument", 9, "fused=True", "SGD"),
        edit("instead", 11, "pass", "empty_cache"),
        edit("import", 0, "torch.set_float32_matmul_precision('high')"),
    ]
    after = edited(SOURCE, edits)
    ast.parse(after)
    assert "    )\n    sublight.patch(model)\n" in after
    assert "data.pin_memory().to(device, non_blocking=True)\n" in after
    assert "torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)\n" in after
    assert "        pass\n" in after and "empty_cache" not in after
    assert after.count("import sublight\n") == 1 and after.count("set_float32_matmul_precision") == 1
    assert after.index("import torch\n") < after.index("import sublight") < after.index("def main")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = f()", "x = f(a=1)"),
        ("x = f(é)", "x = f(é, a=1)"),  # columns are counted in bytes
        ("x = f(\n    2,\n)", "x = f(\n    2,\n    a=1,\n)"),
        ("x = f(\n    2\n)", "x = f(\n    2,\n    a=1,\n)"),
        ("x = f(\n    2  # two\n)", "x = f(\n    2,  # two\n    a=1,\n)"),
        ("x = f(\n)", "x = f(\na=1)"),
        ("x = f(a=2)", "x = f(a=2)"),  # it has one already
        ("x = g(2)", "x = g(2)"),
    ],
)
def test_an_argument(before: str, after: str) -> None:
    line = 1 + before.count("\n")
    assert edited(before, [edit("argument", line, "a=1", "f")]) == after


def test_no_import_is_added_twice_or_without_need() -> None:
    assert edited("import sublight\nm = 1\n", [edit("before", 2, "sublight.patch(m)")]).count("import sublight") == 1
    assert "import sublight" not in edited("m = f()\n", [edit("argument", 1, "fused=True", "f")])
    assert edited("m = 1\nf(m)\n", [edit("before", 2, "sublight.patch(m)")]) == (
        "import sublight\nm = 1\nsublight.patch(m)\nf(m)\n"
    )


def test_a_diff_names_the_file_from_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    text = unified([Edit(kind="before", file=str(file), line=8, text="sublight.patch(model)")], folder=str(tmp_path))
    assert text.startswith("--- a/train.py\n+++ b/train.py\n") and "+    sublight.patch(model)" in text
    assert file.read_text() == SOURCE
    (tmp_path / "link.py").symlink_to(file)
    linked = Edit(kind="before", file=str(tmp_path / "link.py"), line=8, text="x")
    assert unified([linked], folder=str(tmp_path)) == "", "git does not write through links"
    gone = Edit(kind="before", file=str(tmp_path / "gone.py"), line=1, text="x")
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a = 1; empty_cache(); b = 2", "a = 1; pass; b = 2"),
        ("if é: torch.cuda.empty_cache()", "if é: pass"),
        ("f = lambda: empty_cache()", "f = lambda: empty_cache()"),  # no statement
    ],
)
def test_a_call_is_taken_out_alone(before: str, after: str) -> None:
    assert edited(before, [edit("instead", 1, "pass", "empty_cache")]) == after


def test_imports_go_where_they_are_before_their_use() -> None:
    source = 'import os\nos.environ["A"] = "1"\nimport torch\nm = f()\ng(m)\nimport late\n'
    edits = [edit("before", 5, "sublight.patch(m)"), edit("import", 0, "torch.set_float32_matmul_precision('high')")]
    lines = edited(source, edits).splitlines()
    assert lines[:5] == [
        "import os", "import sublight", 'os.environ["A"] = "1"', "import torch", edits[1].text,
    ]  # fmt: skip
    assert lines[6] == "sublight.patch(m)"


ODD = {
    "plain": b"m = f()\ng(m)\n",
    "no newline at the end": b"m = f()\ng(m)",
    "CRLF": b"import a\r\nm = f()\r\ng(m)\r\n",
    "tabs, form feed, other separators": "if a:\n\tm = f('\x0c\x1c\u2028')\n\x0c\tg(m)\n".encode(),
    "byte order mark": "\ufeffm = f()\ng(m)\n".encode(),
    "long lines": b"m = f()\ng(m)  # " + b"long " * 100 + b"\n",
    "trailing blanks": b"m = f()  \n\n   \ng(m)\n",
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["train.py", "a folder/my train.py"])
def test_git_makes_of_the_diff_what_was_run(tmp_path: Path, kind: str, name: str) -> None:
    """In a repository and in a folder of one: what a user does with the text."""
    git = shutil.which("git") or pytest.skip("git is not installed")
    file = tmp_path / "below" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(ODD[kind])
    subprocess.run([git, "init", "-q", str(tmp_path)], check=True)
    line = 1 + ODD[kind][: ODD[kind].index(b"g(m)")].count(b"\n")
    edits = [Edit(kind="before", file=str(file), line=line, text="sublight.patch(m)")]
    text = unified(edits, folder=str(tmp_path / "below"))
    assert text.endswith("\n") and "\n+" in text
    files = applied(text, str(tmp_path / "below"))
    check_with_git(text, str(tmp_path / "below"), files)
    assert file.read_bytes() == ODD[kind], "nothing is changed by checking"
    (tmp_path / "fix.patch").write_bytes(text.encode())
    subprocess.run([git, "apply", "../fix.patch"], cwd=tmp_path / "below", check=True)
    assert files == {name: file.read_bytes()} and b"sublight.patch(m)" in file.read_bytes()
    assert file.read_bytes() == edited(ODD[kind].decode(), edits).encode()


def test_a_diff_that_fits_to_other_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("m = f()\ng(m)\n")
    edits = [Edit(kind="before", file=str(file), line=2, text="x")]
    text = unified(edits, folder=str(tmp_path))
    with pytest.raises(ValueError, match="git apply") if shutil.which("git") else contextlib.nullcontext():
        check_with_git(text, str(tmp_path), {"train.py": b"something else"})
    file.write_text("m = h()\ng(m)\n")
    with pytest.raises(ValueError, match="does not fit to line 1"):
        applied(text, str(tmp_path))


@pytest.mark.parametrize(
    ("content", "name"), [(b"m = '\xe9'\ng(m)\n", "train.py"), (b"m = 1\rg(m)\r", "train.py"), (b"m\n", 'a"b.py')]
)
def test_of_a_file_that_cannot_be_written_as_a_diff_there_is_none(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert unified([Edit(kind="before", file=str(tmp_path / name), line=1, text="x")], folder=str(tmp_path)) == ""
