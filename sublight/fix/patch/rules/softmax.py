"""Softmax modules, and their logarithm, where they go along the last dimension."""

from __future__ import annotations

from typing import Any

import torch

from sublight.fix.patch import probe
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.twin import answer, first, is_cast, is_leaf, keeps_16_bit, own, random, twin_of
from sublight.ops.softmax.log_softmax import log_softmax
from sublight.ops.softmax.softmax import softmax

OPS = {"softmax": softmax, "log_softmax": log_softmax}
SIZES = (4, 3, 5, 7)
RANKS = (2, 3, 4)  # dim=1 is the last one of a matrix, of nothing else


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if not is_leaf(module):
        return None
    twin = twin_of(module)
    kinds = {rank: _kind(twin, random(*SIZES[:rank])) for rank in RANKS}
    ranks = tuple(rank for rank, kind in kinds.items() if kind)
    if not ranks:
        is_one = isinstance(module, torch.nn.Softmax | torch.nn.LogSoftmax)
        return Left(rule="softmax", reason="not along the last dimension") if is_one else None
    if not keeps_16_bit(twin, random(*SIZES[: ranks[0]])):
        return Left(rule="softmax", reason="it gives another data type than it takes")
    return _swap(str(kinds[ranks[0]]), ranks)


def _kind(twin: Any, x: torch.Tensor) -> str | None:
    result, _ = answer(twin, x)
    candidates = ((name, lambda name=name: getattr(torch, name)(x, -1)) for name in OPS)
    return probe.first_match(result, candidates)


def _swap(kind: str, ranks: tuple[int, ...]) -> Swap:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or args[0].dim() not in ranks or is_cast(args[0]):
            return own(self, *args, **kwargs)
        return OPS[kind](*args)

    def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (first(args, kwargs),)

    return Swap(rule="softmax", op=kind, forward=forward, arguments=arguments)


SOFTMAX = Rule(name="softmax", find=find)
