"""A transformer's products with what lies beside them in one launch: gelu, its gradient and every bias's gradient.

By cuBLASLt's epilogues where it takes them, in bf16 on a GPU; elsewhere by PyTorch's products and our `bias_gelu`.
Between two products of a block nothing is then left but attention and the norms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend import cublaslt
from sublight.backend.cublaslt import Epilogue
from sublight.ops.pointwise.bias_gelu import bias_gelu

Tensor = torch.Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear, whose backward pass sums the bias's gradient up inside the weight's product."""
    return F.linear(x, weight, bias) if _why_not(x, weight) else _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def mlp(x: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> Tensor:
    """down(gelu(up(x))), gelu by tanh; each a weight and its bias."""
    if _why_not(x, up[0]):
        return linear(bias_gelu(F.linear(x, up[0]), up[1]), *down)
    return _Mlp.apply(x, *up, *down)  # type: ignore[no-any-return]


def heads_of(x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one product, each (batch, heads, length, head_dim)."""
    if _why_not(x, weight):
        q, k, v = split(F.linear(x, weight, bias), heads)
        return q, k, v
    return _Heads.apply(x, weight, bias, heads)  # type: ignore[no-any-return]


def split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Views of what one product gave."""
    batch, length, width = qkv.shape
    return qkv.view(batch, length, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4).unbind()


def _why_not(x: Tensor, weight: Tensor) -> str:
    """Both passes' products must be cuBLASLt's: the forward one is asked for all of them."""
    if torch.compiler.is_compiling():
        return "torch.compile has fusions of its own"
    return cublaslt.why_not(rows_of(x), weight.T)


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def weight_gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the weight and of the bias, from rows of both."""
    db = torch.empty(dy.shape[1], dtype=dy.dtype, device=dy.device)
    dw = cublaslt.product(dy.T, x, Epilogue.LEFT_SUMS, bias=db)
    return (dy.T @ x, dy.sum(0)) if dw is None else (dw, db)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = rows_of(grads[0])
        return (dy @ weight).view(x.shape), *weight_gradients(dy, rows_of(x))


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return split(F.linear(x, weight, bias), heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = rows_of(torch.stack([each.transpose(1, 2) for each in grads], 2).flatten(2))  # (b, t, 3 * dim)
        return (dy @ weight).view(x.shape), *weight_gradients(dy, rows_of(x)), None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        rows = rows_of(x)
        before = torch.empty(rows.shape[0], up.shape[0], dtype=x.dtype, device=x.device)
        hidden = cublaslt.product(rows, up.T, Epilogue.GELU_BIAS, bias=up_bias, aux=before)
        if hidden is None:
            before = F.linear(rows, up, up_bias)
            hidden = F.gelu(before, approximate="tanh")
        ctx.save_for_backward(rows, up, down, before, hidden)
        ctx.shape = x.shape
        return F.linear(hidden, down, down_bias).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, up, down, before, hidden = ctx.saved_tensors
        dy = rows_of(grads[0])
        d_up_bias = torch.empty(up.shape[0], dtype=dy.dtype, device=dy.device)
        d_before = cublaslt.product(dy, down, Epilogue.GELU_GRADIENT, bias=d_up_bias, aux=before)
        if d_before is None:
            d_before = torch.ops.aten.gelu_backward(dy @ down, before, approximate="tanh")
            d_up_bias = d_before.sum(0)
        d_down, d_down_bias = weight_gradients(dy, hidden)
        return (d_before @ up).view(ctx.shape), d_before.T @ rows, d_up_bias, d_down, d_down_bias
