"""Quantization to 8 bits, whole numbers or fp8 (e4m3), one scale a row or one a block of it; read x, write codes.

A row (or many blocks) stays in registers between finding its largest magnitude and dividing by it. Codes are bit for
bit what dividing in fp32 gives: two multiply-adds mend the product with a reciprocal, since a division for every
element would cost more than the memory does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.quantize import quantize as cost
from sublight.cost.quantize import quantize_blocks as cost_of_blocks
from sublight.errors import BadInput
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import ODD_WIDTHS, copies_of, forget, random_rows, rows_of, why_torch
from sublight.ops.quantize.codes import (
    FORWARD_ONLY,
    KINDS,
    Kind,
    Pair,
    as_numbers,
    buffers_of,
    check,
    code_of,
    fake,
    finite_code_of,
    form_of,
    larger_of,
    magnitude_of,
    plan_rows,
    quantize,
    ratio_of,
    scale_of,
    top_of,
    vector_of,
)
from sublight.ops.record.library import Registered
from sublight.ops.record.tuning import Tile, tile_for

BLOCK_SIZES = (32, 64, 128, 256)


@triton.jit
def _tile_kernel(
    x_ptr, q_ptr, scale_ptr, rows, cols, x_stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, VECTOR: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    x_row, q_row = x_ptr + row * x_stride, q_ptr + row * cols
    col = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    mask = (row < rows) & (col < (cols if TAIL == 0 else BLOCK))  # the first of two blocks is full
    x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
    if TAIL > 0:
        far = BLOCK + tl.max_contiguous(tl.arange(0, TAIL), VECTOR)[None, :]
        far_mask = (row < rows) & (far < cols)
        rest = tl.load(x_row + far, mask=far_mask, other=0.0).to(tl.float32)
    top = top_of(x, 1)
    if TAIL > 0:
        top = larger_of(top, top_of(rest, 1))
    scale = scale_of(top, KIND)[:, None]
    tl.store(scale_ptr + row, scale, mask=row < rows)
    tl.store(q_row + col, finite_code_of(ratio_of(x, scale, DIVIDE), scale, KIND), mask=mask)
    if TAIL > 0:
        tl.store(q_row + far, finite_code_of(ratio_of(rest, scale, DIVIDE), scale, KIND), mask=far_mask)


@triton.jit
def _row_kernel(
    x_ptr, q_ptr, scale_ptr, cols, x_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, PACKED: tl.constexpr, VECTOR: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * x_stride, q_ptr + row * cols
    col = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    mask = col < (cols if TAIL == 0 else BLOCK)  # the first of two blocks is full
    x = tl.load(x_row + col, mask=mask, other=0.0)
    if TAIL > 0:
        far = BLOCK + tl.max_contiguous(tl.arange(0, TAIL), VECTOR)
        rest = tl.load(x_row + far, mask=far < cols, other=0.0)
    top = top_of(x, 0)
    if TAIL > 0:
        top = larger_of(top, top_of(rest, 0))
    scale = scale_of(top, KIND)
    tl.store(scale_ptr + row, scale)
    store_row(q_row + col, forget(x, scale, PACKED), scale, mask, KIND, DIVIDE)
    if TAIL > 0:
        store_row(q_row + far, forget(rest, scale, PACKED), scale, far < cols, KIND, DIVIDE)


@triton.jit
def store_row(ptrs, x, scale, mask, KIND: tl.constexpr, DIVIDE: tl.constexpr):
    """The codes of one row, or of a part of it."""
    if scale < float("inf"):  # asked once a row, not for every element
        tl.store(ptrs, code_of(ratio_of(x.to(tl.float32), scale, DIVIDE), KIND), mask=mask)
    else:
        tl.store(ptrs, code_of(tl.zeros_like(x).to(tl.float32), KIND), mask=mask)


@triton.jit
def _chunks_kernel(
    x_ptr, q_ptr, scale_ptr, cols, x_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """For rows that no multiprocessor holds: read twice, the second time mostly out of the L2."""
    row = tl.program_id(0).to(tl.int64)
    tops = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        tops = tl.maximum(tops, magnitude_of(x))
    scale = scale_of(tl.max(tops, 0).to(tl.float32, bitcast=True), KIND)
    tl.store(scale_ptr + row, scale)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_first")
        ratio = ratio_of(x.to(tl.float32), scale, DIVIDE)
        tl.store(q_ptr + row * cols + col, finite_code_of(ratio, scale, KIND), mask=col < cols)


@triton.jit
def _blocks_kernel(
    x_ptr, q_ptr, scale_ptr, blocks, blocks_per_row, cols, x_stride,
    KIND: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, VECTOR: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    row = block // blocks_per_row
    col = (block - row * blocks_per_row) * SIZE + tl.max_contiguous(tl.arange(0, SIZE), VECTOR)[None, :]
    row = row.to(tl.int64)
    mask = (block < blocks) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(top_of(x, 1), KIND)[:, None]
    tl.store(scale_ptr + block, scale, mask=block < blocks)
    tl.store(q_ptr + row * cols + col, finite_code_of(ratio_of(x, scale, DIVIDE), scale, KIND), mask=mask)


def plan_by_rows(x: torch.Tensor, kind: Kind) -> Plan:
    """The launch that gives codes and one scale a row."""
    kernels = _tile_kernel, _row_kernel, _chunks_kernel
    return plan_rows("quantize", kernels, x, kind, DIVIDE=is_interpreted())


def plan_by_blocks(x: torch.Tensor, block_size: int, kind: Kind) -> Plan:
    """The launch that gives codes and one scale a block."""
    check_block_size(block_size)
    layout, gpu = rows_of(x), facts(x)
    rows, cols, apart, itemsize, *_ = layout
    form, blocks_per_row = form_of(kind, gpu), cdiv(cols, block_size)
    blocks, buffers = rows * blocks_per_row, buffers_of(x, kind, form, blocks_per_row)
    warps = 2 if itemsize == 2 else 4  # a thread holds 64 bytes in each
    rule = Tile(block=block_size, warps=warps, rows=2048 // block_size)
    tile = tile_for("quantize_blocks", cols, itemsize, packable=False, capability=gpu.capability, rule=rule)
    if cols % block_size == 0 and (apart == cols or rows == 1):  # every block is a row of its own
        blocks_per_row, cols, apart = 1, block_size, block_size
    step = Step(
        _blocks_kernel, (cdiv(blocks, tile.rows),), blocks, blocks_per_row, cols, apart, on="x codes scale", tile=tile,
        KIND=form, BLOCKS=tile.rows, SIZE=block_size, VECTOR=vector_of(x), DIVIDE=is_interpreted(), **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason=f"blocks of {block_size}, several a program",
        copies=copies_of(x=layout.is_copy),
        buffers=buffers,
        steps=(step,),
        outputs=tuple(buffers),
    )


def check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise BadInput(f"block_size {block_size}: use one of {', '.join(map(str, BLOCK_SIZES))}")


def _by_rows(kind: Kind) -> Registered:
    return Registered(
        schema=f"quantize_{kind}(Tensor x) -> (Tensor codes, Tensor scale)",
        reference=partial(quantize, kind=kind),
        theirs="torch.amax, torch.div, …",
        why_torch=why_torch,
        plan=partial(plan_by_rows, kind=kind),
        fake=partial(fake, kind=kind),
    )


def _by_blocks(kind: Kind) -> Registered:
    return Registered(
        schema=f"quantize_{kind}_blocks(Tensor x, int block_size) -> (Tensor codes, Tensor scale)",
        reference=lambda x, block_size: quantize(x, kind, block_size),
        theirs="torch.amax, torch.div, …",
        why_torch=lambda x, block_size: why_torch(x),
        plan=partial(plan_by_blocks, kind=kind),
        fake=lambda x, block_size: fake(x, kind, block_size),
    )


_ROWS = {kind: _by_rows(kind) for kind in KINDS}
_BLOCKS = {kind: _by_blocks(kind) for kind in KINDS}


def quantize_int8(x: torch.Tensor) -> Pair:
    """Codes from -127 to 127 and a scale for each row of x: x is about codes * scale. Has no gradient."""
    check(x)
    return _ROWS["int8"].call(x.detach())  # type: ignore[no-any-return]


def quantize_fp8(x: torch.Tensor) -> Pair:
    """Codes in fp8 (e4m3, up to 448) and a scale for each row of x: x is about codes * scale. Has no gradient."""
    check(x)
    return _ROWS["fp8"].call(x.detach())  # type: ignore[no-any-return]


def quantize_int8_blocks(x: torch.Tensor, block_size: int = 128) -> Pair:
    """`quantize_int8` with a scale for every `block_size` columns (the last may have fewer)."""
    check(x)
    check_block_size(block_size)
    return _BLOCKS["int8"].call(x.detach(), block_size)  # type: ignore[no-any-return]


def quantize_fp8_blocks(x: torch.Tensor, block_size: int = 128) -> Pair:
    """`quantize_fp8` with a scale for every `block_size` columns (the last may have fewer)."""
    check(x)
    check_block_size(block_size)
    return _BLOCKS["fp8"].call(x.detach(), block_size)  # type: ignore[no-any-return]


def launch_blocks(x: torch.Tensor, block_size: int = 128, *, kind: Kind) -> Pair:
    """Our kernel for one scale a block, whether or not it wins."""
    return _BLOCKS[kind].by_kernels(x, block_size)  # type: ignore[no-any-return]


def plan_blocks(x: torch.Tensor, block_size: int = 128, *, kind: Kind) -> Plan:
    """What a quantization by blocks runs, and why."""
    return _BLOCKS[kind].decide(x.detach(), block_size)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed),)


ROW_KERNELS = (Kernel(jit=_tile_kernel), Kernel(jit=_row_kernel), Kernel(jit=_chunks_kernel, narrow=ODD_WIDTHS))
BLOCK_KERNELS = (Kernel(jit=_blocks_kernel),)
TEST_SHAPES: tuple[Shape, ...] = tuple(
    {"rows": rows, "cols": cols}
    for rows, cols in ((1, 1), (3, 127), (65, 128), (17, 129), (5, 2049), (9, 4096), (3, 16385), (2, 40_000))
)


def _of_rows(kind: Kind) -> dict[str, Any]:
    """The records' fields for one scale a row."""
    return {
        "reference": partial(quantize, kind=kind),
        "plan": lambda x: _ROWS[kind].decide(x.detach()),
        "providers": {"sublight": Provider(launch=_ROWS[kind].by_kernels, kernels=ROW_KERNELS)},
        "inputs": inputs,
        "cost": cost,
        "test_shapes": TEST_SHAPES,
        "judged": as_numbers,
        **FORWARD_ONLY,
    }


