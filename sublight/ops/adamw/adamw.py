"""AdamW on many tensors at once, as a function: parameters and averages are updated in place.

`AdamW` in adamw_optimizer.py is what a training loop wants; this is the op beneath it, with its record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sublight.backend.jit import AVAILABLE
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.optimizer import adamw as cost
from sublight.cost.optimizer import adamw_clipped as clipped_cost
from sublight.errors import BadInput
from sublight.op import Choice, Op
from sublight.ops.adamw.update import CLIP_EPS, CLIPPED_KERNELS, KERNELS, Settings, Tensors, launch_update
from sublight.ops.kernels.rows import DTYPES, generator_for
from sublight.ops.record.library import LIBRARY

CLIPPED = Settings(max_norm=1.0)


def reference(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _reference(tensors, Settings())


def clipped_reference(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _reference(tensors, CLIPPED)


def _reference(tensors: Tensors, s: Settings) -> tuple[torch.Tensor, ...]:
    """PyTorch's fused kernel where it has one for these data types, else its formula."""
    params, grads, exp_avgs, exp_avg_sqs, step = split(tensors)
    one_kind = all(x.dtype == params[0].dtype for x in (*grads, *exp_avgs))
    if one_kind and params[0].is_cuda and not torch.compiler.is_compiling():
        if s.max_norm:
            clip = (s.max_norm / (_norm(grads) + CLIP_EPS)).clamp(max=1.0)
            grads = list(torch._foreach_mul(grads, clip))
        torch._fused_adamw_(
            params, grads, exp_avgs, exp_avg_sqs, [], [step.float()] * len(params), amsgrad=False, maximize=False,
            lr=s.lr, beta1=s.beta1, beta2=s.beta2, weight_decay=s.weight_decay, eps=s.eps,
        )  # fmt: skip
    else:
        reference_update(params, grads, exp_avgs, exp_avg_sqs, step, s)
    return *params, *exp_avgs, *exp_avg_sqs


def _norm(grads: Tensors) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(g, dtype=_wide(g)) for g in grads]
    return torch.linalg.vector_norm(torch.stack(norms))  # type: ignore[no-any-return]


