"""Two zeros in every four weights of a model's linear layers, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sublight.errors import BadInput, nearest
from sublight.fix.compressed import Compressed
from sublight.fix.layers import replace_layers, restore_layers
from sublight.fix.sparsify.linear import SparseLinear
from sublight.fix.sparsify.training import BLOCK, SparseTrainingLinear

WAYS = ("2:4",)


def sparsify(
    model: torch.nn.Module,
    how: str = "2:4",
    *,
    skip: Sequence[str] | None = None,
    verify: Any = None,
    keep: bool = True,
    training: bool = False,
) -> Compressed:
    """Make the model's linear layers sparse, in place, and say what was done.

    `skip` are names or patterns of layers to leave ("*.down_proj"); unless it is given, the output head is left, whose
    error goes straight into the loss. `verify` is a batch: the change of its loss, or of its outputs, is reported.
    `training` keeps the weights dense for the optimizer and makes them sparse in every step; `unpatch` then gives the
    layers back with what they have learned.
    """
    if how not in WAYS:
        raise BadInput(f"unknown way {how!r}: {nearest(str(how), list(WAYS))}")

    def why_left(weight: torch.Tensor) -> str:
        if training and not isinstance(weight, torch.nn.Parameter):
            return "it holds its weight transposed, and the optimizer has that"
        if training and weight.shape[0] % BLOCK:
            return f"its {weight.shape[0]} outputs do not come in fours, as its transpose would have them"
        return f"its {weight.shape[1]} inputs do not come in fours" if weight.shape[1] % BLOCK else ""

    def words(new: Any) -> str:
        form = f"multiplied dense: {new.why}" if new.why else "on the sparse tensor cores"
        if not training:
            return f"two of four, {form}"
        more = "" if new.why else "; W and Wᵀ are held until backward, 9/8 of the weight more"
        return f"two of four, anew in every step, {form}{more}"

    def sparse(module: Any, weight: torch.Tensor) -> torch.nn.Module:
        if not training:
            return SparseLinear(weight, module.bias)
        return SparseTrainingLinear(module.weight, module.bias)

    return replace_layers(
        model,
        by=sparse,
        why_left=why_left,
        words=words,
        caller="sparsify",
        how=f"{how} in training" if training else how,
        verb="made sparse",
        skip=skip,
        verify=verify,
        keep=keep,
    )


def densify(model: torch.nn.Module) -> int:
    """Put the layers back as they were; how many were sparse."""
    return restore_layers(model, (SparseLinear, SparseTrainingLinear))
