"""Compile what a batch will need, all kernels at once, before the first step would do them one after the other.

The model takes its step with every launch of a kernel of ours left out: what each would be launched with is then known
exactly, and threads compile them side by side (the compiler's passes, the assembler and the C compiler behind a launch
let other threads run). What the step computes is nonsense, and nobody gets to see it. Kernels that are not ours are
launched: one that tunes itself would find every choice equally fast, one that finds places would leave them anywhere.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sublight.backend import private
from sublight.backend.compile_ahead import compiling
from sublight.backend.device import is_interpreted
from sublight.backend.jit import AVAILABLE
from sublight.backend.launch import is_ours
from sublight.fix.patch.step import as_it_was, call, is_inert, is_shared, loss_of
from sublight.fix.patch.twin import is_heard

MOST_THREADS = 16
ONE_AT_A_TIME = threading.RLock()  # each puts back what it has found in Triton


def begin(work: Callable[[], Any]) -> threading.Thread:
    """Start on it in the background; what goes wrong there will go wrong again where somebody waits for it.

    A process that ends waits for it, too: one that ends in the middle of a compilation is aborted.
    """

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly)
    thread.start()
    return thread


def can_launch(device: torch.device) -> bool:
    return AVAILABLE and not is_interpreted() and device.type == "cuda"


def compile_for(model: torch.nn.Module, batch: Any) -> int:
    """The kernels of the model's step on this batch; how many there were.

    None where there is no GPU or there are several, where a call may leave traces outside of the model (a cache of keys
    in the batch would grow, a hook would hear of it, a wrapper of several GPUs would wait for the others), where it
    would be compiled as a whole, and where the step fails: the first step tells why.
    """
    device = device_of(model)
    if not can_launch(device) or not is_inert(batch) or not may_step(model):
        return 0
    wrt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trains = model.training and torch.is_grad_enabled() and bool(wrt)
    with _compiling(device) as kernels, as_it_was(model), contextlib.suppress(Exception):
        with torch.set_grad_enabled(trains), _Filled():
            output = call(model, batch)
        if trains and (loss := loss_of(output)).requires_grad:
            torch.autograd.grad(loss, wrt, allow_unused=True)
    return len(kernels)


class _Filled(TorchFunctionMode):
    """What is made empty, for a kernel to write, holds ones or zeros: not what would stop the GPU, as a NaN does where
    a probability is expected, and 2**40 where a place is."""

    EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self.EMPTY:
            made.detach().fill_(made.is_floating_point())
        return made


def device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def _compiling(device: torch.device) -> Iterator[list[Any]]:
    """Inside, kernels are compiled by threads and not launched; after it, all of them can be."""
    kernels: list[Any] = []
    here = threading.get_ident()

    def is_wanted(kernel: Any) -> bool:
        is_in_step = threading.get_ident() == here or private.graph_task() >= 0  # or its backward
        return is_ours(kernel) and is_in_step

    with ONE_AT_A_TIME, _Pool(device, kernels) as pool, compiling(pool, is_wanted):
        yield kernels


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


def may_step(model: torch.nn.Module) -> bool:
    """Whether a step that computes nonsense is heard of by nobody, and needs kernels of one GPU only."""
    on_one = len({parameter.device for parameter in model.parameters()}) == 1
    return on_one and not any((is_shared(model), _is_compiled(model), is_heard(model)))


def _is_compiled(model: torch.nn.Module) -> bool:
    """Whether a part of it goes through torch.compile: that takes minutes, and again for the forwards that stay."""
    dynamo = private.loaded("dynamo")
    wrapper = dynamo.OptimizedModule if dynamo else ()
    return any(isinstance(each, wrapper) or vars(each).get("_compiled_call_impl") for each in model.modules())
