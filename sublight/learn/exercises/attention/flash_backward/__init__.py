"""The gradients of attention: scores are computed again, tile by tile, in two launches that share nothing."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.learn.exercises.attention.shared import of_op, weights_of
from sublight.learn.exercises.attention.shared import problem as attention_problem
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    plain = attention_problem()

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        q, k, v = plain.inputs(shape, dtype, device, seed)
        grad = plain.inputs(shape, dtype, device, seed + 1)[0]
        weights, log_sum = weights_of(q, k, causal=False)
        wide = weights.dtype
        delta = ((weights @ v.to(wide)) * grad.to(wide)).sum(-1)
        return q, k, v, grad, log_sum, delta

    return Problem(reference=reference, inputs=inputs)


def reference(q: Any, k: Any, v: Any, grad: Any, log_sum: Any, delta: Any) -> Any:
    """The formulas of the page; of 16-bit inputs weights and their gradients are rounded before a product."""
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    kind, (q_, k_, v_, g_) = q.dtype, (x.to(wide) for x in (q, k, v, grad))
    scale = q.shape[-1] ** -0.5
    weights = torch.exp(q_ @ k_.transpose(-1, -2) * scale - log_sum.to(wide)[..., None])
    d_scores = weights * (g_ @ v_.transpose(-1, -2) - delta.to(wide)[..., None])
    weights, d_scores = weights.to(kind).to(wide), d_scores.to(kind).to(wide)
    results = (d_scores @ k_ * scale, d_scores.transpose(-1, -2) @ q_ * scale, weights.transpose(-1, -2) @ g_)
    return tuple(x.to(kind) for x in results)


def cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("attention")(of_op(shape, causal=False), dtype, "bwd")


FLASH_BACKWARD = Exercise(
    name="flash_backward",
    chapter="attention",
    problem=problem,
    cost=cost,
    arguments=("q", "k", "v", "grad", "log_sum", "delta"),
    outputs=("dq", "dk", "dv"),
    apart=("q", "k", "v", "grad", "log_sum", "delta"),
    sizes={"heads": (1, 2), "q_len": (1, 150), "head_dim": (32, 32)},
    shown={"heads": 1, "q_len": 100, "head_dim": 32},
    goal=Goal(
        shape={"heads": 16, "q_len": 512, "head_dim": 64},
        dtype="float16",
        fraction=0.25,
        on_gpu={"heads": 16, "q_len": 4096, "head_dim": 64},
    ),
    needs=("flash_attention", "attention_by_hand"),
    dtypes=("float16", "bfloat16"),
)
