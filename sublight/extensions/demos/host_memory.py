"""Pageable, pinned and mapped host memory: what a copy, or a kernel that reads over the bus, gets from each."""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections.abc import Callable
from typing import Any

from sublight.extensions.demos.demo import Demo, Figures, Table, Unit
from sublight.extensions.demos.gpu import Buffer, Gpu
from sublight.extensions.driver import call

SIZES = (2**14, 2**18, 2**22, 2**27)
MAPPED, WRITE_COMBINED = 0x2, 0x6  # CU_MEMHOSTALLOC_DEVICEMAP, and _WRITECOMBINED with it
BLOCKS, THREADS = 1024, 256
EVERY = 128  # one sector in so many is read


def run(gpu: Gpu) -> Figures:
    most = max(SIZES)
    pages = mmap.mmap(-1, most)
    pageable = Buffer(ctypes.addressof(ctypes.c_char.from_buffer(pages)), most)
    ctypes.memset(pageable.address, 1, most)
    pinned, combined = gpu.pinned(most, MAPPED), gpu.pinned(most, WRITE_COMBINED)
    for each in (pinned, combined):
        ctypes.memset(each.address, 1, most)
    device, out = gpu.buffer(most), gpu.buffer(64)
    there, back = [], []
    for size in SIZES:
        to = device.at(0, size)

        def rate(work: Callable[..., None], *arguments: Any, size: int = size) -> float:
            return size / gpu.time(functools.partial(work, *arguments), times=5)

        there.append(
            (
                size,
                *(rate(gpu.copy_to_gpu, to, host.at(0, size)) for host in (pageable, pinned, combined)),
                rate(gpu.launch, "read_all", BLOCKS, THREADS, pinned, out, size // 16),
            )
        )
        back.append((size, *(rate(gpu.copy_to_host, host.at(0, size), to) for host in (pageable, pinned))))

    def copy_and_read() -> None:
        gpu.copy_to_gpu(device, pinned)
        gpu.launch("read_some", BLOCKS, THREADS, device, out, most // 16, EVERY)

    in_place = functools.partial(gpu.launch, "read_some", BLOCKS, THREADS, pinned, out, most // 16, EVERY)
    little = (
        ("copy all of it, read from device memory", gpu.time(copy_and_read, times=5)),
        ("read in place, over the bus", gpu.time(in_place, times=5)),
    )
    rate_columns: tuple[tuple[str, Unit], ...] = (("pageable", "B/s"), ("pinned", "B/s"))
    return Figures(
        tables=(
            Table(
                title="From the host to the GPU",
                columns=(
                    ("bytes", "B"),
                    *rate_columns,
                    ("pinned, write-combined", "B/s"),
                    ("read by a kernel, mapped", "B/s"),
                ),
                rows=tuple(there),
                note="A rate includes what one operation costs to start: small ones are mostly that.",
            ),
            Table(title="From the GPU to the host", columns=(("bytes", "B"), *rate_columns), rows=tuple(back)),
            Table(
                title=f"A kernel needs one sector of {EVERY} in {most / 1e6:.0f} MB of host memory",
                columns=(("way", ""), ("time", "s")),
                rows=little,
            ),
            Table(
                title=f"What {most / 1e6:.0f} MB of host memory cost to get and to give back",
                columns=(("kind", ""), ("get, every page touched", "s"), ("give back", "s")),
                rows=(("pageable", *_pageable_times(most)), ("pinned", *_pinned_times(gpu, most))),
            ),
        )
    )


def _pageable_times(size: int) -> tuple[float, float]:
    start = time.perf_counter()
    pages = mmap.mmap(-1, size)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 1, size)
    middle = time.perf_counter()
    pages.close()
    return middle - start, time.perf_counter() - middle


def _pinned_times(gpu: Gpu, size: int) -> tuple[float, float]:
    start = time.perf_counter()
    buffer = gpu.pinned(size)
    ctypes.memset(buffer.address, 1, size)
    middle = time.perf_counter()
    call("cuMemFreeHost", ctypes.c_void_p(buffer.address))
    return middle - start, time.perf_counter() - middle


HOST_MEMORY = Demo(
    name="host-memory",
    question="What do pinned and mapped host memory gain over what malloc gives?",
    expect="Pageable memory is first copied by the CPU into the driver's own pinned buffer, so that it comes at a "
    "fraction of the bus's rate; pinned memory at all of it, and without keeping the CPU busy. Mapped memory is read "
    "by a kernel at nearly the same rate without a copy, which wins by far where little of it is needed. Pinned pages "
    "cost about what touching them costs; what they take is memory that the system can no longer page out.",
    run=run,
    source="../demos/host_memory.cu",
    kernels=("read_all", "read_some"),
)
