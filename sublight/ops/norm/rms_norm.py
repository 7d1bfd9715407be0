"""RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) * weight; read x, write y."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import rms_norm as cost
from sublight.op import Choice, Op
from sublight.ops.kernels.rows import (
    NORM_TEST_SHAPES,
    NORM_WIDTHS,
    random_columns,
    random_rows,
    row_shapes,
    why_torch,
)
from sublight.ops.norm import row_norm
from sublight.ops.record.library import LIBRARY, peer
from sublight.timing import Thunk

EPS = 1e-6


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def launch(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return row_norm.forward(x, weight, None, eps)[0]


def launch_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Inputs:
    _, mean, rstd = row_norm.forward(x, weight, None, EPS)
    return row_norm.backward(dy, x, weight, mean, rstd)[:2]


def choose(x: torch.Tensor, weight: torch.Tensor | None, eps: float = EPS) -> Choice:
    """What `rms_norm(x, weight)` runs, and why."""
    if reason := why_torch(x, weight):
        return Choice(provider="torch", kernel="torch.nn.functional.rms_norm", reason=reason)
    return row_norm.choose(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS) -> torch.Tensor:
    """RMSNorm over the last dimension: our kernel where it wins, PyTorch's elsewhere."""
    if weight is None or why_torch(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    row_norm.check_width(x, weight)
    return _rms_norm(x, weight, eps)[0]  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient of rstd


def _backward(ctx: Any, dy: torch.Tensor, _rstd: Any) -> tuple[torch.Tensor | None, ...]:
    return (*_rms_norm_backward(dy, *ctx.saved_tensors), None)


def _cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = (x.float().square().mean(-1) + eps).rsqrt().flatten()
    return reference(x, weight, eps).contiguous(), rstd


def _cpu_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rstd.view(*x.shape[:-1], 1)
    normal, g = x.float() * scale, dy.float() * weight.float()
    dx = (g - normal * (g * normal).mean(-1, keepdim=True)) * scale
    dw = (dy.float() * normal).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype).contiguous(), dw.to(weight.dtype)


def _cuda(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = row_norm.forward(x, weight, None, eps)
    return y, rstd


def _cuda_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw, _ = row_norm.backward(dy, x, weight, rstd.new_empty(0), rstd)
    return dx, dw


_rms_norm = LIBRARY.op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=lambda x, weight, eps: row_norm.fake_forward(x, center=False)[::2],
    backward=_backward,
    setup_context=_setup_context,
)
_rms_norm_backward = LIBRARY.op(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=lambda dy, x, weight, rstd: row_norm.fake_backward(x, weight, center=False)[:2],
)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return random_rows(shape, dtype, device, seed), *random_columns(shape, dtype, device, seed, 1)


def _liger(x: torch.Tensor, weight: torch.Tensor) -> Thunk:
    apply = peer("liger_kernel.ops.rms_norm", "LigerRMSNormFunction").apply
    return partial(apply, x, weight, EPS, 0.0, "llama", False)  # not in place: the gradient is used again


def _quack(x: torch.Tensor, weight: torch.Tensor) -> Thunk:
    return partial(peer("quack.rmsnorm", "rmsnorm"), x, weight, eps=EPS)


RMS_NORM = Op(
    name="rms_norm",
    summary="root-mean-square normalisation over the last dimension",
    reference=reference,
    call=rms_norm,
    launch=launch,
    launch_backward=launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=row_norm.KERNELS,
    shapes=row_shapes(NORM_WIDTHS),
    test_shapes=NORM_TEST_SHAPES,
    peers={"liger": _liger, "quack": _quack},
    library_args=lambda *inputs: (*inputs, EPS),
)
