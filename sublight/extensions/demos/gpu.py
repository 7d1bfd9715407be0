"""One GPU through the driver's C interface, without PyTorch: memory, streams, events, launches, graphs.

The names are the driver's, so that each line of a demonstration can be looked up in CUDA's manual. Nothing is given
back: a demonstration is a process of its own, and its context ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sublight.errors import BadInput
from sublight.extensions import build, driver
from sublight.extensions.driver import STATIC_SHARED_BYTES, DriverError, call

MULTIPROCESSORS, L2_BYTES, MAJOR, MINOR = 16, 38, 75, 76  # CU_DEVICE_ATTRIBUTE_…
PERSISTING_L2_BYTES, WINDOW_BYTES = 108, 109
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TIMING, BLOCKING = 0, 1  # CU_EVENT_DEFAULT, CU_EVENT_BLOCKING_SYNC


def why_no_gpu() -> str:
    """Why no GPU can be used here; empty where one can."""
    try:
        call("cuInit", 0)
        count = ctypes.c_int()
        call("cuDeviceGetCount", ctypes.byref(count))
    except (BadInput, DriverError) as error:
        return str(error)
    return "" if count.value else "the driver finds no GPU (`sublight doctor` says more)"


@dataclass(frozen=True, slots=True)
class Buffer:
    """An address in the GPU's or the host's memory that a kernel or a copy takes."""

    address: int
    bytes: int

    def data_ptr(self) -> int:
        return self.address

    def at(self, offset: int, size: int) -> Buffer:
        return Buffer(self.address + offset, size)


class Gpu:
    """The first GPU, its primary context current in this thread, and the kernels of one file."""

    def __init__(self, source: str = "", *, flags: int | None = None) -> None:
        """`flags`: how this process waits for the GPU (CU_CTX_SCHED_…), to be set before its first use."""
        call("cuInit", 0)
        self._device = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(self._device), 0)
        if flags is not None:
            call("cuDevicePrimaryCtxSetFlags_v2", self._device, flags)
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        call("cuCtxSetCurrent", context)
        self.capability = 10 * self.attribute(MAJOR) + self.attribute(MINOR)
        self.multiprocessors = self.attribute(MULTIPROCESSORS)
        self._functions: dict[str, ctypes.c_void_p] = {}
        if source:
            self.load(build.cubin(source, self.capability).read_bytes())

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(100)
        call("cuDeviceGetName", text, 100, self._device)
        return text.value.decode()

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def load(self, image: bytes) -> None:
        """Load machine code, or PTX, which the driver compiles at once."""
        self._module = ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self._module), image)

    def symbol(self, name: str) -> Buffer:
        """The address of a `__constant__` or `__device__` array in the kernels' file."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), self._module, name.encode())
        return Buffer(address.value, size.value)

    def function(self, kernel: str) -> ctypes.c_void_p:
        if kernel not in self._functions:
            handle = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(handle), self._module, kernel.encode())
            self._functions[kernel] = handle
        return self._functions[kernel]

    def allow_shared(self, kernel: str, size: int) -> None:
        """Allow a kernel more than 48 KiB of dynamic shared memory."""
        if size > STATIC_SHARED_BYTES:
            call("cuFuncSetAttribute", self.function(kernel), _MAX_DYNAMIC_SHARED, size)

    def blocks_per_multiprocessor(self, kernel: str, threads: int, shared_bytes: int = 0) -> int:
        count = ctypes.c_int()
        call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            *(ctypes.byref(count), self.function(kernel), threads, ctypes.c_size_t(shared_bytes)),
        )
        return count.value

    # memory

    def buffer(self, size: int, *, fill: int = 0) -> Buffer:
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        call("cuMemsetD32_v2", address, ctypes.c_uint32(fill), ctypes.c_size_t(size // 4))
        return Buffer(address.value, size)

    def pinned(self, size: int, flags: int = 0) -> Buffer:
        """Pinned host memory: never paged out, so copy engines and kernels reach it without the CPU."""
        address = ctypes.c_void_p()
        call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), flags)
        return Buffer(address.value or 0, size)

    def write(self, to: Buffer, values: Sequence[float]) -> None:
        data = (ctypes.c_float * len(values))(*values)
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(to.address), data, ctypes.c_size_t(4 * len(values)))

    def read(self, buffer: Buffer, kind: Any = ctypes.c_float, count: int = 1) -> list[Any]:
        data = (kind * count)()
        call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(buffer.address), ctypes.c_size_t(ctypes.sizeof(data)))
        return list(data)

    def copy_to_gpu(self, to: Buffer, source: Buffer, stream: int = 0) -> None:
        sizes = (ctypes.c_size_t(source.bytes), ctypes.c_void_p(stream))
        call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(to.address), ctypes.c_void_p(source.address), *sizes)

    def copy_to_host(self, to: Buffer, source: Buffer, stream: int = 0) -> None:
        sizes = (ctypes.c_size_t(source.bytes), ctypes.c_void_p(stream))
        call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(to.address), ctypes.c_uint64(source.address), *sizes)

    # order and time

    def stream(self) -> int:
        """A new stream that does not wait for the default stream."""
        stream = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream.value or 0

    def event(self, flags: int = _TIMING) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(event), flags)
        return event

    def record(self, event: ctypes.c_void_p, stream: int = 0) -> None:
        call("cuEventRecord", event, ctypes.c_void_p(stream))

    def wait_for(self, event: ctypes.c_void_p, stream: int) -> None:
        """Make the stream, not the host, wait for the event."""
        call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)

    def between(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        elapsed_ms = ctypes.c_float()
        call("cuEventElapsedTime", ctypes.byref(elapsed_ms), start, end)
        return elapsed_ms.value / 1e3

    def synchronize(self) -> None:
        call("cuCtxSynchronize")

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        *arguments: Any,
        shared_bytes: int = 0,
        cooperative: bool = False,
        stream: int = 0,
    ) -> None:
        pointers, _kept = driver.pointers_to(arguments)
        sizes = (blocks, 1, 1, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream), pointers)
        if cooperative:
            call("cuLaunchCooperativeKernel", self.function(kernel), *sizes)
        else:
            call("cuLaunchKernel", self.function(kernel), *sizes, None)

    def time(self, work: Callable[[], Any], *, before: Callable[[], Any] = lambda: None, times: int = 9) -> float:
        """Median of the GPU's time from before `work` to behind it; `before` runs ahead of each, untimed."""
        start, end = self.event(), self.event()
        samples = []
        for turn in range(times + 2):  # the first two warm up
            before()
            self.record(start)
            work()
            self.record(end)
            call("cuEventSynchronize", end)
            if turn >= 2:
                samples.append(self.between(start, end))
        return statistics.median(samples)

    @contextlib.contextmanager
    def captured(self, stream: int) -> Iterator[Callable[[], None]]:
        """Capture what the block launches on the stream as a CUDA graph; calling the block's value replays it there."""
        executable = ctypes.c_void_p()
        call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 2)  # CU_STREAM_CAPTURE_MODE_RELAXED
        yield lambda: call("cuGraphLaunch", executable, ctypes.c_void_p(stream))
        graph = ctypes.c_void_p()
        call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
