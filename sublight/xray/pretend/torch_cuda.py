"""Torch where there is no GPU: "cuda" means the CPU, tensors say that they are on the GPU, torch.cuda answers for one.

Torch's own Python code hears the truth: it would look for a CUDA that is not there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sublight.backend import private
from sublight.gpus import Gpu
from sublight.xray.occupancy.sm import REGISTERS_PER_SM, sm_of
from sublight.xray.pretend.replaced import replaced

_READERS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
_COMPARISONS = {torch.allclose, torch.equal, torch.Tensor.allclose, torch.Tensor.equal}


class OnCpu(TorchFunctionMode):
    """`cuda` means the CPU. A script that asked for it is told that its tensors are there."""

    def __init__(self, reads: Callable[[Any], None] | None = None, *, has_results: bool = True) -> None:
        """`reads` hears of tensors whose values leave torch; without results every comparison holds."""
        super().__init__()
        self.reads, self.has_results = reads, has_results
        self.is_cuda_wanted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            self.is_cuda_wanted = True
            return args[0]
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func == torch.Tensor.device.__get__ and self.is_cuda_wanted:  # type: ignore[attr-defined]
            found = func(*args)
            return torch.device("cuda", 0) if found.type == "cpu" and not _is_for_torch() else found
        if func is torch.Tensor.get_device and self.is_cuda_wanted and not _is_for_torch():
            return 0
        if not self.has_results and func in _COMPARISONS:
            return True
        if self.reads and func in _READERS:
            self.reads(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0]
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        return func(*map(self.on_cpu, args), **{name: self.on_cpu(value) for name, value in kwargs.items()})

    def on_cpu(self, value: Any) -> Any:
        is_cuda = (isinstance(value, str) and value.split(":")[0] == "cuda") or (
            isinstance(value, torch.device) and value.type == "cuda"
        )
        self.is_cuda_wanted = self.is_cuda_wanted or is_cuda
        return torch.device("cpu") if is_cuda else value


def _is_for_torch() -> bool:
    """Whether torch's own Python code asks: it must hear the truth."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.")


@contextlib.contextmanager
def modes_in_threads(modes: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """These modes in this thread and in those that it starts: torch's modes hold for one thread alone."""
    original = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with modes():
            original(thread)

    with replaced(threading.Thread, {"run": run}), modes():
        yield


@contextlib.contextmanager
def cuda_of(gpu: Gpu) -> Iterator[None]:
    """What scripts ask of torch.cuda, answered for that GPU."""
    cuda: Any = torch.cuda
    properties = _properties(gpu)

    def truly(original: Callable[[], Any], pretended: Any) -> Callable[[], Any]:
        return lambda: original() if _is_for_torch() else pretended

    def doing_nothing(names: Iterable[str]) -> dict[str, Any]:
        return {name: lambda *args, **kwargs: None for name in names}  # each its own: Dynamo lists them by identity

    done = ("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "init", "ipc_collect")
    reset = ("reset_peak_memory_stats", "reset_max_memory_allocated")
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    answers: dict[str, Any] = {
        "is_available": truly(cuda.is_available, True),
        "device_count": truly(cuda.device_count, 1),
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        **doing_nothing((*done, *reset)),
        **{name: lambda *args, **kwargs: contextlib.nullcontext() for name in ("device", "stream", "device_of")},
        **{name: lambda device=None: 0 for name in memory},
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(cuda, answers))
        stack.enter_context(replaced(cuda.nvtx, doing_nothing(("range_push", "range_pop", "mark"))))
        stack.enter_context(replaced(torch, {"Generator": Generator}))
        stack.enter_context(_default_device_on_cpu())
        yield


@contextlib.contextmanager
def no_comparisons() -> Iterator[None]:
    """`torch.testing.assert_close` passes: where launches are not made, results say nothing."""
    with replaced(torch.testing, {"assert_close": lambda *args, **kwargs: None}):
        yield


def _properties(gpu: Gpu) -> SimpleNamespace:
    major, minor = gpu.compute_capability or (9, 0)
    sm = sm_of(gpu)
    return SimpleNamespace(
        multi_processor_count=gpu.sms or 132,
        name=gpu.name,
        major=major,
        minor=minor,
        warp_size=32,
        total_memory=gpu.memory_bytes or 80 * 2**30,
        max_threads_per_multi_processor=32 * sm.warps,
        regs_per_multiprocessor=REGISTERS_PER_SM,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=sm.shared_bytes_per_block,
        shared_memory_per_multiprocessor=sm.shared_bytes,
        L2_cache_size=gpu.l2_bytes or 50 * 2**20,
        gcnArchName="",
    )


@contextlib.contextmanager
def _default_device_on_cpu() -> Iterator[None]:
    """`torch.set_default_device("cuda")` works below every other mode, so it must be told by itself."""
    original = private.DeviceContext.__init__

    def init(self: Any, device: Any) -> None:
        modes = [mode for mode in private.function_modes() if isinstance(mode, OnCpu)]
        original(self, modes[0].on_cpu(device) if modes else device)

    with replaced(private.DeviceContext, {"__init__": init}):
        yield


class Generator:
    """In place of torch.Generator: of the CPU, for there the numbers are drawn."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return private.Generator("cpu")


class Stream:
    """In place of torch.cuda.Stream: everything has been done already."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class Event:
    """In place of torch.cuda.Event: everything takes a millisecond."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0
