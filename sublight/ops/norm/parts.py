"""Parts that the norms' kernels share, and the shapes that they are tried on."""

from __future__ import annotations

import torch

from sublight.backend.jit import tl, triton
from sublight.errors import BadInput
from sublight.ops.kernels.rows import aligned_as


@triton.jit
def reciprocal_root(squares, cols, eps):
    """1 / sqrt(squares / cols + eps), rounded as IEEE says: once a row, so the hardware's quick forms save nothing."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, cols * 1.0) + eps))


@triton.jit
def load_columns(w_ptr, b_ptr, col, cols, CENTER: tl.constexpr):
    """Weight and bias. With few rows they are loaded next to x, so that the two waits overlap; with many rows after the
    statistics, out of a cache that has them by then, and in no register before."""
    place = aligned_as(cols) + col
    w = tl.load(w_ptr + place, mask=col < cols, other=0.0)
    b = w
    if CENTER:
        b = tl.load(b_ptr + place, mask=col < cols, other=0.0)
    return w, b


@triton.jit
def scaled(x, mean, rstd, w, b, CENTER: tl.constexpr):
    y = (x.to(tl.float32) - mean) * rstd * w.to(tl.float32)
    if CENTER:
        y += b.to(tl.float32)
    return y


def check_width(x: torch.Tensor, *columns: torch.Tensor) -> None:
    """PyTorch's own check, before a kernel reads past the end of a short weight."""
    for column in columns:
        if column.shape != x.shape[-1:]:
            raise BadInput(f"weight and bias must have the {x.shape[-1]} columns of x, not {tuple(column.shape)}")
