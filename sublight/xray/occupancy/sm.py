"""What one multiprocessor (SM) of each compute capability has, and in which portions it hands it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.xray.record import RESERVED_SHARED_BYTES

WARP = 32
MAX_THREADS = 1024  # a block
MAX_REGISTERS = 255  # a thread: the instruction names them R0 to R254
REGISTERS_PER_SM = 65_536
REGISTER_UNIT = 256  # registers are handed to a warp in such portions: 8 a thread
PARTITIONS = 4  # of an SM; each has a quarter of the registers
KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm:
    """What one SM of a compute capability has."""

    warps: int
    blocks: int
    shared_bytes: int
    shared_bytes_per_block: int  # where the launch opts in, as Triton does; 48 KiB where it does not
    unified_bytes: int | None  # shared memory and L1 together; None: they are apart
    carveouts: tuple[int, ...] = ()  # of the unified memory: how much may be shared memory
    shared_unit: int = 128
    barriers: int | None = None  # None: each block has its 16, and they never stop another block
    partitions: int = PARTITIONS

    @property
    def reserved_bytes(self) -> int:
        """The driver's own, of every block's shared memory: since compute capability 8.0, when the unit became 128."""
        return RESERVED_SHARED_BYTES if self.shared_unit == 128 else 0


def _kib(*sizes: int) -> tuple[int, ...]:
    return tuple(size * KIB for size in sizes)


def _large(*, warps: int = 64, blocks: int = 32, barriers: int) -> Sm:
    """Hopper's, and that of Blackwell's chips for data centres and cars."""
    return Sm(
        warps=warps,
        blocks=blocks,
        shared_bytes=228 * KIB,
        shared_bytes_per_block=227 * KIB,
        unified_bytes=256 * KIB,
        carveouts=_kib(0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
        barriers=barriers,
    )


def _ampere(*, warps: int, blocks: int) -> Sm:
    """A100's, and that of Jetson Orin."""
    return Sm(
        warps=warps,
        blocks=blocks,
        shared_bytes=164 * KIB,
        shared_bytes_per_block=163 * KIB,
        unified_bytes=192 * KIB,
        carveouts=_kib(0, 8, 16, 32, 64, 100, 132, 164),
    )


def _small(*, blocks: int, barriers: int | None = None) -> Sm:
    """The SM of graphics cards, from GA10x on."""
    return Sm(
        warps=48,
        blocks=blocks,
        shared_bytes=100 * KIB,
        shared_bytes_per_block=99 * KIB,
        unified_bytes=128 * KIB,
        carveouts=_kib(0, 8, 16, 32, 64, 100),
        barriers=barriers,
    )


# Warps, blocks, shared memory of an SM and a block, registers: CCCL 3, cuda/__device/arch_traits.h. Carve-outs,
# portions, partitions and barriers: cuda_occupancy.h of CUDA 13.0, the occupancy calculator as a header; barriers limit
# from 9.0 on: twice as many as blocks, on 11.0 and 12.x as many as blocks. Unified memory: CUDA C++ Programming Guide,
# "Compute Capabilities".
SMS: Mapping[int, Sm] = {
    60: Sm(
        warps=64,
        blocks=32,
        shared_bytes=64 * KIB,
        shared_bytes_per_block=48 * KIB,
        unified_bytes=None,
        shared_unit=256,
        partitions=2,
    ),
    61: Sm(
        warps=64,
        blocks=32,
        shared_bytes=96 * KIB,
        shared_bytes_per_block=48 * KIB,
        unified_bytes=None,
        shared_unit=256,
    ),
    70: Sm(
        warps=64,
        blocks=32,
        shared_bytes=96 * KIB,
        shared_bytes_per_block=96 * KIB,
        unified_bytes=128 * KIB,
        carveouts=_kib(0, 8, 16, 32, 64, 96),
        shared_unit=256,
    ),
    75: Sm(
        warps=32,
        blocks=16,
        shared_bytes=64 * KIB,
        shared_bytes_per_block=64 * KIB,
        unified_bytes=96 * KIB,
        carveouts=_kib(32, 64),
        shared_unit=256,
    ),
    80: _ampere(warps=64, blocks=32),
    86: _small(blocks=16),
    87: _ampere(warps=48, blocks=16),
    89: _small(blocks=24),
    90: _large(barriers=64),
    100: _large(barriers=64),
    103: _large(barriers=64),
    110: _large(warps=48, blocks=24, barriers=24),
    120: _small(blocks=24, barriers=24),
    121: _small(blocks=24, barriers=24),
}


def sm_of(gpu: Gpu) -> Sm:
    """What one SM of this GPU has."""
    if gpu.compute_capability is None:
        raise BadInput(f"{gpu.name} has no compute capability: occupancy is known for NVIDIA's GPUs alone")
    capability = 10 * gpu.compute_capability[0] + gpu.compute_capability[1]
    if capability not in SMS:
        known = ", ".join(f"sm_{each}" for each in SMS)
        raise BadInput(f"the SM of {gpu.name} (sm_{capability}) is not known: known are {known}")
    return SMS[capability]
