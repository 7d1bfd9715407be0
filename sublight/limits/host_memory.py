"""What the host's memory moves, with every core and with one; bytes are counted as STREAM counts them.

No compiler is needed: the C library's own block functions and torch's kernels saturate memory, run by a thread a core
on pages that the thread touched first. Each limit is the fastest of several ways, and its detail says which:

- read: memchr for an absent byte (one stream), memcmp of equal blocks (two), a matrix-vector product (a stream a row).
- write: memset, and memmove out of a private mapping that nobody ever wrote. All its pages are the kernel's one page of
  zeros, so it reads from the L1; what is left is the C library's stores for large blocks, which pass by the caches.
- copy: memmove, whose stores for large blocks pass by the caches (plain stores first read what they overwrite), and
  memmove by the megabyte, too small for that: some processors need it only when few cores copy.
- triad: a = b + s * c as STREAM has it, and a = a + s * c: both read two blocks and write one, but plain stores to `a`
  first read it, which three blocks pay for as a fourth transfer and two do not.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from sublight import timing, units
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit

KINDS = ("read", "write", "copy", "triad")
FILL = 0x3F  # as float32 0.747: neither zero nor denormal
STAGGER_BYTES = 64  # a target some lines further into its page than its source: elsewhere copies were 10 % slower
ROW = 8192  # length of the matrix-vector product's rows: its vector stays in the L1, its rows are several streams
GRAIN_BYTES = 2 << 20  # a block is whole huge pages, and whole rows
MOST_BYTES = 8 << 30  # largest array, unless four times the cache is more
STARTS = 100  # a timed call lasts this many times as long as starting its threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to move bytes: what it is, how many blocks' worth it moves, and the call on one thread's blocks."""

    how: str
    blocks: int
    move: Callable[[Blocks], object]


@dataclass(slots=True, kw_only=True)
class Blocks:
    """One thread's part of the arrays a, b and c, and a part as large that maps the kernel's page of zeros."""

    size: int
    a: int  # addresses
    b: int
    c: int
    zeros: int
    memory: tuple[mmap.mmap, ...] = ()  # what the addresses point into, so that it stays
    tensors: dict[str, Any] = field(default_factory=dict)


class Team:
    """One thread a place, each in a pool of its own: a block is only ever used by the thread that touched it first."""

    def __init__(self, places: list[set[int]]) -> None:
        self._pools = [ThreadPoolExecutor(1, "memory", initializer=_stay, initargs=(place,)) for place in places]

    def run(self, work: Callable[[int], object]) -> None:
        """Do `work(i)` in thread i, all at once; back when the last is done."""
        for future in [pool.submit(work, i) for i, pool in enumerate(self._pools)]:
            future.result()

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)

    def __len__(self) -> int:
        return len(self._pools)


