"""RMSNorm and the quantization of its result in one pass: read x, write 8-bit codes and a scale a row.

The normalised row is x * weight times one number, so its largest magnitude is known together with its squares, and its
codes follow from x * weight without the row in between, which PyTorch writes, rounds and reads again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.backend.jit import tl, triton
from sublight.correct import Call, Inputs
from sublight.cost import Shape
from sublight.cost.quantize import rms_norm_quantize as cost
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import (
    ODD_WIDTHS,
    aligned_as,
    forget,
    random_columns,
    random_rows,
    sum_of,
    sums_of,
    why_torch,
)
from sublight.ops.norm.parts import check_width, reciprocal_root
from sublight.ops.norm.rms_norm import EPS
from sublight.ops.norm.rms_norm import reference as rms_norm
from sublight.ops.quantize.codes import (
    FORWARD_ONLY,
    KINDS,
    LEAST,
    Kind,
    Pair,
    as_numbers,
    check,
    code_of,
    fake,
    finite_code_of,
    larger_of,
    magnitude_of,
    plan_rows,
    quantize,
    scale_of,
    top_of,
)
from sublight.ops.record.library import Registered


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS, *, kind: Kind) -> Pair:
    return quantize(rms_norm(x, weight, eps), kind)


@triton.jit
def factors(squares, top, cols, eps, KIND: tl.constexpr):
    """The scale, and what x * weight times it is a code: the norm cancels out of it, unless the scale is the least."""
    rstd = reciprocal_root(squares, cols, eps)
    scale = scale_of(top * rstd, KIND)
    if KIND == "int8":
        factor = tl.div_rn(127.0, top)
    else:
        factor = tl.div_rn(448.0, top)
    return scale, tl.where(scale > LEAST, factor, rstd * (1 / LEAST))


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, q_ptr, scale_ptr, rows, cols, x_stride, eps,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, VECTOR: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    x_row, q_row = x_ptr + row * x_stride, q_ptr + row * cols
    w_row = w_ptr + aligned_as(cols)
    col = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    mask = (row < rows) & (col < (cols if TAIL == 0 else BLOCK))  # the first of two blocks is full
    x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
    if TAIL > 0:
        far = BLOCK + tl.max_contiguous(tl.arange(0, TAIL), VECTOR)[None, :]
        far_mask = (row < rows) & (far < cols)
        rest = tl.load(x_row + far, mask=far_mask, other=0.0).to(tl.float32)
        far_w = tl.load(w_row + far, mask=far < cols, other=0.0)
    product = x * tl.load(w_row + col, mask=col < cols, other=0.0).to(tl.float32)
    squares, top = sum_of(x * x, 1, SUMS), top_of(product, 1)
    if TAIL > 0:
        far_product = rest * far_w.to(tl.float32)
        squares, top = squares + sum_of(rest * rest, 1, SUMS), larger_of(top, top_of(far_product, 1))
    scale, factor = factors(squares, top, cols, eps, KIND)
    scale, factor = scale[:, None], factor[:, None]
    tl.store(scale_ptr + row, scale, mask=row < rows)
    tl.store(q_row + col, finite_code_of(product * factor, scale, KIND), mask=mask)
    if TAIL > 0:
        tl.store(q_row + far, finite_code_of(far_product * factor, scale, KIND), mask=far_mask)


@triton.jit
def _row_kernel(
    x_ptr, w_ptr, q_ptr, scale_ptr, cols, x_stride, eps,
    KIND: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, PACKED: tl.constexpr, AGAIN: tl.constexpr,
    VECTOR: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * x_stride, q_ptr + row * cols
    w_row = w_ptr + aligned_as(cols)
    col = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    mask = col < (cols if TAIL == 0 else BLOCK)  # the first of two blocks is full
    x = tl.load(x_row + col, mask=mask, other=0.0)
    if TAIL > 0:
        far = BLOCK + tl.max_contiguous(tl.arange(0, TAIL), VECTOR)
        rest = tl.load(x_row + far, mask=far < cols, other=0.0)
        far_w = tl.load(w_row + far, mask=far < cols, other=0.0)
    w = tl.load(w_row + col, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    squares, top = sum_of(wide * wide, 0, SUMS), top_of(wide * w.to(tl.float32), 0)
    if TAIL > 0:
        wide = rest.to(tl.float32)
        squares += sum_of(wide * wide, 0, SUMS)
        top = larger_of(top, top_of(wide * far_w.to(tl.float32), 0))
    scale, factor = factors(squares, top, cols, eps, KIND)
    tl.store(scale_ptr + row, scale)
    x, w = forget(x, scale, PACKED), forget(w, scale, PACKED)
    if AGAIN:  # out of the L1: many rows need the registers, a few rows the time
        w = tl.load(w_row + col, mask=mask, other=0.0)
    store_row(q_row + col, x, w, factor, scale, mask, KIND)
    if TAIL > 0:
        rest, far_w = forget(rest, scale, PACKED), forget(far_w, scale, PACKED)
        if AGAIN:
            far_w = tl.load(w_row + far, mask=far < cols, other=0.0)
        store_row(q_row + far, rest, far_w, factor, scale, far < cols, KIND)


@triton.jit
def store_row(ptrs, x, w, factor, scale, mask, KIND: tl.constexpr):
    """The codes of one row, or of a part of it."""
    if scale < float("inf"):  # asked once a row, not for every element
        tl.store(ptrs, code_of(x.to(tl.float32) * w.to(tl.float32) * factor, KIND), mask=mask)
    else:
        tl.store(ptrs, code_of(tl.zeros_like(x).to(tl.float32), KIND), mask=mask)


@triton.jit
def _chunks_kernel(
    x_ptr, w_ptr, q_ptr, scale_ptr, cols, x_stride, eps,
    KIND: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """For rows that no multiprocessor holds: read twice, the second time mostly out of the L2."""
    row = tl.program_id(0).to(tl.int64)
    squares, top = 0.0, tl.full((), 0, tl.int32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        w = tl.load(w_ptr + aligned_as(cols) + col, mask=mask, other=0.0).to(tl.float32)
        squares += sum_of(x * x, 0, SUMS)
        top = tl.maximum(top, tl.max(magnitude_of(x * w), 0))
    scale, factor = factors(squares, top.to(tl.float32, bitcast=True), cols, eps, KIND)
    tl.store(scale_ptr + row, scale)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(w_ptr + aligned_as(cols) + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * cols + col, finite_code_of(x * w * factor, scale, KIND), mask=mask)


def plan_forward(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: Kind) -> Plan:
    """The launch that gives the codes of the normalised rows, and their scales."""
    check_width(x, weight)
    return plan_rows(
        "rms_norm_quantize",
        (_tile_kernel, _row_kernel, _chunks_kernel),
        x,
        kind,
        weight=weight,
        numbers=(eps,),
        each=64,
        of_row=lambda few: {"AGAIN": not few},
        SUMS=sums_of(x),
    )


def _register(kind: Kind) -> Registered:
    return Registered(
        schema=f"rms_norm_{kind}(Tensor x, Tensor weight, float eps) -> (Tensor codes, Tensor scale)",
        reference=partial(reference, kind=kind),
        theirs="torch.nn.functional.rms_norm, torch.amax, …",
        why_torch=lambda x, weight, eps: why_torch(x, weight),
        plan=partial(plan_forward, kind=kind),
        fake=lambda x, weight, eps: fake(x, kind),
    )


_REGISTERED = {kind: _register(kind) for kind in KINDS}


def rms_norm_int8(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> Pair:
    """`quantize_int8(rms_norm(x, weight, eps))` in one pass, the normalised row not rounded in between."""
    return _call(x, weight, eps, "int8")


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> Pair:
    """`quantize_fp8(rms_norm(x, weight, eps))` in one pass, the normalised row not rounded in between."""
    return _call(x, weight, eps, "fp8")


def _call(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: Kind) -> Pair:
    check(x)
    check_width(x, weight)
    return _REGISTERED[kind].call(x.detach(), weight.detach(), eps)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS, *, kind: Kind) -> Plan:
    """What `rms_norm_int8(x, weight)` or `rms_norm_fp8(x, weight)` runs, and why."""
    return _REGISTERED[kind].decide(x.detach(), weight.detach(), eps)


def launch(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS, *, kind: Kind) -> Pair:
    """Our kernel, whether or not it wins."""
    return _REGISTERED[kind].by_kernels(x, weight, eps)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return random_rows(shape, dtype, device, seed), *random_columns(shape, dtype, device, seed, 1)


def judged(call: Call) -> Call:
    """A call judged by how far the numbers behind its codes are from the normalised row."""
    return as_numbers(call, exact=rms_norm)


KERNELS = (Kernel(jit=_tile_kernel), Kernel(jit=_row_kernel), Kernel(jit=_chunks_kernel, narrow=ODD_WIDTHS))
TEST_SHAPES: tuple[Shape, ...] = tuple(
    {"rows": rows, "cols": cols}
    for rows, cols in ((1, 1), (3, 127), (65, 128), (17, 129), (40, 2049), (40, 4096), (20, 16_385), (20, 40_000))
)


def _fields(kind: Kind) -> dict[str, Any]:
    return {
        "reference": partial(reference, kind=kind),
        "plan": partial(plan, kind=kind),
        "providers": {"sublight": Provider(launch=partial(launch, kind=kind), kernels=KERNELS)},
        "inputs": inputs,
        "cost": cost,
        "test_shapes": TEST_SHAPES,
        "library_args": lambda *inputs: (*inputs, EPS),
        "judged": judged,
        **FORWARD_ONLY,
    }


RMS_NORM_INT8 = Op(
    name="rms_norm_int8",
    summary="RMSNorm, then to whole numbers of 8 bits, one scale a row",
    call=rms_norm_int8,
    **_fields("int8"),
)
RMS_NORM_FP8 = Op(
    name="rms_norm_fp8",
    summary="RMSNorm, then to fp8 (e4m3), one scale a row",
    call=rms_norm_fp8,
    **_fields("fp8"),
)
