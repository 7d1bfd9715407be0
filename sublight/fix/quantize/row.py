"""One row by a layer's weight, dense or packed, with its norm, SwiGLU and residual in one launch (`row_linear`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sublight.fix.quantize.coded import CodedLinear
from sublight.fix.quantize.linear import PackedLinear
from sublight.ops.matmul.row_linear import row_linear, why_no_stream

Maybe = torch.Tensor | None


def why_not_streamed(by: Any, x: torch.Tensor) -> str:
    """Why `row_linear` streams no such weight for a row like x; empty where it does. `by` is a packed layer, or
    anything with a `weight` (out, in) and a `bias`."""
    if isinstance(by, CodedLinear):
        return "weights of 8 bits"
    if not isinstance(by, PackedLinear):
        return why_no_stream(x, by.weight, None)
    if by.scales.dtype != x.dtype:
        return f"scales are {by.scales.dtype}, x is {x.dtype}"
    return why_no_stream(x, by.packed, by.scales, by.bits, k=by.in_features)


def streamed(
    x: torch.Tensor, by: Any, norm: Maybe = None, residual: Maybe = None, *, eps: float, gated: bool = False,
    row_linear: Callable[..., torch.Tensor] = row_linear,
) -> torch.Tensor:  # fmt: skip
    """norm(x) by the weight, and what is added. A model's weights are written by no launch of its steps: they are read
    before the last launch ends."""
    how: dict[str, Any] = {"eps": eps, "gated": gated, "fixed_weight": True}
    if isinstance(by, PackedLinear):
        return row_linear(x, by.packed, by.scales, by.zeros, norm, by.bias, residual, bits=by.bits, **how)
    return row_linear(x, by.weight, None, None, norm, by.bias, residual, **how)
