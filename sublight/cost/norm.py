"""Norms: one pass over the rows, which an ideal kernel keeps on chip; statistics are too small to count."""

from __future__ import annotations

from collections.abc import Iterable

from sublight.cost.record import Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Tensor, dense, over

# operations an element of x, forward and backward
CENTERED = (7, 12)  # layer, batch, group: subtract, square and sum for the variance, sum, scale, weight, bias
UNCENTERED = (4, 9)  # rms: square and sum, scale, weight
ADDED = 1  # the residual, forward; backward, its gradient


def forward(x: Tensor, *parameters: Tensor, kind: tuple[int, int], out: Tensor | None = None) -> Cost:
    """Read x and the parameters, write y, which is like x unless `out` says otherwise."""
    return over([x, *parameters], [out or x], operations=kind[0] * x.numel, dtype=x.dtype)


def backward(
    dy: Tensor, x: Tensor, *weight: Tensor, gradients: Iterable[Tensor], kind: tuple[int, int], dx: bool = True
) -> Cost:
    """Read dy, x and the weight, write dx and the parameters' gradients."""
    return over([dy, x, *weight], [*([x] if dx else []), *gradients], operations=kind[1] * x.numel, dtype=x.dtype)


def add_forward(x: Tensor, residual: Tensor, *parameters: Tensor, kind: tuple[int, int]) -> Cost:
    """Read x, residual and the parameters, write y and the new residual; add, then the norm."""
    operations = (ADDED + kind[0]) * x.numel
    return over([x, residual, *parameters], [x, residual], operations=operations, dtype=x.dtype)


def add_backward(x: Tensor, weight: Tensor, *, gradients: Iterable[Tensor], kind: tuple[int, int]) -> Cost:
    """Read both gradients, the new residual and the weight, write dx (once) and the parameters' gradients."""
    operations = (ADDED + kind[1]) * x.numel
    return over([x, x, x, weight], [x, *gradients], operations=operations, dtype=x.dtype)


def layer_norm(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, weight = _row_wise(shape, dtype)
    bias = weight
    return in_direction(
        direction,
        forward(x, weight, bias, kind=CENTERED),
        backward(x, x, weight, gradients=(weight, bias), kind=CENTERED),
    )


def rms_norm(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, weight = _row_wise(shape, dtype)
    return in_direction(
        direction,
        forward(x, weight, kind=UNCENTERED),
        backward(x, x, weight, gradients=(weight,), kind=UNCENTERED),
    )


def add_layer_norm(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, weight = _row_wise(shape, dtype)
    residual, bias = x, weight
    return in_direction(
        direction,
        add_forward(x, residual, weight, bias, kind=CENTERED),
        add_backward(x, weight, gradients=(weight, bias), kind=CENTERED),
    )


def add_rms_norm(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, weight = _row_wise(shape, dtype)
    residual = x
    return in_direction(
        direction,
        add_forward(x, residual, weight, kind=UNCENTERED),
        add_backward(x, weight, gradients=(weight,), kind=UNCENTERED),
    )


def _row_wise(shape: Shape, dtype: str) -> tuple[Tensor, Tensor]:
    """x and its weight; the bias is like the weight, y, the residual and their gradients are like x."""
    return dense(dtype, shape["rows"], shape["cols"]), dense(dtype, shape["cols"])
