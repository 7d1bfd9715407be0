"""What pointwise ops share: where the elements of one program lie, and the plan of an op that is one launch.

A program takes 16 bytes of each tensor a thread and is gone: that is how copies are fastest. Tensors that lie in one
piece are one long row. Where rows lie apart, or a bias goes along, a program takes vectors of up to 16 bytes that never
cross a row, and one division a vector, not one an element, tells its row. Where a row's values serve many rows, a
program takes a tile of columns over some rows, and converts them once (`tile_rows`, `block_for_columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, libdevice, tl, triton
from sublight.backend.launch import Step
from sublight.cost import Shape
from sublight.errors import BadInput
from sublight.op import Buffer, Plan
from sublight.ops.kernels.rows import ELEMENTS, HAS_ASSEMBLY, SMALL_ROWS, Rows, copies_of, rows_of
from sublight.ops.record.tuning import Tile, tile_for

THREAD_BYTES = 16  # of each tensor
WARPS = 4
MAX_GROUPS = 2**15  # of rows along one side of a grid, which ends at 2**16
INTERPRETED = tl.constexpr(is_interpreted())  # which has NumPy's exponential, and no library of CUDA's
WIDE_FROM = 2**31 - 2**16  # vectors: from here on a program's last one may pass 2**31


@triton.jit
def vector_places(vectors, per_row, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """Of this program's elements, a row of the tile a vector: their vector, row, column, and which there are.

    Columns and strides come in vectors, so that the compiler sees that each starts at a boundary.
    """
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    vector = first * (BLOCK // VECTOR) + tl.arange(0, BLOCK // VECTOR)[:, None]
    if WIDE:
        row = (vector.to(tl.uint64) // (tl.full([], 0, tl.uint64) + per_row)).to(tl.int64)
    else:
        row = (vector.to(tl.uint32) // (tl.full([], 0, tl.uint32) + per_row)).to(tl.int32)  # quicker than with a sign
    col = (vector - row * per_row) * VECTOR + tl.arange(0, VECTOR)[None, :]
    return vector, row.to(tl.int64), col.to(tl.int32), vector < vectors  # rows * cols may pass 2**31


@triton.jit
def tile_rows(tile, rows, ROWS: tl.constexpr):
    """The tile's first row, and how many of its rows there are."""
    first = (tl.full([], 0, tl.int64) + tile) * ROWS  # rows * cols may pass 2**31
    return first, tl.minimum(rows - first, ROWS).to(tl.int32)


