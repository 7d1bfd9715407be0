"""CUDA's side of `graph`: what captures, replays, waits and counts memory; all else is tested without a GPU.

Work is warmed up and captured on one side stream a device, so that workspaces and gradients live where the capture
finds them; a graph is replayed on the caller's own stream, which first waits for the stream that replayed last.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sublight.backend import private
from sublight.fix.graph.refuse import waits_heard


class Captured(Protocol):
    """One captured call."""

    outputs: Any
    pool_bytes: int  # by which the pool grew
    driver_bytes: int  # what the driver took beside it, as far as that can be seen

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Backend(Protocol):
    """What `Graph` asks of a device."""

    device_type: str

    def is_capturing(self) -> bool: ...

    def new_pool(self) -> Any: ...

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Held while warming up or capturing: one at a time in the process."""

    def side(self, device: torch.device) -> contextlib.AbstractContextManager[None]: ...

    def heard(self, found: Callable[[str, str], None]) -> contextlib.AbstractContextManager[None]: ...

    def prepare(self, device: torch.device) -> None:
        """Before a capture, on its thread: what a thread makes with its first product cannot be made inside."""

    def capture(
        self, call: Callable[[], Any], pool: Any, device: torch.device, generators: Sequence[torch.Generator]
    ) -> Captured: ...

    def enter(self, pool: Any, device: torch.device) -> None:
        """Before a replay: the caller's stream waits for whoever used the pool last."""

    def hand_over(self, tensors: list[torch.Tensor]) -> None:
        """Made on the side stream, used on the caller's."""

    def synchronize(self, device: torch.device) -> None: ...

    def mark(self) -> Any:
        """A moment on the caller's stream."""

    def between_s(self, start: Any, end: Any) -> float: ...


@dataclass(slots=True, kw_only=True)
class Pool:
    """Memory that the graphs of one function share, and the stream that used it last."""

    handle: Any
    stream: Any = None


class CudaCaptured:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, pool_bytes: int, driver_bytes: int) -> None:
        self._graph, self.outputs = graph, outputs
        self.pool_bytes, self.driver_bytes = pool_bytes, driver_bytes
        self.replay = graph.replay  # on the caller's stream, whatever it was captured on

    def reset(self) -> None:
        self.outputs = None
        self._graph.reset()


class Cuda:
    """The real one."""

    device_type = "cuda"

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_pool(self) -> Pool:
        return Pool(handle=torch.cuda.graph_pool_handle())

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        return _one_at_a_time()

    @contextlib.contextmanager
    def side(self, device: torch.device) -> Iterator[None]:
        current, side = torch.cuda.current_stream(device), _side_stream(_index(device))
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)

    def heard(self, found: Callable[[str, str], None]) -> contextlib.AbstractContextManager[None]:
        return waits_heard(found, torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())

    def prepare(self, device: torch.device) -> None:
        """cuBLAS's handle, which each thread has its own of, cuBLASLt's, which is the same, and their workspace.

        Others may have warmed up, and the capture come to a thread that has not multiplied yet. The workspace belongs
        to a handle and a stream: taken here, it is not in the pool of the first graph.
        """
        with torch.cuda.stream(_side_stream(_index(device))):
            torch.cuda.current_blas_handle()

    def capture(
        self, call: Callable[[], Any], pool: Pool, device: torch.device, generators: Sequence[torch.Generator]
    ) -> CudaCaptured:
        index = _index(device)
        torch.cuda.synchronize(index)
        torch.cuda.empty_cache()  # a graph's pool takes none of the memory that PyTorch keeps for others
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        free, reserved = torch.cuda.mem_get_info(index)[0], torch.cuda.memory_reserved(index)
        with _no_collection(), torch.cuda.stream(_side_stream(index)):
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                outputs = call()
            except BaseException:
                self._give_up(graph, pool, index)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._give_up(graph, pool, index)
                raise
        pool_bytes = max(torch.cuda.memory_reserved(index) - reserved, 0)
        taken = free - torch.cuda.mem_get_info(index)[0]
        return CudaCaptured(graph, outputs, pool_bytes, max(taken - pool_bytes, 0))

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: Pool, index: int) -> None:
        """End what failed so that the next capture works: PyTorch 2.11 leaves its allocator and generator waiting."""
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # later versions have ended it themselves
                private.end_allocate_to_pool(index, pool.handle)
            pool.handle = torch.cuda.graph_pool_handle()  # the old one may never be let go
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(index)
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros(1, device=torch.device("cuda", index))
            empty.capture_end()  # tells the generator that no capture is underway
            empty.reset()
        graph.reset()

    def enter(self, pool: Pool, device: torch.device) -> None:
        current = torch.cuda.current_stream(device)
        if pool.stream is None or pool.stream != current:
            if pool.stream is not None:
                current.wait_stream(pool.stream)
            pool.stream = current

    def hand_over(self, tensors: list[torch.Tensor]) -> None:
        for x in tensors:
            if x.is_cuda:
                x.record_stream(torch.cuda.current_stream(x.device))

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def timed(backend: Backend, call: Callable[[], Any], device: torch.device) -> tuple[Any, float, float]:
    """One eager call: its result, its whole time, and the part until Python had launched everything."""
    backend.synchronize(device)
    begin = time.perf_counter()
    with backend.side(device):
        result = call()
    launched = time.perf_counter()
    backend.synchronize(device)
    return result, time.perf_counter() - begin, launched - begin


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One a device: the allocator keeps memory apart by stream, and capture forbids the default one."""
    return torch.cuda.Stream(index)


@functools.cache
def _one_at_a_time() -> threading.RLock:  # type: ignore[valid-type]
    return threading.RLock()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's collector frees in the middle of a capture may be another graph."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
