"""Occupancy: how many blocks of a kernel fit on one multiprocessor at a time, and which resource stops the next one.

A block stays on one multiprocessor (SM) until it ends, so its registers, shared memory, warp slots and barriers are
taken from what that SM has, each rounded up to what the hardware hands out. This is the arithmetic behind
cudaOccupancyMaxActiveBlocksPerMultiprocessor, without a GPU.

Not counted: clusters of blocks (they need room on several SMs at once), and Blackwell's tensor memory, for which
resident blocks wait at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.xray.occupancy.sm import (
    MAX_REGISTERS,
    MAX_THREADS,
    PARTITIONS,
    REGISTER_UNIT,
    REGISTERS_PER_SM,
    WARP,
    Sm,
    sm_of,
)
from sublight.xray.record import Resource, Resources

NUM_WARPS = (1, 2, 4, 8, 16, 32)  # what Triton lets one choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What of a kernel lives on one SM at a time."""

    threads: int  # a block
    warps_per_block: int
    blocks_per_sm: int
    warps_per_sm: int
    max_warps_per_sm: int
    limits: Mapping[Resource, int]  # blocks that each resource allows; one that never stops a block is not here
    limited_by: tuple[Resource, ...]  # every resource that allows no block more
    registers_per_warp: int  # as handed out
    shared_bytes_per_block: int  # as handed out, with the driver's own
    carveout_bytes: int  # the smallest split that holds the blocks; the driver may choose a larger one
    l1_bytes: int | None  # what that split leaves for the L1 cache; None: the L1 is apart
    reason: str  # why not even one block fits; empty where it does

    @property
    def fraction(self) -> float:
        """The occupancy: the share of the SM's warp slots that are taken."""
        return self.warps_per_sm / self.max_warps_per_sm


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a block must come to for one more of it to fit."""

    registers: int  # a thread
    registers_fewer: int  # 0: they need not shrink
    shared_bytes: int  # a block
    shared_bytes_fewer: int
    occupancy: Occupancy  # then; often several blocks more at once


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What fewer registers or less shared memory would bring."""

    now: Occupancy
    next: Step | None  # None: threads, blocks or barriers stop the next block, so nothing here helps
    spare_registers: int  # a thread: so many more cost no block
    spare_shared_bytes: int

    @property
    def sentence(self) -> str:
        """What limits the occupancy, in one line."""
        now, step = self.now, self.next
        if step is None:
            names = " and ".join(name for name in now.limited_by if name not in ("registers", "shared memory"))
            return f"fewer registers or less shared memory bring nothing: {names} limit to {_blocks(now)}"
        parts, idle = [], ""
        if step.registers_fewer:
            parts.append(f"{_count(step.registers_fewer, 'register')} fewer a thread ({step.registers})")
            idle = f"; {_up_to(step.registers_fewer - 1)} nothing" if step.registers_fewer > 1 else ""
        if step.shared_bytes_fewer:
            parts.append(f"{_count(step.shared_bytes_fewer, 'byte')} of shared memory fewer ({step.shared_bytes})")
        gain = f"{_blocks(step.occupancy)} instead of {now.blocks_per_sm}"
        return f"with {' and '.join(parts)}, {gain}: {_percent(now)} -> {_percent(step.occupancy)}{idle}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size of a block in the table."""

    threads: int
    num_warps: int
    occupancy: Occupancy
    is_best: bool  # no size keeps more warps on the SM
    is_compiled: bool  # the size that the registers were counted for


