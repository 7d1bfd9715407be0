"""On a GPU, occupancy is what the driver says, for thousands of launches of kernels made for the purpose."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from sublight.xray import binary
from sublight.xray.occupancy.blocks import occupancy
from sublight.xray.occupancy.blocks_test import card, kernel
from sublight.xray.occupancy.sm import SMS


def ptx(live: int, barriers: int, static_bytes: int) -> str:
    """A kernel that keeps so many values in registers at a time: it loads all, then stores all."""
    shared = f".shared .align 16 .b8 room_{live}_{barriers}_{static_bytes}[{static_bytes}];\n" if static_bytes else ""
    touch = (
        f"mov.u32 %r0, room_{live}_{barriers}_{static_bytes}; st.volatile.shared.u32 [%r0], %r0;\n"
        if static_bytes
        else ""
    )
    loads = "".join(f"ld.volatile.global.u32 %r{each}, [%p+{4 * each}];\n" for each in range(1, live + 1))
    waits = "".join(f"bar.sync {each};\n" for each in range(barriers))
    stores = "".join(f"st.volatile.global.u32 [%p+{4 * each}], %r{each};\n" for each in range(1, live + 1))
    name = f"kernel_{live}_{barriers}_{static_bytes}"
    body = (
        f".reg .u64 %p;\n.reg .u32 %r<{live + 1}>;\n{shared}ld.param.u64 %p, [at];\n{touch}{loads}{waits}{stores}ret;\n"
    )
    return f".visible .entry {name}(.param .u64 at)\n{{\n{body}}}\n"


SHAPES = [(live, 1, static) for live in (1, 20, 30, 40, 50, 60, 90, 120, 160, 200, 240) for static in (0, 1000, 20_000)]
SHAPES += [(20, barriers, 0) for barriers in (0, 2, 3, 4, 6, 8, 11, 16)]
SIZES = (1, 32, 33, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
DYNAMIC = (0, 1, 1000, 8192, 20_000, 40_000, 60_000, 90_000, 115_712, 115_713, 200_000)


def cubin(capability: int) -> bytes:
    version = "8.8" if capability >= 100 else "7.8"
    head = f".version {version}\n.target sm_{capability}\n.address_size 64\n"
    return binary.assemble(head + "".join(ptx(*shape) for shape in SHAPES), capability)


def test_the_kernels_for_the_driver_take_what_they_should() -> None:
    pytest.importorskip("triton")
    used = binary.usage(cubin(90))
    assert len(used) == len(SHAPES) >= 40
    registers = {each["REG"] for each in used.values()}
    assert len(registers) >= 10
    assert max(registers) > 240
    assert all(each["LOCAL"] == 0 and each["STACK"] == 0 for each in used.values())


class Driver:
    """As much of libcuda as the question takes."""

    STATIC_BYTES, REGISTERS, MAX_DYNAMIC_BYTES = 1, 4, 8  # CUfunction_attribute
    INVALID_VALUE = 1

    def __init__(self, image: bytes) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        assert self.cuda.cuModuleLoadData(ctypes.byref(self.module), ctypes.c_char_p(image)) == 0

    def function(self, name: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        assert self.cuda.cuModuleGetFunction(ctypes.byref(found), self.module, name.encode()) == 0
        return found

    def ask(self, function: ctypes.c_void_p, attribute: int) -> int:
        value = ctypes.c_int()
        assert self.cuda.cuFuncGetAttribute(ctypes.byref(value), attribute, function) == 0
        return value.value

    def allow(self, function: ctypes.c_void_p, dynamic_bytes: int) -> None:
        """Above 48 KiB a kernel must be opted in."""
        assert self.cuda.cuFuncSetAttribute(function, self.MAX_DYNAMIC_BYTES, dynamic_bytes) == 0

    def blocks(self, function: ctypes.c_void_p, threads: int, dynamic_bytes: int) -> int:
        value = ctypes.c_int()
        status = self.cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(value), function, threads, ctypes.c_size_t(dynamic_bytes)
        )
        assert status in (0, self.INVALID_VALUE)
        return 0 if status else value.value


@pytest.mark.gpu
@pytest.mark.parametrize("barriers", [False, True], ids=["registers and shared memory", "barriers"])
def test_equals_the_driver(barriers: bool) -> None:
    import torch

    torch.zeros(1, device="cuda")  # makes the context that the driver's functions want
    major, minor = torch.cuda.get_device_capability()
    gpu = card(10 * major + minor)
    driver = Driver(cubin(10 * major + minor))
    most = SMS[10 * major + minor].shared_bytes_per_block
    asked, wrong = 0, []
    for live, count, static in SHAPES:
        if (count != 1) != barriers:
            continue
        function = driver.function(f"kernel_{live}_{count}_{static}")
        registers, allowed = driver.ask(function, Driver.REGISTERS), most - driver.ask(function, Driver.STATIC_BYTES)
        driver.allow(function, allowed)
        for threads, dynamic in itertools.product(SIZES, DYNAMIC):
            if dynamic > allowed:
                continue
            resources = kernel(registers, threads, dynamic, count, static)
            told, found = driver.blocks(function, threads, dynamic), occupancy(resources, gpu)
            asked += 1
            if told != found.blocks_per_sm:
                wrong.append((resources, told, found.limits))
    assert asked > 500
    assert not wrong, f"{len(wrong)} of {asked}, the first: {wrong[:3]}"
