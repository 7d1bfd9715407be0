"""Weights of which two in four are left out: half of the bytes, and two bits a weight that say where it was."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem, rounded_once

WORD = 16  # columns that one word of places tells of


def problem() -> Problem:
    from sublight import ops

    product, sparsify = ops.find("matmul"), ops.find("sparsify_24")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        rows, cols = shape["rows"], shape["words"] * WORD
        x, _ = product.inputs({"m": 1, "n": 1, "k": cols}, dtype, device, seed)
        if device == "meta":
            values = torch.empty(rows, cols // 2, dtype=x.dtype, device=device)
            return values, torch.empty(rows, shape["words"], dtype=torch.int16, device=device), x[0]
        (weight,) = sparsify.inputs({"rows": rows, "cols": cols, "both": 0}, dtype, device, seed)
        return *sparsify.reference(weight), x[0]

    return Problem(reference=rounded_once(reference), inputs=inputs)


def reference(values: Any, places: Any, x: Any) -> Any:
    """The weight with its zeros, times x."""
    import torch

    rows, count = values.shape
    shifts = torch.arange(8, device=values.device) * 2
    near = ((places.int()[:, :, None] >> shifts) & 3).reshape(rows, count)
    col = torch.arange(count, device=values.device) // 2 * 4 + near
    weight = torch.zeros(rows, 2 * count, dtype=values.dtype, device=values.device).scatter(1, col, values)
    return weight @ x


def cost(shape: Shape, dtype: str) -> Cost:
    rows, cols = shape["rows"], shape["words"] * WORD
    read = size_bytes(rows * cols // 2, dtype) + size_bytes(rows * shape["words"], "int16") + size_bytes(cols, dtype)
    return Cost(read_bytes=read, write_bytes=size_bytes(rows, dtype))


SPARSE_24 = Exercise(
    name="sparse_24",
    chapter="products",
    problem=problem,
    cost=cost,
    arguments=("values", "places", "x"),
    outputs=("out",),
    apart=("values", "places"),
    sizes={"rows": (1, 30), "words": (1, 60)},
    shown={"rows": 20, "words": 40},
    goal=Goal(shape={"rows": 2048, "words": 256}, dtype="float16", fraction=0.4, on_gpu={"rows": 16384, "words": 256}),
    needs=("dequantize",),
    dtypes=("float16", "bfloat16"),
)
