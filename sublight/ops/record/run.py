"""A plan as a function of its arguments: buffers are made, the launches follow one another, outputs come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from sublight.op import Buffer, Plan

Values = Any  # a tensor, or a tuple of them


def runner(plan: Plan, names: Sequence[str]) -> Callable[..., Values]:
    """(*args) -> outputs; `names` are those of the arguments, in their order."""
    places = {name: place for place, name in enumerate((*names, *plan.buffers))}
    makers = [_maker(buffer) for buffer in plan.buffers.values()]
    shown = {name: place for place, name in enumerate(plan.buffers, len(names) + len(makers))}  # as kernels see them
    bits = [(places[name], buffer.bits or buffer.dtype) for name, buffer in plan.buffers.items()]
    bits = bits if any(buffer.bits for buffer in plan.buffers.values()) else []
    seen = places | shown if bits else places
    launches = [
        (step, _getter([seen[name] for name in step.on]), _getter([places[name] for name in step.free]))
        for step in plan.steps
    ]
    outputs = _getter([places[name] for name in plan.outputs])
    copied = [places[name] for name in plan.copies]
    has_free, count = any(step.free for step in plan.steps), len(plan.outputs)

    def run(*args: Any) -> Values:
        device = args[0].device
        tensors = [*args, *[make(device=device) for make in makers]]
        for place in copied:
            tensors[place] = tensors[place].contiguous()
        for place, kind in bits:
            tensors.append(tensors[place].view(kind))
        for step, on, free in launches:
            if has_free:
                step(*on(tensors), free=free(tensors))
            else:
                step(*on(tensors))
        return outputs(tensors) if count > 1 else outputs(tensors)[0] if count else None

    return run


def _maker(buffer: Buffer) -> Callable[..., torch.Tensor]:
    if buffer.strides:
        return partial(torch.empty_strided, buffer.shape, buffer.strides, dtype=buffer.dtype)
    return partial(torch.zeros if buffer.is_zero else torch.empty, buffer.shape, dtype=buffer.dtype)


def _getter(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """These of a list, as a tuple; `itemgetter` gives no tuple for one."""
    if len(places) == 1:
        (place,) = places
        return lambda tensors: (tensors[place],)
    return itemgetter(*places) if places else lambda tensors: ()
