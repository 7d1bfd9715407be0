"""Embedding tables: rows by number, a gradient that is the same bits every time."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from sublight.fix.patch import probe
from sublight.fix.patch.proof import DTYPES, contents, in_dtype, quiet
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.trace import trace
from sublight.fix.patch.twin import NotCopied, answer, is_pytorchs, own, random, set_training, twin_of
from sublight.ops.movement.embedding import ID_DTYPES, embedding

ROWS = 8  # of the table in a trial
PADDING = 5  # the row there that gets no gradient, where the module has such a row


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if not isinstance(module, torch.nn.Embedding):
        return None
    if reason := _why_not(module):
        return Left(rule="embedding", reason=reason)
    return _swap()


def _why_not(module: torch.nn.Embedding) -> str:
    for name, why in (
        ("max_norm", "max_norm rewrites the table"),
        ("scale_grad_by_freq", "its gradient is scaled by frequency"),
        ("sparse", "its gradient is sparse"),
    ):
        if getattr(module, name):
            return why
    if type(module).forward is torch.nn.Embedding.forward:
        return "" if is_pytorchs(torch.nn.Embedding, F.embedding) else "somebody has changed PyTorch's embedding"
    if module._modules or set(module._parameters) != {"weight"}:
        return "its forward is its own, and it has more than a table"
    table = random(ROWS, module.weight.shape[1])
    try:
        twin = twin_of(module, parameters={"weight": table})
    except NotCopied as why:
        return f"not tried: {why}"
    twin.num_embeddings, twin.padding_idx = ROWS, None if module.padding_idx is None else PADDING
    ids = torch.tensor([[1, 0, PADDING], [7, PADDING, 2], [6, 3, 4]])  # every row: any may be treated otherwise
    result, reason = answer(twin, ids)
    if result is not None and not probe.same(result, table[ids]):
        reason = "values not proven: its forward is its own, and no plain lookup (a scale, or positions)"
    return reason or _unproven(twin, ids)


def _unproven(twin: Any, ids: torch.Tensor) -> str:
    """Why its forward is not a lookup and nothing else, gradient included; empty where it is."""
    for training, records, dtype in itertools.product((False, True), (False, True), (torch.float64, *DTYPES)):
        each = in_dtype(twin, dtype)
        set_training(each, training)
        each._parameters["weight"] = table = each._parameters["weight"].detach().requires_grad_()
        before = contents(each)
        with torch.set_grad_enabled(records), quiet():
            found = trace(type(each).forward, each, ids)
            if why := found.why_not({"embedding": 1}, "a lookup"):
                return f"structure not proven: {why}"
            if contents(each) != before:
                return "structure not proven: its forward changes what the module holds"
            if not torch.equal(found.result, table[ids]):
                return "values not proven: its forward is no lookup in every mode and data type"
            if not records:
                continue
            if not found.result.requires_grad:
                return "structure not proven: no gradient comes through its forward"
            (gradient,) = torch.autograd.grad(found.result.sum(), table)
        times = torch.bincount(ids.flatten(), minlength=ROWS)
        if twin.padding_idx is not None:
            times[PADDING] = 0
        expected = times[:, None].expand_as(table)
        if found.result.dtype != dtype or not torch.equal(gradient, expected.to(dtype)):
            return "values not proven: the gradient is not a lookup's"
    return ""


def _swap() -> Swap:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or getattr(args[0], "dtype", None) not in ID_DTYPES:
            return own(self, *args, **kwargs)
        return embedding(*args, self.weight, self.padding_idx)

    def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*args, *kwargs.values())[0], module.weight

    return Swap(rule="embedding", op="embedding", forward=forward, arguments=arguments)


EMBEDDING = Rule(name="embedding", find=find)
