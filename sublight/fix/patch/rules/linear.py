"""Linear layers whose rows begin at odd places: 700 inputs, 50,257 outputs, where cuBLAS falls to a third or a sixth.

Only `torch.nn.Linear` itself is known, by its own forward: a subclass that does more is none of this rule's. Layers
with even sizes are not looked at: cuBLAS is as fast there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.twin import first, is_autocast, is_pytorchs, own
from sublight.ops.matmul.matmul import matmul
from sublight.ops.matmul.product import ENGINE_BYTES

MULTIPLE = ENGINE_BYTES // 2  # of a 16-bit row's elements: those begin at even places


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if type(module).forward is not torch.nn.Linear.forward or not isinstance(module, torch.nn.Linear):
        return None
    if not is_pytorchs(torch.nn.Linear, F.linear):
        return Left(rule="linear", reason="somebody has changed PyTorch's linear layers")
    if not any(size % MULTIPLE for size in (module.out_features, module.in_features)):
        return None
    weight = module._parameters.get("weight")  # to ask a parametrization for it is a step of a spectral norm
    if weight is None or set(module._parameters) != {"weight", "bias"} or module._modules or module._buffers:
        return Left(rule="linear", reason="it has more than a weight and a bias (a parametrization)")
    n, k = weight.shape
    return Swap(rule="linear", op="matmul", forward=forward, arguments=arguments, what=f"Linear of {k} to {n}")


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    x = first(args, kwargs) if len(args) + len(kwargs) == 1 else None
    if x is None or x.dtype != self.weight.dtype or is_autocast(x):
        return own(self, *args, **kwargs)  # which says what is wrong, or casts
    return matmul(x, self.weight.T, self.bias)


def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return first(args, kwargs), module.weight.T, module.bias


LINEAR = Rule(name="linear", find=find)
