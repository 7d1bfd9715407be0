"""On paper: the gradients of attention for one query."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.learn.record import Exercise, Problem


def problem() -> Problem:
    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        from sublight.learn.exercises.attention.shared import problem as attention_problem

        sizes = {"heads": 1, "q_len": 1, "kv_len": shape["keys"], "head_dim": shape["head_dim"]}
        q, k, v = attention_problem().inputs(sizes, "float32", "cpu", seed)
        grad = attention_problem().inputs(sizes, "float32", "cpu", seed + 1)[0]
        return q[0, 0], k[0], v[0], grad[0, 0]

    return Problem(reference=reference, inputs=inputs)


def reference(q: Any, k: Any, v: Any, grad: Any) -> Any:
    """By PyTorch's autograd; without the scale, which is one factor more."""
    import torch

    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        result = torch.softmax(leaves[1] @ leaves[0], 0) @ leaves[2]
        return torch.autograd.grad(result, leaves, grad)


ATTENTION_BY_HAND = Exercise(
    name="attention_by_hand",
    chapter="attention",
    problem=problem,
    cost=lambda shape, dtype: Cost(read_bytes=0, write_bytes=0),
    arguments=("q", "k", "v", "grad"),
    outputs=("dq", "dk", "dv"),
    sizes={"keys": (1, 12), "head_dim": (1, 8)},
    shown={"keys": 3, "head_dim": 2},
    goal=None,
    needs=("online_attention", "layer_norm_by_hand"),
    kind="paper",
    dtypes=("float32",),
)
