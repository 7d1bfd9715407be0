"""The first kernel: copy. A program copies its block of elements, the last one fewer."""

from __future__ import annotations

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        return ops.find("add").inputs(shape, dtype, device, seed)[:1]

    return Problem(reference=lambda x: x.clone(), inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    moved = size_bytes(shape["numel"], dtype)
    return Cost(read_bytes=moved, write_bytes=moved)  # read x, write out


COPY = Exercise(
    name="copy",
    chapter="first",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    apart=("x",),
    sizes={"numel": (1, 4000)},
    shown={"numel": 2500},
    goal=Goal(shape={"numel": 2**24}, on_gpu={"numel": 2**26}),
)
