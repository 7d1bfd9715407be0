"""One small table in global, constant, texture and shared memory, looked up in three patterns."""

from __future__ import annotations

import ctypes
import functools
import random

from sublight.extensions.demos.demo import Cell, Demo, Figures, Table
from sublight.extensions.demos.gpu import Buffer, Gpu
from sublight.extensions.driver import call

ENTRIES, LOOKUPS, THREADS = 4096, 512, 256  # as in memories.cu
PATTERNS = ("all the same of 1 KiB", "one entry a warp", "neighbours", "anywhere")  # numbered so in memories.cu
SIDE = 4096  # pixels of the square image
_LINEAR, _PITCH_2D, _FLOAT = 2, 3, 0x20  # CU_RESOURCE_TYPE_…, CU_AD_FORMAT_FLOAT
_CLAMP, _POINT, _BETWEEN = 1, 0, 1  # CU_TR_ADDRESS_MODE_CLAMP, CU_TR_FILTER_MODE_…


class Resource(ctypes.Structure):
    """CUDA_RESOURCE_DESC of plain memory: a line (width in bytes), or an image of rows (width, height, pitch)."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("format", ctypes.c_int),
        ("channels", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("pitch_bytes", ctypes.c_size_t),
        ("rest", ctypes.c_char * 88),
        ("flags", ctypes.c_uint),
    )


class Sampling(ctypes.Structure):
    """CUDA_TEXTURE_DESC"""

    _fields_ = (
        ("address_modes", ctypes.c_int * 3),
        ("filter", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("rest", ctypes.c_int * 21),
    )


def texture(resource: Resource, filter_mode: int) -> int:
    handle = ctypes.c_uint64()
    sampling = Sampling(address_modes=(_CLAMP, _CLAMP, _CLAMP), filter=filter_mode)
    call("cuTexObjectCreate", ctypes.byref(handle), ctypes.byref(resource), ctypes.byref(sampling), None)
    return handle.value


def lookups(gpu: Gpu) -> Table:
    table, out = gpu.buffer(4 * ENTRIES), gpu.buffer(64)
    values = [random.Random(0).random() for _ in range(ENTRIES)]
    gpu.write(table, values)
    gpu.write(gpu.symbol("constant_table"), values)
    line = texture(Resource(kind=_LINEAR, address=table.address, format=_FLOAT, channels=1, width=4 * ENTRIES), _POINT)
    blocks = 8 * gpu.multiprocessors
    rows: list[tuple[Cell, ...]] = []
    kinds: tuple[tuple[str, str, Buffer | int | None], ...] = (
        ("global, through the L1", "lookup_global", table),
        ("constant", "lookup_constant", None),
        ("texture", "lookup_texture", line),
        ("shared", "lookup_shared", table),
    )
    for name, kernel, place in kinds:
        places = () if place is None else (place,)
        rates = []
        for pattern in range(len(PATTERNS)):
            launch = functools.partial(gpu.launch, kernel, blocks, THREADS, *places, out, pattern)
            rates.append(blocks * THREADS * LOOKUPS / gpu.time(launch))
        rows.append((name, *rates))
    return Table(
        title="Lookups a second in a table of 16 KiB",
        columns=(("memory", ""), *((pattern, "1/s") for pattern in PATTERNS)),
        rows=tuple(rows),
        note="All the same: every warp reads the same 256 entries in the same order. One entry a warp: its 32 lanes "
        "read one address, other warps another. Shared memory: the time to fill it is in.",
    )


def images(gpu: Gpu) -> Table:
    image, smooth, plain = (gpu.buffer(4 * SIDE * SIDE) for _ in range(3))
    blocks = SIDE * SIDE // THREADS
    gpu.launch("fill_image", blocks, THREADS, image)
    whole = Resource(
        kind=_PITCH_2D, address=image.address, format=_FLOAT, channels=1, width=SIDE, height=SIDE, pitch_bytes=4 * SIDE
    )
    sampler = texture(whole, _BETWEEN)
    rows = []
    for name, kernel, source, to in (
        ("texture unit", "turn_by_texture", sampler, smooth),
        ("four loads", "turn_by_loads", image, plain),
    ):
        elapsed_s = gpu.time(functools.partial(gpu.launch, kernel, blocks, THREADS, source, to, SIDE))
        rows.append((name, elapsed_s, SIDE * SIDE / elapsed_s))
    most = gpu.buffer(64)
    gpu.launch("largest_difference", blocks, THREADS, smooth, plain, most)
    difference = gpu.read(most)[0]
    return Table(
        title=f"An image of {SIDE} x {SIDE} turned by 30 degrees, values between pixels",
        columns=(("way", ""), ("time", "s"), ("pixels", "1/s")),
        rows=tuple(rows),
        note=f"The largest difference between the two is {difference:.1e} on values from 0 to 1: a texture unit has "
        "8 bits for the place between two pixels.",
    )


def run(gpu: Gpu) -> Figures:
    return Figures(tables=(lookups(gpu), images(gpu)))


MEMORIES = Demo(
    name="memories",
    question="What are constant, texture and shared memory good for, beside global memory?",
    expect="Constant memory gives one address a warp at a time, out of a cache of about 2 KiB: it is for a few numbers "
    "that all threads read alike. Looked up at will it is the slowest of all, and where every lane goes elsewhere a "
    "warp's lookup is 32 of them. Shared memory has 32 banks: one address and neighbours take one turn, random entries "
    "a few. Global memory through the L1 is close behind as long as a warp stays within one line. A texture unit has "
    "fewer lookups a cycle; what only it does is to read between pixels in one instruction, with 8 bits of fraction.",
    run=run,
    source="../demos/memories.cu",
    kernels=(
        *("lookup_global", "lookup_constant", "lookup_texture", "lookup_shared"),
        *("turn_by_texture", "turn_by_loads", "fill_image", "largest_difference"),
    ),
)
