"""Stream compaction: what the mask names first, the rest behind, both in their order; the count stays on the device.

An element's place is how many are chosen before it, and of the rest it is the whole count further on. So the mask is
counted first, group by group (a byte an element, 1/5 of the traffic of 16-bit values), the groups' counts are added up,
and then every program moves its chunk. Counts are whole numbers: any order gives the same.

A thread counts neighbours, as it loads them, but lanes side by side write neighbours: those go to one place, or to two.
What passes between threads for that is 16 bits an element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.movement import compact as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.by_name import take, tensors_of
from sublight.ops.kernels.rows import copies_of, generator_for, why_no_kernel
from sublight.ops.kernels.sized_gradient import SizedGradient
from sublight.ops.record.library import Registered
from sublight.ops.record.tuning import Tile, tile_for

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
CHUNK = 2048  # elements that a program moves
MOST_GROUPS = 2048  # of chunks, whose counts one program adds up
COUNTED = 8  # chunks that are counted at once


def reference(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([x[mask], x[~mask]]), mask.sum()


@triton.jit
def _count_kernel(mask_ptr, before_ptr, group_ptr, n, chunks, each, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """A group's count, and for each of its chunks how many of the group are chosen before it."""
    group = tl.program_id(0)
    near = tl.arange(0, CHUNK)[None, :]
    end = tl.minimum((group + 1) * each, chunks)
    count = tl.full([], 0, tl.int64)
    for start in tl.range(group * each, end, STEP):
        chunk = start + tl.arange(0, STEP)
        place = chunk[:, None].to(tl.int64) * CHUNK + near
        chosen = tl.load(mask_ptr + place, mask=(place < n) & (chunk < end)[:, None], other=0)
        counts = tl.sum((chosen != 0).to(tl.int32), 1)
        tl.store(before_ptr + chunk, count + (tl.cumsum(counts, 0) - counts), mask=chunk < end)
        count += tl.sum(counts, 0)
    tl.store(group_ptr + group, count)


@triton.jit
def _groups_kernel(group_ptr, count_ptr, groups, GROUPS: tl.constexpr):
    """Of the groups' counts, how many are chosen before each, and in all."""
    group = tl.arange(0, GROUPS)
    counts = tl.load(group_ptr + group, mask=group < groups, other=0)
    tl.store(group_ptr + group, tl.cumsum(counts, 0) - counts, mask=group < groups)
    tl.store(count_ptr, tl.sum(counts, 0))


