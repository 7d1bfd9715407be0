"""Compile what a batch will need, all kernels at once, before the first step would do them one after the other.

The model takes its step with every launch of a Triton kernel left out: what each kernel would be launched with is then
known exactly, and threads compile them side by side (the compiler's passes, the assembler and the C compiler behind
a launch let other threads run). What the step computes is garbage, and nobody gets to see it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from sublight.fix.patch.step import as_it_was, call, is_inert, loss_of
from sublight.jit import AVAILABLE
from sublight.ops.rows import is_interpreted

MOST_THREADS = 16


def begin(work: Callable[[], Any]) -> threading.Thread:
    """Start on it in the background; what goes wrong there will go wrong again where somebody waits for it."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread


def start_driver() -> None:
    """What Triton does before its first launch: on 3.6 a C compiler runs for it, most of a second."""
    from triton.runtime import driver

    _ = driver.active.utils


def can_launch(device: torch.device) -> bool:
    return AVAILABLE and not is_interpreted() and device.type == "cuda"


def compile_for(model: torch.nn.Module, batch: Any) -> int:
    """The kernels of the model's step on this batch; how many there were.

    None where there is no GPU, where a call may leave traces outside of the model (a cache of keys in the batch would
    grow, a wrapper of several GPUs would wait for the others), and where the step fails: the first step tells why.
    """
    device = device_of(model)
    if not can_launch(device) or not is_inert(batch) or _is_shared(model):
        return 0
    wrt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trains = model.training and torch.is_grad_enabled() and bool(wrt)
    with _compiling(device) as kernels, as_it_was(model), contextlib.suppress(RuntimeError, ValueError):
        with torch.set_grad_enabled(trains):
            output = call(model, batch)
        if trains and (loss := loss_of(output)).requires_grad:
            torch.autograd.grad(loss, wrt, allow_unused=True)
    return len(kernels)


def device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def _compiling(device: torch.device) -> Iterator[list[Any]]:
    """Inside, kernels are compiled by threads and not launched; after it, all of them can be."""
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.runtime.jit import JITFunction

    original = JITFunction.run
    kernels: list[Any] = []

    with _Pool(device, kernels) as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            before = active_mode.set(mode)  # in each thread again: gradients have one of their own
            try:
                return original(self, *args, grid=grid, warmup=True, **kwargs)
            finally:
                active_mode.reset(before)

        JITFunction.run = compile_only  # type: ignore[method-assign]
        try:
            with mode:
                yield kernels
        finally:
            JITFunction.run = original  # type: ignore[method-assign]


class _Pool(ThreadPoolExecutor):
    """Threads that compile a kernel and make it ready to launch: on Triton 3.6 a C compiler runs for that too."""

    def __init__(self, device: torch.device, kernels: list[Any]) -> None:
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))
        self.kernels = kernels

    def submit(self, compile_one: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def ready() -> Any:
            kernel = compile_one(*args, **kwargs)
            _ = kernel.run  # the property loads it
            self.kernels.append(kernel)
            return kernel

        return super().submit(ready)


def _is_shared(model: torch.nn.Module) -> bool:
    """Whether several processes have a part in the model: DDP, FSDP, fully_shard, tensor parallel."""
    wrappers = any("parallel" in type(module).__module__ for module in model.modules())
    return wrappers or any(hasattr(parameter, "placements") for parameter in model.parameters())
