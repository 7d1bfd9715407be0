"""On paper: the gradient of a normalised row."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.learn.record import Exercise, Problem


def problem() -> Problem:
    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        from sublight import ops

        op = ops.find("layer_norm")
        x, weight, _ = op.inputs({"rows": 1, **shape}, "float32", "cpu", seed)
        return x[0], weight, op.inputs({"rows": 1, **shape}, "float32", "cpu", seed + 1)[0][0]

    return Problem(reference=reference, inputs=inputs)


def reference(x: Any, weight: Any, grad: Any) -> Any:
    """By PyTorch's autograd."""
    import torch

    from sublight import ops

    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        result = ops.find("layer_norm").reference(leaf[None], weight, torch.zeros_like(weight))
        return torch.autograd.grad(result, leaf, grad[None])[0]


LAYER_NORM_BY_HAND = Exercise(
    name="layer_norm_by_hand",
    chapter="rows",
    problem=problem,
    cost=lambda shape, dtype: Cost(read_bytes=0, write_bytes=0),
    arguments=("x", "weight", "grad"),
    outputs=("dx",),
    sizes={"cols": (2, 60)},
    shown={"cols": 5},
    goal=None,
    needs=("layer_norm",),
    kind="paper",
    dtypes=("float32",),
)
