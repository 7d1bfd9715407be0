"""Triton where there is no GPU: its driver answers for the GPU that is named, and nothing is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sublight.backend import private
from sublight.backend.record import capability_of
from sublight.gpus import Gpu
from sublight.xray.occupancy.sm import REGISTERS_PER_SM, sm_of
from sublight.xray.pretend.replaced import replaced

_OF_MARK = ("show_plots", "print_data", "save_path", "return_df", "diff_col", "save_precision")


@contextlib.contextmanager
def driver_of(gpu: Gpu) -> Iterator[None]:
    """Triton's driver for a GPU that is not here."""
    target, sm = private.GPUTarget("cuda", capability_of(gpu), 32), sm_of(gpu)
    facts = {
        "max_shared_mem": sm.shared_bytes_per_block,
        "max_num_regs": REGISTERS_PER_SM,
        "multiprocessor_count": gpu.sms or 132,
        "max_threads_per_sm": 32 * sm.warps,
        "warpSize": 32,
        "sm_clock_rate": int((gpu.boost_clock_hz or 1.8e9) / 1e3),
        "mem_clock_rate": int((gpu.memory_transfers_per_s or 5e9) / 2e3),
        "mem_bus_width": gpu.memory_bus_bits or 5120,
    }
    pretended: Any = SimpleNamespace(
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,
        get_current_stream=lambda device=None: 0,
        get_device_interface=lambda: torch.cuda,
        get_empty_cache_for_benchmark=lambda: torch.empty(1),
        clear_cache=lambda cache: None,
        utils=SimpleNamespace(get_device_properties=lambda device: facts),
    )
    driver = private.driver
    before = driver._active
    driver.set_active(pretended)
    try:
        with _no_cublas(), _no_profiler():
            yield
    finally:
        driver._active = before


@contextlib.contextmanager
def nothing_timed(
    run_benchmark: Callable[..., None],
    tried: Callable[[Any], None] = lambda tuner: None,
    seconds: Callable[[], float] = lambda: 1.0,
) -> Iterator[None]:
    """Autotune takes its first configuration, `do_bench` runs once, and `run_benchmark` gets benchmarks.

    `tried` hears of autotuners that would have tried configurations; what `seconds` says of each decides, where they
    are not all alike.
    """
    import triton

    Autotuner = private.Autotuner

    def untimed(self: Any, *args: Any, **kwargs: Any) -> list[float]:
        tried(self)
        return [seconds()] * 3  # where all are alike: the first

    def unkept(self: Any, key: Any, configs: Any, bench_fn: Callable[[], None]) -> bool:
        bench_fn()
        return False

    tuner: dict[str, Any] = {"_bench": untimed}
    if hasattr(Autotuner, "check_disk_cache"):
        tuner["check_disk_cache"] = unkept  # what was not timed is not to be kept
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(Autotuner, tuner))
        timers = {"do_bench": run_once, "do_bench_cudagraph": run_once}
        stack.enter_context(replaced(triton.testing, timers))
        stack.enter_context(replaced(triton.testing.Mark, {"run": run_benchmark}))
        yield


def at_first_sizes(mark: Any, *args: Any, **kwargs: Any) -> None:
    """In place of a benchmark's `run`: every provider once, at the first size."""
    own = {name: value for name, value in kwargs.items() if name not in _OF_MARK}
    for benchmark in mark.benchmarks if isinstance(mark.benchmarks, list) else [mark.benchmarks]:
        first = next(iter(benchmark.x_vals))
        sizes = first if isinstance(first, list | tuple) else [first] * len(benchmark.x_names)
        for provider in benchmark.line_vals:
            chosen = {**dict(zip(benchmark.x_names, sizes, strict=True)), benchmark.line_arg: provider}
            mark.fn(**chosen, **benchmark.args, **own)


def run_once(fn: Callable[[], Any], *args: Any, quantiles: Any = None, return_mode: str = "mean", **kwargs: Any) -> Any:
    """In place of a benchmark: one run, which is said to take a millisecond, for scripts divide by it."""
    fn()
    count = len(quantiles) if quantiles is not None else 0
    return [1.0] * count if count > 1 or return_mode == "all" else 1.0


@contextlib.contextmanager
def _no_cublas() -> Iterator[None]:
    """Triton's own door to cuBLAS, which scripts compare with: there is no such library without a GPU."""

    class Cublas:
        def __init__(self, workspace: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    try:
        cublas = private.cublas
    except ImportError:
        yield
        return
    with replaced(cublas, {"CublasLt": Cublas}):
        yield


@contextlib.contextmanager
def _no_profiler() -> Iterator[None]:
    """Proton, Triton's profiler, would look for CUPTI."""
    try:
        import triton.profiler
    except ImportError:
        yield
        return
    names = ("start", "activate", "deactivate", "finalize")
    with replaced(triton.profiler, {name: lambda *args, **kwargs: None for name in names}):
        yield
