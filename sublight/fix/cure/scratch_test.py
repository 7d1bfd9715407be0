"""A scratch copy holds what a script may read, leads nowhere that it could write, and is refused when too large."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sublight.errors import BadInput
from sublight.fix.cure import scratch
from sublight.fix.cure.scratch import Scratch, plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder as they are, with what lies beside it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "set.bin").write_bytes(b"data")
    here = tmp_path / "work"
    for name in ("data", ".git", "env/bin", "__pycache__", "package", "large/part"):
        (here / name).mkdir(parents=True)
    for name in ("train.py", "data/a.bin", ".git/HEAD", "env/pyvenv.cfg", "__pycache__/x.pyc", "large/part/b"):
        (here / name).write_text(name)
    (here / "package" / "locked.txt").write_text("read only")
    (here / "package" / "locked.txt").chmod(0o444)
    (here / "inside").symlink_to(here / "data")  # a whole path
    (here / "near").symlink_to("data/a.bin")
    (here / "outside").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(here / "pipe")  # copying would wait for ever
    return here


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Bytes, mode and time of every file: bit by bit."""
    return {
        str(file): (file.read_bytes(), file.stat().st_mode, file.stat().st_mtime_ns)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_what_a_copy_holds(folder: Path) -> None:
    before = contents(folder)
    planned = plan(str(folder), "train.py", module=False, exclude=["large/"])
    with planned.copied() as name:
        copy = Path(name)
        assert sorted(path.name for path in copy.iterdir()) == [
            ".git", "data", "env", "inside", "large", "near", "outside", "package", "train.py",
        ]  # fmt: skip  # no pipe, no caches
        for linked in (".git", "env", "large"):
            assert (copy / linked).is_symlink() and (copy / linked).resolve() == folder / linked
        assert (copy / "large/part/b").read_text() == "large/part/b", "what is excluded is read where it lies"
        assert (copy / "inside").resolve() == copy / "data", "a whole path into the folder leads into the copy"
        assert (copy / "outside/set.bin").read_bytes() == b"data" and not (copy / "data").is_symlink()
        (copy / "near").write_text("changed")
        (copy / "inside" / "a.bin").write_text("changed")
        assert (copy / "train.py").stat().st_mtime_ns == (folder / "train.py").stat().st_mtime_ns
        assert planned.total_bytes == len("train.py" + "data/a.bin" + "read only")
    assert contents(folder) == before and not copy.exists()


@pytest.mark.parametrize("fenced", [True, False])
def test_what_lies_beside_the_folder_is_read_where_nothing_can_write_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    monkeypatch.setattr(scratch.landlock, "version", lambda: int(fenced))
    (folder / "package" / "away").symlink_to("../../elsewhere")
    (folder / "package" / "home").symlink_to("../data")
    with plan(str(folder), "train.py", module=False).copied() as copy:
        for path in ("package/away/set.bin", "../elsewhere/set.bin"):
            assert os.path.exists(os.path.join(copy, path)) == fenced, path
        assert (Path(copy) / "package/home").resolve() == Path(copy) / "data"
    assert (folder.parent / "elsewhere" / "set.bin").read_bytes() == b"data"


def test_paths_lead_into_the_copy_and_back(folder: Path) -> None:
    planned = Scratch(folder=str(folder))
    words = ["data/a.bin", f"{folder}/data", f"--out={folder}/new", "--lr=1", f"{folder}2/x", f"{folder}/outside"]
    assert planned.arguments(words, "/copy") == [
        "data/a.bin", "/copy/data", "--out=/copy/new", "--lr=1", f"{folder}2/x", f"{folder}/outside",
    ]  # fmt: skip
    assert (
        planned.out_of("/copy/a/b.py", "/copy") == f"{folder}/a/b.py" and planned.out_of("/copy2", "/copy") == "/copy2"
    )


def test_what_is_too_large_names_the_way_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "data" / "huge.bin").write_bytes(bytes(5000))
    monkeypatch.setattr(scratch, "MOST_BYTES", 1000)
    with pytest.raises(BadInput, match=r"--scratch-exclude data \(5\.01 kB\) lets it be read where it lies, or start"):
        plan(str(folder), "train.py", module=False)
    assert plan(str(folder), "train.py", module=False, exclude=["data"]).total_bytes < 1000
    assert plan(str(folder), "train.py", module=False, exclude=["*.bin"]).total_bytes < 1000


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("../train.py", {}, "cd to its folder"),
        ("package/run.py", {"exclude": ["package"]}, "leaves package out, and the script lies there"),
        ("train.py", {"allow": ["/no/such"]}, "no such file or folder"),
        ("train.py", {"allow": ["data"]}, "lies in the working folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: Path, target: str, options: dict[str, list[str]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(BadInput, match=words):
        plan(str(folder), target, module=False, **options)  # type: ignore[arg-type]


def test_a_temporary_folder_inside_or_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(BadInput, match="set TMPDIR"):
        plan(str(folder), "train.py", module=False)
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(folder / "data"))
    with pytest.raises(BadInput, match="TMPDIR lies in it"):
        plan(str(folder), "train.py", module=False)
