"""Running sums along a dimension: read x once, write y once, however long the row.

A short row is scanned by one program. A long one is cut in parts, a program each: it publishes its part's sum, then
waits for the sums before it, which programs with smaller numbers hold and which are on their way by then. It takes them
in three levels, parts of its own group, groups of its own block of groups, and blocks, never whatever prefix happens to
be there already: the order of additions is fixed, so the result is the same every time. fp32 is added up in float64,
16-bit types in fp32.

From the end to the beginning, threads take their vectors in reversed order and turn them in registers; the sums are the
same then. (Triton's reversed scan passes every value between lanes twice: 231 µs against 147 on an H200.)
"""

from __future__ import annotations

import math

import torch

from sublight.backend.device import INTERPRETER_MULTIPROCESSORS, facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.reduce import cumsum as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import Rows, block_for, copies_of, random_rows, rows_of, why_no_kernel
from sublight.ops.record.library import Registered
from sublight.ops.record.sized_gradient import gradient_by
from sublight.ops.record.tuning import Tile, tile_for

TILE_BYTES = 16 * 1024  # a row of more is cut in parts
PART_BYTES = 8 * 1024
GROUP = 32  # parts, and groups in a block: what a program reads of others is little beside its part
COLUMNS = 64  # side by side in a program, where the dimension is not the last


