"""Launch a cubin through the driver's own C interface, on the stream that PyTorch is on.

ctypes on libcuda needs nothing that a machine with a driver has not: no CUDA headers, no PyTorch extension to build, no
CUDA version that must match PyTorch's. `torch.cuda._compile_kernel` is private and has no cooperative launch;
`cuda.core` is one more package. A launch costs some µs more than from C++: these kernels are read and timed through
CUDA graphs, where that does not count.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from sublight.errors import BadInput
from sublight.extensions import build

if TYPE_CHECKING:
    import torch

_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED_BYTES = 48 * 1024  # a kernel gets more only after it is allowed to


class DriverError(RuntimeError):
    """A call of the driver failed."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise BadInput("no libcuda.so.1: there is no NVIDIA driver here (`sublight doctor` says more)") from None


def checked(result: int, what: str) -> None:
    """Raise a `DriverError` if a driver call returned an error code."""
    if result:
        name = ctypes.c_char_p()
        _library().cuGetErrorName(result, ctypes.byref(name))
        raise DriverError(f"{what}: {(name.value or b'unknown error').decode()} ({result})")


def function(name: str) -> Any:
    """A function of the driver by its name in libcuda (cuMemAlloc_v2): ctypes passes a plain int as 32 bits."""
    return getattr(_library(), name)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver by its name, and check the code that it returns."""
    checked(function(name)(*arguments), name)


def pointers_to(arguments: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """What a launch takes: an array of pointers to the arguments, and the arguments, to be kept until it is made.

    A tensor becomes its address, a whole number 64 bits, any other a float: the only kinds our kernels have.
    """
    values: list[Any] = []
    for each in arguments:
        if isinstance(each, int):
            values.append(ctypes.c_longlong(each))
        elif isinstance(each, float):
            values.append(ctypes.c_float(each))
        else:
            values.append(ctypes.c_void_p(each.data_ptr()))
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values)), values


class OnGpu:
    """The kernels of one file on one GPU."""

    def __init__(self, source: str, device: torch.device) -> None:
        import torch

        self.device = device
        facts = torch.cuda.get_device_properties(device)
        self.multiprocessors = int(facts.multi_processor_count)
        image = build.cubin(source, 10 * facts.major + facts.minor).read_bytes()
        torch.cuda.synchronize(device)  # PyTorch makes the context and this thread's: the module goes into it
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.empty(1, device=device)
            checked(_library().cuModuleLoadData(ctypes.byref(self._module), image), f"load {source}")
        self._functions: dict[str, ctypes.c_void_p] = {}

    def _function(self, kernel: str, shared_bytes: int) -> ctypes.c_void_p:
        if kernel not in self._functions:
            function = ctypes.c_void_p()
            name = kernel.encode()
            checked(_library().cuModuleGetFunction(ctypes.byref(function), self._module, name), f"find {kernel}")
            if shared_bytes > STATIC_SHARED_BYTES:
                checked(_library().cuFuncSetAttribute(function, _SHARED_BYTES, shared_bytes), f"shared of {kernel}")
            self._functions[kernel] = function
        return self._functions[kernel]

    def resident(self, kernel: str, threads: int) -> int:
        """How many blocks of a kernel without dynamic shared memory run at the same time: all that may cooperate."""
        count = ctypes.c_int()
        function = self._function(kernel, 0)
        checked(
            _library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), function, threads, ctypes.c_size_t(0)
            ),
            f"occupancy of {kernel}",
        )
        return count.value * self.multiprocessors

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        threads: tuple[int, ...],
        *arguments: Any,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        import torch

        pointers, _kept = pointers_to(arguments)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        function = self._function(kernel, shared_bytes)
        sizes = (*grid, 1, 1)[:3] + (*threads, 1, 1)[:3]
        make = _library().cuLaunchCooperativeKernel if cooperative else _library().cuLaunchKernel
        extra = () if cooperative else (None,)
        checked(make(function, *sizes, shared_bytes, stream, pointers, *extra), f"launch {kernel}")
