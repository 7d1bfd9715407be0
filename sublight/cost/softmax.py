"""Softmax and what is made of it: the row stays on chip, so memory is touched twice."""

from __future__ import annotations

from sublight.cost.record import Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Tensor, dense, over

TOP_K = 8  # of softmax_topk, where nothing else is said
# operations an element, forward and backward
PLAIN = (5, 4)  # subtract, exponential, sum, divide, maximum; multiply, sum, subtract, multiply
LOG = (6, 4)  # maximum, subtract, exponential, sum, subtract twice; sum, exponential, multiply, subtract


def forward(x: Tensor, y: Tensor, kind: tuple[int, int] = PLAIN) -> Cost:
    """Read x, write y, which may have another data type."""
    return over([x], [y], operations=kind[0] * x.numel, dtype=x.dtype)


def backward(dy: Tensor, y: Tensor, dx: Tensor, kind: tuple[int, int] = PLAIN) -> Cost:
    """Read y and dy, write dx."""
    return over([dy, y], [dx], operations=kind[1] * y.numel, dtype=y.dtype)


def softmax(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x = dense(dtype, shape["rows"], shape["cols"])
    return in_direction(direction, forward(x, x), backward(x, x, x))


def log_softmax(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x = dense(dtype, shape["rows"], shape["cols"])
    return in_direction(direction, forward(x, x, LOG), backward(x, x, x, LOG))


def online_softmax(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, log = dense(dtype, shape["rows"], shape["cols"]), dense("float32", shape["rows"])
    # as softmax, and a row's log of its sum is written, and read again by the backward pass
    return in_direction(
        direction,
        over([x], [x, log], operations=PLAIN[0] * x.numel, dtype=dtype),
        over([x, x, log], [x], operations=PLAIN[1] * x.numel, dtype=dtype),
    )


def softmax_topk(shape: Shape, dtype: str, direction: Direction, k: int = TOP_K) -> Cost:
    x, values, indices = dense(dtype, shape["rows"], shape["cols"]), (shape["rows"], k), (shape["rows"], k)
    # read x, write k values and their indices a row; subtract, exponential, sum, two maxima
    return over([x], [dense(dtype, *values), dense("int64", *indices)], operations=5 * x.numel, dtype=dtype)


def sample(shape: Shape, dtype: str, direction: Direction) -> Cost:
    logits, seed, tokens = dense(dtype, shape["rows"], shape["vocab"]), dense("int64", 1), dense("int64", shape["rows"])
    # read the logits and the seed, write a token a row; one maximum for each logit
    return over([logits, seed], [tokens], operations=logits.numel, dtype=dtype)
