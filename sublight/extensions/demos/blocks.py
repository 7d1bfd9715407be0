"""How many blocks it takes to fill the memory's bandwidth."""

from __future__ import annotations

import functools

from sublight.extensions.demos.demo import Demo, Figures, Table
from sublight.extensions.demos.gpu import Gpu

BYTES = 2**30
THREADS = 512
SHARES = (0.25, 0.5, 1, 1.5, 2, 3, 4, 8, 16)  # blocks for each multiprocessor


def counts(multiprocessors: int) -> list[int]:
    """One block, then shares of the multiprocessors, then one block for each 4 accesses of its threads.

    >>> counts(132)[:6], counts(132)[-1]
    ([1, 8, 33, 66, 132, 198], 32768)
    """
    return [1, 8, *(int(share * multiprocessors) for share in SHARES), BYTES // (16 * 4 * THREADS)]


def run(gpu: Gpu) -> Figures:
    x, y, out = gpu.buffer(BYTES), gpu.buffer(BYTES), gpu.buffer(64)
    rows = []
    for blocks in counts(gpu.multiprocessors):
        read_s, copy_s = (
            gpu.time(functools.partial(gpu.launch, kernel, blocks, THREADS, x, to, BYTES // 16), times=5)
            for kernel, to in (("read_by", out), ("copy_by", y))
        )
        rows.append((blocks, blocks / gpu.multiprocessors, BYTES / read_s, 2 * BYTES / copy_s))
    resident = gpu.blocks_per_multiprocessor("read_by", THREADS)
    return Figures(
        tables=(
            Table(
                title=f"Blocks of {THREADS} threads against bandwidth, {BYTES / 1e9:.1f} GB",
                columns=(("blocks", "count"), ("a multiprocessor", "number"), ("read", "B/s"), ("copy", "B/s")),
                rows=tuple(rows),
                note=f"{gpu.multiprocessors} multiprocessors; each holds {resident} such blocks of the reading kernel.",
            ),
        )
    )


BLOCKS = Demo(
    name="blocks",
    question="How many blocks does it take to reach the memory's bandwidth?",
    expect="One block reaches what one multiprocessor can have in flight, a hundredth of the bandwidth. It grows in "
    "step with the blocks up to one a multiprocessor, then less and less until the bytes in flight fill the memory's "
    "latency. A number that is no multiple of the multiprocessors leaves some idle at the end.",
    run=run,
    source="../demos/blocks.cu",
    kernels=("read_by", "copy_by"),
)
