"""What a swap is expected to save: the module's own forward and ours, timed on what the batch brings it."""

from __future__ import annotations

import types
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from sublight.fix.patch.record import Swap

REPEATS = 5


def saving_s(module: torch.nn.Module, swap: Swap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Seconds of one forward call, below zero where ours is slower.

    None where there is no GPU to time it on, or where a call may leave traces: a cache of keys would grow.
    """
    values = (*args, *kwargs.values())
    if not all(_is_inert(value) for value in values) or not any(getattr(value, "is_cuda", False) for value in values):
        return None
    ours = types.MethodType(swap.forward, module)
    return _seconds(lambda: type(module).forward(module, *args, **kwargs)) - _seconds(lambda: ours(*args, **kwargs))


def _is_inert(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_inert(item) for item in value)
    return isinstance(value, torch.Tensor | bool | int | float | str | None)


def _seconds(call: Callable[[], Any]) -> float:
    """The median of a few calls, launched back to back: what the caller waits for, host or device."""
    call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(median(times))