def reference(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return x.cumsum(dim)


@triton.jit
def _wide(x):
    return x.to(tl.float64) if x.dtype == tl.float32 else x.to(tl.float32)


@triton.jit
def _lanes(BLOCK: tl.constexpr, VECTOR: tl.constexpr, REVERSE: tl.constexpr):
    """Places in a block as (threads, VECTOR); what a thread holds lies together."""
    thread = tl.arange(0, BLOCK // VECTOR)[:, None]
    if REVERSE:
        thread = BLOCK // VECTOR - 1 - thread
    return thread * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def _turn(x, REVERSE: tl.constexpr):
    """The last dimension, which a thread holds, from the end: registers change their names."""
    return tl.flip(x, len(x.shape) - 1) if REVERSE else x


@triton.jit
def _tile_kernel(
    x_ptr, y_ptr, rows, cols, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS  # rows * cols may pass 2**31
    if REVERSE:
        row = first + tl.arange(0, ROWS)[:, None, None]
        col = _lanes(BLOCK, VECTOR, REVERSE)[None, :, :]
        mask = (row < rows) & (col < cols)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        y = tl.cumsum(tl.reshape(_wide(_turn(x, REVERSE)), [ROWS, BLOCK]), 1).to(x.dtype)
        tl.store(y_ptr + row * cols + col, _turn(tl.reshape(y, [ROWS, BLOCK // VECTOR, VECTOR]), REVERSE), mask=mask)
    else:  # without the change of shape, which costs half as much again (195 against 131 µs)
        row = first + tl.arange(0, ROWS)[:, None]
        col = tl.arange(0, BLOCK)[None, :]
        mask = (row < rows) & (col < cols)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        tl.store(y_ptr + row * cols + col, tl.cumsum(_wide(x), 1).to(x.dtype), mask=mask)


@triton.jit
def _publish(ptr, total):
    """A float64 in a word that is not zero, so that who sees it change sees all of it."""
    word = total.to(tl.int64, bitcast=True)
    tl.atomic_xchg(ptr, tl.where(word == 0, 1, word), sem="relaxed")  # as a number, 1 adds 5e-324


@triton.jit
def _sum_of(ptrs, needed):
    """The sum of the published words that are needed, once they are all there."""
    words = tl.load(ptrs, mask=needed, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), 0) == 0:
        words = tl.load(ptrs, mask=needed, other=1, volatile=True)
    return tl.sum(tl.where(needed, words, 0).to(tl.float64, bitcast=True), 0)


@triton.jit
def _parts_kernel(
    x_ptr, y_ptr, part_ptr, group_ptr, block_ptr, cols, x_stride, parts, groups, blocks, first_group, first_block,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The three pointers are one: the words of all parts, then of all groups, then of all blocks of groups. (With a
    single one, reversed bf16 takes 64 registers on sm_90 instead of 56.)"""
    unit = tl.program_id(0)
    row, part = (unit // parts).to(tl.int64), unit % parts
    start = part.to(tl.int64) * BLOCK
    if REVERSE:
        start = (parts - 1 - part).to(tl.int64) * BLOCK
    near = _lanes(BLOCK, VECTOR, REVERSE)
    mask = start + near < cols
    x = tl.load(x_ptr + (row * x_stride + start) + near, mask=mask, other=0.0)
    values = tl.reshape(_wide(_turn(x, REVERSE)), [BLOCK])
    total = tl.sum(values, 0).to(tl.float64)
    part_ptr += row * parts
    _publish(part_ptr + part, total)
    y = tl.cumsum(values, 0)  # meanwhile the parts before publish theirs
    group, within = part // GROUP, part % GROUP
    block, group_within = group // GROUP, group % GROUP
    ahead = tl.arange(0, SPAN)
    ptrs, needed = part_ptr + (part - within) + ahead, ahead < within
    if SPAN > GROUP:
        group_ptr += first_group + row * groups
        block_ptr += first_block + row * blocks
        few = tl.arange(0, GROUP)
        if within == GROUP - 1:
            total += _sum_of(part_ptr + (part - within) + few, few < within)
            _publish(group_ptr + group, total)
            if group_within == GROUP - 1:
                total += _sum_of(group_ptr + (group - group_within) + few, few < group_within)
                _publish(block_ptr + block, total)
        is_group, is_block = (ahead >= GROUP) & (ahead < 2 * GROUP), ahead >= 2 * GROUP
        ptrs = tl.where(is_group, group_ptr + (group - group_within) + (ahead - GROUP), ptrs)
        ptrs = tl.where(is_block, block_ptr + (ahead - 2 * GROUP), ptrs)
        needed |= (is_group & (ahead - GROUP < group_within)) | (is_block & (ahead - 2 * GROUP < block))
    y += _sum_of(ptrs, needed).to(y.dtype)
    y = tl.reshape(y.to(x.dtype), [BLOCK // VECTOR, VECTOR])
    tl.store(y_ptr + (row * cols + start) + near, _turn(y, REVERSE), mask=mask)


@triton.jit
def _columns_kernel(
    x_ptr, y_ptr, n, inner, blocks, steps,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Along n of (outer, n, inner): a block of columns, from one end to the other."""
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    before = tl.zeros([1, COLS], tl.float64 if x_ptr.dtype.element_ty == tl.float32 else tl.float32)
    for index in tl.range(0, steps, num_stages=STAGES):
        step = tl.full([], 0, tl.int64) + index
        if REVERSE:
            step = steps - 1 - step
        row = step * ROWS + tl.arange(0, ROWS)[:, None]
        place = (outer * n + row) * inner + col
        mask = (row < n) & (col < inner)
        x = _wide(tl.load(x_ptr + place, mask=mask, other=0.0))
        y = tl.cumsum(x, 0, reverse=REVERSE) + before
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)
        before += tl.sum(x, 0)[None, :]


def plan_cumsum(x: torch.Tensor, dim: int, reverse: bool) -> Plan:
    """Which kernel sums along this dimension; with `reverse`, from the end to the beginning."""
    buffers = {"y": Buffer(shape=tuple(x.shape), dtype=x.dtype)}
    layout = rows_of(x)
    if dim < x.dim() - 1:
        reason, is_copy = "blocks of columns, read once", not x.is_contiguous()
        step = _columns(x, dim, reverse)
    elif block_for(layout.cols) * layout.itemsize <= TILE_BYTES:
        reason, is_copy = "a program holds a row, or several", layout.is_copy
        step = _tile(layout, reverse, facts(x).capability)
    else:
        reason, is_copy = "parts of a row wait for the sums before them", layout.is_copy
        words, step = _parts(layout, reverse, facts(x).capability)
        buffers["words"] = Buffer(shape=(words,), dtype=torch.int64, is_zero=True)
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(x=is_copy),
        buffers=buffers,
        steps=(step,),
        outputs=("y",),
    )


def _tile(layout: Rows, reverse: bool, capability: int) -> Step:
    rows, cols, apart, item, *_ = layout
    block = block_for(cols)
    rule = Tile(block=block, rows=max(1, PART_BYTES // item // block), warps=4 if block * item <= PART_BYTES else 8)
    tile = tile_for("cumsum", cols, item, packable=True, capability=capability, rule=rule)
    return Step(
        _tile_kernel, (cdiv(rows, tile.rows),), rows, cols, apart,
        on="x y", tile=tile,
        ROWS=tile.rows, BLOCK=tile.block, VECTOR=16 // item, REVERSE=reverse, num_warps=tile.warps,
    )  # fmt: skip


def _parts(layout: Rows, reverse: bool, capability: int) -> tuple[int, Step]:
    """The words in which sums are published, and the launch."""
    rows, cols, apart, item, *_ = layout
    rule = Tile(block=PART_BYTES // item, warps=4)
    tile = tile_for("cumsum_parts", cols, item, packable=True, capability=capability, rule=rule)
    parts = cdiv(cols, tile.block)
    groups = cdiv(parts, GROUP)
    blocks = cdiv(groups, GROUP)
    first_group, first_block = rows * parts, rows * (parts + groups)
    step = Step(
        _parts_kernel, (rows * parts,), cols, apart, parts, groups, blocks, first_group, first_block,
        on="x y words words words", tile=tile, BLOCK=tile.block, VECTOR=16 // item, GROUP=GROUP,
        SPAN=GROUP if groups == 1 else next_power_of_2(2 * GROUP + blocks), REVERSE=reverse, num_warps=tile.warps,
    )  # fmt: skip
    return rows * (parts + groups + blocks), step


def _columns(x: torch.Tensor, dim: int, reverse: bool) -> Step:
    outer, n, inner = _around(x, dim)
    cols = min(COLUMNS, next_power_of_2(inner))
    rows = min(next_power_of_2(n), PART_BYTES // x.element_size() // cols)
    blocks = cdiv(inner, cols)
    # fp32 rows of odd width would go through shared memory column by column, all lanes to one bank
    stages = 1 if x.element_size() == 4 and inner % 16 else 3
    return Step(
        _columns_kernel, (outer * blocks,), n, inner, blocks, cdiv(n, rows),
        on="x y", tile=Tile(block=cols, rows=rows, warps=4, stages=stages),
        ROWS=rows, COLS=cols, STAGES=stages, REVERSE=reverse, num_warps=4,
    )  # fmt: skip


def _around(x: torch.Tensor, dim: int) -> tuple[int, int, int]:
    return math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])


def _why_torch(x: torch.Tensor, dim: int, reverse: bool) -> str:
    if reason := why_no_kernel(x):
        return reason
    if x.numel() == 0:
        return "nothing to do for a tensor without elements"
    outer, n, inner = _around(x, dim)
    if dim < x.dim() - 1 and n > COLUMNS and outer * cdiv(inner, COLUMNS) < 2 * _multiprocessors(x):
        return "too few columns to keep the GPU busy from one end to the other"
    return ""


def _multiprocessors(x: torch.Tensor) -> int:
    if torch.compiler.is_compiling() and not x.is_cuda:  # interpreted; no compiler reads what `facts` looks up then
        return INTERPRETER_MULTIPROCESSORS
    return facts(x).multiprocessors


def _by_torch(x: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


def _gradient(dy: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    """The same from the other end, which has a gradient in its turn."""
    return _cumsum.call(dy, dim, not reverse)  # type: ignore[no-any-return]


_cumsum = Registered(
    schema="cumsum(Tensor x, int dim, bool reverse) -> Tensor y",
    plan=plan_cumsum,
    fake=lambda x, dim, reverse: torch.empty_like(x, memory_format=torch.contiguous_format),
    reference=_by_torch,
    theirs="torch.cumsum",
    why_torch=_why_torch,
    gradient=gradient_by(_gradient, of="x", options=("dim", "reverse")),
)


def dim_of(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise BadInput(f"dim {dim} of a tensor with {x.dim()} dimensions: use {-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def cumsum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Running sums along the last dimension or `dim`: our kernel where it wins, PyTorch's elsewhere."""
    if x.dim() == 0:
        return reference(x, dim)
    return _cumsum.call(x, dim_of(x, dim), False)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, dim: int = -1) -> Plan:
    """What `cumsum(x, dim)` runs, and why."""
    if x.dim() == 0:
        return Plan(provider="torch", theirs="torch.cumsum", reason="a tensor without dimensions is its own sum")
    return _cumsum.decide(x, dim_of(x, dim), False)


def launch(x: torch.Tensor, dim: int = -1, reverse: bool = False) -> torch.Tensor:
    """Our kernel, whether or not it wins; with `reverse`, from the end to the beginning."""
    return _cumsum.by_kernels(x, dim_of(x, dim), reverse)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed),)


def _shapes(*sizes: tuple[int, int]) -> tuple[Shape, ...]:
    return tuple({"rows": rows, "cols": cols} for rows, cols in sizes)


CUMSUM = Op(
    name="cumsum",
    summary="running sums along a dimension",
    reference=reference,
    call=cumsum,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=launch,
            backward=lambda dy, x: (launch(dy, -1, True),),
            kernels=(
                Kernel(jit=_tile_kernel),
                Kernel(jit=_parts_kernel),
                Kernel(jit=_columns_kernel, spills="16 bytes a thread by Triton 3.6, none by 3.9"),
            ),
            variants=(lambda x: launch(x, 0), lambda x: launch(x, 0, True)),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        *((2**27 // cols, cols) for cols in (768, 1600, 4096, 8192, 12288, 50257, 131072)),
        *((16, 2**23), (1, 2**27), (128, 4096), (16, 4096), (1, 4096)),
    ),
    test_shapes=_shapes((1, 1), (3, 127), (65, 128), (17, 129), (5, 2049), (2, 9000), (1, 40_000), (2, 20_001)),
    library_args=lambda x: (x, x.dim() - 1, False),
)
