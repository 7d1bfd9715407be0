"""One op of a step, and the products that most of them are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sublight.cost import matmul
from sublight.cost.dtypes import find_dtype, matmul_limit
from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import Tensor, dense
from sublight.predict.step import Step

Kind = Literal["product", "attention", "stream", "link"]
GROUP = 128  # weights of fewer than eight bits share a 16-bit scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One op of the step. `shape` has what its time depends on; `cost` is of one run."""

    name: str
    op: str  # the name of its cost
    kind: Kind
    shape: Shape
    dtype: str
    direction: Direction = "fwd"
    count: int
    cost: Cost
    once: bool = False  # a step, however many parts the batch is cut into
    at_end: bool = False  # before or after the layers: one stage of a pipeline alone has it
    stored: str = ""  # the data type of its weights or of the cache that it reads; empty: of `dtype`
    row_step: int = 8  # of a product: what divides the lengths of its factors' and its result's rows, up to 8
    chained: bool = False  # a product of one row: its weight is read while the one before still runs

    @property
    def intensity(self) -> float:
        return self.cost.total_flops / self.cost.bytes if self.cost.bytes else 0.0


def weight_tensors(dtype: str, n: int, k: int) -> list[Tensor]:
    """A matrix as it lies in memory: with its scales where it has fewer than eight bits."""
    scales = [dense("float16", n, -(-k // GROUP))] if find_dtype(dtype).bits < 8 else []
    return [dense(dtype, n, k), *scales]


def product(
    step: Step, name: str, m: int, n: int, k: int, count: int, *, bias: bool = False, groups: int = 1
) -> Operation:
    """A product; with `groups`, each group has a matrix of its own, and the m rows are spread over the groups."""
    precision = step.precision
    weight, *scales = weight_tensors(precision.weights, n * groups, k)
    x, y = dense(precision.products, m, k), dense(precision.activations, m, n)
    biases = [dense(precision.activations, n)] if bias else []
    spent = matmul.product(x, weight, y, k, *scales, *biases, limit=matmul_limit(precision.products))
    shape = {"m": m, "n": n, "k": k} | ({"groups": groups} if groups > 1 else {})
    op = "grouped_matmul" if groups > 1 else "linear" if bias else "matmul"
    return Operation(
        name=name,
        op=op,
        kind="product",
        shape=shape,
        dtype=precision.products,
        stored=precision.weights,
        count=count,
        cost=spent,
    )
