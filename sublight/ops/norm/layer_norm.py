"""LayerNorm over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias; read x, write y.

The kernels are RMSNorm's (`rms_norm.py`, where they are explained) with `CENTER` set.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import layer_norm as cost
from sublight.op import Op, Plan, Provider
from sublight.ops.kernels.rows import (
    NORM_TEST_SHAPES,
    NORM_WIDTHS,
    random_columns,
    random_rows,
    row_shapes,
    why_torch,
)
from sublight.ops.norm.parts import check_width
from sublight.ops.norm.rms_norm import (
    KERNELS,
    fake_backward,
    fake_forward,
    plan_backward,
    plan_forward,
)
from sublight.ops.record.gradient import Gradient, vjp
from sublight.ops.record.library import Registered, peer
from sublight.timing import Thunk

EPS = 1e-5


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = EPS
) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _backward_by_torch(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    bias = torch.zeros_like(saved["weight"], requires_grad=True)  # no gradient depends on its values
    return vjp(reference, [saved["x"], saved["weight"], bias, saved["eps"]], grads)[:3]


LAYER_BACKWARD = Registered(
    schema="layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor dx, Tensor dw, Tensor db)",
    plan=plan_backward,
    fake=lambda dy, x, weight, mean, rstd: fake_backward(x, weight, center=True),
)
LAYER = Registered(
    schema="layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    reference=reference,
    theirs="torch.nn.functional.layer_norm",
    why_torch=lambda x, weight, bias, eps: why_torch(x, weight, bias),
    plan=plan_forward,
    plan_results=partial(plan_forward, stats=False),
    fake=lambda x, weight, bias, eps: fake_forward(x, center=True),
    results=1,
    gradient=Gradient(
        by=LAYER_BACKWARD,
        saves=("x", "weight", "mean", "rstd"),
        gives=("x", "weight", "bias"),
        by_torch=_backward_by_torch,
    ),
)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = EPS
) -> torch.Tensor:
    """LayerNorm over the last dimension: our kernel where it wins, PyTorch's elsewhere."""
    if weight is None or bias is None or weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        return reference(x, weight, bias, eps)  # PyTorch's own, or its own complaint
    return LAYER.call(x, weight, bias, eps)  # type: ignore[no-any-return]


def plan(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = EPS
) -> Plan:
    """What `layer_norm(x, weight, bias, eps)` runs, and why."""
    return LAYER.decide(x, weight, bias, eps)


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """Our forward kernels, whether or not they win."""
    check_width(x, weight, bias)
    return LAYER.by_kernels(x, weight, bias, eps)[0]  # type: ignore[no-any-return]


def launch_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Inputs:
    _, mean, rstd = LAYER.by_kernels(x, weight, bias, EPS)
    return LAYER_BACKWARD.by_kernels(dy, x, weight, mean, rstd)  # type: ignore[no-any-return]


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
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=row_shapes(NORM_WIDTHS),
    test_shapes=NORM_TEST_SHAPES,
    peers={"liger": _liger, "quack": _quack},
    library_args=lambda *inputs: (*inputs, EPS),
)