def _stay(place: set[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # the core was taken away meanwhile: the thread runs on any other
            os.sched_setaffinity(0, place)  # 0 is this thread, not the process


def _map(size: int, *, huge: bool) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get no huge pages
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(advice)
    return memory


def allocate(team: Team, size: int, torch: ModuleType | None) -> list[Blocks]:
    """Each thread's blocks, touched by that thread first, so that they lie in its memory.

    An array is one mapping, touched before the next. With a mapping a thread for all three, huge pages put source and
    target at one distance in the banks of memory, and 16 cores copied 10 % slower.
    """
    arrays = {name: _map(size * len(team) + GRAIN_BYTES, huge=True) for name in "bca"}
    zeros = _map(size * len(team), huge=False)
    starts = {name: _address(memory) + i * STAGGER_BYTES for i, (name, memory) in enumerate(arrays.items())}
    keep = (*arrays.values(), zeros)
    parts = []
    for offset in range(0, size * len(team), size):
        at = {name: start + offset for name, start in starts.items()}
        part = Blocks(size=size, a=at["a"], b=at["b"], c=at["c"], zeros=_address(zeros) + offset, memory=keep)
        if torch is not None:
            for name, memory in arrays.items():
                within = at[name] - _address(memory)
                part.tensors[name] = torch.frombuffer(memory, dtype=torch.float32, count=size // 4, offset=within)
            part.tensors["vector"] = torch.ones(ROW)
            part.tensors["products"] = torch.empty(size // 4 // ROW)
        parts.append(part)
    for name in arrays:
        team.run(lambda i, name=name: ctypes.memset(getattr(parts[i], name), FILL, size))  # type: ignore[misc]
    return parts


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def ways(torch: ModuleType | None) -> dict[str, list[Way]]:
    """Every way to move bytes that this machine has, by limit: read, write, copy, triad."""
    library = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    memchr = ctypes.CFUNCTYPE(address, address, number, size)(("memchr", library))
    memcmp = ctypes.CFUNCTYPE(number, address, address, size)(("memcmp", library))

    def scan(blocks: Blocks) -> None:
        for start in (blocks.b, blocks.c):
            if memchr(start, FILL ^ 0xFF, blocks.size) is not None:
                raise RuntimeError("memory did not keep what was written: memchr found a byte that is not there")

    def compare(blocks: Blocks) -> None:
        if memcmp(blocks.b, blocks.c, blocks.size) != 0:
            raise RuntimeError("memory did not keep what was written: equal blocks compare as different")

    def piecewise(blocks: Blocks) -> None:
        for start in range(0, blocks.size, 1 << 20):
            ctypes.memmove(blocks.a + start, blocks.b + start, 1 << 20)

    by_limit = {
        "read": [Way(how="memchr", blocks=2, move=scan), Way(how="memcmp", blocks=2, move=compare)],
        "write": [
            Way(how="memset", blocks=1, move=lambda x: ctypes.memset(x.a, FILL, x.size)),
            Way(how="memmove of the zero page", blocks=1, move=lambda x: ctypes.memmove(x.a, x.zeros, x.size)),
        ],
        "copy": [
            Way(how="memmove", blocks=2, move=lambda x: ctypes.memmove(x.a, x.b, x.size)),
            Way(how="memmove by the megabyte", blocks=2, move=piecewise),
        ],
        "triad": [],
    }
    if torch is None:
        return by_limit

    def product(blocks: Blocks) -> None:
        tensors = blocks.tensors
        for name in ("b", "c"):
            torch.mv(tensors[name].view(-1, ROW), tensors["vector"], out=tensors["products"])

    def triad(blocks: Blocks, first: str) -> None:
        tensors = blocks.tensors
        torch.add(tensors[first], tensors["c"], alpha=0.5, out=tensors["a"])

    by_limit["read"].append(Way(how="torch.mv", blocks=2, move=product))
    by_limit["triad"] = [
        Way(how="torch.add of two arrays into a third", blocks=3, move=partial(triad, first="b")),
        Way(how="torch.add in place", blocks=3, move=partial(triad, first="a")),
    ]
    return by_limit


def _measure(context: Context) -> Iterator[Limit]:
    try:
        import torch
    except ImportError:
        torch = None  # type: ignore[assignment]
    every = cores()
    known = ways(torch)
    for suffix, places in (("", [{core} for core in every]), ("_1", [set(every)])):
        small = context.quick or suffix == "_1"  # on one core large arrays take seconds
        size = block_bytes(len(places), caches(every), free_memory_bytes(), small=small)
        if isinstance(size, str):
            for kind in KINDS:
                yield Limit(name=f"host_{kind}{suffix}", unit="B/s", unavailable=size)
            continue
        with _team(places, torch) as team:
            parts = allocate(team, size, torch)
            for kind in KINDS:
                yield _fastest(f"host_{kind}{suffix}", known[kind], team, parts, context.time_limit_s)


@contextmanager
def _team(places: list[set[int]], torch: ModuleType | None) -> Iterator[Team]:
    """A team in whose threads torch starts no threads of its own."""
    with ExitStack() as stack:
        team = Team(places)
        stack.callback(team.close)
        if torch is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            team.run(lambda _: torch.set_num_threads(1))
        yield team


def _fastest(name: str, candidates: list[Way], team: Team, parts: list[Blocks], time_limit_s: float) -> Limit:
    """Try each way for a moment, then measure the best one."""
    if not candidates:
        return Limit(name=name, unit="B/s", unavailable="needs torch: pip install torch")
    start_s = min(_seconds(lambda: team.run(lambda _: None)) for _ in range(5))
    total = parts[0].size * len(parts)
    tried: dict[str, float] = {}
    for way in candidates:
        once = partial(team.run, lambda i, way=way: way.move(parts[i]))  # type: ignore[misc]
        first_s = _seconds(once)
        tried[way.how] = way.blocks * total / min(_seconds(once) for _ in range(3 if first_s < 0.03 else 1))
    best = max(candidates, key=lambda way: tried[way.how])
    amount = best.blocks * total
    pass_s = amount / tried[best.how]
    passes = max(1, min(math.ceil(STARTS * start_s / pass_s), int(time_limit_s / 3 / pass_s)))

    def work(i: int) -> None:
        for _ in range(passes):
            best.move(parts[i])

    samples = timing.measure(partial(team.run, work), device="cpu", time_limit_s=time_limit_s)
    detail: dict[str, object] = {"how": best.how, "threads": len(team), "array_bytes": total, "bytes": amount}
    detail["best"] = amount * passes / min(samples.times_s)  # STREAM prints the best pass; our limit is the median
    if others := {how: value for how, value in tried.items() if how != best.how}:
        detail["others"] = others
    return rate(name, "B/s", amount * passes, samples, detail=detail)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def block_bytes(threads: int, cache_bytes: list[int], free_bytes: int, *, small: bool) -> int | str:
    """One thread's part of an array, so that arrays lie well beyond the last-level caches; or why there is no room.

    >>> block_bytes(2, [48 << 20], 16 << 30, small=False) >> 20, block_bytes(1, [], 16 << 30, small=True) >> 20
    (128, 128)
    >>> block_bytes(64, [256 << 20], 256 << 30, small=False) >> 20  # memmove stores past caches from 1/4 of one up
    84
    >>> block_bytes(1, [256 << 20], 2 << 30, small=False)
    'needs 3.22 GB of free memory to get past the cache of 268 MB, has 2.15 GB'
    """
    together = sum(cache_bytes)
    size = max((2 if small else 4) * together, (128 if small else 256) << 20)
    size = max(size, threads * GRAIN_BYTES, min(MOST_BYTES, threads * max(cache_bytes, default=0) // 3))
    size = min(size, free_bytes // 4 // 3)  # three arrays take a quarter of what is free
    least = max(together, threads * GRAIN_BYTES)
    if size < least:
        needs, cache, room = (units.text(value, "B") for value in (12 * least, together, free_bytes))
        return f"needs {needs} of free memory to get past the cache of {cache}, has {room}"
    return size // threads // GRAIN_BYTES * GRAIN_BYTES


def caches(used: list[int]) -> list[int]:
    """The sizes of the last-level caches that these cores share; empty where the system does not say."""
    sizes: dict[str, int] = {}
    for core in used:
        with suppress(OSError, ValueError):
            levels = Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index[0-9]")
            last = max(levels, key=lambda path: int((path / "level").read_text()))
            sizes[(last / "shared_cpu_list").read_text()] = units.parse_quantity(
                (last / "size").read_text().strip() + "i"  # "49152K" is binary
            )
    return list(sizes.values())


def free_memory_bytes() -> int:
    """What may be taken without swapping: what the kernel says is available, within the container's limit."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with suppress(OSError, ValueError, KeyError):
        free = _numbers("/proc/meminfo")["MemAvailable:"] * 1024
    for folder, most, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max", or no such file: no limit
            files = _numbers(f"{folder}/memory.stat")
            cached = files.get("inactive_file", 0) + files.get("active_file", 0)  # goes when memory is asked for
            room = int(Path(folder, most).read_text()) - int(Path(folder, used).read_text()) + cached
            free = min(free, max(room, 0))
    return free


def _numbers(path: str) -> dict[str, int]:
    rows = (line.split() for line in Path(path).read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


HOST_MEMORY = Probe(
    name="host memory",
    names=tuple(f"host_{kind}{suffix}" for suffix in ("", "_1") for kind in KINDS),
    kinds=("cuda", "cpu"),
    measure=_measure,
)
