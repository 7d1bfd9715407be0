"""Residual and LayerNorm in one pass: new_residual = x + residual, y = LayerNorm(new_residual); read both, write both.

The new residual is rounded to the inputs' data type, as PyTorch's sum is, and y is the norm of the rounded one. The
backward pass adds the new residual's own gradient inside the kernel; x and residual share one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import add_layer_norm as cost
from sublight.op import Op, Plan, Provider
from sublight.ops.kernels.rows import NORM_TEST_SHAPES, random_columns, random_rows
from sublight.ops.norm import add_norm, layer_norm
from sublight.ops.norm.parts import check_width
from sublight.ops.norm.rms_norm import fake_backward
from sublight.ops.record.gradient import Gradient, vjp
from sublight.ops.record.library import Registered

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


def _backward_by_torch(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    dy, d_new_residual = grads
    bias = torch.zeros_like(saved["weight"], requires_grad=True)  # no gradient depends on its values
    args = [saved["new_residual"], saved["weight"], bias, saved["eps"]]
    dx, *columns = vjp(layer_norm.reference, args, [dy])[:3]
    return dx if d_new_residual is None else dx + d_new_residual, *columns


ADD_LAYER_BACKWARD = Registered(
    schema="add_layer_norm_backward(Tensor dy, Tensor? d_new_residual, Tensor new_residual, Tensor weight, Tensor mean,"
    " Tensor rstd) -> (Tensor dx, Tensor dw, Tensor db)",
    plan=add_norm.plan_backward,
    fake=lambda dy, d_new_residual, new_residual, weight, mean, rstd: fake_backward(new_residual, weight, center=True),
)
ADD_LAYER = Registered(
    schema="add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor y, Tensor new_residual, Tensor mean, Tensor rstd)",
    reference=reference,
    theirs="torch.add, torch.nn.functional.layer_norm",
    why_torch=lambda x, residual, weight, bias, eps: add_norm.not_ours(x, residual, weight, bias),
    plan=add_norm.plan_forward,
    fake=lambda x, residual, weight, bias, eps: add_norm.fake_forward(x, center=True),
    results=2,
    gradient=Gradient(
        by=ADD_LAYER_BACKWARD,
        saves=("new_residual", "weight", "mean", "rstd"),
        gives=(("x", "residual"), "weight", "bias"),  # one tensor for both, as PyTorch's sum gives
        without_first=lambda _, d_new_residual: (d_new_residual, d_new_residual, None, None, None),
        by_torch=_backward_by_torch,
    ),
)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = EPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(LayerNorm of x + residual, x + residual): our kernel where it wins, PyTorch's two elsewhere."""
    if weight is None or bias is None:
        return reference(x, residual, weight, bias, eps)
    if x.shape == residual.shape:
        check_width(x, weight, bias)
    return ADD_LAYER.call(x, residual, weight, bias, eps)  # type: ignore[no-any-return]


def plan(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = EPS,
) -> Plan:
    """What `add_layer_norm` runs for these arguments, and why."""
    return ADD_LAYER.decide(x, residual, weight, bias, eps)


def launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our forward kernels, whether or not they win."""
    add_norm.check(x, residual, weight, bias)
    return ADD_LAYER.by_kernels(x, residual, weight, bias, eps)[:2]  # type: ignore[no-any-return]


def launch_backward(
    dy: torch.Tensor, d_new_residual: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, *columns: torch.Tensor
) -> Inputs:
    _, new_residual, *stats = ADD_LAYER.by_kernels(x, residual, *columns, EPS)
    dx, *grads = ADD_LAYER_BACKWARD.by_kernels(dy, d_new_residual, new_residual, columns[0], *stats)
    return dx, dx, *grads


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    x, residual = (random_rows(shape, dtype, device, part) for part in (2 * seed, 2 * seed + 1))
    return x, residual, *random_columns(shape, dtype, device, seed, 2)


ADD_LAYER_NORM = Op(
    name="add_layer_norm",
    summary="x + residual, and its layer normalisation",
    reference=reference,
    call=add_layer_norm,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=add_norm.KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=add_norm.SHAPES,
    test_shapes=NORM_TEST_SHAPES[1:],  # a row of one column is PyTorch's
    library_args=lambda *inputs: (*inputs, EPS),
)
