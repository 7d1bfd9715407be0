"""AdamW on many tensors at once, as a function: parameters and averages are updated in place.

`AdamW` in optimizer.py is what a training loop wants; this is the op beneath it, with its record. The kernels and their
plan are in update.py. A plan depends on data types, sizes and alignment; learning rates and the like change from step
to step, and are numbers that launches get by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sublight.backend.device import why_not_here
from sublight.backend.jit import AVAILABLE
from sublight.backend.private import foreach_mul, fused_adamw_
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.optimizer import adamw as cost
from sublight.cost.optimizer import adamw_clipped as clipped_cost
from sublight.errors import BadInput
from sublight.op import Op, Plan, Provider
from sublight.ops.adamw.tables import batches_of, check, groups_of, put_back, together
from sublight.ops.adamw.update import (
    CLIP_EPS,
    CLIPPED_KERNELS,
    KERNELS,
    Settings,
    Tensors,
    plan_tasks,
    run,
    task_of,
)
from sublight.ops.kernels.rows import DTYPES, generator_for
from sublight.ops.record.library import Registered

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
            grads = foreach_mul(grads, clip)
        fused_adamw_(
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
    """Why an optimizer leaves these tensors, the step last, to PyTorch; on a CPU it does even where kernels are
    interpreted, which is for tests of the kernels alone."""
    if tensors[0].device.type == "cpu":
        return "our kernels are for GPUs, this is on the cpu"
    return _why_torch(tensors)


def _why_torch(tensors: Tensors) -> str:
    """Why these tensors, the step last, go to PyTorch; empty where our kernels take them."""
    *others, step = tensors
    if not AVAILABLE:
        return "triton is not installed"
    if reason := why_not_here(others[0]):
        return reason
    if any(x.device != others[0].device for x in tensors):
        return "the tensors are on several devices"
    if step.dtype != torch.float32 or any(x.dtype not in DTYPES for x in others):
        return "no kernel of ours for these data types"
    return ""


def plan_update(step: torch.Tensor, p: Tensors, g: Tensors, m: Tensors, v: Tensors, *numbers: Any) -> Plan:
    """One launch for the tensors of one kind, and before it a small one for what depends on the step."""
    fours = list(zip(p, g, m, v, strict=True))
    check(fours)
    settings = settings_of(numbers)
    tasks = tuple(task_of(group, settings) for group in groups_of(fours))
    return plan_tasks(tasks, clips=bool(settings.max_norm), increments=False)


def run_update(
    plan: Plan, step: torch.Tensor, p: Tensors, g: Tensors, m: Tensors, v: Tensors, *numbers: Any
) -> torch.Tensor:
    """The plan's launches; what does not lie in one order is copied first, and back afterwards."""
    fours = list(zip(p, g, m, v, strict=True))
    own = together(fours)
    settings = settings_of(numbers)
    norm = run(plan, [(batch, settings) for batch in batches_of([(*four, step) for four in own])])
    put_back(fours, own)
    return norm


NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "max_norm")  # as the schema has them


def settings_of(numbers: tuple[Any, ...]) -> Settings:
    return Settings(**dict(zip(NUMBERS, numbers, strict=True)))


def numbers_of(settings: Settings) -> tuple[Any, ...]:
    return tuple([getattr(settings, name) for name in NUMBERS])


def _register(name: str) -> Registered:
    return Registered(
        schema=f"{name}(Tensor step, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
        "Tensor(c!)[] exp_avg_sqs, float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize, "
        "float max_norm) -> Tensor norm",
        plan=plan_update,
        launch=run_update,
        fake=lambda step, *rest: step.new_empty((), dtype=torch.float32),
        reference=lambda step, p, g, m, v, *numbers: reference_update(p, g, m, v, step, settings_of(numbers)),
        theirs="torch.optim.AdamW's formula, tensor by tensor",
        why_torch=lambda step, p, g, m, v, *numbers: _why_torch((*p, *g, *m, *v, step)),
    )


_adamw, _adamw_clipped = _register("adamw"), _register("adamw_clipped")


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
    return _by(_adamw.call, tensors, settings)


def adamw_clipped(*tensors: torch.Tensor, max_norm: float = 1.0, **settings: Any) -> tuple[torch.Tensor, ...]:
    """`adamw` of gradients scaled down to `max_norm`, without the host ever seeing their norm."""
    return adamw(*tensors, max_norm=max_norm, **settings)


def plan(*tensors: torch.Tensor) -> Plan:
    """What `adamw(*tensors)` runs, and why."""
    return _adamw.decide(*_library_args(tensors, Settings()))


def plan_clipped(*tensors: torch.Tensor) -> Plan:
    """What `adamw_clipped(*tensors)` runs, and why."""
    return _adamw.decide(*_library_args(tensors, CLIPPED))


def launch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Our kernels, whether or not they win."""
    return _by(_adamw.by_kernels, tensors, Settings())


def launch_clipped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _by(_adamw.by_kernels, tensors, CLIPPED)


def _by(call: Callable[..., Any], tensors: Tensors, settings: Settings) -> tuple[torch.Tensor, ...]:
    step, params, grads, exp_avgs, exp_avg_sqs, *numbers = _library_args(tensors, settings)
    with torch.no_grad():
        call(step, params, grads, exp_avgs, exp_avg_sqs, *numbers)
    return *params, *exp_avgs, *exp_avg_sqs


def _library_args(tensors: Tensors, settings: Settings) -> tuple[Any, ...]:
    *four, step = split(tensors)
    return step, *four, *numbers_of(settings)


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
    plan=plan,
    providers={"sublight": Provider(launch=launch, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=_shapes((1, 2**28), (300, 2**20), (100, 1_000_003), (300, 4096), (1, 2**24), (1, 2**20), (1, 2**16)),
    test_shapes=_shapes((1, 1), (3, 127), (2, 512), (5, 513), (2, 1025), (7, 2048), (3, 3000)),
    directions=("fwd",),
    wrt=(),
    writes=(0,),  # and the other parameters and averages: how many there are is in the shape
    batch="",
    library_args=lambda *inputs: _library_args(inputs, Settings()),
)
ADAMW_CLIPPED = Op(
    name="adamw_clipped",
    summary="AdamW's update with the gradients clipped by their norm over all tensors, in place",
    reference=clipped_reference,
    call=adamw_clipped,
    plan=plan_clipped,
    providers={"sublight": Provider(launch=launch_clipped, kernels=CLIPPED_KERNELS)},
    inputs=inputs,
    cost=clipped_cost,
    shapes=_shapes((1, 2**28), (300, 2**20), (100, 1_000_003), (1, 2**20)),
    test_shapes=_shapes((1, 1), (3, 127), (2, 512), (5, 513), (7, 2048), (3, 3000)),
    directions=("fwd",),
    wrt=(),
    writes=(0,),
    batch="",
    library_args=lambda *inputs: _library_args(inputs, CLIPPED),
)
