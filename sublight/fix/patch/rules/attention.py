"""`torch.nn.MultiheadAttention`, where our attention wins: its projections stay products, what is between them is ours.

What ours does not take (weights that are asked for, masks that are tensors, padding, biases that are added, dropout,
whose draws would be others) goes to the module's own forward, call by call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sublight.fix.attention.fused_mha import FusedMHA
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.twin import is_pytorchs, own

MHA = torch.nn.MultiheadAttention


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if not isinstance(module, MHA) or isinstance(module, FusedMHA):
        return None
    if type(module) is not MHA and type(module).forward is MHA.forward:
        return Left(rule="attention", reason="a class of its own, which may hold its parameters otherwise")
    is_own = type(module).forward is not MHA.forward or "forward" in vars(module)
    if is_own or not is_pytorchs(MHA, F.multi_head_attention_forward, F.linear):
        return Left(rule="attention", reason="a forward of its own")
    if type(module.out_proj) not in (NonDynamicallyQuantizableLinear, torch.nn.Linear) or _is_hooked(module.out_proj):
        return Left(rule="attention", reason="an output projection of its own kind, or with hooks")
    if module.bias_k is not None or module.add_zero_attn:
        return Left(rule="attention", reason="keys that are added to those it is given")
    return Swap(rule="attention", op="attention", forward=_forward, arguments=_arguments, hides=("out_proj",))


def _is_hooked(module: torch.nn.Module) -> bool:
    """PyTorch's forward reads the projection's weights and calls no hook of it; ours calls the projection."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if (self.training and self.dropout) or _is_hooked(self.out_proj):
        return own(self, *args, **kwargs)
    return FusedMHA.forward(FusedMHA.of(self), *args, **kwargs)


def _arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """q, k and v as attention gets them: of the inputs' sizes, which the projections keep."""
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    found = []
    for name in ("query", "key", "value"):
        x = given[name] if module.batch_first or given[name].dim() != 3 else given[name].transpose(0, 1)
        size = (*x.shape[:-1], module.num_heads, module.head_dim)
        found.append(x.new_empty(size if len(size) == 4 else (1, *size)).transpose(1, 2))
    return tuple(found)


ATTENTION = Rule(name="attention", find=find)