def occupancy(resources: Resources, gpu: Gpu, *, threads: int | None = None) -> Occupancy:
    """Blocks and warps on one SM, and what limits them, as the driver counts.

    `threads` a block: from the launch where the kernel does not fix them. Shared memory above 48 KiB is taken to be
    opted into, as Triton does.

    >>> from sublight.gpus import find
    >>> kernel = Resources(registers=65, spill_bytes=0, stack_bytes=0, static_shared_bytes=0,
    ...                    dynamic_shared_bytes=0, barriers=1, threads=512)
    >>> found = occupancy(kernel, find("h200"))
    >>> found.blocks_per_sm, found.warps_per_sm, found.fraction, found.limited_by
    (1, 16, 0.25, ('registers',))
    >>> found.limits
    {'registers': 1, 'shared memory': 228, 'threads': 4, 'blocks': 32, 'barriers': 64}
    """
    sm, threads = sm_of(gpu), _threads(resources, threads)
    warps = -(-threads // WARP)
    shared = _handed_out(resources.shared_bytes, sm)
    limits: dict[Resource, int] = {}
    if resources.registers:
        limits["registers"] = _by_registers(resources.registers, warps, sm)
    if shared:
        limits["shared memory"] = sm.shared_bytes // shared if _fits_shared(shared, sm) else 0
    limits["threads"] = sm.warps // warps if threads <= MAX_THREADS else 0
    limits["blocks"] = sm.blocks
    if sm.barriers and resources.barriers:
        limits["barriers"] = sm.barriers // resources.barriers
    blocks = min(limits.values())
    carveout = min((size for size in sm.carveouts if size >= blocks * shared), default=sm.shared_bytes)
    return Occupancy(
        threads=threads,
        warps_per_block=warps,
        blocks_per_sm=blocks,
        warps_per_sm=blocks * warps,
        max_warps_per_sm=sm.warps,
        limits=limits,
        limited_by=tuple(name for name, limit in limits.items() if limit == blocks),
        registers_per_warp=_registers_per_warp(resources.registers),
        shared_bytes_per_block=shared,
        carveout_bytes=carveout,
        l1_bytes=sm.unified_bytes - carveout if sm.unified_bytes else None,
        reason="; ".join(_misfits(resources, threads, sm, limits)),
    )


def what_if(resources: Resources, gpu: Gpu, *, threads: int | None = None) -> WhatIf:
    """How far registers and shared memory must shrink, together, for the next block; and how far they may grow.

    >>> from sublight.gpus import find
    >>> kernel = Resources(registers=72, spill_bytes=0, stack_bytes=0, static_shared_bytes=0,
    ...                    dynamic_shared_bytes=0, barriers=1, threads=128)
    >>> what_if(kernel, find("h200")).sentence
    'with 8 registers fewer a thread (64), 8 blocks an SM instead of 7: 44 % -> 50 %; 1 to 7 fewer bring nothing'
    """
    sm, now = sm_of(gpu), occupancy(resources, gpu, threads=threads)
    wanted, step = now.blocks_per_sm + 1, None
    if all(limit >= wanted for name, limit in now.limits.items() if name not in ("registers", "shared memory")):
        registers = min(resources.registers, _most_registers(wanted, now.warps_per_block, sm))
        shared = min(resources.shared_bytes, _most_shared(wanted, sm))
        smaller = replace(resources, registers=registers, static_shared_bytes=0, dynamic_shared_bytes=shared)
        step = Step(
            registers=registers,
            registers_fewer=resources.registers - registers,
            shared_bytes=shared,
            shared_bytes_fewer=resources.shared_bytes - shared,
            occupancy=occupancy(smaller, gpu, threads=now.threads),
        )
    fits = now.blocks_per_sm > 0
    return WhatIf(
        now=now,
        next=step,
        spare_registers=_most_registers(now.blocks_per_sm, now.warps_per_block, sm) - resources.registers
        if fits
        else 0,
        spare_shared_bytes=_most_shared(now.blocks_per_sm, sm) - resources.shared_bytes if fits else 0,
    )


def table(resources: Resources, gpu: Gpu, *, threads: Iterable[int] | None = None) -> tuple[Row, ...]:
    """Occupancy by threads a block, from one warp to 32, the compiled size among them; the best is marked.

    Registers and shared memory are taken to stay as they are: compiling for another size may change both, so this says
    which sizes are worth a try. For every multiple of a warp, `threads=range(32, 1025, 32)`.
    """
    sizes = set(threads) if threads is not None else {WARP * num_warps for num_warps in NUM_WARPS}
    sizes |= {resources.threads} if resources.threads else set()
    occupancies = {size: occupancy(resources, gpu, threads=size) for size in sorted(sizes)}
    best = max((each.warps_per_sm for each in occupancies.values()), default=0)
    return tuple(
        Row(
            threads=size,
            num_warps=each.warps_per_block,
            occupancy=each,
            is_best=each.warps_per_sm == best > 0,
            is_compiled=size == resources.threads,
        )
        for size, each in occupancies.items()
    )


def _threads(resources: Resources, threads: int | None) -> int:
    threads = threads if threads is not None else resources.threads
    if threads is None:
        raise BadInput("threads a block are not known: only the launch says; give them, e.g. threads=128")
    if threads < 1:
        raise BadInput(f"a block of {threads} threads: give at least 1")
    return threads


def _registers_per_warp(registers: int) -> int:
    return -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT


def _by_registers(registers: int, warps: int, sm: Sm) -> int:
    """Blocks that the registers allow: a warp's lie in one partition."""
    per_warp = _registers_per_warp(registers)
    # The launch is checked as if every partition took as many warps as the fullest one; Pascal's two-partition chip is
    # held to what its four-partition sisters can run.
    rows = -(-warps // PARTITIONS) * PARTITIONS
    if registers > MAX_REGISTERS or per_warp * rows > REGISTERS_PER_SM:
        return 0
    return REGISTERS_PER_SM // sm.partitions // per_warp * sm.partitions // warps


def _handed_out(shared_bytes: int, sm: Sm) -> int:
    return -(-(shared_bytes + sm.reserved_bytes) // sm.shared_unit) * sm.shared_unit


def _fits_shared(handed_out: int, sm: Sm) -> bool:
    return handed_out <= sm.shared_bytes_per_block + sm.reserved_bytes


def _most_registers(blocks: int, warps: int, sm: Sm) -> int:
    """Registers a thread with which so many blocks still fit."""
    return next((each for each in range(MAX_REGISTERS, 0, -1) if _by_registers(each, warps, sm) >= blocks), 0)


def _most_shared(blocks: int, sm: Sm) -> int:
    """Bytes a block with which so many blocks still fit."""
    share = sm.shared_bytes // blocks // sm.shared_unit * sm.shared_unit - sm.reserved_bytes
    return max(0, min(share, sm.shared_bytes_per_block))


def _misfits(resources: Resources, threads: int, sm: Sm, limits: Mapping[Resource, int]) -> Iterable[str]:
    if limits["threads"] == 0:
        yield f"{threads} threads: a block has at most {MAX_THREADS}"
    if limits.get("registers") == 0 and resources.registers > MAX_REGISTERS:
        yield f"{resources.registers} registers a thread: at most {MAX_REGISTERS}"
    elif limits.get("registers") == 0:
        rows = -(-threads // WARP // PARTITIONS) * PARTITIONS
        taken = rows * _registers_per_warp(resources.registers)
        yield f"{threads} threads of {resources.registers} registers take {taken}: an SM has {REGISTERS_PER_SM}"
    if limits.get("shared memory") == 0:
        yield f"{resources.shared_bytes} bytes of shared memory: a block has at most {sm.shared_bytes_per_block}"
    if limits.get("barriers") == 0:
        yield f"{resources.barriers} barriers: an SM has {sm.barriers}"


def _blocks(found: Occupancy) -> str:
    return f"{_count(found.blocks_per_sm, 'block')} an SM"


def _percent(found: Occupancy) -> str:
    return f"{100 * found.fraction:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _up_to(number: int) -> str:
    return f"1 to {number} fewer bring" if number > 1 else "1 fewer brings"
