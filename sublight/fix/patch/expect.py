"""What a swap is expected to save: the module's own forward and ours, timed on what the batch brings it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from sublight.backend import private
from sublight.fix.patch.record import Swap
from sublight.fix.patch.step import is_inert, outputs_of
from sublight.fix.patch.twin import is_heard

REPEATS = 5
AHEAD_CYCLES = 40_000_000  # of the GPU's clock, some 20 ms: the host launches all repeats meanwhile


def saving_s(module: torch.nn.Module, swap: Swap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Seconds on the device of one call, with its gradients where the module trains; below zero where ours is slower.

    None where there is no GPU to time it on, where a call may leave traces (a cache of keys would grow, a hook would
    hear of it), or where it fails, called by itself: for want of memory, or of what is around it.
    """
    values = (*args, *kwargs.values())
    if not all(is_inert(value) for value in values) or not any(getattr(value, "is_cuda", False) for value in values):
        return None
    if is_heard(module):
        return None
    own, ours = types.MethodType(type(module).forward, module), types.MethodType(swap.forward, module)
    try:
        return _seconds(_step(own, module, args, kwargs)) - _seconds(_step(ours, module, args, kwargs))
    except Exception:  # whatever a stranger's forward may raise
        return None


def _step(forward: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
    """A call, and the gradients of what a training step asks gradients of; none is kept."""
    if not module.training:
        return lambda: forward(*args, **kwargs)
    args = tuple(_leaf(value) for value in args)
    kwargs = {name: _leaf(value) for name, value in kwargs.items()}
    tensors = [*args, *kwargs.values(), *module.parameters()]
    wrt = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]

    def step() -> None:
        with torch.enable_grad():
            outputs = [x for x in outputs_of(forward(*args, **kwargs)).values() if x.requires_grad]
        if outputs and wrt:
            torch.autograd.grad(outputs, wrt, [torch.ones_like(x) for x in outputs], allow_unused=True)

    return step


def _leaf(value: Any) -> Any:
    """In training, what is not the model's input has a gradient; the model's own inputs are mostly whole numbers."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _seconds(call: Callable[[], Any]) -> float:
    """The device's time of a few calls in a row, all launched before the first begins: without the host's."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    private.sleep(AHEAD_CYCLES)
    begin.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPEATS
