"""Rotary embedding: each pair of numbers is turned by an angle that depends on the token's position."""

from __future__ import annotations

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.learn.record import Exercise, Goal, Problem


def of_op(shape: Shape, kv_heads: int) -> Shape:
    """As the op names the dimensions; it turns queries and keys, the exercise one of them."""
    return {
        "batch": 1, "q_len": shape["tokens"], "heads": shape["heads"], "kv_heads": kv_heads,
        "head_dim": 2 * shape["half"],
    }  # fmt: skip


def problem() -> Problem:
    from sublight import ops

    op = ops.find("rope")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        x, _, cos, sin = op.inputs(of_op(shape, 1), dtype, device, seed)
        return x[0], cos, sin

    return Problem(reference=lambda x, cos, sin: op.reference(x[None], x[None], cos, sin)[0][0], inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("rope")(of_op(shape, 0), dtype, "fwd")


ROPE = Exercise(
    name="rope",
    chapter="movement",
    problem=problem,
    cost=cost,
    arguments=("x", "cos", "sin"),
    outputs=("out",),
    apart=("x", "cos", "sin"),
    sizes={"tokens": (1, 9), "heads": (1, 5), "half": (1, 70)},
    shown={"tokens": 6, "heads": 4, "half": 32},
    goal=Goal(shape={"tokens": 4096, "heads": 32, "half": 64}, on_gpu={"tokens": 16384, "heads": 32, "half": 64}),
    needs=("add_2d",),
)
