"""The gradient of LayerNorm's input: two sums over the row, then one pass."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    op = ops.find("layer_norm")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        x, weight, _ = op.inputs(shape, dtype, device, seed)
        grad = op.inputs(shape, dtype, device, seed + 1)[0]
        return x, weight, grad

    def reference(x: Any, weight: Any, grad: Any) -> Any:
        import torch

        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            result = op.reference(leaf, weight, torch.zeros_like(weight))
            return torch.autograd.grad(result, leaf, grad)[0]

    return Problem(reference=reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    each, row = size_bytes(shape["rows"] * shape["cols"], dtype), size_bytes(shape["cols"], dtype)
    return Cost(read_bytes=2 * each + row, write_bytes=each)  # read x, grad and weight, write dx


LAYER_NORM_BACKWARD = Exercise(
    name="layer_norm_backward",
    chapter="rows",
    problem=problem,
    cost=cost,
    arguments=("x", "weight", "grad"),
    outputs=("dx",),
    apart=("x", "grad"),
    sizes={"rows": (1, 6), "cols": (2, 1500)},
    shown={"rows": 5, "cols": 1000},
    goal=Goal(shape={"rows": 4096, "cols": 2048}, on_gpu={"rows": 16384, "cols": 2048}),
    needs=("layer_norm_by_hand",),
)
