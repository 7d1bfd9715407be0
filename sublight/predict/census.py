"""Every op of a step with its shape, how often it runs and what it costs; costs are those of `sublight.cost`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sublight.predict.backward import backward, optimizer_step
from sublight.predict.forward import Builder, convolutional, transformer
from sublight.predict.model import Model
from sublight.predict.operation import Operation
from sublight.predict.step import Step


def census(model: Model, step: Step) -> tuple[Operation, ...]:
    """The ops of one GPU, those that are alike together."""
    builder = Builder(model=model, step=step)
    if model.family == "convolution":
        convolutional(builder)
    else:
        transformer(builder)
    ops = [*builder.ops]
    if step.trains:
        ops += [*backward(builder), *optimizer_step(model, step)]
    return tuple(_merged(op for op in ops if op.count))


def _merged(ops: Iterator[Operation]) -> Iterator[Operation]:
    """Ops that differ only in how many layers they stand for, as one."""
    found: dict[tuple[object, ...], Operation] = {}
    for op in ops:
        key = (op.name, op.direction, op.dtype, op.at_end, *op.shape.items())
        before = found.get(key)
        found[key] = op if before is None else replace(before, count=before.count + op.count)
    yield from found.values()
