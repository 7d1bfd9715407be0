"""What follows a product before it is stored: bias, activation, residual; in fp32, while the tile is in registers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sublight.backend.jit import tl, triton
from sublight.errors import BadInput, nearest

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise BadInput(f"unknown activation {name!r}: {nearest(name, list(ACTIVATIONS))}")


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """x in fp32."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))  # x * (1 + tanh(inner)) / 2
    else:
        return x


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
