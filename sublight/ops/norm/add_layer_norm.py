"""Residual and LayerNorm in one pass: new_residual = x + residual, y = LayerNorm(new_residual); read both, write both.

The new residual is rounded to the inputs' data type, as PyTorch's sum is, and y is the norm of the rounded one. The
backward pass adds the new residual's own gradient inside the kernel; x and residual share one gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import add_layer_norm as cost
from sublight.op import Choice, Op
from sublight.ops.kernels.rows import NORM_TEST_SHAPES, random_columns, random_rows
from sublight.ops.norm import add_norm, row_norm
from sublight.ops.record.library import LIBRARY

EPS = 1e-5


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = EPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    new_residual = x + residual
    return F.layer_norm(new_residual, new_residual.shape[-1:], weight, bias, eps), new_residual


def launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norm.forward(x, residual, weight, bias, eps)[:2]


def launch_backward(
    dy: torch.Tensor,
    d_new_residual: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> Inputs:
    _, new_residual, mean, rstd = add_norm.forward(x, residual, weight, bias, EPS)
    dx, dw, db = add_norm.backward(dy, d_new_residual, new_residual, weight, mean, rstd)
    return dx, dx, dw, db


def choose(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = EPS,
) -> Choice:
    """What `add_layer_norm(x, residual, weight, bias)` runs, and why."""
    if reason := add_norm.not_ours(x, residual, weight, bias):
        return Choice(provider="torch", kernel="torch.add, torch.nn.functional.layer_norm", reason=reason)
    return add_norm.choose(x)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = EPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(LayerNorm of x + residual, x + residual): our kernel where it wins, PyTorch's two elsewhere."""
    if weight is None or bias is None or add_norm.not_ours(x, residual, weight, bias):
        return reference(x, residual, weight, bias, eps)
    row_norm.check_width(x, weight, bias)
    return _add_layer_norm(x, residual, weight, bias, eps)[:2]  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, new_residual, mean, rstd = output
    ctx.save_for_backward(new_residual, inputs[2], mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # no zeros for the gradients of mean and rstd, nor of an output that nobody used


def _backward(
    ctx: Any, dy: torch.Tensor | None, d_new_residual: torch.Tensor | None, _mean: Any, _rstd: Any
) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return d_new_residual, d_new_residual, None, None, None
    dx, dw, db = _add_layer_norm_backward(dy, d_new_residual, *ctx.saved_tensors)
    return dx, dx, dw, db, None  # one tensor for both, as PyTorch's own sum gives


def _cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    new_residual = (x + residual).contiguous()
    y, mean, rstd = torch.ops.sublight.layer_norm(new_residual, weight, bias, eps)
    return y, new_residual, mean, rstd


def _cpu_backward(
    dy: torch.Tensor, d_new_residual: torch.Tensor | None, new_residual: torch.Tensor, *saved: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    dx, dw, db = torch.ops.sublight.layer_norm_backward(dy, new_residual, *saved)
    return dx if d_new_residual is None else (dx + d_new_residual).contiguous(), dw, db


_add_layer_norm = LIBRARY.op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=add_norm.forward,
    fake=lambda x, residual, weight, bias, eps: add_norm.fake_forward(x, center=True),
    backward=_backward,
    setup_context=_setup_context,
)
_add_layer_norm_backward = LIBRARY.op(
    "add_layer_norm_backward(Tensor dy, Tensor? d_new_residual, Tensor new_residual, Tensor weight, Tensor mean,"
    " Tensor rstd) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=add_norm.backward,
    fake=lambda dy, d_new_residual, new_residual, weight, mean, rstd: row_norm.fake_backward(
        new_residual, weight, center=True
    ),
)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    x, residual = (random_rows(shape, dtype, device, part) for part in (2 * seed, 2 * seed + 1))
    return x, residual, *random_columns(shape, dtype, device, seed, 2)


ADD_LAYER_NORM = Op(
    name="add_layer_norm",
    summary="x + residual, and its layer normalisation",
    reference=reference,
    call=add_layer_norm,
    launch=launch,
    launch_backward=launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=add_norm.KERNELS,
    shapes=add_norm.SHAPES,
    test_shapes=NORM_TEST_SHAPES[1:],  # a row of one column is PyTorch's
    library_args=lambda *inputs: (*inputs, EPS),
)
