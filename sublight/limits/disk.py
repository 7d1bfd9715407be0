"""What a disk writes and reads past the page cache, which would otherwise be all that is measured.

O_DIRECT where the filesystem takes it; F_NOCACHE on macOS; elsewhere each write is flushed, and its pages are dropped
before they are read again. The file has no name while it is used, so nothing is left of it, whatever ends the process.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from sublight import units
from sublight.folder import cache_folder
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit, Samples

NAMES = ("disk_write", "disk_read")
SIZE_BYTES, QUICK_SIZE_BYTES = 1 << 30, 128 << 20
ROUND_BYTES = 32 << 20  # one sample
BLOCK_BYTES = 4 << 20
DEPTH = 4  # blocks in flight: one after the other leaves a fast disk idle in between
TIME_LIMITS = 5  # a disk gets this many times another figure's time: its cache must fill first
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
FULL = (errno.ENOSPC, errno.EDQUOT)


class Scratch:
    """A file without a name, and a buffer for each block in flight."""

    def __init__(self, folder: Path) -> None:
        self.fd = _nameless(folder)
        self.method = _past_the_cache(self.fd)
        self.buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(DEPTH)]  # pages, as O_DIRECT wants them
        self.stop = threading.Event()
        for buffer in self.buffers:
            buffer[:] = os.urandom(BLOCK_BYTES)  # some disks compress

    def write(self, buffer: mmap.mmap, offset: int) -> None:
        view = memoryview(buffer)
        while view:
            was_direct = self.method == "O_DIRECT"  # another thread may meet the refusal first, and change `method`
            try:
                done = os.pwrite(self.fd, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self.method = _buffered(self.fd)  # O_DIRECT was accepted by open, and is refused by write
                continue
            view, offset = view[done:], offset + done

    def read(self, buffer: mmap.mmap, offset: int) -> None:
        done = os.preadv(self.fd, [buffer], offset)
        if done != BLOCK_BYTES:
            raise OSError(errno.EIO, f"{done} bytes came back of {BLOCK_BYTES} that were written")

    def flush(self) -> None:
        if hasattr(os, "fdatasync"):
            os.fdatasync(self.fd)
        else:
            os.fsync(self.fd)

    def drop(self) -> None:
        if self.method == "flushed and dropped":
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _nameless(folder: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # some filesystems do not support it
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    path = folder / f".sublight-{secrets.token_hex(8)}"
    try:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def _past_the_cache(fd: int) -> str:
    import fcntl

    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return "F_NOCACHE"
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return _buffered(fd)
    return "O_DIRECT"


def _buffered(fd: int) -> str:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return "flushed and dropped"


def _measure(context: Context) -> Iterator[Limit]:
    folder = scratch_folder()
    size = QUICK_SIZE_BYTES if context.quick else SIZE_BYTES
    if reason := _unfit(folder, size):
        yield from (Limit(name=name, unit="B/s", unavailable=reason) for name in NAMES)
        return
    left = list(NAMES)
    try:
        with _scratch(folder) as scratch:
            for limit in _both(scratch, folder, size, TIME_LIMITS * context.time_limit_s):
                left.remove(limit.name)
                yield limit
    except OSError as error:
        if error.errno in FULL:
            reason = _full(size, folder)
        else:
            reason = f"cannot use {folder}: {error.strerror or error}: set SUBLIGHT_DISK=FOLDER"
        yield from (Limit(name=name, unit="B/s", unavailable=reason) for name in left)


def _both(scratch: Scratch, folder: Path, size: int, time_limit_s: float) -> Iterator[Limit]:
    written, samples = _rounds(scratch, scratch.write, scratch.flush, size, time_limit_s)
    detail = {"method": scratch.method, "in_flight": DEPTH, "block_bytes": BLOCK_BYTES, "folder": str(folder)}
    yield rate("disk_write", "B/s", 1, samples, detail={"bytes": written, **detail})
    scratch.drop()
    read, samples = _rounds(scratch, scratch.read, lambda: None, written, time_limit_s)
    yield rate("disk_read", "B/s", 1, samples, detail={"bytes": read, **detail})


def _rounds(
    scratch: Scratch,
    move: Callable[[mmap.mmap, int], None],
    finish: Callable[[], None],
    size: int,
    time_limit_s: float,
) -> tuple[int, Samples]:
    """Move blocks from the file's start to its size, or until time is up; each sample is one round's seconds a byte."""
    deadline = time.perf_counter() + time_limit_s
    seconds_a_byte: list[float] = []
    moved = 0
    with ThreadPoolExecutor(DEPTH, "disk") as pool:
        try:
            while moved < size and (not seconds_a_byte or time.perf_counter() < deadline):
                begin = time.perf_counter()
                blocks = itertools.count(moved // BLOCK_BYTES)  # a thread that is free takes the next block
                last = min(moved + ROUND_BYTES, size) // BLOCK_BYTES
                work = [pool.submit(_stream, scratch, i, move, blocks, last, deadline) for i in range(DEPTH)]
                done = sum(future.result() for future in work)
                finish()
                seconds_a_byte.append((time.perf_counter() - begin) / (done * BLOCK_BYTES))
                moved += done * BLOCK_BYTES
        except BaseException:
            scratch.stop.set()  # the others end with the block that they are at
            raise
    return moved, Samples(times_s=tuple(seconds_a_byte), method="wall")


def _stream(
    scratch: Scratch,
    slot: int,
    move: Callable[[mmap.mmap, int], None],
    blocks: Iterator[int],
    last: int,
    deadline: float,
) -> int:
    done = 0
    for block in blocks:
        if block >= last or scratch.stop.is_set():
            break
        move(scratch.buffers[slot], block * BLOCK_BYTES)
        done += 1
        if time.perf_counter() > deadline:
            break
    return done


@contextmanager
def _scratch(folder: Path) -> Iterator[Scratch]:
    scratch = Scratch(folder)
    try:
        yield scratch
    finally:
        os.close(scratch.fd)


def scratch_folder() -> Path:
    """SUBLIGHT_DISK, else where the cache lies or would lie, else the folder for temporary files."""
    if chosen := os.environ.get("SUBLIGHT_DISK"):
        return Path(chosen)
    cache = cache_folder().absolute()
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    return there if os.access(there, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _unfit(folder: Path, size: int) -> str | None:
    """Why a measurement in this folder would not be one of a disk; None where it would."""
    if not folder.is_dir():
        return f"{folder} is not a folder: set SUBLIGHT_DISK=FOLDER"
    kind = filesystem(folder)
    if kind in IN_MEMORY:
        return f"{folder} is a {kind} (memory), not a disk: set SUBLIGHT_DISK=FOLDER"
    space = os.statvfs(folder)
    return _full(size, folder) if space.f_bavail * space.f_frsize < 2 * size else None


def _full(size: int, folder: Path) -> str:
    # room for twice the file: a disk must not be filled to its end, even for a moment
    return f"disk full: needs {units.text(2 * size, 'B')} free in {folder}"


def filesystem(folder: Path, mounts: str = "/proc/self/mounts") -> str:
    """The type of the filesystem that holds a folder, empty where the system does not say."""
    kinds: dict[str, str] = {}
    with suppress(OSError):
        for line in Path(mounts).read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            _, point, kind, *_ = line.split(" ")
            kinds[point.replace("\\040", " ")] = kind  # of mounts on one point the last hides the others
    here = folder.resolve()
    return next((kinds[str(at)] for at in (here, *here.parents) if str(at) in kinds), "")


DISK = Probe(name="disk", names=NAMES, kinds=("cuda", "cpu"), measure=_measure)
