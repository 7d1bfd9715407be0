"""Figures by which two runs of a script are held against each other: its first losses, else its first outputs.

A loss is what `.backward()` is called on. A script that never does is compared by what its model gives: the mean
magnitude of the tensors in it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sublight.fix.cure.first_call import at_first_call

if TYPE_CHECKING:
    import torch

LOSSES = 5  # the first: later ones drift apart by rounding alone;
STEPS, MOST_LOSSES = 3, 64  # more where the optimizer's steps are rare: what it does shows only in the losses after one
OUTPUTS = 12  # enough to see some that a graph replayed
LOW, FULL = 1e-2, 1e-4  # what may differ, relative: in bfloat16 or float16, in float32


class Figures:
    """What a run gave; the figures stay on the device until they are asked for, so that nothing waits."""

    def __init__(self) -> None:
        self.low_precision = False
        self._losses: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._steps = 0  # of optimizers

    def read(self) -> tuple[list[float], str]:
        """The figures, and what they are of."""
        if self._losses:
            return [float(loss) for loss in self._losses], "losses"
        return [float(output) for output in self._outputs], "outputs" if self._outputs else ""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        own = torch.Tensor.backward

        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._wants_loss() and not torch.compiler.is_compiling() and tensor.numel() == 1:
                self._mind(tensor)
                self._losses.append(tensor.detach().double().reshape(()).clone())
            return own(tensor, *args, **kwargs)

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._steps += 1  # the hook stays: PyTorch walks over its hooks while this one is called

        counting = register_optimizer_step_post_hook(count)
        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
        try:
            with at_first_call(self._listen):
                yield
        finally:
            counting.remove()
            torch.Tensor.backward = own  # type: ignore[method-assign]

    def _wants_loss(self) -> bool:
        return len(self._losses) < (LOSSES if self._steps >= STEPS else MOST_LOSSES)

    def _listen(self, models: list[torch.nn.Module]) -> None:
        import torch

        self.low_precision |= torch.is_autocast_enabled()
        for model in models:
            for parameter in model.parameters():
                self._mind(parameter)
            if not hasattr(model, "_orig_mod"):  # a hook would be compiled
                self._listen_to(model)

    def _listen_to(self, model: torch.nn.Module) -> None:
        import torch

        def hook(module: Any, args: Any, output: Any) -> None:
            if self._losses or len(self._outputs) >= OUTPUTS:
                handle.remove()  # a model that trains is compared by its losses
            elif not torch.compiler.is_compiling():
                sizes = [_size(x) for x in tensors(output) if x.is_floating_point() and x.numel()]
                if sizes:
                    self._outputs.append(torch.stack(sizes).sum())

        handle = model.register_forward_hook(hook)

    def _mind(self, x: torch.Tensor) -> None:
        self.low_precision |= x.is_floating_point() and x.element_size() <= 2


def _size(x: torch.Tensor) -> torch.Tensor:
    """Its mean magnitude, in float64 without a copy in float64: outputs may fill the device."""
    import torch

    total: torch.Tensor = torch.linalg.vector_norm(x.detach(), 1, dtype=torch.float64)
    return total / x.numel()


def tensors(output: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [x for value in output.values() for x in tensors(value)]
    return [x for value in output for x in tensors(value)] if isinstance(output, tuple | list) else []


def difference(before: Sequence[float], after: Sequence[float]) -> float | None:
    """The largest, relative; None: nothing to compare, and what is NaN in both compares to nothing.

    >>> difference([2.0, 1.0], [2.0, 1.01]), difference([], [1.0]), difference([1.0], [float("nan")])
    (0.01, None, inf)
    """
    pairs = [
        pair for pair in zip(before, after, strict=False) if math.isfinite(pair[0]) or str(pair[0]) != str(pair[1])
    ]
    return max((_apart(a, b) for a, b in pairs), default=None)


def _apart(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return round(abs(a - b) / max(abs(a), 1e-30), 9)
