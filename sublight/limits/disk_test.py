"""The disk's probe: every byte is written and read, past the page cache, and nothing is left whatever interrupts it."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublight.limits import disk
from sublight.limits.disk import DISK, filesystem, scratch_folder
from sublight.limits.probe import Context
from sublight.results import Limit

QUICK = Context(kind="cpu", quick=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if filesystem(tmp_path) in disk.IN_MEMORY:
        pytest.skip("temporary files lie in memory here")
    monkeypatch.setenv("SUBLIGHT_DISK", str(tmp_path))
    monkeypatch.setattr(disk, "QUICK_SIZE_BYTES", 48 << 20)  # a round and a half
    return tmp_path


def measured() -> dict[str, Limit]:
    return {limit.name: limit for limit in DISK.measure(QUICK)}


def open_files_without_a_name() -> list[str]:
    if not Path("/proc/self/fd").is_dir():
        return []
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the listing's own
    return [target for target in targets if "(deleted)" in target]


def at_call(number: int, act: Callable[[], Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but `act` in its place from the given call on."""
    calls = 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return act() if calls >= number else real(*args)

    return call


def test_both_rates_and_nothing_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names_seen: list[str] = []
    real = os.pwrite

    def spy(*args: Any) -> int:
        names_seen.extend(os.listdir(folder))
        return real(*args)

    before = open_files_without_a_name()
    monkeypatch.setattr(os, "pwrite", spy)
    limits = measured()
    assert tuple(limits) == DISK.names
    for limit in limits.values():
        assert limit.value is not None and 1e5 < limit.value < 1e12 and limit.unit == "B/s"
        assert limit.detail["bytes"] == 48 << 20 and limit.n == 2
        assert limit.detail["method"] in ("O_DIRECT", "F_NOCACHE", "flushed and dropped")
    assert not names_seen, "a name that a killed process would leave behind"
    assert not os.listdir(folder) and open_files_without_a_name() == before


def test_every_byte_is_written_once_and_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: dict[str, list[int]] = {"pwrite": [], "preadv": []}

    def spy(name: str) -> Callable[[int, Any, int], int]:
        real = getattr(os, name)

        def call(fd: int, data: Any, at: int) -> int:
            offsets[name].append(at)
            return int(real(fd, data, at))

        return call

    for name in offsets:
        monkeypatch.setattr(os, name, spy(name))
    measured()
    every = list(range(0, 48 << 20, disk.BLOCK_BYTES))
    assert sorted(offsets["pwrite"]) == sorted(offsets["preadv"]) == every


def test_several_threads_find_out_that_there_is_no_direct_access(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, real, refused = disk.Scratch(folder), os.pwrite, []

    def refuse_once(fd: int, data: Any, at: int) -> int:
        if refused:
            return real(fd, data, at)
        refused.append(at)
        scratch.method = disk._buffered(fd)  # another thread, in the meantime
        raise OSError(errno.EINVAL, "Invalid argument")

    scratch.method = "O_DIRECT"
    monkeypatch.setattr(os, "pwrite", refuse_once)
    scratch.write(scratch.buffers[0], 0)
    assert os.fstat(scratch.fd).st_size == disk.BLOCK_BYTES
    os.close(scratch.fd)


def test_without_temporary_nameless_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    test_both_rates_and_nothing_left(folder, monkeypatch)


@pytest.mark.parametrize("when", ["at once", "at the first write"])
def test_without_direct_access(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no O_DIRECT here")
    import fcntl

    real_fcntl, real_pwrite = fcntl.fcntl, os.pwrite

    def refuse_flag(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, flags)

    def refuse_write(fd: int, data: Any, at: int) -> int:
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(fd, data, at)

    dropped: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, advice: dropped.append(advice))
    if when == "at once":
        monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    else:
        monkeypatch.setattr(os, "pwrite", refuse_write)
    limits = measured()
    assert all(limit.value and limit.detail["method"] == "flushed and dropped" for limit in limits.values())
    assert dropped == [os.POSIX_FADV_DONTNEED]


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_interrupt_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = open_files_without_a_name()
    monkeypatch.setattr(os, call, at_call(3, interrupt, getattr(os, call)))
    with pytest.raises(KeyboardInterrupt):
        measured()
    assert not os.listdir(folder) and open_files_without_a_name() == before


def test_interrupt_between_opening_and_unlinking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def interrupted_open(*args: Any) -> int:
        os.close(real(*args))
        raise KeyboardInterrupt

    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(os, "open", interrupted_open)
    with pytest.raises(KeyboardInterrupt):
        measured()
    monkeypatch.undo()
    assert not os.listdir(folder)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_fills_up_while_writing(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fill_up() -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", at_call(3, fill_up, os.pwrite))
    limits = measured()
    assert tuple(limits) == DISK.names
    for limit in limits.values():
        assert limit.value is None and limit.unavailable == f"disk full: needs 101 MB free in {folder}"
    assert not os.listdir(folder)


def test_short_writes_are_completed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 1 << 20], at))
    limits = measured()
    assert all(limit.value for limit in limits.values())  # a short write left alone would be a short read


