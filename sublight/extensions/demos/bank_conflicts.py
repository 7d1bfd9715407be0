"""Bank conflicts counted three ways: by arithmetic, by the clock, and by the hardware's counter.

python -m sublight.extensions.demos.bank_conflicts    each launch once, for ncu to count
"""

from __future__ import annotations

import ctypes

from sublight.errors import BadInput
from sublight.extensions.demos import ncu
from sublight.extensions.demos.demo import Cell, Demo, Figures, Table
from sublight.extensions.demos.gpu import Gpu

SOURCE = "../demos/bank_conflicts.cu"
CASES = (("read_4", 0), *(("read_4", stride) for stride in (1, 2, 4, 8, 16, 32, 33)), ("read_16", 1), ("read_16", 8))
WARPS, ROUNDS = 32, 4096
BANKS = 32
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
LOADS = "smsp__inst_executed_op_shared_ld.sum"


def turns(kernel: str, stride: int) -> int:
    """How often the banks must answer one load of a warp: each gives one word of 4 bytes a turn.

    >>> [turns("read_4", stride) for stride in (0, 1, 2, 16, 32, 33)], turns("read_16", 1), turns("read_16", 8)
    ([1, 1, 2, 16, 32, 1], 4, 32)
    """
    width = 4 if kernel == "read_16" else 1
    words = {lane * stride * width + word for lane in range(32) for word in range(width)}
    return max(sum(word % BANKS == bank for word in words) for bank in range(BANKS))


def launch(gpu: Gpu, kernel: str, stride: int, out: object, cycles: object) -> None:
    gpu.launch(kernel, 1, 32 * WARPS, out, cycles, stride, ROUNDS)


def run(gpu: Gpu) -> Figures:
    out, cycles = gpu.buffer(64), gpu.buffer(64)
    rows: list[tuple[Cell, ...]] = []
    missing: tuple[str, ...] = ()
    try:
        counted = ncu.counters("sublight.extensions.demos.bank_conflicts", (), (CONFLICTS, WAVEFRONTS, LOADS))
    except BadInput as error:
        counted, missing = [], (str(error),)
    for index, (kernel, stride) in enumerate(CASES):
        measured = []
        for _ in range(3):
            launch(gpu, kernel, stride, out, cycles)
            gpu.synchronize()
            measured.append(gpu.read(cycles, ctypes.c_longlong)[0] / (WARPS * ROUNDS))
        row = counted[index] if len(counted) == len(CASES) else {}
        loads = ncu.number(row, LOADS)
        ncu_turns, ncu_conflicts = (
            value / loads if loads and (value := ncu.number(row, name)) is not None else None
            for name in (WAVEFRONTS, CONFLICTS)
        )
        words = "4 bytes" if kernel == "read_4" else "16 bytes"
        name = f"{words} a lane, {'one address' if stride == 0 else f'{stride} apart'}"
        rows.append((name, turns(kernel, stride), sorted(measured)[1], ncu_turns, ncu_conflicts))
    return Figures(
        tables=(
            Table(
                title="Turns of the 32 banks for one load of a warp",
                columns=(
                    ("lanes read", ""),
                    ("by arithmetic", "count"),
                    ("cycles measured", "number"),
                    ("wavefronts (ncu)", "number"),
                    ("conflicts (ncu)", "number"),
                ),
                rows=tuple(rows),
                note="32 warps keep the banks busy, so that a load takes its turns and no latency is seen.",
            ),
        ),
        missing=missing,
    )


def main() -> None:
    gpu = Gpu(SOURCE)
    out, cycles = gpu.buffer(64), gpu.buffer(64)
    for kernel, stride in CASES:
        launch(gpu, kernel, stride, out, cycles)
    gpu.synchronize()


BANK_CONFLICTS = Demo(
    name="bank-conflicts",
    question="What does a bank conflict cost, and how is it counted?",
    expect="A load of a warp takes as many turns as the fullest bank has words of it: one for neighbours, for one "
    "address (a broadcast) and for lanes 33 words apart, two for every other word, 32 for a column of a 32-wide tile. "
    "16 bytes a lane are four times the bytes and take four turns, which is no conflict.",
    run=run,
    source=SOURCE,
    kernels=("read_4", "read_16"),
)

if __name__ == "__main__":
    main()
