"""Optimizers: every parameter, its gradient and its state are read, and all but the gradient written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import Tensor, dense, over

# operations an element
ADAM = 15  # decay; two averages, three operations each; two corrections, root, epsilon, divide, step, subtract
SGD = 4  # decay, momentum, step, subtract
ADAGRAD = 6  # square, add, root, epsilon, divide, step


def update(updated: Iterable[Tensor], gradients: Sequence[Tensor], *, each: int) -> Cost:
    """Read the gradients and what is updated (parameters and their state), write what is updated."""
    updated = list(updated)
    operations = each * sum(tensor.numel for tensor in gradients)
    return over([*updated, *gradients], updated, operations=operations)


def foreach(reads: Iterable[Tensor], writes: Iterable[Tensor], *, operations: int = 0) -> Cost:
    """The same elementwise op on each tensor of some lists."""
    return over(reads, writes, operations=operations)


def norms(tensors: Sequence[Tensor]) -> Cost:
    """Read every tensor, write a number for each; square and sum."""
    results = [dense("float32", 1) for _ in tensors]
    return over(tensors, results, operations=2 * sum(tensor.numel for tensor in tensors))


def adamw(shape: Shape, dtype: str, direction: Direction) -> Cost:
    parameter, average = (dense(kind, shape["tensors"], shape["numel"]) for kind in (dtype, "float32"))
    # read parameter, gradient and two fp32 averages, write all but the gradient
    return update([parameter, average, average], [parameter], each=ADAM)


def adamw_clipped(shape: Shape, dtype: str, direction: Direction) -> Cost:
    once, gradient = adamw(shape, dtype, direction), dense(dtype, shape["tensors"], shape["numel"])
    # no gradient can be used before all have been read: twice, then
    return replace(once, read_bytes=once.read_bytes + gradient.bytes, launches=2)