def test_full_disk_is_seen_before_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise AssertionError("wrote to a full disk")

    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1000, f_frsize=4096))
    monkeypatch.setattr(os, "pwrite", never)
    assert {limit.unavailable for limit in measured().values()} == {f"disk full: needs 101 MB free in {folder}"}


def test_other_errors_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", at_call(2, fail, os.preadv))
    limits = measured()
    assert limits["disk_write"].value, "what was measured before is kept"
    assert limits["disk_read"].unavailable == f"cannot use {folder}: Input/output error: set SUBLIGHT_DISK=FOLDER"


def test_slow_disk_stops_at_the_time_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(fd: int, data: Any, at: int) -> int:
        nonlocal now
        now += 2.0
        return real(fd, data, at)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    written = next(DISK.measure(QUICK))
    assert written.detail["bytes"] <= disk.DEPTH * disk.BLOCK_BYTES and written.n == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
def test_memory_is_not_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    if filesystem(Path("/dev/shm")) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    monkeypatch.setenv("SUBLIGHT_DISK", "/dev/shm")
    reason = "/dev/shm is a tmpfs (memory), not a disk: set SUBLIGHT_DISK=FOLDER"
    assert [limit.unavailable for limit in DISK.measure(QUICK)] == [reason, reason]


def test_a_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUBLIGHT_DISK", str(tmp_path / "nowhere"))
    limits = measured()
    assert all("is not a folder: set SUBLIGHT_DISK=FOLDER" in (limit.unavailable or "") for limit in limits.values())


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SUBLIGHT_DISK", raising=False)
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "not" / "yet"))
    assert scratch_folder() == tmp_path
    assert not (tmp_path / "not").exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert scratch_folder() == Path(tempfile.gettempdir())
    monkeypatch.setenv("SUBLIGHT_DISK", "/somewhere")
    assert scratch_folder() == Path("/somewhere")


def test_the_innermost_mount_tells_the_filesystem(tmp_path: Path) -> None:
    inner = tmp_path / "a b" / "c"
    inner.mkdir(parents=True)
    mounts = tmp_path / "mounts"
    point = str(tmp_path.resolve()).replace(" ", "\\040")
    lines = ("/dev/sda / ext4", f"tmpfs {point}/a\\040b tmpfs", f"/dev/sdb {point}/a\\040b/cd xfs")
    mounts.write_text("".join(f"{line} rw 0 0\n" for line in lines))
    assert filesystem(inner, str(mounts)) == "tmpfs"
    assert filesystem(tmp_path, str(mounts)) == "ext4"
    assert filesystem(inner, str(tmp_path / "missing")) == ""
