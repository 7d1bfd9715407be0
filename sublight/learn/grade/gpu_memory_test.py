"""Shared GPU memory against a driver that is none: it holds each call to CUDA's own header, and maps files."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from sublight.extensions.driver import DriverError
from sublight.learn.grade import gpu_memory
from sublight.learn.grade.gpu_memory import Access, IpcHandle, Location, Properties, Way

INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
PAGE_BYTES = 1 << 16
STRUCTURES = {"CUmemLocation": Location, "CUmemAllocationProp": Properties, "CUmemAccessDesc": Access}
NAMES = {  # of constants in cuda.h, and what stands here for them
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": gpu_memory._LAZY_PEER_ACCESS,
    "CU_MEM_ALLOCATION_TYPE_PINNED": gpu_memory._PINNED,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": gpu_memory._BY_DESCRIPTOR,
    "CU_MEM_LOCATION_TYPE_DEVICE": gpu_memory._ON_DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": gpu_memory._READ_AND_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": gpu_memory._RECOMMENDED,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": gpu_memory._NEEDED[0],
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": gpu_memory._NEEDED[1],
}
TYPES: dict[str, Any] = {
    "CUdeviceptr": ctypes.c_ulonglong, "CUmemGenericAllocationHandle": ctypes.c_ulonglong, "size_t": ctypes.c_size_t,
    "unsigned long long": ctypes.c_ulonglong, "unsigned int": ctypes.c_uint, "int": ctypes.c_int,
    "CUdevice": ctypes.c_int, "CUdevice_attribute": ctypes.c_int, "CUmemAllocationHandleType": ctypes.c_int,
    "CUmemAllocationGranularity_flags": ctypes.c_int, "CUipcMemHandle": IpcHandle, **STRUCTURES,
}  # fmt: skip


def prototypes() -> dict[str, list[str]]:
    """The types of each function's arguments, from cuda.h, which has those of older versions at its end."""
    found: dict[str, list[str]] = {}
    for name, arguments in re.findall(r"CUresult CUDAAPI (\w+)\(([^)]*)\);", (INCLUDE / "cuda.h").read_text()):
        types = [re.sub(r"\s*\w+$", "", each.replace("const ", "").strip()) for each in arguments.split(",")]
        found.setdefault(name, [each.replace(" ", "") if "*" in each else each for each in types])
    return found


class Driver:
    """Calls by their names, as `sublight.extensions.driver` takes them."""

    def __init__(self, *, has_descriptors: bool = True) -> None:
        self.prototypes = prototypes()
        self.has_descriptors = has_descriptors
        self.blocks: dict[int, int] = {}  # number of a block -> descriptor
        self.maps: dict[int, Any] = {}  # address -> pages
        self.reserved: dict[int, int] = {}
        self.calls: list[str] = []

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        types = [each for each in self.prototypes[name] if each not in ("", "void")]
        assert len(types) == len(arguments), name
        for wanted, given in zip(types, arguments, strict=True):
            pointed = given._obj if hasattr(given, "_obj") else None
            if wanted == "void*":
                assert pointed is not None or isinstance(given, ctypes.c_void_p), (name, wanted)
            elif wanted.endswith("*"):
                assert isinstance(pointed, TYPES[wanted[:-1]]), (name, wanted)
            else:
                assert isinstance(given, TYPES[wanted]), (name, wanted, given)
        getattr(self, name)(*arguments)

    def cuCtxSynchronize(self) -> None:  # noqa: N802
        pass

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> None:  # noqa: N802
        value._obj.value = int(self.has_descriptors or attribute.value == 102)

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: Any) -> None:  # noqa: N802
        size._obj.value = PAGE_BYTES

    def cuMemCreate(self, block: Any, size: Any, properties: Any, flags: Any) -> None:  # noqa: N802
        assert size.value % PAGE_BYTES == 0 and properties._obj.location.id == 3
        descriptor = os.memfd_create("block")
        os.ftruncate(descriptor, size.value)
        block._obj.value = 1000 + descriptor
        self.blocks[block._obj.value] = descriptor

    def cuMemExportToShareableHandle(self, descriptor: Any, block: Any, kind: Any, flags: Any) -> None:  # noqa: N802
        descriptor._obj.value = os.dup(self.blocks[block.value])

    def cuMemImportFromShareableHandle(self, block: Any, descriptor: Any, kind: Any) -> None:  # noqa: N802
        copy = os.dup(descriptor.value)
        block._obj.value = 1000 + copy
        self.blocks[block._obj.value] = copy

    def cuMemRelease(self, block: Any) -> None:  # noqa: N802
        os.close(self.blocks.pop(block.value))

    def cuMemAddressReserve(self, address: Any, size: Any, alignment: Any, wanted: Any, flags: Any) -> None:  # noqa: N802
        address._obj.value = 7 + len(self.reserved)
        self.reserved[address._obj.value] = size.value

    def cuMemMap(self, address: Any, size: Any, offset: Any, block: Any, flags: Any) -> None:  # noqa: N802
        assert self.reserved[address.value] == size.value
        self.maps[address.value] = mmap.mmap(self.blocks[block.value], size.value)

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> None:  # noqa: N802
        assert address.value in self.maps and count.value == 1
        assert (access._obj.location.type, access._obj.location.id, access._obj.flags) == (1, 3, 3)

    def cuMemUnmap(self, address: Any, size: Any) -> None:  # noqa: N802
        self.maps.pop(address.value).close()

    def cuMemAddressFree(self, address: Any, size: Any) -> None:  # noqa: N802
        assert self.reserved.pop(address.value) == size.value and address.value not in self.maps

    def cuMemAlloc_v2(self, address: Any, size: Any) -> None:  # noqa: N802
        address._obj.value = 5

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:  # noqa: N802
        handle._obj.reserved[0] = address.value

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:  # noqa: N802
        assert handle.reserved[0] == 5 and flags.value == 1
        address._obj.value = 6

    def cuMemFree_v2(self, address: Any) -> None:  # noqa: N802
        assert address.value == 5

    def cuIpcCloseMemHandle(self, address: Any) -> None:  # noqa: N802
        assert address.value == 6


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    newer = ("cuMemAlloc", "cuMemFree", "cuIpcOpenMemHandle")  # as the library calls what the header names so
    fake.prototypes |= {f"{name}_v2": fake.prototypes[name] for name in newer}
    monkeypatch.setattr("sublight.extensions.driver.call", fake.call)
    monkeypatch.setattr(gpu_memory, "take_context", lambda: 3)
    yield fake
    assert not fake.blocks and not fake.maps and not fake.reserved  # nothing is left behind