def reference_update(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, step: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """torch.optim's single-tensor formula, in place; gives the gradients' norm, if it is clipped (else 0)."""
    norm, clip = step.new_zeros((), dtype=torch.float32), None
    if settings.max_norm:
        norm = _norm(grads)
        clip = (settings.max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
    bias1, bias2 = (1 - beta ** step.double() for beta in (settings.beta1, settings.beta2))
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        g = g.to(m.dtype) if clip is None else (g * clip.to(_wide(g))).to(m.dtype)
        g = -g if settings.maximize else g
        p.mul_(1 - settings.lr * settings.weight_decay)
        m.lerp_(g, 1 - settings.beta1)
        v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
        denominator = (v.sqrt() / bias2.sqrt().to(_wide(v))).add_(settings.eps)
        p.sub_(m / denominator * (settings.lr / bias1).to(_wide(m)))
    return norm.float()


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def launch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Our kernels, whatever `choose` would say."""
    return _launch(tensors, Settings())


def clipped_launch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _launch(tensors, CLIPPED)


def _launch(tensors: Tensors, settings: Settings) -> tuple[torch.Tensor, ...]:
    params, grads, exp_avgs, exp_avg_sqs, step = split(tensors)
    launch_update(params, grads, exp_avgs, exp_avg_sqs, step, settings)
    return *params, *exp_avgs, *exp_avg_sqs


def split(tensors: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor],
                                     torch.Tensor]:  # fmt: skip
    """Parameters, gradients, averages, averages of squares, as many of each, and the step."""
    count, rest = divmod(len(tensors) - 1, 4)
    if count < 1 or rest:
        raise BadInput(
            f"{len(tensors)} tensors: give all parameters, then as many gradients, averages and averages of squares, "
            "then the step"
        )
    own = list(tensors)
    return own[:count], own[count : 2 * count], own[2 * count : 3 * count], own[3 * count : 4 * count], own[-1]


def why_torch(tensors: Tensors) -> str:
    """Why these tensors, the step last, go to PyTorch; empty where our kernels take them."""
    *others, step = tensors
    if not AVAILABLE:
        return "triton is not installed"
    if others[0].device.type != "cuda":
        return f"our kernels are for GPUs, this is on the {others[0].device.type}"
    if any(x.device != others[0].device for x in tensors):
        return "the tensors are on several devices"
    if step.dtype != torch.float32 or any(x.dtype not in DTYPES for x in others):
        return "no kernel of ours for these data types"
    return ""


def choose(*tensors: torch.Tensor) -> Choice:
    """What `adamw(*tensors)` runs, and why."""
    if reason := why_torch(tensors):
        return Choice(provider="torch", kernel="torch._fused_adamw_", reason=reason)
    return Choice(provider="sublight", kernel="_update_kernel", reason="all tensors in one launch")


def adamw(
    *tensors: torch.Tensor,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    max_norm: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """One AdamW step in place: all parameters, then their gradients, averages, averages of squares, then the step.

    The step is an fp32 tensor of one element, the number of this update, from 1. With `max_norm` the gradients are
    scaled so that their norm, over all tensors, does not pass it. Gives the parameters and the averages.
    """
    settings = Settings(
        lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay, maximize=maximize, max_norm=max_norm
    )
    params, grads, exp_avgs, exp_avg_sqs, step = split(tensors)
    with torch.no_grad():
        if why_torch(tensors) and any(x.device.type != "cpu" for x in tensors):  # for the CPU it is registered too
            reference_update(params, grads, exp_avgs, exp_avg_sqs, step, settings)
        else:
            _adamw(step, params, grads, exp_avgs, exp_avg_sqs, *_numbers(settings))
    return *params, *exp_avgs, *exp_avg_sqs


def adamw_clipped(*tensors: torch.Tensor, max_norm: float = 1.0, **settings: Any) -> tuple[torch.Tensor, ...]:
    """`adamw` of gradients scaled down to `max_norm`, without the host ever seeing their norm."""
    return adamw(*tensors, max_norm=max_norm, **settings)


def _numbers(s: Settings) -> tuple[Any, ...]:
    return s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.maximize, s.max_norm


def _by(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(step: torch.Tensor, p: Tensors, g: Tensors, m: Tensors, v: Tensors, *numbers: Any) -> torch.Tensor:
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "max_norm")
        return run(p, g, m, v, step, Settings(**dict(zip(names, numbers, strict=True))))

    return call


def _register(name: str) -> Callable[..., Any]:
    return LIBRARY.op(
        f"{name}(Tensor step, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
        " float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize, float max_norm) -> Tensor",
        cpu=_by(reference_update),
        cuda=_by(launch_update),
        fake=lambda step, *rest: step.new_empty((), dtype=torch.float32),
    )


_adamw, _adamw_clipped = _register("adamw"), _register("adamw_clipped")


def _library_args(tensors: Tensors, settings: Settings) -> tuple[Any, ...]:
    *four, step = split(tensors)
    return step, *four, *_numbers(settings)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Parameters and gradients of the data type, averages in fp32; matrices where the number of elements is even."""
    generator = generator_for(device, seed)
    count, numel, kind = shape["tensors"], shape["numel"], getattr(torch, dtype)
    size = (2, numel // 2) if numel % 2 == 0 else (numel,)

    def random(scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(scale) for _ in range(count)]

    params, grads, exp_avgs = random(0.02, kind), random(1e-2, kind), random(1e-3, torch.float32)
    exp_avg_sqs = [x.square_() for x in random(1e-2, torch.float32)]
    return *params, *grads, *exp_avgs, *exp_avg_sqs, torch.full((), 7.0, device=device)


def _shapes(*sizes: tuple[int, int]) -> tuple[Shape, ...]:
    return tuple({"tensors": tensors, "numel": numel} for tensors, numel in sizes)


ADAMW = Op(
    name="adamw",
    summary="AdamW's update of many tensors in one launch, in place",
    reference=reference,
    call=adamw,
    launch=launch,
    launch_backward=None,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=KERNELS,
    shapes=_shapes((1, 2**28), (300, 2**20), (100, 1_000_003), (300, 4096), (1, 2**24), (1, 2**20), (1, 2**16)),
    test_shapes=_shapes((1, 1), (3, 127), (2, 512), (5, 513), (2, 1025), (7, 2048), (3, 3000)),
    directions=("fwd",),
    wrt=(),
    writes=(0,),  # and the other parameters and averages: how many there are is in the shape
    library_args=lambda *inputs: _library_args(inputs, Settings()),
)
ADAMW_CLIPPED = Op(
    name="adamw_clipped",
    summary="AdamW's update with the gradients clipped by their norm over all tensors, in place",
    reference=clipped_reference,
    call=adamw_clipped,
    launch=clipped_launch,
    launch_backward=None,
    choose=choose,
    inputs=inputs,
    cost=clipped_cost,
    kernels=CLIPPED_KERNELS,
    shapes=_shapes((1, 2**28), (300, 2**20), (100, 1_000_003), (1, 2**20)),
    test_shapes=_shapes((1, 1), (3, 127), (2, 512), (5, 513), (7, 2048), (3, 3000)),
    directions=("fwd",),
    wrt=(),
    writes=(0,),
    library_args=lambda *inputs: _library_args(inputs, CLIPPED),
)
