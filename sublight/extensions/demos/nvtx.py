"""NVTX ranges: names for stretches of a program, which Nsight shows on the host's and the GPU's time.

python -m sublight.extensions.demos.nvtx    three named ranges, for nsys and ncu to see
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sublight.errors import BadInput
from sublight.extensions.demos import ncu
from sublight.extensions.demos.demo import Cell, Demo, Figures, Table
from sublight.extensions.demos.gpu import Gpu

SOURCE = "../demos/overlap.cu"
RANGES = (("forward", 2000), ("backward", 4000), ("optimizer", 500))  # and how much work each launches
COUNT = 2**24
LIMIT_S = 40


def range_push(name: str) -> None:
    import torch

    torch.cuda.nvtx.range_push(name)


def range_pop() -> None:
    import torch

    torch.cuda.nvtx.range_pop()


def work(gpu: Gpu) -> list[tuple[str, float, float]]:
    """Run the ranges; returns each one's time on the host, and the GPU's time for what was launched in it."""
    x = gpu.buffer(4 * COUNT)
    gpu.launch("work", 1024, 256, x, COUNT, 1)
    gpu.synchronize()
    rows = []
    for name, rounds in RANGES:
        range_push(name)
        host = time.perf_counter()
        start, end = gpu.event(), gpu.event()
        gpu.record(start)
        gpu.launch("work", 1024, 256, x, COUNT, rounds)
        gpu.record(end)
        host_s = time.perf_counter() - host
        range_pop()
        rows.append((name, host_s, start, end))
    gpu.synchronize()
    return [(name, host_s, gpu.between(start, end)) for name, host_s, start, end in rows]


def range_cost_s(times: int = 20_000) -> float:
    start = time.perf_counter()
    for _ in range(times):
        range_push("step")
        range_pop()
    return (time.perf_counter() - start) / times


def by_ncu() -> Table:
    """Profile the kernels of one range alone, by Nsight Compute."""
    name = RANGES[1][0]
    metric = "gpu__time_duration.sum"
    options = ("--nvtx", "--nvtx-include", f"{name}/")
    rows = ncu.counters("sublight.extensions.demos.nvtx", (), (metric,), *options)
    return Table(
        title=f"ncu --nvtx --nvtx-include {name}/: {len(rows)} of the program's {len(RANGES) + 1} launches",
        columns=(("kernel", ""), ("grid", ""), ("time", "s")),
        rows=tuple((row["Kernel Name"], row.get("Grid Size", ""), _seconds(row, metric)) for row in rows),
    )


def _seconds(row: dict[str, str], metric: str) -> float | None:
    """ncu gives nanoseconds in raw pages of one kernel."""
    value = ncu.number(row, metric)
    return None if value is None else value / 1e9


def by_nsys() -> Table:
    """The ranges of the host projected on the GPU's time, as Nsight Systems stores them."""
    tool = shutil.which("nsys")
    if tool is None:
        raise BadInput("timeline: no nsys (Nsight Systems) on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [tool, "profile", "-t", "cuda,nvtx", "--export", "sqlite", "-o", str(out), sys.executable]
        try:
            done = subprocess.run(
                [*command, "-m", "sublight.extensions.demos.nvtx"],
                capture_output=True, text=True, check=False, timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise BadInput(f"timeline: nsys took more than {LIMIT_S} s") from None
        path = out.with_suffix(".sqlite")
        if not path.exists():
            words = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise BadInput(f"timeline: nsys made no report: {words[-1] if words else 'no word'}")
        return projected(path)


PROJECTION = """
select coalesce(n.text, s.value), count(*), (n.end - n.start) / 1e9, (max(k.end) - min(k.start)) / 1e9
from NVTX_EVENTS n left join StringIds s on s.id = n.textId
join CUPTI_ACTIVITY_KIND_RUNTIME r on r.globalTid = n.globalTid and r.start >= n.start and r.end <= n.end
join CUPTI_ACTIVITY_KIND_KERNEL k on k.correlationId = r.correlationId
group by n.start, n.end order by n.start
"""


def projected(path: Path) -> Table:
    """A kernel belongs to the range in which its launch was called, on the same thread."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as data:
        rows: tuple[tuple[Cell, ...], ...] = tuple(data.execute(PROJECTION))
    return Table(
        title="What Nsight Systems stores: ranges on the host, projected on the GPU",
        columns=(("range", ""), ("kernels", "count"), ("host", "s"), ("GPU", "s")),
        rows=rows,
    )


def run(gpu: Gpu) -> Figures:
    tables = [
        Table(
            title="A range on the host, and the work that was launched in it",
            columns=(("range", ""), ("host in the range", "s"), ("GPU at its kernels", "s")),
            rows=tuple(work(gpu)),
            note="Launches are asynchronous: the range ends on the host long before its kernels do, which is why "
            "Nsight projects ranges on the GPU's time.",
        ),
        Table(
            title="What a range costs where no tool listens",
            columns=(("", ""), ("push and pop", "s")),
            rows=(("torch.cuda.nvtx", range_cost_s()),),
        ),
    ]
    missing = []
    for make in (by_ncu, by_nsys):
        try:
            tables.append(make())
        except BadInput as error:
            missing.append(str(error))
    return Figures(tables=tuple(tables), missing=tuple(missing))


def main() -> None:
    work(Gpu(SOURCE))


NVTX = Demo(
    name="nvtx",
    question="What does a named range cost, and what does Nsight make of it?",
    expect="A range is a push and a pop on the host: well under a microsecond where no tool listens. It marks the "
    "host's time, and launches return at once, so that the kernels of `forward` run long after its range has ended; "
    "Nsight Systems therefore projects a range on its kernels, and Nsight Compute profiles only those of a range when "
    "asked to.",
    run=run,
    source=SOURCE,
    kernels=("work",),
)

if __name__ == "__main__":
    main()
