"""GPU memory that one process makes and another maps, through the driver's own interface.

Two ways. The virtual memory functions make memory that travels as a file descriptor over a Unix socket: who has the
descriptor can map the memory, nobody else, and it lives until the last process that maps it lets go. The older
interprocess handles (`ipc`) are 64 bytes that any process may open.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from sublight.extensions import driver

Way = Literal["descriptor", "ipc"]
_IPC_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which opening a handle must name
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_BY_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_NEEDED = (102, 103)  # device attributes: virtual memory management, and handles that are file descriptors


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Flags(ctypes.Structure):
    """CUmemAllocationProp's allocFlags."""

    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", Flags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _IPC_BYTES),)


@dataclass(slots=True, kw_only=True)
class GpuMemory:
    """A piece of the GPU's memory at an address of this process; to be closed by whoever made or opened it."""

    way: Way
    address: int
    size_bytes: int  # a whole number of the driver's pages, at least what was asked for
    is_own: bool  # made here, not opened
    descriptor: int = -1  # what another process opens it with
    handle: str = ""  # the same, for `ipc`

    def pages(self, size_bytes: int) -> Any:
        """The first bytes of it, as a tensor."""
        import torch

        address = self.address

        class Memory:
            @property
            def __cuda_array_interface__(self) -> dict[str, Any]:
                return {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}

        return torch.as_tensor(Memory(), device="cuda")

    def close_descriptor(self) -> None:
        """Once the other process has it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self.close_descriptor()
        if not self.address:
            return
        take_context()
        at, self.address = ctypes.c_ulonglong(self.address), 0
        driver.call("cuCtxSynchronize")
        if self.way == "descriptor":
            driver.call("cuMemUnmap", at, ctypes.c_size_t(self.size_bytes))
            driver.call("cuMemAddressFree", at, ctypes.c_size_t(self.size_bytes))
        else:
            driver.call("cuMemFree_v2" if self.is_own else "cuIpcCloseMemHandle", at)


def best_way() -> Way:
    """By descriptors, where this GPU's driver has them."""
    device = take_context()
    for attribute in _NEEDED:
        is_there = ctypes.c_int()
        driver.call("cuDeviceGetAttribute", ctypes.byref(is_there), ctypes.c_int(attribute), ctypes.c_int(device))
        if not is_there.value:
            return "ipc"
    return "descriptor"


def make(size_bytes: int, way: Way) -> GpuMemory:
    """New memory, with what another process opens it with."""
    device = take_context()
    if way == "ipc":
        address, handle = ctypes.c_ulonglong(), IpcHandle()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        with ExitStack() as undo:
            undo.callback(driver.call, "cuMemFree_v2", address)
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            undo.pop_all()
        return GpuMemory(way=way, address=address.value, size_bytes=size_bytes, is_own=True, handle=bytes(handle).hex())
    location = Location(_ON_DEVICE, device)
    wanted = Properties(type=_PINNED, requestedHandleTypes=_BY_DESCRIPTOR, location=location)
    page_bytes = ctypes.c_size_t()
    driver.call("cuMemGetAllocationGranularity", ctypes.byref(page_bytes), ctypes.byref(wanted),
                ctypes.c_int(_RECOMMENDED))  # fmt: skip
    whole_bytes = -(-size_bytes // page_bytes.value) * page_bytes.value
    block, descriptor = ctypes.c_ulonglong(), ctypes.c_int(-1)
    driver.call("cuMemCreate", ctypes.byref(block), ctypes.c_size_t(whole_bytes), ctypes.byref(wanted),
                ctypes.c_ulonglong(0))  # fmt: skip
    try:
        driver.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), block, ctypes.c_int(_BY_DESCRIPTOR),
                    ctypes.c_ulonglong(0))  # fmt: skip
        return GpuMemory(way=way, address=_mapped(block, whole_bytes, device), size_bytes=whole_bytes, is_own=True,
                         descriptor=descriptor.value)  # fmt: skip
    except BaseException:
        if descriptor.value >= 0:  # it alone would keep the memory
            os.close(descriptor.value)
        raise
    finally:
        driver.call("cuMemRelease", block)  # a mapping keeps it, and so does the descriptor


def opened(size_bytes: int, *, descriptor: int = -1, handle: str = "") -> GpuMemory:
    """Memory of another process, of this size as it was made; the descriptor is closed."""
    device = take_context()
    if handle:
        address, value = ctypes.c_ulonglong(), IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return GpuMemory(way="ipc", address=address.value, size_bytes=size_bytes, is_own=False)
    block = ctypes.c_ulonglong()
    try:
        driver.call("cuMemImportFromShareableHandle", ctypes.byref(block), ctypes.c_void_p(descriptor),
                    ctypes.c_int(_BY_DESCRIPTOR))  # fmt: skip
    finally:
        os.close(descriptor)
    try:
        address_here = _mapped(block, size_bytes, device)
    finally:
        driver.call("cuMemRelease", block)
    return GpuMemory(way="descriptor", address=address_here, size_bytes=size_bytes, is_own=False)


def _mapped(block: ctypes.c_ulonglong, size_bytes: int, device: int) -> int:
    """An address of this process at which the block can be read and written."""
    address, size = ctypes.c_ulonglong(), ctypes.c_size_t(size_bytes)
    none = ctypes.c_ulonglong(0)  # no wanted address, and no flags: there are none
    driver.call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
    with ExitStack() as undo:
        undo.callback(driver.call, "cuMemAddressFree", address, size)
        driver.call("cuMemMap", address, size, ctypes.c_size_t(0), block, none)
        undo.callback(driver.call, "cuMemUnmap", address, size)
        access = Access(Location(_ON_DEVICE, device), _READ_AND_WRITE)
        driver.call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        undo.pop_all()  # it is mapped: `GpuMemory.close` undoes it
    return address.value


def take_context() -> int:
    """Make PyTorch's context this thread's own: a thread that allocates from PyTorch's cache alone has none yet. Gives
    the number of the device."""
    import torch

    torch.cuda.init()
    device = int(torch.cuda.current_device())
    context = ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
    driver.call("cuCtxSetCurrent", context)
    return device
