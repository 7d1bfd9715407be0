"""A product with a long k and a small result: k is shared out among programs, which add their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sublight.cost import Cost, Shape, size_bytes
from sublight.cost import find as find_cost
from sublight.learn.record import Exercise, Goal, problem_of


def _in_float32(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The result stays in float32, since that is what programs add to."""

    def call(a: Any, b: Any) -> Any:
        import torch

        return reference(a, b) if a.dtype == torch.float64 else reference(a.float(), b.float())

    return call


def cost(shape: Shape, dtype: str) -> Cost:
    product, result = find_cost("matmul")(shape, dtype, "fwd"), shape["m"] * shape["n"]
    return Cost(read_bytes=product.read_bytes, write_bytes=size_bytes(result, "float32"), flops=product.flops)


SPLIT_K = Exercise(
    name="split_k",
    chapter="products",
    problem=partial(problem_of, "matmul", around=_in_float32),
    cost=cost,
    arguments=("a", "b"),
    outputs=("out",),
    sizes={"m": (1, 40), "n": (1, 90), "k": (1, 900)},
    shown={"m": 16, "n": 64, "k": 700},
    goal=Goal(
        shape={"m": 32, "n": 128, "k": 16384}, dtype="float16", fraction=0.4, on_gpu={"m": 32, "n": 128, "k": 2**20}
    ),
    needs=("matmul", "embedding_backward"),
    dtypes=("float16", "bfloat16"),
)
