"""LayerNorm over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias; read x, write y."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import layer_norm as cost
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

EPS = 1e-5


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return row_norm.forward(x, weight, bias, eps)[0]


def launch_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Inputs:
    _, mean, rstd = row_norm.forward(x, weight, bias, EPS)
    return row_norm.backward(dy, x, weight, mean, rstd)


def choose(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = EPS) -> Choice:
    """What `layer_norm(x, weight, bias)` runs, and why."""
    if reason := why_torch(x, weight, bias):
        return Choice(provider="torch", kernel="torch.nn.functional.layer_norm", reason=reason)
    return row_norm.choose(x)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = EPS
) -> torch.Tensor:
    """LayerNorm over the last dimension: our kernel where it wins, PyTorch's elsewhere."""
    if weight is None or bias is None or why_torch(x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    row_norm.check_width(x, weight, bias)
    return _layer_norm(x, weight, bias, eps)[0]  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # no zeros for the gradients of mean and rstd


def _backward(ctx: Any, dy: torch.Tensor, _mean: Any, _rstd: Any) -> tuple[torch.Tensor | None, ...]:
    return (*_layer_norm_backward(dy, *ctx.saved_tensors), None)


def _cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y.contiguous(), mean.flatten().float(), rstd.flatten().float()


def _cpu_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    stats = [part.to(x.dtype).view(*x.shape[:-1], 1) for part in (mean, rstd)]
    bias = torch.empty_like(weight)  # its values do not matter to any gradient
    grads = torch.ops.aten.native_layer_norm_backward(
        dy.contiguous(), x.contiguous(), x.shape[-1:], *stats, weight, bias, [True, True, True]
    )
    return tuple(grad.contiguous() for grad in grads)


_layer_norm = LIBRARY.op(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=row_norm.forward,
    fake=lambda x, weight, bias, eps: row_norm.fake_forward(x, center=True),
    backward=_backward,
    setup_context=_setup_context,
)
_layer_norm_backward = LIBRARY.op(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=row_norm.backward,
    fake=lambda dy, x, weight, mean, rstd: row_norm.fake_backward(x, weight, center=True),
)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return random_rows(shape, dtype, device, seed), *random_columns(shape, dtype, device, seed, 2)


def _liger(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Thunk:
    return partial(peer("liger_kernel.ops.layer_norm", "LigerLayerNormFunction").apply, x, weight, bias, EPS)


def _quack(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Thunk:
    # it takes fp32 weights only and has no autograd
    return partial(peer("quack.rmsnorm", "layernorm_fwd"), x, weight.detach().float(), bias.detach().float(), EPS)


LAYER_NORM = Op(
    name="layer_norm",
    summary="layer normalisation over the last dimension",
    reference=reference,
    call=layer_norm,
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
