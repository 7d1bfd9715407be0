"""How much occupancy hides a memory's latency, and that bytes in flight a thread do the same.

python -m sublight.extensions.demos.occupancy    each launch once, for ncu to count
"""

from __future__ import annotations

import functools

from sublight.errors import BadInput
from sublight.extensions.demos import ncu
from sublight.extensions.demos.demo import Cell, Demo, Figures, Table
from sublight.extensions.demos.gpu import Gpu

SOURCE = "../demos/occupancy.cu"
KERNELS = ("one_in_flight", "four_in_flight")
COUNT = 2**28
THREADS = 128
WANTED = (1, 2, 4, 8, 16)  # blocks on a multiprocessor
SHARED_PER_MULTIPROCESSOR, SHARED_PER_BLOCK, THREADS_PER_MULTIPROCESSOR = 81, 97, 39  # CU_DEVICE_ATTRIBUTE_…
RESERVED_BYTES = 1024  # shared memory that the driver takes in each block
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    "long_scoreboard": "device memory, L2",
    "short_scoreboard": "shared memory",
    "wait": "a fixed latency",
    "barrier": "a barrier",
    "lg_throttle": "the queue of loads is full",
    "math_pipe_throttle": "arithmetic units are busy",
    "not_selected": "another warp was chosen",
    "no_instruction": "instructions",
    "branch_resolving": "a branch",
}
THEORETICAL = "sm__maximum_warps_per_active_cycle_pct"
ACHIEVED = "sm__warps_active.avg.pct_of_peak_sustained_active"
ACTIVE = "smsp__warps_active.avg.per_cycle_active"
ELIGIBLE = "smsp__warps_eligible.avg.per_cycle_active"
ISSUED = "smsp__issue_active.avg.per_cycle_active"
METRICS = (THEORETICAL, ACHIEVED, ACTIVE, ELIGIBLE, ISSUED, *(STALL.format(name) for name in STALLS))


def shared_for(blocks: int, per_multiprocessor: int, per_block: int) -> int:
    """Shared memory of a block so that no more than `blocks` of them fit.

    >>> shared_for(1, 233472, 232448), shared_for(4, 233472, 232448)
    (232448, 57344)
    """
    return min(per_block, per_multiprocessor // blocks - RESERVED_BYTES)


def launches(gpu: Gpu) -> list[tuple[str, int, int]]:
    """Kernel, blocks a multiprocessor and shared memory of each case; those that cannot be had are left out."""
    per_multiprocessor, per_block = gpu.attribute(SHARED_PER_MULTIPROCESSOR), gpu.attribute(SHARED_PER_BLOCK)
    cases = []
    for kernel in KERNELS:
        for wanted in WANTED:
            shared_bytes = shared_for(wanted, per_multiprocessor, per_block)
            gpu.allow_shared(kernel, shared_bytes)
            if gpu.blocks_per_multiprocessor(kernel, THREADS, shared_bytes) == wanted:
                cases.append((kernel, wanted, shared_bytes))
    return cases


def run(gpu: Gpu) -> Figures:
    x, out = gpu.buffer(4 * COUNT), gpu.buffer(64)
    cases = launches(gpu)
    most_warps = gpu.attribute(THREADS_PER_MULTIPROCESSOR) // 32
    rates: dict[int, list[float]] = {}
    for kernel, blocks, shared_bytes in cases:
        gpu.allow_shared(kernel, shared_bytes)
        grid = blocks * gpu.multiprocessors
        launch = functools.partial(gpu.launch, kernel, grid, THREADS, x, out, COUNT, shared_bytes=shared_bytes)
        rates.setdefault(blocks, []).append(4 * COUNT / gpu.time(launch, times=5))
    warps = {blocks: blocks * THREADS // 32 for blocks in rates}
    table = Table(
        title=f"Reading {4 * COUNT / 1e9:.1f} GB",
        columns=(
            ("warps a multiprocessor", "count"),
            ("occupancy", "fraction"),
            ("one access in flight", "B/s"),
            ("four in flight", "B/s"),
        ),
        rows=tuple((warps[blocks], warps[blocks] / most_warps, *found) for blocks, found in rates.items()),
        note="Theoretical occupancy, set by shared memory that nothing uses: the kernels are the same.",
    )
    try:
        counted = counter_table(ncu.counters("sublight.extensions.demos.occupancy", (), METRICS), cases)
    except BadInput as error:
        return Figures(tables=(table,), missing=(str(error),))
    return Figures(tables=(table, counted))


def counter_table(rows: list[dict[str, str]], cases: list[tuple[str, int, int]]) -> Table:
    """Counters of each launch, in the cases' order; they count one scheduler, of which a multiprocessor has four."""
    if len(rows) != len(cases):
        raise BadInput(f"counters: ncu counted {len(rows)} launches of {len(cases)}")
    lines: list[tuple[Cell, ...]] = []
    for row, (kernel, blocks, _) in zip(rows, cases, strict=True):
        theoretical, achieved, active, eligible, issued = (ncu.number(row, name) for name in METRICS[:5])
        stalls = {name: ncu.number(row, STALL.format(name)) or 0.0 for name in STALLS}
        worst = max(stalls, key=lambda name: stalls[name])
        stalled = active - eligible if active is not None and eligible is not None else None
        lines.append(
            (
                f"{kernel.partition('_')[0]}, {blocks * THREADS // 32} warps",
                *(None if value is None else value / 100 for value in (theoretical, achieved)),
                *(active, stalled, eligible, issued),
                f"{STALLS[worst]} ({stalls[worst] / (sum(stalls.values()) or 1):.0%})",
            )
        )
    return Table(
        title="Why: occupancy, and the warps of one scheduler in a cycle (ncu)",
        columns=(
            ("launch", ""),
            ("in theory", "fraction"),
            ("achieved", "fraction"),
            ("active", "number"),
            ("stalled", "number"),
            ("eligible", "number"),
            ("issued", "number"),
            ("waits most for", ""),
        ),
        rows=tuple(lines),
        note="One or four accesses in flight. Active = stalled + eligible; issued: instructions a cycle. More warps "
        "mean that more loads wait at the same time, not that each waits less.",
    )


def main() -> None:
    gpu = Gpu(SOURCE)
    x, out = gpu.buffer(4 * COUNT), gpu.buffer(64)
    for kernel, blocks, shared_bytes in launches(gpu):
        gpu.allow_shared(kernel, shared_bytes)
        gpu.launch(kernel, blocks * gpu.multiprocessors, THREADS, x, out, COUNT, shared_bytes=shared_bytes)
    gpu.synchronize()


OCCUPANCY = Demo(
    name="occupancy",
    question="How much occupancy does it take to hide the memory's latency?",
    expect="With one access in flight a thread, bandwidth grows with the number of warps: each waits for the memory, "
    "and only other warps fill the time. With four in flight a quarter of the warps does nearly as much: what counts "
    "is bytes in flight, and occupancy is one way to have them. ncu says the same: nearly all active warps are stalled "
    "on device memory, and a scheduler issues in few of its cycles.",
    run=run,
    source=SOURCE,
    kernels=KERNELS,
)

if __name__ == "__main__":
    main()
