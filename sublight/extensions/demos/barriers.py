"""`__syncthreads` holds a block together, not the grid; Triton's `tl.debug_barrier` is the same barrier of a block."""

from __future__ import annotations

import ctypes
import re

from sublight.extensions.demos.demo import Cell, Demo, Figures, Table, Unit
from sublight.extensions.demos.gpu import Gpu

ROUNDS = 1000
LAUNCHES = 200
TARGET = 90  # what the Triton kernels are compiled for: no GPU is needed


def run(gpu: Gpu) -> Figures:
    cycles = gpu.buffer(64)
    columns: tuple[tuple[str, Unit], ...] = (
        ("barrier", ""),
        ("blocks", "count"),
        ("threads", "count"),
        ("time", "s"),
        ("cycles", "number"),
    )
    rows: list[tuple[Cell, ...]] = []

    def row(name: str, kernel: str, blocks: int, threads: int, *, cooperative: bool = False) -> None:
        def work() -> None:
            gpu.launch(kernel, blocks, threads, cycles, ROUNDS, cooperative=cooperative)

        elapsed_s = gpu.time(work) / ROUNDS
        rows.append((name, blocks, threads, elapsed_s, gpu.read(cycles, ctypes.c_longlong)[0] / ROUNDS))

    row("__syncwarp", "warp_barriers", 1, 32)
    for threads in (32, 128, 256, 512, 1024):
        row("__syncthreads", "block_barriers", 1, threads)
    resident = gpu.multiprocessors * gpu.blocks_per_multiprocessor("grid_barriers", 256)
    for blocks in (2, gpu.multiprocessors, resident):
        row("grid.sync()", "grid_barriers", blocks, 256, cooperative=True)
    rows.append(("a new launch, in a CUDA graph", gpu.multiprocessors, 256, _launch_s(gpu), None))
    compiled = offline()
    return Figures(
        tables=(
            Table(
                title="What a barrier costs",
                columns=columns,
                rows=tuple(rows),
                note="The kernel's time over its 1000 barriers, and the clock of its first thread.",
            ),
            _late(gpu),
            *compiled.tables,
        ),
        missing=compiled.missing,
    )


def _launch_s(gpu: Gpu) -> float:
    stream = gpu.stream()
    with gpu.captured(stream) as replay:
        for _ in range(LAUNCHES):
            gpu.launch("nothing", gpu.multiprocessors, 256, stream=stream)
    start, end = gpu.event(), gpu.event()
    elapsed_s = []
    for _ in range(5):
        gpu.record(start, stream)
        replay()
        gpu.record(end, stream)
        gpu.synchronize()
        elapsed_s.append(gpu.between(start, end) / LAUNCHES)
    return sorted(elapsed_s)[2]


def _late(gpu: Gpu) -> Table:
    rows = []
    blocks = gpu.multiprocessors
    for name, grid in (("__syncthreads", 0), ("grid.sync()", 1)):
        counts, late = gpu.buffer(8 * blocks), gpu.buffer(64)
        gpu.launch("neighbours_seen", blocks, 128, counts, late, ROUNDS, grid, cooperative=True)
        gpu.synchronize()
        rows.append((name, blocks * ROUNDS, gpu.read(late, ctypes.c_longlong)[0]))
    return Table(
        title="Looks at the next block's word right after the barrier",
        columns=(("barrier", ""), ("looks", "count"), ("too early", "count")),
        rows=tuple(rows),
    )


def offline() -> Figures:
    """What `tl.debug_barrier` becomes, by compiling a kernel with and without it."""
    try:
        with_it, without = (barriers_in(_ptx(wanted)) for wanted in (True, False))
    except ImportError as error:
        return Figures(missing=(f"tl.debug_barrier: no Triton ({error})",))
    rows = [
        (word, without.get(word, 0), with_it.get(word, 0))
        for word in sorted({*with_it, *without, "bar.sync", "barrier.cluster.arrive", "atom.global"})
    ]
    return Figures(
        tables=(
            Table(
                title=f"Barriers in the PTX of a Triton kernel (sm_{TARGET})",
                columns=(("instruction", ""), ("as it is", "count"), ("with tl.debug_barrier()", "count")),
                rows=tuple(rows),
                note="bar.sync 0 is what CUDA C++ calls __syncthreads(): it holds the threads of one program, and says "
                "nothing about other programs of the grid.",
            ),
        )
    )


def _ptx(wanted: bool) -> str:
    from sublight.extensions.demos.triton_barrier import ptx_of

    return ptx_of(TARGET, barrier=wanted)


def barriers_in(ptx: str) -> dict[str, int]:
    """How often each instruction that waits or counts stands in a PTX text.

    >>> barriers_in("bar.sync 0; bar.sync 1; atom.global.add.u32 %r1, [%rd1], 1;")
    {'bar.sync': 2, 'atom.global': 1}
    """
    counts: dict[str, int] = {}
    for word in re.findall(r"\b(bar\.sync|barrier\.cluster\.\w+|atom\.global|mbarrier\.\w+)", ptx):
        counts[word] = counts.get(word, 0) + 1
    return counts


BARRIERS = Demo(
    name="barriers",
    question="What do __syncthreads, a barrier of the grid and tl.debug_barrier wait for, and what do they cost?",
    expect="A barrier of the block takes some tens of cycles. A barrier of the grid goes through the L2 and takes one "
    "to two microseconds, more than a new launch in a CUDA graph, which is a barrier, too. Behind __syncthreads "
    "another block's word may not be there yet, which the count shows; behind a barrier of the grid it always is. "
    "tl.debug_barrier is one bar.sync: the barrier of a block.",
    run=run,
    source="../demos/barriers.cu",
    kernels=("warp_barriers", "block_barriers", "grid_barriers", "neighbours_seen", "nothing"),
    offline=offline,
)