@triton.jit
def widen(x, VECTOR: tl.constexpr):
    """In fp32. The compiler takes three instructions for two bf16 numbers; they are the halves of a word: two do."""
    if HAS_ASSEMBLY and x.dtype == tl.bfloat16 and VECTOR > 1:
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def exp_of(x):
    """exp(x) to all digits of fp32, which the hardware's own exponential has not."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


def block_for_columns(cols: int, widest: int, narrowest: int = 16) -> int:
    """The widest block that leaves no more than a twentieth of its columns empty; else the one that fits best.

    >>> block_for_columns(4096, 1024), block_for_columns(50257, 1024), block_for_columns(1600, 1024)
    (1024, 1024, 128)
    """
    blocks = [widest >> shift for shift in range((widest // narrowest).bit_length())]
    padded = {block: -(-cols // block) * block for block in blocks}
    return next((block for block in blocks if padded[block] <= 1.05 * cols), min(blocks, key=lambda b: padded[b]))


def tile_grid(rows: int, cols: int, tile: Tile) -> tuple[int, int, int]:
    """A program a tile; neighbours in a row run together, as they lie together."""
    groups = cdiv(rows, tile.rows)
    side = min(groups, MAX_GROUPS)
    return cdiv(cols, tile.block), side, cdiv(groups, side)


def tile_of(kernel: str, x: torch.Tensor) -> Tile:
    """Elements of a program and its warps; one rule for all, unless a trial asks for another tile."""
    rule = Tile(block=WARPS * 32 * THREAD_BYTES // x.element_size(), warps=WARPS)
    return tile_for(kernel, 1, x.element_size(), packable=False, capability=facts(x).capability, rule=rule)


def vector_of(*layouts: Rows) -> int:
    """How many elements of these rows move at once: a power of two that divides columns and strides.

    >>> half = torch.float16
    >>> vector_of(rows_of(torch.empty(3, 64, dtype=half))), vector_of(rows_of(torch.empty(3, 66, dtype=half)[:, :64]))
    (8, 2)
    """
    vector = THREAD_BYTES // layouts[0].itemsize
    while any(each.cols % vector or each.apart % vector for each in layouts):
        vector //= 2
    return vector


def grid(n: int, tile: Tile) -> tuple[int]:
    return (cdiv(n, tile.block),)


def is_wide(vectors: int) -> bool:
    return vectors >= WIDE_FROM


def plan_pointwise(
    name: str,
    kernels: tuple[Any, Any],
    reads: Mapping[str, torch.Tensor],
    writes: str,
    *,
    apart: int | None = None,
    **constants: Any,
) -> Plan:
    """One launch that reads tensors of one shape and writes results of that shape.

    `kernels` are the one that takes all tensors for one long row, whose only number is how many elements there are, and
    the one that takes rows apart in memory, with their strides in vectors. `writes` names the results. Each lies in one
    piece, and its kernels know that, unless `apart` says how many elements its rows are apart: then that is the last of
    the strides.
    """
    x = next(iter(reads.values()))
    tile, layouts = tile_of(name, x), {each: rows_of(tensor) for each, tensor in reads.items()}
    rows, cols, *_ = next(iter(layouts.values()))
    copies = copies_of(**{each: layout.is_copy for each, layout in layouts.items()})
    on = f"{' '.join(reads)} {writes}"
    constants |= {"BLOCK": tile.block, **tile.options()}
    if all(tensor.is_contiguous() for tensor in reads.values()) and (apart in (None, cols) or rows == 1):
        reason, copies = "in one piece: one long row", ()
        step = Step(kernels[0], grid(rows * cols, tile), rows * cols, on=on, tile=tile, **constants)
    else:
        reason = "columns apart in memory: copied first" if copies else "rows apart in memory, not copied"
        rooms = list(layouts.values())
        rooms += [] if apart is None else [rooms[0]._replace(apart=apart)]  # of the results
        vector = vector_of(*rooms)
        vectors = rows * cols // vector
        step = Step(
            kernels[1], grid(rows * cols, tile), vectors, cols // vector, *(each.apart // vector for each in rooms),
            on=on, tile=tile, VECTOR=vector, WIDE=is_wide(vectors), **constants,
        )  # fmt: skip
    buffers = {each: Buffer(shape=tuple(x.shape), dtype=x.dtype) for each in writes.split()}
    return Plan(
        provider="sublight", reason=reason, copies=copies, buffers=buffers, steps=(step,), outputs=tuple(buffers)
    )


@dataclass(frozen=True, slots=True)
class Through:
    """Stands for `Gradient.by` where a gradient is not one registered op as it is: other arguments, or more results."""

    call: Callable[..., Any]


def like(x: torch.Tensor) -> torch.Tensor:
    """Room for a result of x's shape, in one piece."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_alike(**tensors: torch.Tensor) -> None:
    """Before a kernel reads past the end of the smaller one, or takes bits for what they are not."""
    (first, x), *others = tensors.items()
    for name, other in others:
        if other.shape != x.shape:
            raise BadInput(f"{name} has shape {tuple(other.shape)}, {first} {tuple(x.shape)}: they must be the same")
        if other.dtype != x.dtype or other.device != x.device:
            raise BadInput(f"{name} is {other.dtype} on {other.device}, {first} {x.dtype} on {x.device}: convert one")


def check_bias(x: torch.Tensor, bias: torch.Tensor) -> None:
    if bias.shape != x.shape[-1:]:
        raise BadInput(f"bias has shape {tuple(bias.shape)}: it must have the {x.shape[-1]} columns of x")
    if bias.dtype != x.dtype or bias.device != x.device:
        raise BadInput(f"bias is {bias.dtype} on {bias.device}, x {x.dtype} on {x.device}: convert one")


def shapes_of(widths: tuple[int, ...], small: int) -> tuple[Shape, ...]:
    """Every width with rows enough to fill the memory bus, then small batches of one."""
    large = [{"rows": ELEMENTS // cols, "cols": cols} for cols in widths]
    return (*large, *({"rows": rows, "cols": small} for rows in SMALL_ROWS))


TEST_SHAPES: tuple[Shape, ...] = tuple(
    {"rows": rows, "cols": cols}
    for rows, cols in ((1, 1), (3, 127), (4, 128), (8, 129), (5, 1024), (7, 1600), (1, 2049), (33, 520), (16, 1500))
)