def test_memory_reaches_another_process_by_a_descriptor(driver: Driver) -> None:
    made = gpu_memory.make(PAGE_BYTES + 1, "descriptor")
    assert made.size_bytes == 2 * PAGE_BYTES and made.descriptor >= 0 and not made.handle
    there = gpu_memory.opened(made.size_bytes, descriptor=os.dup(made.descriptor))
    driver.maps[made.address][5] = 42
    assert there.address != made.address and driver.maps[there.address][5] == 42
    made.close()
    assert driver.maps[there.address][5] == 42  # as long as one holds it
    there.close()
    there.close()
    assert driver.calls.count("cuMemUnmap") == 2


def test_descriptors_are_closed(driver: Driver) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = gpu_memory.make(1, "descriptor")
    there = gpu_memory.opened(made.size_bytes, descriptor=os.dup(made.descriptor))
    made.close_descriptor()
    assert len(os.listdir("/proc/self/fd")) - before == 2  # the two maps
    made.close()
    there.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("descriptor", "cuMemExportToShareableHandle"),
        ("descriptor", "cuMemAddressReserve"),
        ("descriptor", "cuMemMap"),
        ("descriptor", "cuMemSetAccess"),
        ("ipc", "cuIpcGetMemHandle"),
    ],
)
def test_what_fails_half_way_leaves_nothing_behind(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, way: Way, name: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> None:
        raise DriverError(f"{name} failed")

    monkeypatch.setattr(driver, name, fail)
    with pytest.raises(DriverError, match=name):
        gpu_memory.make(1, way)
    assert len(os.listdir("/proc/self/fd")) == before
    assert ("cuMemFree_v2" in driver.calls) == (way == "ipc")


def test_interprocess_handles(driver: Driver) -> None:
    made = gpu_memory.make(100, "ipc")
    there = gpu_memory.opened(100, handle=made.handle)
    assert (made.address, there.address, len(made.handle), made.descriptor) == (5, 6, 128, -1)
    made.close()
    there.close()
    assert driver.calls[-3:] == ["cuMemFree_v2", "cuCtxSynchronize", "cuIpcCloseMemHandle"]


def test_the_way_is_the_best_that_the_driver_has(driver: Driver) -> None:
    assert gpu_memory.best_way() == "descriptor"
    driver.has_descriptors = False
    assert gpu_memory.best_way() == "ipc"


def test_structures_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or not (INCLUDE / "cuda.h").exists():
        pytest.skip("needs a C compiler and cuda.h")
    lines, ours = [], []
    for name, structure in STRUCTURES.items():
        lines.append(f"sizeof({name})")
        ours.append(ctypes.sizeof(structure))
        for field, *_ in structure._fields_:
            lines += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
            ours += [getattr(structure, field).offset, getattr(structure, field).size]
    for field, *_ in gpu_memory.Flags._fields_:
        lines.append(f"offsetof(CUmemAllocationProp, allocFlags.{field})")
        ours.append(Properties.allocFlags.offset + getattr(gpu_memory.Flags, field).offset)
    lines += ["sizeof(CUipcMemHandle)", *NAMES]
    ours += [ctypes.sizeof(IpcHandle), *NAMES.values()]
    print_all = "".join(f'printf("%zu\\n", (size_t)({line}));' for line in lines)
    code = f"#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{ {print_all} }}"
    (tmp_path / "layout.c").write_text(code)
    subprocess.run([compiler, "-I", str(INCLUDE), "layout.c", "-o", "layout"], cwd=tmp_path, check=True)
    theirs = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(lines, map(int, theirs), strict=True)) == dict(zip(lines, ours, strict=True))
