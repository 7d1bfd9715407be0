"""Mixture of experts: routing, the experts' products over the tokens that are sent to them, and the weighted sum."""

from __future__ import annotations

from sublight.cost.dtypes import matmul_limit
from sublight.cost.record import Cost, Direction, Shape, in_direction
from sublight.cost.softmax import PLAIN
from sublight.cost.tensor import Tensor, dense, over, raw


def routing(logits: Tensor, *results: Tensor) -> Cost:
    """Read the router's logits, write the chosen experts and their weights; a softmax, and a maximum for each."""
    return over([logits], results, operations=PLAIN[0] * logits.numel)


def alignment(chosen: Tensor) -> Cost:
    """Read which expert each row goes to, write the rows in the order of their experts."""
    return over([chosen], [Tensor(shape=chosen.shape, dtype="int32")])


def combination(x: Tensor, out: Tensor) -> Cost:
    """Read what the experts made of each token, write the sum; one addition an element."""
    return over([x], [out], operations=x.numel)


def experts(x: Tensor, up: Tensor, down: Tensor, rows: int, *chosen: Tensor, limit: str = "") -> Cost:
    """Both products of every row that an expert gets; `up` is (experts, n, k), `down` is (experts, k, inner).

    Read the tokens, once the matrices of every expert that can have a row, the choice and its weights; write the
    tokens. What lies between the products, and the rows in the experts' order, need not leave the chip.
    """
    touched = min(up.shape[0], rows)
    matrices = [raw(matrix.real_bytes * touched // max(matrix.shape[0], 1)) for matrix in (up, down)]
    operations = 2.0 * rows * (up.shape[1] * x.shape[-1] + down.shape[1] * down.shape[2])
    return over([x, *matrices, *chosen], [x], flops={limit or matmul_limit(x.dtype): operations})


def moe_routing(shape: Shape, dtype: str, direction: Direction) -> Cost:
    chosen = (shape["tokens"], shape["top_k"])
    logits = dense(dtype, shape["tokens"], shape["experts"])
    return routing(logits, dense("float32", *chosen), dense("int32", *chosen))


def experts_backward(x: Tensor, up: Tensor, down: Tensor, rows: int, *chosen: Tensor) -> Cost:
    """Each product's two gradients are as large as itself, so twice the forward operations.

    Read dy, the tokens, what gate and up were (`rows` of them), the matrices and the choice; write the gradients of
    the tokens, of the choice's weights (the first of `chosen`) and of all matrices, zeros where no row went.
    """
    forward = experts(x, up, down, rows)
    kept = dense(x.dtype, rows, up.shape[1])
    return over(
        [x, x, kept, up, down, *chosen],
        [x, up, down, *chosen[:1]],
        flops={limit: 2 * count for limit, count in forward.flops.items()},
    )


def moe_experts(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Gated: `up` makes gate and up, each `inner` wide."""
    tokens, hidden, inner = shape["tokens"], shape["hidden"], shape["inner"]
    up, down = dense(dtype, shape["experts"], 2 * inner, hidden), dense(dtype, shape["experts"], hidden, inner)
    sizes = (tokens, shape["top_k"])
    x, rows = dense(dtype, tokens, hidden), tokens * shape["top_k"]
    chosen = dense("float32", *sizes), dense("int32", *sizes)
    return in_direction(direction, experts(x, up, down, rows, *chosen), experts_backward(x, up, down, rows, *chosen))
