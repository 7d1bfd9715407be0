"""A vector times weights of 4 bits, which become numbers inside of the loop."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem, rounded_once

GROUP, EACH = 128, 8  # weights that share a scale, and weights in a word of 32 bits


def problem() -> Problem:
    from sublight import ops

    op = ops.find("matmul")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        rows, groups = shape["rows"], shape["groups"]
        x, _ = op.inputs({"m": 1, "n": 1, "k": groups * GROUP}, dtype, device, seed)
        luck = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        size = (rows, groups * GROUP // EACH)
        packed = torch.empty(size, dtype=torch.int32, device=device)
        if device != "meta":
            packed.random_(-(2**31), 2**31 - 1, generator=luck)
        scales = torch.rand(rows, groups, generator=luck, device=device) * 0.1 + 0.01
        return x[0], packed, scales.to(x.dtype)

    return Problem(reference=rounded_once(reference), inputs=inputs)


def reference(x: Any, packed: Any, scales: Any) -> Any:
    import torch

    shifts = torch.arange(EACH, device=packed.device)[:, None] * 4
    words = packed.view(packed.shape[0], -1, 1, GROUP // EACH)  # place after place of all words of a group
    codes = ((words >> shifts) & 15).reshape(packed.shape[0], -1)
    weight = (codes.to(scales.dtype) - 8) * scales.repeat_interleave(GROUP, 1)
    return weight @ x


def cost(shape: Shape, dtype: str) -> Cost:
    rows, weights = shape["rows"], shape["rows"] * shape["groups"] * GROUP
    read = size_bytes(weights // EACH, "int32") + size_bytes(rows * shape["groups"], dtype)
    return Cost(read_bytes=read + size_bytes(shape["groups"] * GROUP, dtype), write_bytes=size_bytes(rows, dtype))


DEQUANTIZE = Exercise(
    name="dequantize",
    chapter="products",
    problem=problem,
    cost=cost,
    arguments=("x", "packed", "scales"),
    outputs=("out",),
    apart=("packed", "scales"),
    sizes={"rows": (1, 40), "groups": (1, 7)},
    shown={"rows": 20, "groups": 5},
    goal=Goal(shape={"rows": 8192, "groups": 32}, dtype="float16", fraction=0.4, on_gpu={"rows": 65536, "groups": 32}),
    needs=("gemv",),
    dtypes=("float16", "bfloat16"),
)
