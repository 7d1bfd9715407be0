"""The transformer's kernels (transformer.cu) with their grids: what the ladders time is what a GPT-2 step calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sublight.extensions.ladder import Runner, ceil_div

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "transformer.cu"
KERNELS = (
    *("encoder_forward", "encoder_backward_tokens", "encoder_backward_positions"),
    *("norm_forward", "norm_backward_x", "norm_backward_weight", "norm_backward_weight_atomics", "sum_of_rows"),
    *("attention_scores", "attention_softmax", "attention_values", "attention_online"),
    *("attention_backward_dots", "attention_backward_q", "attention_backward_kv"),
    *("residual_forward", "residual_forward_4", "gelu_forward", "gelu_forward_4", "gelu_backward"),
    *("classifier", "classifier_online", "adamw"),
    *("linear_forward", "linear_backward_x", "linear_backward_weight"),
)
THREADS = 256
WARPS = THREADS // 32
MOST_HEAD = 128  # the largest head: 32 lanes with four registers each
EPS = 1e-5


def each(count: int) -> tuple[tuple[int], tuple[int]]:
    """The grid and block for one thread an element."""
    return (ceil_div(count, THREADS),), (THREADS,)


def _warps(count: int) -> tuple[tuple[int], tuple[int]]:
    """The grid and block for one warp a row."""
    return (ceil_div(count, WARPS),), (THREADS,)


def encoder(runner: Runner, tokens: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
    batch, time = tokens.shape
    out = wte.new_empty(batch, time, wte.shape[1])
    runner.launch("encoder_forward", *each(out.numel()), tokens, wte, wpe, out, time, wte.shape[1], out.numel())
    return out


def encoder_backward(runner: Runner, d_out: Tensor, tokens: Tensor, d_wte: Tensor, d_wpe: Tensor) -> None:
    """Adds to d_wte, which the classifier's gradient may be in already; writes d_wpe of the positions there are."""
    batch, time, channels = d_out.shape
    size = time * channels
    runner.launch("encoder_backward_tokens", *each(d_out.numel()), tokens, d_out, d_wte, channels, d_out.numel())
    runner.launch("encoder_backward_positions", *each(size), d_out, d_wpe, batch, size)


