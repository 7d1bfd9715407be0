"""What autocast does to our ops: products take its data type, as PyTorch's do; all others take tensors as they are.

Its list of ops that run in float32 whatever they get (softmax, norms, losses, sums) does not reach our kernels. Nor may
it reach PyTorch's ops where those stand in for them: the data type of a result would depend on its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def as_ours(reference: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """PyTorch's ops without autocast, for arguments of the kinds of these tensors. Of several data types, which our
    kernels do not take, it still makes one."""
    device = tensors[0].device.type if tensors else "meta"
    if device == "meta" or len({x.dtype for x in tensors if x.is_floating_point()}) > 1:
        return reference

    def run(*args: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return reference(*args)
        with torch.autocast(device, enabled=False):
            return reference(*args)

    return run


def under_autocast(*operands: Any) -> Any:
    """A product's operands in autocast's data type, so that they need not be alike before; the first is a tensor."""
    kind = "cuda" if operands[0].is_cuda else operands[0].device.type  # which takes 0.2 µs, at every call
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in operands)


def _is_cast(x: torch.Tensor | None) -> bool:
    return x is not None and x.is_floating_point() and x.dtype != torch.float64