def _of_blocks(kind: Kind) -> dict[str, Any]:
    return {
        **_of_rows(kind),
        "reference": partial(quantize, kind=kind, block_size=128),
        "plan": partial(plan_blocks, kind=kind),
        "providers": {"sublight": Provider(launch=partial(launch_blocks, kind=kind), kernels=BLOCK_KERNELS)},
        "cost": cost_of_blocks,
        "library_args": lambda x: (x, 128),
        "judged": partial(as_numbers, block_size=128),
    }


QUANTIZE_INT8 = Op(
    name="quantize_int8",
    summary="to whole numbers of 8 bits, one scale a row",
    call=quantize_int8,
    **_of_rows("int8"),
)
QUANTIZE_FP8 = Op(
    name="quantize_fp8",
    summary="to fp8 (e4m3), one scale a row",
    call=quantize_fp8,
    **_of_rows("fp8"),
)
QUANTIZE_INT8_BLOCKS = Op(
    name="quantize_int8_blocks",
    summary="to whole numbers of 8 bits, one scale for every 128 columns",
    call=quantize_int8_blocks,
    **_of_blocks("int8"),
)
QUANTIZE_FP8_BLOCKS = Op(
    name="quantize_fp8_blocks",
    summary="to fp8 (e4m3), one scale for every 128 columns",
    call=quantize_fp8_blocks,
    **_of_blocks("fp8"),
)
