"""A linear layer multiplied in fp8, for training: codes are made of x, the weight and dy as they come, by rows.

Forward and the gradient of x are fp8 products, each operand with a scale a row along what is summed over: for dx the
weight is quantized anew along its outputs. The gradient of the weight stays in x's data type: it is a sum over all
tokens, where one outlier would take the scale from the others.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.errors import BadInput
from sublight.ops.matmul.matmul import matmul
from sublight.ops.matmul.scaled_matmul import OUT, scaled_matmul
from sublight.ops.quantize.quantize import quantize_fp8


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias with x and the weight rounded to fp8 (e4m3), a scale a row; has gradients for all three."""
    if x.dtype not in OUT.values() or weight.dtype != x.dtype or weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise BadInput(
            f"fp8_linear takes x (…, k) and weight (n, k) of one data type of {', '.join(OUT)}, not "
            f"{x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}"
        )
    rows = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _Fp8Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.shape[0])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return by_codes(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            by_codes(dy, weight.T, None) if wants_x else None,
            matmul(dy.T, x) if wants_weight else None,
            dy.sum(0) if wants_bias else None,
        )


def by_codes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (m, k) @ weight.T of (n, k), both rounded to fp8 along k."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], weight.shape[0])
    (codes, scales), (weights, of_weights) = quantize_fp8(x.contiguous()), quantize_fp8(weight.contiguous())
    return scaled_matmul(codes, weights.T, scales.float(), of_weights.float().T, bias, out_dtype=x.dtype)
