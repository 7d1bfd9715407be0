"""What follows a product before it is stored: scales, bias, activation, residual; in fp32, while it is in registers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sublight.backend.jit import tl, triton
from sublight.errors import one_of

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def check_activation(name: str, *more: str) -> None:
    one_of("activation", name, (*ACTIVATIONS, *more))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """x in fp32."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_16":
        # for results of 16 bits: erfc by a polynomial and one exponential (Abramowitz, Stegun 7.1.26: off by 1.5e-7),
        # without a difference of nearly equal numbers where x is negative; a third of the instructions of erf
        t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
        poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail = 0.5 * poly * tl.exp(-0.5 * x * x)
        return x * tl.where(x < 0.0, tail, 1.0 - tail)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))  # x * (1 + tanh(inner)) / 2
    else:
        return x


@triton.jit
def scaled(acc, scale_a_ptr, scale_b_ptr, row, col, rows, cols, SCALED: tl.constexpr):
    """A product of codes as numbers: times one scale of each operand ("tensor"), or one of each row and column ("row").

    The two are not multiplied with each other first: of small ones that would lose bits."""
    if SCALED == "tensor":
        return acc * tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    elif SCALED == "row":
        of_row = tl.load(scale_a_ptr + row, mask=row < rows, other=0.0)
        of_col = tl.load(scale_b_ptr + col, mask=col < cols, other=0.0)
        return acc * of_row[:, None] * of_col[None, :]
    else:
        return acc


@triton.jit
def finished(
    acc, bias_ptr, residual_ptr, batch, row, col, rows, cols,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The tile at these rows and columns, in fp32; `batch` and `row` are int64: a place may pass 2**31."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    acc = activated(acc, ACTIVATION)
    if HAS_RESIDUAL:
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        at = residual_ptr + (batch * rows + row[:, None]) * cols + col[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def halves(x):
    """Left and right columns; they stay in the registers they are in."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def store_finished(
    acc, first_row, first_col, c_desc, bias_ptr, residual_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BY_ENGINE: tl.constexpr,
    SCALED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The tile at this corner, finished, into C: COLS columns at a time, for which shared memory has room."""
    if acc.shape[1] == COLS:
        row = first_row.to(tl.int64) + tl.arange(0, acc.shape[0])
        col = first_col + tl.arange(0, COLS)
        acc = scaled(acc, scale_a_ptr, scale_b_ptr, row, col, m, n, SCALED)
        acc = finished(acc, bias_ptr, residual_ptr, 0, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
        c = acc.to(c_ptr.dtype.element_ty)
        if BY_ENGINE:
            c_desc.store([first_row, first_col], c)
        else:  # rows of C that begin anywhere
            tl.store(c_ptr + row[:, None] * n + col[None, :], c, mask=(row < m)[:, None] & (col < n)[None, :])
    else:
        left, right = halves(acc)
        store_finished(
            left, first_row, first_col, c_desc, bias_ptr, residual_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n,
            HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BY_ENGINE, SCALED, COLS,
        )  # fmt: skip
        store_finished(
            right, first_row, first_col + acc.shape[1] // 2, c_desc, bias_ptr, residual_ptr, c_ptr, scale_a_ptr,
            scale_b_ptr, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BY_ENGINE, SCALED, COLS,
        )  # fmt: skip
