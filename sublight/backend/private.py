"""Functions of PyTorch whose names begin with an underscore: where it moves one, this is the only file to mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def fused_adamw_(*args: Any, **options: Any) -> None:
    """AdamW's update of many tensors in one launch, which `torch.optim.AdamW(fused=True)` makes: what ours is judged
    and timed against."""
    torch._fused_adamw_(*args, **options)


def foreach_mul(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
    """Many tensors times one number on the device, as `clip_grad_norm_` scales gradients."""
    return list(torch._foreach_mul(list(tensors), factor))


def foreach_add_(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
    """A number of its own added to each tensor; the numbers travel as arguments of launches, which a CUDA graph's
    capture allows and a copy from the host it does not."""
    torch._foreach_add_(list(tensors), list(numbers))
