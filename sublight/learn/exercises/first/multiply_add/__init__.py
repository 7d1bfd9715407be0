"""x * y + z in one kernel: what PyTorch does in two passes over memory, done in one."""

from __future__ import annotations

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        drawn = ops.find("add").inputs({"numel": 3 * shape["numel"]}, dtype, device, seed)[0]
        return tuple(drawn.view(3, -1).unbind())

    return Problem(reference=lambda x, y, z: x * y + z, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    each = size_bytes(shape["numel"], dtype)
    return Cost(read_bytes=3 * each, write_bytes=each)  # read x, y and z, write out


MULTIPLY_ADD = Exercise(
    name="multiply_add",
    chapter="first",
    problem=problem,
    cost=cost,
    arguments=("x", "y", "z"),
    outputs=("out",),
    apart=("x", "y", "z"),
    sizes={"numel": (1, 4000)},
    shown={"numel": 2500},
    goal=Goal(shape={"numel": 2**24}, on_gpu={"numel": 2**26}),
    needs=("add",),
)
