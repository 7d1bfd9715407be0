"""Softmax modules, and their logarithm, where they go along the last dimension."""

from __future__ import annotations

from typing import Any

import torch

from sublight.fix.patch import probe
from sublight.fix.patch.proof import Formula, prove, scaled
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.twin import NotCopied, answer, first, is_cast, is_leaf, own, random, twin_of
from sublight.ops.softmax.log_softmax import log_softmax
from sublight.ops.softmax.softmax import softmax

OPS = {"softmax": softmax, "log_softmax": log_softmax}
SIZES = (4, 3, 5, 7)
RANKS = (2, 3, 4)  # dim=1 is the last one of a matrix, of nothing else
BUDGET = {
    **{"_softmax": 1, "_log_softmax": 1, "amax": 1, "max": 1, "sub": 2, "exp": 1, "sum": 1, "div": 1, "log": 1},
    **{"logsumexp": 1},
}
ROWS, COLS = 8, 128


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if not is_leaf(module):
        return None
    try:
        twin = twin_of(module)
    except NotCopied:
        return None
    kinds = {rank: _kind(twin, random(*SIZES[:rank])) for rank in RANKS}
    ranks = tuple(rank for rank, kind in kinds.items() if kind)
    if not ranks:
        is_one = isinstance(module, torch.nn.Softmax | torch.nn.LogSoftmax)
        return Left(rule="softmax", reason="not along the last dimension") if is_one else None
    kind = str(kinds[ranks[0]])
    dtypes: list[frozenset[torch.dtype]] = []
    turned, _ = answer(twin, random(ROWS, COLS).T.contiguous().T)
    for rank in ranks:
        x = scaled(random(*[1] * (rank - 3), ROWS, COLS))
        x = x.flatten(0, 1) if rank == 2 else x
        proof = prove(twin, _formula(kind), x, probe.dtype_of(module, model))
        if proof.missing:
            return Left(rule="softmax", reason=proof.missing)
        dtypes.append(proof.dtypes)
    return _swap(kind, ranks, frozenset.intersection(*dtypes), keeps_order=not turned.is_contiguous())


def _formula(kind: str) -> Formula:
    def compute(twin: Any, x: torch.Tensor) -> torch.Tensor:
        return getattr(torch, kind)(x, -1)  # type: ignore[no-any-return]

    def by_hand(twin: Any, x: torch.Tensor) -> torch.Tensor:
        x = x - x.amax(-1, keepdim=True)
        e = x.exp()
        total = e.sum(-1, keepdim=True)
        return e / total if kind == "softmax" else x - total.log()

    return Formula(name=kind, budget=BUDGET, compute=compute, by_hand=by_hand, any_width=True)


def _kind(twin: Any, x: torch.Tensor) -> str | None:
    result, _ = answer(twin, x)
    candidates = ((name, lambda name=name: getattr(torch, name)(x, -1)) for name in OPS)
    return probe.first_match(result, candidates)


def _swap(kind: str, ranks: tuple[int, ...], dtypes: frozenset[torch.dtype], keeps_order: bool) -> Swap:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dim() not in ranks or x.dtype not in dtypes or is_cast(x):
            return own(self, *args, **kwargs)
        if keeps_order and not probe.lies_in_order(x):
            return own(self, x)  # its result lies in memory as x does
        return OPS[kind](x)

    def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (first(args, kwargs),)

    return Swap(rule="softmax", op=kind, forward=forward, arguments=arguments)


SOFTMAX = Rule(name="softmax", find=find)
