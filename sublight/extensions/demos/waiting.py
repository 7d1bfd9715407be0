"""What the host waits for while a kernel runs, and what its core does meanwhile: spin, yield or sleep.

python -m sublight.extensions.demos.waiting FLAGS    one way of waiting, in a process of its own: JSON
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from sublight.extensions.demos.demo import Demo, Figures, Table
from sublight.extensions.demos.gpu import BLOCKING, Gpu
from sublight.extensions.driver import call

SOURCE = "../demos/waiting.cu"
KERNEL_S = 0.1  # a kernel so long that a call which waits for it stands out
SHORT_S = 50e-6  # a kernel so short that a late wake-up shows
WAYS = {"spin": 1, "yield": 2, "block": 4}  # CU_CTX_SCHED_SPIN, _YIELD, _BLOCKING_SYNC
CHILD_LIMIT_S = 20


def busy(gpu: Gpu, seconds: float, stream: int = 0) -> None:
    gpu.launch("busy", 1, 1, round(1e9 * seconds), stream=stream)


def calls(gpu: Gpu) -> Table:
    """How long the host stands in each call while a kernel of 0.1 s runs on another stream."""
    running, other = gpu.stream(), gpu.stream()
    size = 2**22
    pinned, pageable = gpu.pinned(size), ctypes.create_string_buffer(size)
    device = gpu.buffer(size)
    done, pool = gpu.event(), ctypes.c_uint64()
    call("cuMemAllocAsync", ctypes.byref(pool), ctypes.c_size_t(size), ctypes.c_void_p(other))
    gpu.synchronize()
    spare = [gpu.buffer(size) for _ in range(2)]
    spare_pinned = gpu.pinned(size)
    fresh = ctypes.c_uint64()
    works: tuple[tuple[str, Callable[[], None]], ...] = (
        ("launch on another stream", lambda: busy(gpu, 0.0, other)),
        ("cuEventRecord on the kernel's stream", lambda: gpu.record(done, running)),
        ("copy from pinned memory, another stream", lambda: gpu.copy_to_gpu(device, pinned, other)),
        (
            "copy from pageable memory, another stream",
            lambda: call(
                "cuMemcpyHtoDAsync_v2",
                *(ctypes.c_uint64(device.address), pageable, ctypes.c_size_t(size), ctypes.c_void_p(other)),
            ),
        ),
        ("cuStreamSynchronize of another stream", lambda: call("cuStreamSynchronize", ctypes.c_void_p(other))),
        ("cuMemAlloc", lambda: call("cuMemAlloc_v2", ctypes.byref(fresh), ctypes.c_size_t(size))),
        ("cuMemFreeAsync", lambda: call("cuMemFreeAsync", pool, ctypes.c_void_p(other))),
        ("cuMemFree of memory no kernel uses", lambda: call("cuMemFree_v2", ctypes.c_uint64(spare[0].address))),
        ("cuMemFreeHost", lambda: call("cuMemFreeHost", ctypes.c_void_p(spare_pinned.address))),
        ("cuStreamSynchronize of the kernel's stream", lambda: call("cuStreamSynchronize", ctypes.c_void_p(running))),
        ("cuCtxSynchronize", gpu.synchronize),
    )
    rows = []
    for name, work in works:
        gpu.synchronize()
        busy(gpu, KERNEL_S, running)
        start = time.perf_counter()
        work()
        elapsed_s = time.perf_counter() - start
        still_running = bool(_unfinished(running))
        rows.append((name, elapsed_s, "no" if still_running else "yes"))
    gpu.synchronize()
    return Table(
        title=f"How long the host stands in a call while a kernel of {KERNEL_S:g} s runs",
        columns=(("call", ""), ("time", "s"), ("waited for the kernel", "")),
        rows=tuple(rows),
        note="PyTorch calls neither cuMemAlloc nor cuMemFree while its cache has memory: that is why it keeps one.",
    )


def _unfinished(stream: int) -> int:
    from sublight.extensions.driver import DriverError

    try:
        call("cuStreamQuery", ctypes.c_void_p(stream))
    except DriverError as error:
        if "NOT_READY" in str(error):
            return 1
        raise
    return 0


def one_way(flags: int) -> dict[str, float]:
    """Wall and CPU time of one long wait, and how long after a short kernel's end the host goes on."""
    gpu = Gpu(SOURCE, flags=flags)
    busy(gpu, 0.001)
    gpu.synchronize()
    busy(gpu, KERNEL_S)
    wall, cpu = time.perf_counter(), time.process_time()
    gpu.synchronize()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall_s, "cpu_s": cpu_s, "round_s": _round_s(gpu, gpu.synchronize)}


def _round_s(gpu: Gpu, wait: Callable[[], None], times: int = 51) -> float:
    """Median wall time of a launch of a short kernel and the wait for it."""
    samples = []
    for _ in range(times):
        start = time.perf_counter()
        busy(gpu, SHORT_S)
        wait()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _child(flags: int) -> dict[str, float]:
    """Run one way of waiting in a process of its own: a process chooses its way before its first use of the GPU."""
    command = [sys.executable, "-m", "sublight.extensions.demos.waiting", str(flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHILD_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"waiting with flags {flags}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return dict(json.loads(done.stdout))


def ways(gpu: Gpu) -> Table:
    rows = []
    for name, flags in WAYS.items():
        found = _child(flags)
        rows.append((name, found["wall_s"], found["cpu_s"], found["round_s"] - SHORT_S))
    event = gpu.event(BLOCKING)

    def wait_for_the_event() -> None:
        gpu.record(event)
        call("cuEventSynchronize", event)

    busy(gpu, KERNEL_S)
    wall, cpu = time.perf_counter(), time.process_time()
    wait_for_the_event()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    rows.append(("an event that blocks", wall_s, cpu_s, _round_s(gpu, wait_for_the_event) - SHORT_S))
    return Table(
        title=f"Waiting for a kernel of {KERNEL_S:g} s",
        columns=(("way", ""), ("wall time", "s"), ("CPU time", "s"), ("late by", "s")),
        rows=tuple(rows),
        note=f"Late by: launch and wait of a kernel of {1e6 * SHORT_S:.0f} µs, less the kernel: what the launch costs, "
        "and how long after the kernel's end the host goes on.",
    )


def run(gpu: Gpu) -> Figures:
    return Figures(tables=(calls(gpu), ways(gpu)))


def main(words: Sequence[str]) -> None:
    print(json.dumps(one_way(int(words[0]))))


WAITING = Demo(
    name="waiting",
    question="Which calls wait for running kernels, and what does the CPU do while it waits?",
    expect="Launches, events, pinned copies and the work of other streams do not wait. cuMemFree (cudaFree) waits for "
    "everything that runs, even for kernels that do not use the memory, and so does giving back pinned memory; "
    "cuMemFreeAsync does not. A host that spins or yields burns a core for as long as it waits and goes on within some "
    "microseconds; one that blocks uses none of it and goes on tens of microseconds later.",
    run=run,
    source=SOURCE,
    kernels=("busy",),
)

if __name__ == "__main__":
    main(sys.argv[1:])
