"""Residual and RMSNorm in one pass: new_residual = x + residual, y = RMSNorm(new_residual); read both, write both.

The new residual is rounded to the inputs' data type, as PyTorch's sum is, and y is the norm of the rounded one. The
backward pass adds the new residual's own gradient inside the kernel; x and residual share one gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import add_rms_norm as cost
from sublight.op import Choice, Op
from sublight.ops.kernels.rows import NORM_TEST_SHAPES, random_columns, random_rows
from sublight.ops.norm import add_norm, row_norm
from sublight.ops.record.library import LIBRARY, peer
from sublight.timing import Thunk

EPS = 1e-6


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    new_residual = x + residual
    return F.rms_norm(new_residual, new_residual.shape[-1:], weight, eps), new_residual


def launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norm.forward(x, residual, weight, None, eps)[:2]


def launch_backward(
    dy: torch.Tensor, d_new_residual: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> Inputs:
    _, new_residual, mean, rstd = add_norm.forward(x, residual, weight, None, EPS)
    dx, dw, _ = add_norm.backward(dy, d_new_residual, new_residual, weight, mean, rstd)
    return dx, dx, dw


def choose(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float = EPS) -> Choice:
    """What `add_rms_norm(x, residual, weight)` runs, and why."""
    if reason := add_norm.not_ours(x, residual, weight):
        return Choice(provider="torch", kernel="torch.add, torch.nn.functional.rms_norm", reason=reason)
    return add_norm.choose(x)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of x + residual, x + residual): our kernel where it wins, PyTorch's two elsewhere."""
    if weight is None or add_norm.not_ours(x, residual, weight):
        return reference(x, residual, weight, eps)
    row_norm.check_width(x, weight)
    return _add_rms_norm(x, residual, weight, eps)[:2]  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, new_residual, rstd = output
    ctx.save_for_backward(new_residual, inputs[2], rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)  # no zeros for the gradient of rstd, nor of an output that nobody used


def _backward(
    ctx: Any, dy: torch.Tensor | None, d_new_residual: torch.Tensor | None, _rstd: Any
) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return d_new_residual, d_new_residual, None, None
    dx, dw = _add_rms_norm_backward(dy, d_new_residual, *ctx.saved_tensors)
    return dx, dx, dw, None  # one tensor for both, as PyTorch's own sum gives


def _cpu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    new_residual = (x + residual).contiguous()
    y, rstd = torch.ops.sublight.rms_norm(new_residual, weight, eps)
    return y, new_residual, rstd


def _cpu_backward(
    dy: torch.Tensor,
    d_new_residual: torch.Tensor | None,
    new_residual: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw = torch.ops.sublight.rms_norm_backward(dy, new_residual, weight, rstd)
    return dx if d_new_residual is None else (dx + d_new_residual).contiguous(), dw


def _cuda(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    y, new_residual, _, rstd = add_norm.forward(x, residual, weight, None, eps)
    return y, new_residual, rstd


def _cuda_backward(
    dy: torch.Tensor,
    d_new_residual: torch.Tensor | None,
    new_residual: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norm.backward(dy, d_new_residual, new_residual, weight, rstd.new_empty(0), rstd)[:2]


_add_rms_norm = LIBRARY.op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=lambda x, residual, weight, eps: [add_norm.fake_forward(x, center=False)[i] for i in (0, 1, 3)],
    backward=_backward,
    setup_context=_setup_context,
)
_add_rms_norm_backward = LIBRARY.op(
    "add_rms_norm_backward(Tensor dy, Tensor? d_new_residual, Tensor new_residual, Tensor weight, Tensor rstd)"
    " -> (Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=lambda dy, d_new_residual, new_residual, weight, rstd: row_norm.fake_backward(
        new_residual, weight, center=False
    )[:2],
)


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
    launch=launch,
    launch_backward=launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=add_norm.KERNELS,
    shapes=add_norm.SHAPES,
    test_shapes=NORM_TEST_SHAPES[1:],  # a row of one column is PyTorch's
    peers={"liger": _liger, "quack": _quack},
    library_args=lambda *inputs: (*inputs, EPS),
)
