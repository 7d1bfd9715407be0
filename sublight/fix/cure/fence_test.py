"""The fence around a trial run: what is refused, what is not, by Python and by what is not Python."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sublight.fix.cure import landlock
from sublight.fix.cure.fence import Fence


@pytest.fixture
def fence(tmp_path: Path) -> Fence:
    """Not started: an audit hook would stay in the tests' process. Files made from now on are the run's own."""
    for name in ("copy", "theirs", "temporary", "cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("before")
        os.utime(tmp_path / name / "old")
    time.sleep(0.02)  # a file's time is as coarse as the kernel's clock
    return Fence(
        roots=[str(tmp_path / "copy"), str(tmp_path / "cache")],
        temporary=[str(tmp_path / "temporary")],
        protected=str(tmp_path / "theirs"),
        log=str(tmp_path / "log"),
        began_s=time.time(),
    )


def event(name: str, *args: Any) -> Callable[[Fence], None]:
    return lambda fence: fence._hear(name, args)


def opened(path: str, flags: int) -> Callable[[Fence], None]:
    return event("open", path, None, flags)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, os.O_APPEND | os.O_WRONLY])
@pytest.mark.parametrize(("where", "is_refused"), [("theirs/old", True), ("theirs/new", True), ("copy/new", False),
                                                   ("cache/old", False), ("temporary/new", False),
                                                   ("temporary/old", True)])  # fmt: skip
def test_what_is_opened_for_writing(fence: Fence, tmp_path: Path, where: str, flags: int, is_refused: bool) -> None:
    path = tmp_path / where
    opened(str(path), os.O_RDONLY)(fence)  # reading is free
    if not is_refused:
        return opened(str(path), flags)(fence)
    with pytest.raises(PermissionError, match="outside of the scratch copy"):
        opened(str(path), flags)(fence)
    assert (tmp_path / "log").read_text() == f"{path}\n" and path.exists() == (where[-3:] == "old")


def test_what_the_run_made_itself_is_its_own(fence: Fence, tmp_path: Path) -> None:
    own = tmp_path / "temporary" / "own"
    own.write_text("by another process of the run")
    opened(str(own), os.O_WRONLY)(fence)
    event("os.remove", str(own), -1)(fence)


@pytest.mark.parametrize(
    "change",
    [
        lambda old, new: event("os.remove", old, -1),
        lambda old, new: event("os.rmdir", os.path.dirname(old), -1),
        lambda old, new: event("shutil.rmtree", os.path.dirname(old), None),
        lambda old, new: event("os.mkdir", new, 0o777, -1),
        lambda old, new: event("os.rename", old, "mine", -1, -1),
        lambda old, new: event("os.rename", "mine", old, -1, -1),
        lambda old, new: event("os.link", "mine", new, -1, -1),
        lambda old, new: event("os.symlink", "mine", new, -1),
        lambda old, new: event("os.truncate", old, 0),
        lambda old, new: event("os.chmod", old, 0, -1),
        lambda old, new: event("os.utime", old, None, None, -1),
    ],
)
def test_every_other_change(
    fence: Fence, tmp_path: Path, change: Callable[[str, str], Callable[[Fence], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "copy")
    with pytest.raises(PermissionError):
        change(str(tmp_path / "theirs" / "old"), str(tmp_path / "theirs" / "new"))(fence)
    Path("mine").touch()
    change(str(tmp_path / "copy" / "old"), str(tmp_path / "copy" / "new"))(fence)


def test_links_and_folders_by_number(fence: Fence, tmp_path: Path) -> None:
    link = tmp_path / "copy" / "link"
    link.symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError):
        opened(f"{link}/new", os.O_WRONLY)(fence)
    event("os.remove", str(link), -1)(fence)  # the link itself is the copy's
    event("os.mkdir", str(tmp_path / "theirs"), 0o777, -1)(fence)  # it is there: os.makedirs(..., exist_ok=True)
    number = os.open(tmp_path / "theirs", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            event("os.remove", "old", number)(fence)
    finally:
        os.close(number)
    event("open", 1, "w", os.O_WRONLY)(fence)  # an open file's number
    with pytest.raises(PermissionError):  # Python's own cache: refused, and no news
        opened(str(tmp_path / "theirs/__pycache__/a.pyc"), os.O_WRONLY)(fence)
    assert "pycache" not in (tmp_path / "log").read_text()


def test_the_kernel_refuses_what_python_does_not_hear_of(tmp_path: Path) -> None:
    """In another process: there is no way back."""
    if not landlock.version():
        pytest.skip("this kernel has no Landlock")
    for name in ("copy", "copy/sub", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "theirs" / "old").write_text("before")
    code = (
        "import os, subprocess, sys; from sublight.fix.cure import landlock;"
        "print(landlock.restrict([sys.argv[1] + '/copy', '/dev', '/no/such']));"
        "os.chdir(sys.argv[1]); sys.stdout.flush();"
        "subprocess.run('cat theirs/old; echo a > copy/a; mv copy/a copy/sub/a; rm theirs/old; echo b > theirs/old;"
        " mv copy/sub/a theirs/b; ln -s x theirs/c; mkdir theirs/d; echo > /dev/null; ls copy/sub', shell=True)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\nbeforea\n" and done.stderr.count("denied") == 5
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["old"]
    assert (tmp_path / "theirs" / "old").read_text() == "before"


def test_an_old_kernel_and_another_system_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "_call", lambda number, *args: 1)
    assert landlock.version() == 0 and not landlock.restrict(["/tmp"])
    monkeypatch.setattr(landlock, "_call", lambda number, *args: -1)
    assert landlock.version() == 0
    monkeypatch.setattr(landlock.sys, "platform", "darwin")
    assert landlock.version() == 0
