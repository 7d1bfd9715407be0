"""A copy with its dimensions in another order: read x, write y, both by whole vectors.

Dimensions that stay neighbours are made one first. If the last dimension stays last, rows are copied as they are; else
a tile that is contiguous one way in x and the other way in y turns in shared memory, so that neither side is touched
element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.movement import permute as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.record.library import Registered
from sublight.ops.record.sized_gradient import gradient_by
from sublight.ops.record.tuning import Tile, tile_for

MAX_DIMS = 5
DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
TURN_TILE = {1: (128, 128), 2: (64, 64), 4: (64, 32), 8: (32, 32)}  # by item size: about 8 KB, 64 bytes or more a side
LARGE_SIDE = 128  # of a tile of 16-bit values, where that leaves enough tiles to fill the GPU
THREAD_BYTES = 16


def reference(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    return x.permute(order_of(x, dims)).clone(memory_format=torch.contiguous_format)


def transpose_reference(x: torch.Tensor) -> torch.Tensor:
    return x.mT.clone(memory_format=torch.contiguous_format)


def order_of(x: torch.Tensor, dims: Sequence[int] | None) -> tuple[int, ...]:
    """The dimensions of x in the order of the result; None turns them round."""
    if dims is None:
        return tuple(reversed(range(x.dim())))
    if sorted([dim + x.dim() if dim < 0 else dim for dim in dims]) != list(range(x.dim())):
        raise BadInput(f"dims {tuple(dims)} of a tensor with {x.dim()} dimensions: name each once, as torch.permute")
    return tuple([dim % x.dim() for dim in dims])


@triton.jit
def _bases(piece, b_size, c_size, a_x, a_y, b_x, b_y, c_x, c_y):
    """Where a tile lies in x and in y, by the dimensions a, b and c that no tile spans."""
    a, b, c = piece // c_size // b_size, piece // c_size % b_size, piece % c_size
    return a * a_x + b * b_x + c * c_x, a * a_y + b * b_y + c * c_y


@triton.jit
def _turn_kernel(
    x_ptr, y_ptr, rows, cols, x_row, y_col, row_blocks, col_blocks, b_size, c_size, a_x, a_y, b_x, b_y, c_x, c_y,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Columns are contiguous in x, rows in y. `cols` and `x_row` come in X_UNITs, `rows` and `y_col` in Y_UNITs: Triton
    sees by itself only whether 16 divides a number, and would move 1,000 rows one element at a time."""
    rows, cols, x_row, y_col = rows * Y_UNIT, cols * X_UNIT, x_row * X_UNIT, y_col * Y_UNIT
    tile = (tl.program_id(0) % (row_blocks * col_blocks)).to(tl.int64)  # rows * cols may pass 2**31
    piece = (tl.program_id(0) // (row_blocks * col_blocks)).to(tl.int64)
    x_base, y_base = _bases(piece, b_size, c_size, a_x, a_y, b_x, b_y, c_x, c_y)
    x_base, y_base = x_base // X_UNIT * X_UNIT, y_base // Y_UNIT * Y_UNIT
    row = tile // col_blocks * ROWS + tl.arange(0, ROWS)
    col = tile % col_blocks * COLS + tl.arange(0, COLS)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    x = tl.load(x_ptr + x_base + row[:, None] * x_row + col[None, :], mask=inside)
    inside = (col[:, None] < cols) & (row[None, :] < rows)
    tl.store(y_ptr + y_base + col[:, None] * y_col + row[None, :], tl.trans(x), mask=inside)


@triton.jit
def _move_kernel(
    x_ptr, y_ptr, rows, cols, x_row, y_row, x_col, row_blocks, col_blocks,
    b_size, c_size, a_x, a_y, b_x, b_y, c_x, c_y, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Columns are contiguous in y, and in x, too, unless x is a slice with a step."""
    tile = (tl.program_id(0) % (row_blocks * col_blocks)).to(tl.int64)
    piece = (tl.program_id(0) // (row_blocks * col_blocks)).to(tl.int64)
    x_base, y_base = _bases(piece, b_size, c_size, a_x, a_y, b_x, b_y, c_x, c_y)
    row = tile // col_blocks * ROWS + tl.arange(0, ROWS)[:, None]
    col = tile % col_blocks * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    x = tl.load(x_ptr + x_base + row * x_row + col * x_col, mask=inside)
    tl.store(y_ptr + y_base + row * y_row + col, x, mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Dimensions of the result that are one, seen from x and from y."""

    size: int = 1
    x_stride: int = 0
    y_stride: int = 0


def runs_of(x: torch.Tensor) -> list[Run]:
    """x, already in the order of the result, with dimensions made one that are one in memory."""
    runs: list[Run] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size == 1:
            continue
        if runs and runs[-1].x_stride == size * stride:
            runs[-1] = Run(size=runs[-1].size * size, x_stride=stride)
        else:
            runs.append(Run(size=size, x_stride=stride))
    below = 1
    for i in reversed(range(len(runs))):  # no generators: torch.compile traces this
        runs[i] = Run(size=runs[i].size, x_stride=runs[i].x_stride, y_stride=below)
        below *= runs[i].size
    return runs


def plan_permute(x: torch.Tensor, order: Sequence[int]) -> Plan:
    """Which kernel copies x in this order, and how."""
    turned = x.permute(tuple(order))
    *others, row, col = [Run(), Run(), *runs_of(turned)]  # two of one element, so that there are always two
    if col.x_stride != 1 and (turning := [run for run in (*others, row) if run.x_stride == 1]):
        others = [run for run in (*others, row) if run is not turning[0]]
        reason, step = "tiles turn in shared memory", _turn(x, others, row=col, col=turning[0])
    else:
        reason, step = "rows stay rows", _move(x, others, row=row, col=col)
    return Plan(
        provider="sublight",
        reason=reason,
        buffers={"y": Buffer(shape=tuple(turned.shape), dtype=x.dtype)},
        steps=(step,),
        outputs=("y",),
    )


def _turn(x: torch.Tensor, others: list[Run], *, row: Run, col: Run) -> Step:
    item, gpu = x.element_size(), facts(x)
    rows, cols = TURN_TILE[item]
    if item == 2 and x.numel() >= 4 * gpu.multiprocessors * LARGE_SIDE**2:
        rows, cols = (max(32, min(LARGE_SIDE, next_power_of_2(run.size))) for run in (row, col))
    rule = Tile(rows=rows, block=cols, warps=max(4, rows * cols // 2048))
    tile = tile_for("permute_turn", col.size, item, packable=True, capability=gpu.capability, rule=rule)
    row_blocks, col_blocks = cdiv(row.size, tile.rows), cdiv(col.size, tile.block)
    pieces, sizes_and_strides = _others(others)
    x_unit = _unit(item, col.size, row.x_stride, *[run.x_stride for run in others])
    y_unit = _unit(item, row.size, col.y_stride, *[run.y_stride for run in others])
    return Step(
        _turn_kernel, (pieces * row_blocks * col_blocks,),
        row.size // y_unit, col.size // x_unit, row.x_stride // x_unit, col.y_stride // y_unit,
        row_blocks, col_blocks, *sizes_and_strides,
        on="x y", tile=tile, X_UNIT=x_unit, Y_UNIT=y_unit, ROWS=tile.rows, COLS=tile.block, num_warps=tile.warps,
    )  # fmt: skip


def _unit(item: int, size: int, stride: int, *others: int) -> int:
    """Elements that are moved at once: as many as divide all of these, up to a vector. The kernel has size and stride
    from their quotients, by a product in 32 bits: what that does not hold it gets as it is, and as 64 bits.

    >>> _unit(2, 1000, 5000), _unit(2, 3506, 2), _unit(2, 12288, 16, 8), _unit(4, 7, 8), _unit(2, 2**31, 16)
    (8, 2, 8, 1, 1)
    """
    return math.gcd(THREAD_BYTES // item, size, stride, *others) if max(size, stride) < 2**31 else 1


def _move(x: torch.Tensor, others: list[Run], *, row: Run, col: Run) -> Step:
    elements = 4 * 32 * THREAD_BYTES // x.element_size()
    cols = min(elements, next_power_of_2(col.size))
    rows = min(elements // cols, next_power_of_2(row.size))
    row_blocks, col_blocks = cdiv(row.size, rows), cdiv(col.size, cols)
    pieces, sizes_and_strides = _others(others)
    return Step(
        _move_kernel, (pieces * row_blocks * col_blocks,),
        row.size, col.size, row.x_stride, row.y_stride, col.x_stride, row_blocks, col_blocks, *sizes_and_strides,
        on="x y", tile=Tile(rows=rows, block=cols, warps=4), ROWS=rows, COLS=cols, num_warps=4,
    )  # fmt: skip


def _others(others: list[Run]) -> tuple[int, tuple[int, ...]]:
    """How many tiles lie beside one another, and what `_bases` must know."""
    real = [run for run in others if run.size != 1]
    if len(real) > MAX_DIMS - 2:
        raise BadInput(f"{len(real) + 2} dimensions that stay apart: our kernels take up to {MAX_DIMS}")
    a, b, c = [Run()] * (MAX_DIMS - 2 - len(real)) + real
    strides = (a.x_stride, a.y_stride, b.x_stride, b.y_stride, c.x_stride, c.y_stride)
    return a.size * b.size * c.size, (b.size, c.size, *strides)


def _why_torch(x: torch.Tensor, order: Sequence[int]) -> str:
    if reason := why_no_kernel(x, DTYPES):
        return reason
    if x.numel() == 0:
        return "nothing to do for a tensor without elements"
    if len(runs_of(x.permute(tuple(order)))) > MAX_DIMS:
        return f"more than {MAX_DIMS} dimensions that stay apart"
    return ""


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """
    >>> inverse((2, 0, 1))
    (1, 2, 0)
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def transpose_order(x: torch.Tensor) -> tuple[int, ...]:
    if x.dim() < 2:
        raise BadInput(f"transpose of a tensor with {x.dim()} dimensions: it swaps the last two, so give two or more")
    return (*range(x.dim() - 2), x.dim() - 1, x.dim() - 2)


# the gradients are views of dy, as PyTorch's own: who needs a copy will make it
_permute = Registered(
    schema="permute(Tensor x, int[] order) -> Tensor y",
    plan=plan_permute,
    fake=lambda x, order: x.new_empty([x.shape[dim] for dim in order]),
    reference=lambda x, order: reference(x, tuple(order)),
    theirs="torch.clone",
    why_torch=_why_torch,
    gradient=gradient_by(lambda dy, order: dy.permute(inverse(order)), of="x", options=("order",)),
)
_transpose = Registered(
    schema="transpose(Tensor x) -> Tensor y",
    plan=lambda x: plan_permute(x, transpose_order(x)),
    fake=lambda x: x.new_empty(x.mT.shape),
    reference=transpose_reference,
    theirs="torch.clone",
    why_torch=lambda x: _why_torch(x, transpose_order(x)),
    gradient=gradient_by(lambda dy: dy.mT, of="x"),
)


def permute(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """A contiguous copy of `x.permute(dims)`; without dims, of x with its dimensions turned round."""
    return _permute.call(x, order_of(x, dims))  # type: ignore[no-any-return]


def transpose(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of x with its last two dimensions swapped."""
    transpose_order(x)  # two dimensions or more
    return _transpose.call(x)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, dims: Sequence[int] | None = None) -> Plan:
    """What `permute(x, dims)` runs, and why."""
    return _permute.decide(x, order_of(x, dims))


def plan_transpose(x: torch.Tensor) -> Plan:
    """What `transpose(x)` runs, and why."""
    transpose_order(x)
    return _transpose.decide(x)


def launch(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Our kernel, whether or not it wins."""
    return _permute.by_kernels(x, order_of(x, dims))  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """A tensor d0 x d1 x d2 x d3, seen so that turning its dimensions round puts them in the order given (1324)."""
    base = torch.randn(
        [shape[f"d{i}"] for i in range(4)],
        generator=generator_for(device, seed), device=device, dtype=getattr(torch, dtype),
    )  # fmt: skip
    order = [int(digit) - 1 for digit in str(shape["order"])]
    return (base.permute(order[::-1]),)


def transpose_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    size = (shape["batch"], shape["rows"], shape["cols"])
    return (torch.randn(size, generator=generator_for(device, seed), device=device, dtype=getattr(torch, dtype)),)


_shapes = partial(shapes, "d0 d1 d2 d3 order")


def _planes(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple({"batch": batch, "rows": rows, "cols": cols} for batch, rows, cols in sizes)


KERNELS = (Kernel(jit=_turn_kernel), Kernel(jit=_move_kernel))
PERMUTE = Op(
    name="permute",
    summary="a copy with its dimensions in another order",
    reference=reference,
    call=permute,
    plan=plan,
    providers={"sublight": Provider(launch=launch, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        *((8, 4096, 32, 128, 1324), (16, 4096, 32, 64, 1324)),  # heads before tokens, as attention wants them
        *((8, 4096, 32, 128, 1342), (32, 256, 128, 128, 1342), (32, 128, 128, 256, 1423)),  # K turned, NCHW and NHWC
        *((64, 128, 128, 128, 4321), (64, 128, 128, 128, 2143), (1, 4096, 32, 128, 1324), (1, 16, 32, 128, 1324)),
    ),
    test_shapes=_shapes(
        *((1, 1, 1, 1, 1234), (2, 3, 4, 5, 4321), (2, 65, 3, 64, 1324), (3, 5, 7, 33, 1342), (2, 3, 65, 66, 1243)),
        *((2, 9, 4, 16, 2143), (3, 1, 70, 5, 3142), (2, 3, 40, 50, 4321)),
    ),
    batch="",
    library_args=lambda x: (x, list(order_of(x, None))),
)
TRANSPOSE = Op(
    name="transpose",
    summary="a copy with the last two dimensions swapped",
    reference=transpose_reference,
    call=transpose,
    plan=plan_transpose,
    providers={"sublight": Provider(launch=_transpose.by_kernels, kernels=KERNELS)},
    inputs=transpose_inputs,
    cost=cost,
    shapes=_planes(
        *((1, 2**14, 2**13), (1, 2**15, 4096), (1, 2**17, 1024), (1, 26208, 5120), (1, 50257, 2560)),
        *((64, 2048, 1024), (4096, 256, 128), (1, 4096, 4096), (1, 128, 4096), (1, 16, 4096), (1, 1, 4096)),
    ),
    test_shapes=_planes((1, 1, 1), (1, 63, 65), (3, 64, 64), (2, 130, 127), (1, 16, 200), (5, 7, 3), (2, 33, 150)),
    batch="batch",
)
