"""Residual and RMSNorm in one pass: new_residual = x + residual, y = RMSNorm(new_residual); read both, write both.

The new residual is rounded to the inputs' data type, as PyTorch's sum is, and y is the norm of the rounded one. The
backward pass adds the new residual's own gradient inside the kernel; x and residual share one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import add_rms_norm as cost
from sublight.op import Op, Plan, Provider
from sublight.ops.kernels.rows import NORM_TEST_SHAPES, random_columns, random_rows
from sublight.ops.norm import add_norm, rms_norm
from sublight.ops.norm.parts import check_width
from sublight.ops.norm.rms_norm import fake_backward
from sublight.ops.record.gradient import Gradient, vjp
from sublight.ops.record.library import Registered, peer
from sublight.timing import Thunk

EPS = 1e-6


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    new_residual = x + residual
    return F.rms_norm(new_residual, new_residual.shape[-1:], weight, eps), new_residual


def _backward_by_torch(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    dy, d_new_residual = grads
    dx, *columns = vjp(rms_norm.reference, [saved["new_residual"], saved["weight"], saved["eps"]], [dy])[:2]
    return dx if d_new_residual is None else dx + d_new_residual, *columns


ADD_RMS_BACKWARD = Registered(
    schema="add_rms_norm_backward(Tensor dy, Tensor? d_new_residual, Tensor new_residual, Tensor weight, Tensor rstd)"
    " -> (Tensor dx, Tensor dw)",
    plan=lambda dy, d_new_residual, new_residual, weight, rstd: add_norm.plan_backward(
        dy, d_new_residual, new_residual, weight, None, rstd
    ),
    fake=lambda dy, d_new_residual, new_residual, weight, rstd: fake_backward(new_residual, weight, center=False),
)
ADD_RMS = Registered(
    schema="add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps)"
    " -> (Tensor y, Tensor new_residual, Tensor rstd)",
    reference=reference,
    theirs="torch.add, torch.nn.functional.rms_norm",
    why_torch=lambda x, residual, weight, eps: add_norm.not_ours(x, residual, weight),
    plan=lambda x, residual, weight, eps: add_norm.plan_forward(x, residual, weight, None, eps),
    fake=lambda x, residual, weight, eps: add_norm.fake_forward(x, center=False),
    results=2,
    gradient=Gradient(
        by=ADD_RMS_BACKWARD,
        saves=("new_residual", "weight", "rstd"),
        gives=(("x", "residual"), "weight"),  # one tensor for both, as PyTorch's sum gives
        without_first=lambda _, d_new_residual: (d_new_residual, d_new_residual, None, None),
        by_torch=_backward_by_torch,
    ),
)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of x + residual, x + residual): our kernel where it wins, PyTorch's two elsewhere."""
    if weight is None:
        return reference(x, residual, weight, eps)
    if x.shape == residual.shape:
        check_width(x, weight)
    return ADD_RMS.call(x, residual, weight, eps)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS) -> Plan:
    """What `add_rms_norm` runs for these arguments, and why."""
    return ADD_RMS.decide(x, residual, weight, eps)


def launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our forward kernels, whether or not they win."""
    add_norm.check(x, residual, weight)
    return ADD_RMS.by_kernels(x, residual, weight, eps)[:2]  # type: ignore[no-any-return]


def launch_backward(
    dy: torch.Tensor, d_new_residual: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, *columns: torch.Tensor
) -> Inputs:
    _, new_residual, *stats = ADD_RMS.by_kernels(x, residual, *columns, EPS)
    dx, *grads = ADD_RMS_BACKWARD.by_kernels(dy, d_new_residual, new_residual, columns[0], *stats)
    return dx, dx, *grads


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    x, residual = (random_rows(shape, dtype, device, part) for part in (2 * seed, 2 * seed + 1))
    return x, residual, *random_columns(shape, dtype, device, seed, 1)


def _liger(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Thunk:
    apply = peer("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply
    return partial(apply, x, residual, weight, EPS, 0.0, "llama", False)  # not in place: the gradient is used again


def _quack(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Thunk:
    return partial(peer("quack.rmsnorm", "rmsnorm"), x, weight, residual=residual, eps=EPS, prenorm=True)


ADD_RMS_NORM = Op(
    name="add_rms_norm",
    summary="x + residual, and its root-mean-square normalisation",
    reference=reference,
    call=add_rms_norm,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=add_norm.KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=add_norm.SHAPES,
    test_shapes=NORM_TEST_SHAPES[1:],  # a row of one column is PyTorch's
    peers={"liger": _liger, "quack": _quack},
    library_args=lambda *inputs: (*inputs, EPS),
)
