"""Losses: every logit is read once, and almost nothing is written."""

from __future__ import annotations

from sublight.cost.dtypes import matmul_limit
from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import Tensor, dense, over

LOGIT = (4, 8)  # maximum, subtract, exponential, sum; for the gradient also exponential, multiply, subtract, scale
PAIR = 2  # subtract, square (or their like) and sum


def cross_entropy_forward(logits: Tensor, target: Tensor, loss: Tensor) -> Cost:
    """Read logits and labels, write the loss."""
    return over([logits, target], [loss], operations=LOGIT[0] * logits.numel)


def nll_forward(picked: Tensor, target: Tensor, loss: Tensor) -> Cost:
    """Read the labels and one log-probability for each, write the loss."""
    return over([picked, target], [loss], operations=target.numel)


def nll_backward(target: Tensor, dx: Tensor) -> Cost:
    """Read the labels, write a gradient that is zero almost everywhere."""
    return over([target], [dx])


def pair_forward(x: Tensor, target: Tensor, loss: Tensor) -> Cost:
    """Read x and what it should be, write the loss."""
    return over([x, target], [loss], operations=PAIR * x.numel)


def pair_backward(dy: Tensor, x: Tensor, target: Tensor) -> Cost:
    return over([dy, x, target], [x], operations=PAIR * x.numel, dtype=x.dtype)


def cross_entropy(shape: Shape, dtype: str, direction: Direction) -> Cost:
    logits, target, loss = dense(dtype, shape["rows"], shape["cols"]), dense("int64", shape["rows"]), dense(dtype, 1)
    if direction == "fwd":
        return cross_entropy_forward(logits, target, loss)
    if direction == "bwd":  # finished in the forward pass
        return Cost(read_bytes=0, write_bytes=0)
    # the same, and write the gradient
    return over([logits, target], [loss, logits], operations=LOGIT[1] * logits.numel)


def linear_cross_entropy(shape: Shape, dtype: str, direction: Direction) -> Cost:
    rows, cols, vocab = shape["rows"], shape["cols"], shape["vocab"]
    hidden, weight, target = dense(dtype, rows, cols), dense(dtype, vocab, cols), dense("int64", rows)
    loss, product = dense(dtype, 1), 2 * rows * cols * vocab
    if direction == "bwd":  # finished in the forward pass
        return Cost(read_bytes=0, write_bytes=0)
    # read hidden, weight, labels, write the loss and, with gradients, those of hidden and weight: three products
    gradients, products = ((), 1) if direction == "fwd" else ((hidden, weight), 3)
    return over([hidden, weight, target], [loss, *gradients], flops={matmul_limit(dtype): products * product})
