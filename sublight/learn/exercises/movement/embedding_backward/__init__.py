"""The gradient of an embedding: rows are added where their ids say, and several may meet in one."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    op = ops.find("embedding")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        ids, weight = op.inputs(shape, dtype, device, seed)
        luck = None if device == "meta" else torch.Generator(device).manual_seed(seed + 1)
        grad = torch.randn(shape["rows"], shape["cols"], generator=luck, device=device, dtype=weight.dtype)
        return ids, grad, weight

    def reference(ids: Any, grad: Any, weight: Any) -> Any:
        import torch

        with torch.enable_grad():
            leaf = weight.detach().requires_grad_()
            return torch.autograd.grad(op.reference(ids, leaf), leaf, grad)[0]

    return Problem(reference=reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    read = size_bytes(shape["rows"], "int64") + size_bytes(shape["rows"] * shape["cols"], dtype)
    return Cost(read_bytes=read, write_bytes=size_bytes(shape["vocab"] * shape["cols"], dtype))  # ids, grad; out


EMBEDDING_BACKWARD = Exercise(
    name="embedding_backward",
    chapter="movement",
    problem=problem,
    cost=cost,
    arguments=("ids", "grad", "weight"),
    outputs=("out",),
    sizes={"rows": (1, 20), "cols": (1, 300), "vocab": (1, 12)},
    shown={"rows": 16, "cols": 256, "vocab": 10},
    goal=Goal(
        shape={"rows": 256, "cols": 4096, "vocab": 256},
        fraction=0.6,
        on_gpu={"rows": 2048, "cols": 4096, "vocab": 16384},
    ),
    needs=("permute_rows",),
    dtypes=("float32",),
)
