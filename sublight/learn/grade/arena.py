"""All tensors of a timed run in one piece of memory that the grader owns and a child maps: on a GPU by CUDA's handles
for other processes, on a CPU (for tests) as a file.

Inputs of every set lie first, outputs of every set after them, so that one copy takes all results at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.extensions import driver
from sublight.learn.grade.buffers import POISON, Spec
from sublight.learn.grade.scratch import made

ALIGNED_BYTES = 512
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which opening a handle must name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each tensor of each set lies; both sides compute it from the same specs."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    sets: int

    @classmethod
    def of(cls, inputs: Sequence[Any], outputs: Sequence[Any], sets: int) -> Plan:
        return cls(inputs=tuple(map(_spec, inputs)), outputs=tuple(map(_spec, outputs)), sets=sets)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        specs = {name: tuple(Spec.from_json(each) for each in data[name]) for name in ("inputs", "outputs")}
        return cls(**specs, sets=data["sets"])

    def to_json(self) -> dict[str, Any]:
        specs = {name: [each.to_json() for each in getattr(self, name)] for name in ("inputs", "outputs")}
        return {**specs, "sets": self.sets}

    @property
    def inputs_bytes(self) -> int:
        return self.sets * sum(map(_room, self.inputs))

    @property
    def outputs_bytes(self) -> int:
        return self.sets * sum(map(_room, self.outputs))

    def tensors(self, pages: Any) -> list[tuple[list[Any], list[Any]]]:
        """Inputs and outputs of each set, on one long tensor of bytes."""
        inputs = self._of(self.inputs, pages[: self.inputs_bytes])
        return list(zip(inputs, self.results(pages[self.inputs_bytes :]), strict=True))

    def results(self, pages: Any) -> list[list[Any]]:
        """The outputs of each set, on the bytes that hold outputs alone."""
        return self._of(self.outputs, pages)

    def _of(self, specs: tuple[Spec, ...], pages: Any) -> list[list[Any]]:
        import torch

        found, at = [], 0
        for _ in range(self.sets):
            tensors = []
            for spec in specs:
                flat = pages[at : at + _room(spec)].view(getattr(torch, spec.dtype))
                tensors.append(flat.as_strided(spec.shape, spec.strides, flat.storage_offset()))
                at += _room(spec)
            found.append(tensors)
        return found


def _spec(tensor: Any) -> Spec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Spec(file="", shape=tuple(tensor.shape), strides=tuple(tensor.stride()), dtype=dtype)


def _room(spec: Spec) -> int:
    import torch

    reach = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)) + 1
    size_bytes = reach * int(getattr(torch, spec.dtype).itemsize)
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


@dataclass(slots=True, kw_only=True)
class Arena:
    """Memory of the grader's; `handle` is what a child opens it with."""

    pages: Any  # a tensor of bytes
    handle: str
    address: int = 0  # on a GPU

    @classmethod
    def on_gpu(cls, size_bytes: int) -> Arena:
        _take_context()
        address = ctypes.c_ulonglong()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        handle = (ctypes.c_ubyte * _HANDLE_BYTES)()
        driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return cls(pages=_bytes_at(address.value, size_bytes), handle=bytes(handle).hex(), address=address.value)

    @classmethod
    def in_file(cls, size_bytes: int, file: Path) -> Arena:
        import os

        descriptor = made(file, b"")
        os.ftruncate(descriptor, size_bytes)
        os.close(descriptor)
        return cls(pages=_of_file(str(file)), handle=str(file))

    def poison(self, begin: int = 0) -> None:
        self.pages[begin:].fill_(POISON)

    def close(self) -> None:
        if self.address:
            _take_context()
            driver.call("cuMemFree_v2", ctypes.c_ulonglong(self.address))
            self.address = 0


def opened(handle: str, size_bytes: int, device: str) -> Any:
    """A child's view of the grader's memory, as bytes."""
    if device == "cpu":
        return _of_file(handle)

    class Handle(ctypes.Structure):  # passed by value, as the driver's C interface has it
        _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)

    _take_context()
    address = ctypes.c_ulonglong()
    value = Handle.from_buffer_copy(bytes.fromhex(handle))
    driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return _bytes_at(address.value, size_bytes)


def _take_context() -> None:
    """Make PyTorch's context this thread's own: a thread that allocates from PyTorch's cache alone has none yet."""
    import torch

    torch.cuda.init()
    context = ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(torch.cuda.current_device()))
    driver.call("cuCtxSetCurrent", context)


def _of_file(name: str) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.memmap(name, np.uint8, mode="r+"))


def _bytes_at(address: int, size_bytes: int) -> Any:
    """Memory that PyTorch did not make, as a tensor."""
    import torch

    class Memory:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    return torch.as_tensor(Memory(), device="cuda")