@triton.jit
def _ranks(mask_ptr, n, CHUNK: tl.constexpr):
    """For each element, how many like it are before it in its chunk: if it is chosen, else -1 less that."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    near = tl.arange(0, CHUNK)
    chosen = (tl.load(mask_ptr + start + near, mask=start + near < n, other=0) != 0).to(tl.int32)
    rank = tl.cumsum(chosen, 0)  # with itself
    code = tl.where(chosen != 0, rank - 1, rank - 1 - near).to(tl.int16)
    # another shape, so that its layout is another, too: lanes side by side; Triton moves it while it is 16 bits
    return tl.reshape(code, [1, CHUNK]).to(tl.int32)


@triton.jit
def _starts(before_ptr, group_ptr, count_ptr, each, CHUNK: tl.constexpr):
    """Where in the result this chunk's chosen elements begin, and where the rest."""
    chunk = tl.program_id(0)
    before = tl.load(group_ptr + chunk // each) + tl.load(before_ptr + chunk)
    return before, tl.load(count_ptr) + (chunk.to(tl.int64) * CHUNK - before)


@triton.jit
def _places(ptr, rank, chosen_start, rest_start):
    """Of elements of these ranks; few instructions, as they are what takes the time."""
    return tl.where(rank >= 0, ptr + chosen_start, ptr + rest_start) + (rank ^ (rank >> 31))  # r, and of -1 - r also r


@triton.jit
def _scatter_kernel(
    x_ptr, mask_ptr, before_ptr, group_ptr, count_ptr, y_ptr, index_ptr, n, each,
    CHUNK: tl.constexpr, INDICES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * CHUNK
    near = tl.arange(0, CHUNK)
    x = tl.reshape(tl.load(x_ptr + start + near, mask=start + near < n), [1, CHUNK])
    rank = _ranks(mask_ptr, n, CHUNK)
    chosen_start, rest_start = _starts(before_ptr, group_ptr, count_ptr, each, CHUNK)
    inside = near[None, :] < tl.minimum(n - start, CHUNK).to(tl.int32)
    tl.store(_places(y_ptr, rank, chosen_start, rest_start), x, mask=inside)
    if INDICES:
        tl.store(_places(index_ptr, rank, chosen_start, rest_start), start + near[None, :], mask=inside)


@triton.jit
def _gather_kernel(dy_ptr, mask_ptr, before_ptr, group_ptr, count_ptr, dx_ptr, n, each, CHUNK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * CHUNK
    near = tl.arange(0, CHUNK)
    rank = _ranks(mask_ptr, n, CHUNK)
    chosen_start, rest_start = _starts(before_ptr, group_ptr, count_ptr, each, CHUNK)
    inside = near[None, :] < tl.minimum(n - start, CHUNK).to(tl.int32)
    dy = tl.load(_places(dy_ptr, rank, chosen_start, rest_start), mask=inside)
    tl.store(dx_ptr + start + near, tl.reshape(dy, [CHUNK]), mask=start + near < n)


class Counting(NamedTuple):
    """The launches that count a mask, and what the launch after them must know."""

    n: int
    chunks: int
    each: int  # chunks of a group
    tile: Tile
    buffers: dict[str, Buffer]
    steps: tuple[Step, ...]


def counting(mask: torch.Tensor) -> Counting:
    n = mask.numel()
    rule = Tile(block=CHUNK, warps=4)
    tile = tile_for("compact", max(1, n), 1, packable=True, capability=facts(mask).capability, rule=rule)
    chunks = cdiv(n, tile.block)
    each = max(1, cdiv(chunks, MOST_GROUPS))
    groups = cdiv(chunks, each)
    buffers = {
        name: Buffer(shape=shape, dtype=torch.int64)
        for name, shape in (("before", (chunks,)), ("starts", (groups,)), ("count", ()))
    }
    steps = (
        Step(
            _count_kernel, (groups,), n, chunks, each,
            on="bits before starts", CHUNK=tile.block, STEP=min(COUNTED, next_power_of_2(each)), num_warps=4,
        ),
        Step(_groups_kernel, (1,), groups, on="starts count", GROUPS=next_power_of_2(groups), num_warps=4),
    )  # fmt: skip
    return Counting(n, chunks, each, tile, buffers, steps)


def plan_compact(x: torch.Tensor, mask: torch.Tensor, indices: bool) -> Plan:
    """The mask counted, then every element moved, and with `indices` its number."""
    n, chunks, each, tile, buffers, steps = counting(mask)
    move = Step(
        _scatter_kernel, (chunks,), n, each,
        on="x bits before starts count y index", tile=tile, CHUNK=tile.block, INDICES=indices, num_warps=tile.warps,
    )  # fmt: skip
    buffers |= {
        "y": Buffer(shape=(n,), dtype=x.dtype),
        "index": Buffer(shape=(n if indices else 0,), dtype=torch.int64),
    }
    return Plan(
        provider="sublight",
        reason="the mask counted, then x moved once",
        copies=copies_of(x=not x.is_contiguous(), mask=not mask.is_contiguous()),
        buffers=buffers,
        steps=(*steps, move),
        outputs=("y", "count", "index"),
    )


def plan_backward(dy: torch.Tensor, mask: torch.Tensor) -> Plan:
    """The mask counted again, then dx takes from dy what x gave to y."""
    n, chunks, each, tile, buffers, steps = counting(mask)
    move = Step(
        _gather_kernel, (chunks,), n, each,
        on="dy bits before starts count dx", tile=tile, CHUNK=tile.block, num_warps=tile.warps,
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="the mask counted, then dy moved once",
        copies=copies_of(dy=not dy.is_contiguous(), mask=not mask.is_contiguous()),
        buffers=buffers | {"dx": Buffer(shape=tuple(mask.shape), dtype=dy.dtype)},
        steps=(*steps, move),
        outputs=("dx",),
    )


def _run(plan: Plan, **arguments: torch.Tensor) -> list[torch.Tensor]:
    """The plan's launches; kernels see the mask's bytes."""
    tensors = tensors_of(plan, **arguments)
    tensors["bits"] = tensors["mask"].view(torch.uint8)
    for step in plan.steps:
        take(step, tensors)
    return [tensors[name] for name in plan.outputs]


def _why_torch(x: torch.Tensor, mask: torch.Tensor, indices: bool) -> str:
    return why_no_kernel(x, DTYPES) or ("" if x.numel() else "nothing to do for a tensor without elements")


def _order(mask: torch.Tensor) -> torch.Tensor:
    """For each place of the result, where its element was."""
    flat = mask.flatten()
    return torch.cat([flat.nonzero(), (~flat).nonzero()]).flatten()


def _with_indices(
    x: torch.Tensor, mask: torch.Tensor, indices: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = _order(mask)
    return x.flatten()[order], mask.sum(), order if indices else order.new_empty(0)


def _fake(x: torch.Tensor, mask: torch.Tensor, indices: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = x.numel()
    index = x.new_empty(size if indices else 0, dtype=torch.int64)
    return x.new_empty(size), x.new_empty((), dtype=torch.int64), index


def _backward_by_torch(dy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """dx by PyTorch's ops, none of which waits for a count."""
    chosen = mask.flatten()
    place = torch.where(chosen, chosen.cumsum(0) - 1, chosen.sum() + (~chosen).cumsum(0) - 1)
    return dy[place].view(mask.shape)


_compact_backward = Registered(
    schema="compact_backward(Tensor dy, Tensor mask) -> Tensor dx",
    plan=plan_backward,
    launch=lambda plan, dy, mask: _run(plan, dy=dy, mask=mask)[0],
    fake=lambda dy, mask: dy.new_empty(mask.shape),
    reference=_backward_by_torch,
)
_compact = Registered(
    schema="compact(Tensor x, Tensor mask, bool indices) -> (Tensor y, Tensor count, Tensor index)",
    plan=plan_compact,
    launch=lambda plan, x, mask, indices: tuple(_run(plan, x=x, mask=mask)),
    fake=_fake,
    reference=_with_indices,
    theirs="x[mask], x[~mask], torch.cat",
    why_torch=_why_torch,
    gradient=SizedGradient(
        by=_compact_backward,
        saves=("mask",),
        gives=("x",),
        differentiable=1,
        by_torch=lambda saved, grads: (_backward_by_torch(grads[0], saved["mask"]),),
    ),
)


def check(x: torch.Tensor, mask: torch.Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != x.shape or mask.device != x.device:
        raise BadInput(
            f"the mask is {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)} on {mask.device}: "
            f"give a bool tensor {tuple(x.shape)} on {x.device}"
        )


def compact(
    x: torch.Tensor, mask: torch.Tensor, indices: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, flat, with what the mask names first, and how many that are, as a tensor; with `indices`, where each was."""
    check(x, mask)
    y, count, index = _compact.call(x, mask, indices)
    return (y, count, index) if indices else (y, count)


def plan(x: torch.Tensor, mask: torch.Tensor, indices: bool = False) -> Plan:
    """What `compact(x, mask, indices)` runs, and why."""
    check(x, mask)
    return _compact.decide(x, mask, indices)


def launch_with_indices(
    x: torch.Tensor, mask: torch.Tensor, indices: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Our kernels, whether or not they win."""
    check(x, mask)
    return _compact.by_kernels(x, mask, indices)  # type: ignore[no-any-return]


def launch(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_with_indices(x, mask, False)[:2]


def launch_backward(dy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _compact_backward.by_kernels(dy, mask)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Half of the elements are chosen, at random: the worst case for who writes by runs."""
    generator = generator_for(device, seed)
    x = torch.randn(shape["numel"], generator=generator, device=device, dtype=getattr(torch, dtype))
    mask = torch.empty(shape["numel"], dtype=torch.bool, device=device)
    return x, mask if device == "meta" else mask.random_(generator=generator)


KERNELS = (
    Kernel(jit=_count_kernel),
    Kernel(jit=_groups_kernel),
    Kernel(jit=_scatter_kernel, narrow="the mask says where each element goes; lanes side by side write neighbours"),
    Kernel(jit=_gather_kernel, narrow="the mask says where each element lies; lanes side by side read neighbours"),
)
COMPACT = Op(
    name="compact",
    summary="what a mask names first, the rest behind, in order; the count on the device",
    reference=reference,
    call=compact,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=launch,
            backward=lambda dy, x, mask: (launch_backward(dy, mask),),
            kernels=KERNELS,
            variants=(lambda x, mask: launch_with_indices(x, mask, True),),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=tuple({"numel": n} for n in (2**27, 2**26, 2**24, 2**22, 2**20, 2**16, 2**12)),
    test_shapes=tuple({"numel": n} for n in (1, 511, 2047, 2048, 2049, 4097, 50_001)),
    wrt=(0,),
    batch="",
    library_args=lambda x, mask: (x, mask, False),
)
