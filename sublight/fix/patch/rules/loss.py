"""Cross entropy as a module: one pass over the logits, the gradient made in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.twin import is_cast, is_pytorchs, own
from sublight.ops.cross_entropy.cross_entropy import cross_entropy


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if not isinstance(module, torch.nn.CrossEntropyLoss):
        return None
    is_own = type(module).forward is not torch.nn.CrossEntropyLoss.forward
    if is_own or not is_pytorchs(torch.nn.CrossEntropyLoss, F.cross_entropy):
        return Left(rule="loss", reason="its forward is its own")
    if module.weight is not None:
        return Left(rule="loss", reason="its classes have weights, which our kernels do not know")
    return Swap(rule="loss", op="cross_entropy", forward=forward, arguments=_both)


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    logits, labels = _both(self, *args, **kwargs)
    by_rows = logits.dim() == 2 and labels.shape == logits.shape[:1] and labels.dtype == torch.int64
    if not by_rows or labels.device != logits.device or is_cast(logits):
        return own(self, *args, **kwargs)  # shares of classes as labels, classes along the second of many dimensions
    return cross_entropy(
        logits,
        labels,
        ignore_index=self.ignore_index,
        label_smoothing=self.label_smoothing,
        reduction=self.reduction,
    )


def _both(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Logits and labels, as torch.nn.CrossEntropyLoss names them."""
    return (*args, *(kwargs[name] for name in ("input", "target")[len(args) :]))


LOSS = Rule(name="loss", find=find)
