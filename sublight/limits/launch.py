"""What it costs to start work and to wait for it: an eager op, a Triton launch, a node of a graph, a synchronize.

Waiting has two costs: how late the caller learns that the device is done (wall), and the processor time that the
waiting burns (CPU: `time.thread_time`): spinning is early and burns a core, blocking is late and burns nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

from sublight import timing
from sublight.backend import private
from sublight.limits.probe import Context, Probe
from sublight.results import Limit

NODES = 1000
WAIT_CYCLES = 2_000_000  # about a millisecond of work to wait for
REPEATS = 15


def measure(context: Context) -> Iterator[Limit]:
    import torch

    x = torch.ones(8, device=context.kind)
    out = torch.empty_like(x)
    yield _seconds("launch_eager", timing.call_seconds(partial(torch.add, x, x, out=out), device=context.kind))
    if context.kind == "cpu":
        return
    from sublight.limits.kernels.launch import empty

    yield _seconds("launch_triton", timing.call_seconds(partial(empty, x), device="cuda"))
    samples = timing.measure([partial(empty, x)] * NODES, time_limit_s=context.time_limit_s)
    yield Limit(name="launch_graph_node", unit="s", value=samples.median_s, spread=samples.spread_s, n=samples.n)
    for how in ("spin", "block"):
        wall, cpu = zip(*(_wait(how) for _ in range(REPEATS)), strict=True)
        yield _seconds(f"sync_{how}_wall", statistics.median(wall))
        yield _seconds(f"sync_{how}_cpu", statistics.median(cpu))


def _wait(how: str) -> tuple[float, float]:
    """Wall seconds that starting and waiting took beyond the device's own time, and CPU seconds of the wait."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=how == "block")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    start.record()
    private.sleep(WAIT_CYCLES)
    end.record()
    cpu = time.thread_time()
    end.synchronize()
    elapsed, burned = time.perf_counter() - begin, time.thread_time() - cpu
    return elapsed - start.elapsed_time(end) * 1e-3, burned


def _seconds(name: str, value: float) -> Limit:
    return Limit(name=name, unit="s", value=value)


ON_GPU = ("launch_triton", "launch_graph_node", "sync_spin_wall", "sync_spin_cpu", "sync_block_wall", "sync_block_cpu")
LAUNCH = Probe(
    name="launch and synchronize",
    names=("launch_eager", *ON_GPU),
    kinds=("cuda", "cpu"),
    measure=measure,
    gpu_only=ON_GPU,
)