def norm(runner: Runner, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, and each row's mean and scale."""
    cols = x.shape[-1]
    rows = x.numel() // cols
    y, means, scales = x.new_empty(x.shape), x.new_empty(rows), x.new_empty(rows)
    runner.launch("norm_forward", *_warps(rows), x, weight, bias, y, means, scales, rows, cols, EPS)
    return y, means, scales


def norm_backward(
    runner: Runner, d_y: Tensor, x: Tensor, weight: Tensor, means: Tensor, scales: Tensor, *, atomics: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    cols = x.shape[-1]
    rows = x.numel() // cols
    d_x, d_weight, d_bias = x.new_empty(x.shape), weight.new_zeros(cols), weight.new_zeros(cols)
    runner.launch("norm_backward_x", *_warps(rows), d_y, x, weight, means, scales, d_x, rows, cols)
    arguments = (d_y, x, means, scales, d_weight, d_bias, rows, cols)
    if atomics:
        runner.launch("norm_backward_weight_atomics", *each(rows * cols), *arguments)
    else:
        runner.launch("norm_backward_weight", (ceil_div(cols, 32),), (THREADS,), *arguments)
    return d_x, d_weight, d_bias


def attention_three(runner: Runner, qkv: Tensor, heads: int) -> Tensor:
    """Scores, softmax, values: (batch, heads, time, time) goes through memory four times."""
    batch, time, width = qkv.shape
    size = width // (3 * heads)
    scores, out = qkv.new_empty(batch, heads, time, time), qkv.new_empty(batch, time, heads * size)
    runner.launch("attention_scores", *each(scores.numel()), qkv, scores, time, heads, size, size**-0.5, scores.numel())
    runner.launch("attention_softmax", *_warps(batch * heads * time), scores, batch * heads * time, time)
    runner.launch("attention_values", *each(out.numel()), qkv, scores, out, time, heads, size, out.numel())
    return out


def attention(runner: Runner, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """out, and the logarithm of each row's sum of exponentials."""
    batch, time, width = qkv.shape
    size, queries = width // (3 * heads), batch * heads * time
    out, lse = qkv.new_empty(batch, time, heads * size), qkv.new_empty(batch, heads, time)
    runner.launch("attention_online", *_warps(queries), qkv, out, lse, time, heads, size, size**-0.5, queries)
    return out, lse


def attention_backward(runner: Runner, d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    batch, heads, time = lse.shape
    size, rows = qkv.shape[-1] // (3 * heads), batch * heads * time
    dots, d_qkv = qkv.new_empty(batch, time, heads), qkv.new_empty(qkv.shape)
    runner.launch("attention_backward_dots", *_warps(rows), d_out, out, dots, rows, size)
    for kernel in ("attention_backward_q", "attention_backward_kv"):
        runner.launch(kernel, *_warps(rows), qkv, d_out, lse, dots, d_qkv, time, heads, size, size**-0.5, rows)
    return d_qkv


def residual(runner: Runner, a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape)
    if a.numel() % 4:
        runner.launch("residual_forward", *each(a.numel()), a, b, out, a.numel())
    else:
        runner.launch("residual_forward_4", *each(a.numel() // 4), a, b, out, a.numel() // 4)
    return out


def gelu(runner: Runner, x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel() % 4:
        runner.launch("gelu_forward", *each(x.numel()), x, y, x.numel())
    else:
        runner.launch("gelu_forward_4", *each(x.numel() // 4), x, y, x.numel() // 4)
    return y


def gelu_backward(runner: Runner, d_y: Tensor, x: Tensor) -> Tensor:
    d_x = x.new_empty(x.shape)
    runner.launch("gelu_backward", *each(x.numel()), d_y, x, d_x, x.numel())
    return d_x


def classifier(
    runner: Runner,
    logits: Tensor,
    targets: Tensor,
    d_logits: Tensor,
    *,
    vocabulary: int,
    d_loss: float,
    kernel: str = "classifier_online",
) -> Tensor:
    """The loss of each row; d_logits is written, and may be the logits themselves."""
    cols = logits.shape[-1]
    rows = logits.numel() // cols
    losses = logits.new_empty(rows)
    runner.launch(kernel, (rows,), (THREADS,), logits, targets, losses, d_logits, vocabulary, cols, d_loss)
    return losses


def adamw(
    runner: Runner,
    given: tuple[Tensor, Tensor, Tensor, Tensor],  # parameter, gradient, first and second moment
    to: tuple[Tensor, Tensor, Tensor],  # parameter and moments, which may be the given ones
    *,
    step: int,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """`step` counts from 1."""
    count = given[0].numel()
    moments = (betas[0], 1 - betas[0], betas[1], 1 - betas[1])
    corrected = (rate / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step))
    runner.launch("adamw", *each(count), *given, *to, count, 1 - rate * decay, *moments, *corrected, eps)


def linear(runner: Runner, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias: the weight is (out, in), as PyTorch has it."""
    n, k = weight.shape
    m = x.numel() // k
    out = x.new_empty(*x.shape[:-1], n)
    runner.launch("linear_forward", _tiles(m, n), (THREADS,), x, weight, bias, out, m, n, k)
    return out


def linear_backward(runner: Runner, d_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, weight and bias."""
    n, k = weight.shape
    m = x.numel() // k
    d_x, d_weight, d_bias = x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(n)
    runner.launch("linear_backward_x", _tiles(m, k), (THREADS,), d_out, weight, d_x, m, k, n)
    runner.launch("linear_backward_weight", _tiles(n, k), (THREADS,), d_out, x, d_weight, n, k, m)
    runner.launch("sum_of_rows", (ceil_div(n, 32),), (THREADS,), d_out, d_bias, m, n)
    return d_x, d_weight, d_bias


def _tiles(rows: int, cols: int) -> tuple[int, int]:
    return ceil_div(cols, 64), ceil_div(rows, 64)
