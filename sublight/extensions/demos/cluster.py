"""Distributed shared memory: blocks of a cluster read one another's shared memory (sm_90 and later)."""

from __future__ import annotations

import functools

from sublight.errors import BadInput
from sublight.extensions.demos.demo import Cell, Demo, Figures, Table
from sublight.extensions.demos.gpu import Gpu

BLOCKS, PART_BYTES, LOOKUPS = 4, 96 * 1024, 1024  # as in cluster.cu
THREADS = 512


def run(gpu: Gpu) -> Figures:
    if gpu.capability < 90:
        raise BadInput(f"clusters need sm_90 or later, and this GPU is sm_{gpu.capability}")
    table, out = gpu.buffer(BLOCKS * PART_BYTES), gpu.buffer(64)
    blocks = gpu.multiprocessors // BLOCKS * BLOCKS * 2
    rows: list[tuple[Cell, ...]] = []
    for name, kernel, held_bytes in (
        ("global, through L1 and L2", "lookup_global", 0),
        ("shared of 4 blocks of a cluster", "lookup_cluster", PART_BYTES),
        ("shared of the block (a quarter of the table)", "lookup_own", PART_BYTES),
    ):
        gpu.allow_shared(kernel, held_bytes)
        rates = []
        for neighbours in (1, 0):
            launch = functools.partial(gpu.launch, kernel, blocks, THREADS, table, out, neighbours)
            elapsed_s = gpu.time(functools.partial(launch, shared_bytes=held_bytes))
            rates.append(blocks * THREADS * LOOKUPS / elapsed_s)
        rows.append((name, *rates))
    return Figures(
        tables=(
            Table(
                title="Lookups in a table of 384 KiB",
                columns=(("where it lies", ""), ("a warp reads neighbours", "1/s"), ("each lane anywhere", "1/s")),
                rows=tuple(rows),
                note="The time to fill shared memory is in.",
            ),
        )
    )


CLUSTER = Demo(
    name="cluster",
    question="What does it cost to read another block's shared memory?",
    expect="A table of 384 KiB fits into no block's shared memory. Four blocks of a cluster hold a quarter each, and "
    "three of four lookups go over the network between multiprocessors, which carries a warp's 32 neighbours as one "
    "and 32 scattered words one by one. A block's own shared memory is far faster; whether the cluster beats global "
    "memory, whose L1 and L2 hold the table too, is to be measured and not to be assumed.",
    run=run,
    source="../demos/cluster.cu",
    kernels=("lookup_global", "lookup_own", "lookup_cluster"),
)
