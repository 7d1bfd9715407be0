"""A transformer's products, by the fastest of cuBLAS's kernels for their sizes, with gelu in their launch.

Which kernel that is `tune` finds before the first step; without it, on a CPU and in fp32, products are PyTorch's and
gelu our `bias_gelu`. A bias's gradient is a product with ones, which reads its matrix once.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend import cublaslt
from sublight.backend.cublaslt import Epilogue
from sublight.ops.pointwise.bias_gelu import bias_gelu, launch_backward

MOST_LOGITS = 2**31  # beyond, no kernel but PyTorch's choice was ever tried
Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]  # a weight and its bias


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear by `product`, in both passes."""
    return F.linear(x, weight, bias) if _why_not(x, weight) else _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def mlp(x: Tensor, up: Pair, down: Pair, *, keep: bool = True) -> Tensor:
    """down(gelu(up(x))), gelu by tanh, which is kept for the backward pass or computed again there."""
    if _why_not(x, up[0]):
        return plain_mlp(x, up, down)
    return _Mlp.apply(x, *up, *down, keep)  # type: ignore[no-any-return]


def plain_mlp(x: Tensor, up: Pair, down: Pair) -> Tensor:
    return F.linear(bias_gelu(F.linear(x, up[0]), up[1]), *down)


def heads_of(x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one product, each (batch, heads, length, head_dim)."""
    if _why_not(x, weight):
        return plain_heads_of(x, weight, bias, heads)
    return _Heads.apply(x, weight, bias, heads)  # type: ignore[no-any-return]


def plain_heads_of(x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _split(F.linear(x, weight, bias), heads)
    return q, k, v


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Views of what one product gave."""
    batch, length, width = qkv.shape
    return qkv.view(batch, length, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4).unbind()


def _why_not(x: Tensor, weight: Tensor) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile has fusions of its own"
    return cublaslt.why_not(rows_of(x), weight.T)


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(a: Tensor, b: Tensor) -> Tensor:
    found = cublaslt.product(a, b)
    return a @ b if found is None else found


def _biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = rows_of(x)
    found = cublaslt.product(rows, weight.T, Epilogue.BIAS, bias=bias)
    return F.linear(x, weight, bias) if found is None else found.view(*x.shape[:-1], -1)


def _sum_over_rows(x: Tensor) -> Tensor:
    """The sum over rows by cuBLAS: on an H200 2.5 times as fast as PyTorch's sum over 32768 rows of 768."""
    return x.T @ _ones(x.shape[0], x.dtype, x.device)


@functools.cache
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made once, and never let go: a graph may read them."""
    return torch.ones(count, dtype=dtype, device=device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _biased(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return _linear_gradients(rows_of(grads[0]), x, weight)


def _linear_gradients(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _product(dy, weight).view(x.shape), _product(dy.T, rows_of(x)), _sum_over_rows(dy)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return _split(_biased(x, weight, bias), heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = torch.stack([each.transpose(1, 2) for each in grads], 2).flatten(2)  # (b, t, 3 * dim)
        return *_linear_gradients(rows_of(dy), x, weight), None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, keep: bool
    ) -> Tensor:
        rows = rows_of(x)
        before = torch.empty(rows.shape[0], up.shape[0], dtype=x.dtype, device=x.device)
        hidden = cublaslt.product(rows, up.T, Epilogue.GELU_BIAS, bias=up_bias, aux=before)
        ctx.is_biased = hidden is not None  # whether `before` has the bias in it
        if hidden is None:
            before = _product(rows, up.T)
            hidden = bias_gelu(before, up_bias)
        ctx.save_for_backward(rows, up, up_bias, down, before, hidden if keep else None)
        ctx.shape = x.shape
        return _biased(hidden, down, down_bias).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, up, up_bias, down, before, hidden = ctx.saved_tensors
        dy = rows_of(grads[0])
        if hidden is None:
            hidden = F.gelu(before, approximate="tanh") if ctx.is_biased else bias_gelu(before, up_bias)
        d_down, d_down_bias = _product(dy.T, hidden), _sum_over_rows(dy)
        d_before = cublaslt.product(dy, down, Epilogue.GELU_GRADIENT, aux=before) if ctx.is_biased else None
        if d_before is not None:
            d_up_bias = _sum_over_rows(d_before)
        else:
            added = torch.zeros_like(up_bias) if ctx.is_biased else up_bias
            d_before, d_up_bias = launch_backward(_product(dy, down), before, added)
        dx, d_up = _product(d_before, up).view(ctx.shape), _product(d_before.T, rows)
        return dx, d_up, d_up_bias, d_down, d_down_bias, None


def tune(rows: int, dim: int, vocab: int, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Time the products of a block and of the head for so many tokens, and what would be done instead; a row each."""
    made = partial(torch.randn, dtype=dtype, device=device)
    found: dict[str, dict[str, Any]] = {}
    cublaslt.warm(device, dtype)
    if rows * vocab < MOST_LOGITS:
        hidden, weight, logits = made(rows, dim), made(vocab, dim) * 0.02, made(rows, vocab)
        found["head"] = cublaslt.tune(hidden, weight.T, rival=partial(torch.mm, hidden, weight.T))
        found["head dx"] = cublaslt.tune(logits, weight, rival=partial(torch.mm, logits, weight))
        found["head dw"] = cublaslt.tune(logits.T, hidden, rival=partial(torch.mm, logits.T, hidden))
        del logits
    for name, width, depth in (("qkv", 3 * dim, dim), ("out", dim, dim), ("up", 4 * dim, dim), ("down", dim, 4 * dim)):
        x, dy, weight, bias = made(rows, depth), made(rows, width), made(width, depth) * 0.02, made(width)
        found[f"{name} dx"] = cublaslt.tune(dy, weight, rival=partial(torch.mm, dy, weight))
        found[f"{name} dw"] = cublaslt.tune(dy.T, x, rival=partial(torch.mm, dy.T, x))
        if name == "up":
            found["up"] = cublaslt.tune(x, weight.T, rival=partial(torch.mm, x, weight.T))
            found["up gelu"] = cublaslt.tune(
                x, weight.T, Epilogue.GELU_BIAS, bias=bias, aux=torch.empty_like(dy),
                rival=partial(_gelu_apart, x, weight, bias),
            )  # fmt: skip
            continue
        by_torch = partial(F.linear, x, weight, bias)
        found[name] = cublaslt.tune(x, weight.T, Epilogue.BIAS, bias=bias, rival=by_torch)
        if name == "down":
            found["down dx gelu"] = cublaslt.tune(
                dy, weight, Epilogue.GELU_GRADIENT, aux=x, beside=partial(_sum_over_rows, x),
                rival=partial(_gelu_gradient_apart, dy, weight, x),
            )  # fmt: skip
    return [{"product": name, **row} for name, row in found.items()]


def _gelu_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return bias_gelu(_product(x, weight.T), bias)


def _gelu_gradient_apart(dy: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    return launch_backward(_product(dy, weight), before, torch.zeros_like(before[0]))[0]
