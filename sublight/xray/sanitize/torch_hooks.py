"""Torch under watch: which memory has no value yet, who gives it one, who reads it; and `cuda` made to mean the CPU.

Scripts ask for device="cuda". The interpreter works on the CPU, so tensors are made there and say they are on the GPU.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sublight.backend import private
from sublight.xray.sanitize.memory import Memory

_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_SIZES_ONLY = ("_like", "is_same_size", "size", "stride", "numel", "new_zeros", "new_ones", "new_full", "sym_size")
_READERS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
_PROPERTIES = SimpleNamespace(
    multi_processor_count=132,
    name="Triton's interpreter",
    major=9,
    minor=0,
    warp_size=32,
    total_memory=80 * 2**30,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
)


class Reads(TorchDispatchMode):
    """Tells the shadow of every operation that makes, writes or reads a tensor."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _EMPTY:
            made = func(*args, **kwargs)
            self.memory.created_empty(made)
            return made
        if self.memory.storages and not name.endswith(_SIZES_ONLY):
            self._read(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.memory.storages and func._schema.is_mutable:
            for value, declared in _declared(func, args, kwargs):
                if declared.alias_info is not None and declared.alias_info.is_write:
                    for tensor in _tensors(value):
                        self.memory.torch_writes(tensor)
        return result

    def _read(self, func: Any, args: Any, kwargs: Any) -> None:
        for value, declared in _declared(func, args, kwargs):
            if declared.alias_info is None:  # neither written nor only looked at from another side
                for tensor in _tensors(value):
                    self.memory.torch_reads(tensor)


def _declared(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for i, declared in enumerate(func._schema.arguments):
        if i < len(args) and not declared.kwarg_only:
            yield args[i], declared
        elif declared.name in kwargs:
            yield kwargs[declared.name], declared


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


class OnCpu(TorchFunctionMode):
    """`cuda` means the CPU. A script that asked for it is told that its tensors are there."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            self.asked = True
            return args[0]
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func == torch.Tensor.device.__get__ and self.asked:  # type: ignore[attr-defined]
            found = func(*args)
            return torch.device("cuda", 0) if found.type == "cpu" and not _asked_by_torch() else found
        if func is torch.Tensor.get_device and self.asked and not _asked_by_torch():
            return 0
        if func in _READERS:
            self.memory.torch_reads(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0]
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        return func(*map(self._on_cpu, args), **{name: self._on_cpu(value) for name, value in kwargs.items()})

    def _on_cpu(self, value: Any) -> Any:
        is_cuda = (isinstance(value, str) and value.split(":")[0] == "cuda") or (
            isinstance(value, torch.device) and value.type == "cuda"
        )
        self.asked = self.asked or is_cuda
        return torch.device("cpu") if is_cuda else value


def _asked_by_torch() -> bool:
    """Whether torch's own Python code asks: it must hear the truth."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.")


@contextlib.contextmanager
def watching(memory: Memory) -> Iterator[None]:
    """Torch under watch in this thread and in those that it starts: torch's modes hold for one thread alone."""
    original = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with OnCpu(memory), Reads(memory):
            original(thread)

    threading.Thread.run = run  # type: ignore[method-assign, assignment]
    try:
        with OnCpu(memory), Reads(memory):
            yield
    finally:
        threading.Thread.run = original  # type: ignore[method-assign]


def pretend_gpu() -> None:
    """What scripts ask of torch.cuda and of Triton's driver, answered without a GPU; for the rest of this process."""
    cuda: Any = torch.cuda

    def truly(original: Callable[[], Any], told: Any) -> Callable[[], Any]:
        return lambda: original() if _asked_by_torch() else told

    cuda.is_available = truly(cuda.is_available, True)
    cuda.device_count = truly(cuda.device_count, 1)
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=None: _PROPERTIES.name
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: _PROPERTIES
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("device", "stream", "device_of"):
        setattr(cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    for name in ("reset_peak_memory_stats", "ipc_collect", "reset_max_memory_allocated"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    _default_device_on_cpu()
    cuda.Event = _Event
    cuda.Stream = _Stream
    torch.Generator = _Generator  # type: ignore[assignment, misc]
    cuda.current_stream = cuda.default_stream = lambda device=None: _Stream()
    _pretend_driver()


def _default_device_on_cpu() -> None:
    """`torch.set_default_device("cuda")` works below every other mode, so it must be told by itself."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    original = DeviceContext.__init__

    def init(self: Any, device: Any) -> None:
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, OnCpu)]
        original(self, modes[0]._on_cpu(device) if modes else device)

    DeviceContext.__init__ = init  # type: ignore[method-assign]


class _Generator:
    """In place of torch.Generator: of the CPU, for there the numbers are drawn."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return private.Generator("cpu")


class _Stream:
    """In place of torch.cuda.Stream: all that is asked has been done already."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Event:
    """In place of torch.cuda.Event: everything takes a millisecond."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def _pretend_driver() -> None:
    import triton

    GPUTarget = private.GPUTarget
    Autotuner = private.Autotuner

    facts = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    driver: Any = SimpleNamespace(
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda device: facts),
    )
    private.driver.set_active(driver)
    Autotuner._bench = lambda self, *args, config, **meta: 0.0  # the first configuration wins
    triton.testing.do_bench = triton.testing.do_bench_cudagraph = _run_once
    triton.testing.Mark.run = lambda *args, **kwargs: None  # times and plots at sizes that nobody interprets


def _run_once(
    fn: Callable[[], Any], *args: Any, quantiles: Any = None, return_mode: str = "mean", **kwargs: Any
) -> Any:
    """In place of a benchmark: one run, said to take a millisecond, for scripts divide by it."""
    fn()
    count = len(quantiles) if quantiles is not None else 0
    return [1.0] * count if count > 1 or return_mode == "all" else 1.0
