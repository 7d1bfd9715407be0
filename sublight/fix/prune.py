"""Weights taken away for good: by magnitude a share at a time, with what is left set back to its first values.

The lottery ticket (Frankle and Carbin, 2019): train, take away the smallest weights, set the others back to what they
were at the beginning, and train again; after some rounds a small part of the weights is left that trains as well as all
of them did, if it begins with its own first values. `rounds` does that; masks at random and weights at random are what
it is compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sublight.errors import BadInput
from sublight.fix.layers import weight_of

Masks = dict[str, torch.Tensor]  # by the parameter's name: where a weight is left
Scope = Literal["layer", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One training, and the mask that it was trained with."""

    masks: Masks
    score: float

    @property
    def left(self) -> float:
        """The share of the weights that is left."""
        return share_left(self.masks)


def share_left(masks: Masks) -> float:
    return sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())


def all_weights(model: torch.nn.Module, *, skip: tuple[str, ...] = ()) -> Masks:
    """Masks that leave everything: of the matrices of linear layers, but those whose layer is named in `skip`."""
    known = {name for name, _ in model.named_modules()}
    for name in skip:
        if name not in known:
            raise BadInput(f"skip={name!r} names no module of this model")
    found = {
        f"{name}.weight" if name else "weight": torch.ones_like(module.weight, dtype=torch.bool)  # type: ignore[call-overload]
        for name, module in model.named_modules()
        if weight_of(module) is not None and name not in skip
    }
    if not found:
        raise BadInput("nothing to prune: the model has no linear layer, or all are skipped")
    return found


def apply(model: torch.nn.Module, masks: Masks) -> None:
    """Zeros where nothing is left."""
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)


@contextlib.contextmanager
def held(model: torch.nn.Module, masks: Masks, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What is taken away is zero inside, after every step of the optimizer, too."""
    apply(model, masks)
    handle = optimizer.register_step_post_hook(lambda *_: apply(model, masks))
    try:
        yield
    finally:
        handle.remove()


def without_smallest(model: torch.nn.Module, masks: Masks, share: float, *, scope: Scope = "layer") -> Masks:
    """Masks without `share` of the weights that are left, the smallest by magnitude: of each layer as many, or wherever
    in the model they are. Of equal ones the later go first."""
    if not 0 < share < 1:
        raise BadInput(f"share is {share}: give more than 0 and less than 1")
    sizes = {
        name: model.get_parameter(name).detach().abs().masked_fill(~mask, torch.inf) for name, mask in masks.items()
    }
    if scope == "layer":
        return {
            name: _without(sizes[name].flatten(), masks[name].flatten(), share).view_as(masks[name]) for name in masks
        }
    flat = torch.cat([size.flatten() for size in sizes.values()])
    left = _without(flat, torch.cat([mask.flatten() for mask in masks.values()]), share)
    parts = left.split([mask.numel() for mask in masks.values()])
    return {name: part.view_as(mask) for (name, mask), part in zip(masks.items(), parts, strict=True)}


def _without(sizes: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    count = round(share * int(mask.sum()))
    smallest = sizes.flip(0).sort(stable=True).indices[:count]
    return mask.scatter(0, sizes.numel() - 1 - smallest, False)


def shuffled(masks: Masks, generator: torch.Generator | None = None) -> Masks:
    """As many weights left in each layer, at random places."""
    found = {}
    for name, mask in masks.items():
        order = torch.randperm(mask.numel(), generator=generator).to(mask.device)
        found[name] = mask.flatten()[order].view_as(mask)
    return found


def two_of_four(model: torch.nn.Module, masks: Masks) -> Masks:
    """Masks that leave the two largest of every four along a row, as sparse tensor cores need them, where rows come in
    fours; the others as they are."""
    from sublight.ops.sparse.sparsify_24 import sparsify_24, unpack_24

    found = dict(masks)
    for name in masks:
        weight = model.get_parameter(name).detach()
        if weight.shape[1] % 4 == 0:
            packed, meta = sparsify_24(weight)
            found[name] = unpack_24(torch.ones_like(packed), meta, weight.shape[1]) != 0
    return found


def rounds(
    model: torch.nn.Module,
    train: Callable[[torch.nn.Module, Masks], float],
    *,
    count: int,
    share: float,
    first: Mapping[str, Any] | None = None,
    masks: Masks | None = None,
    scope: Scope = "layer",
) -> Iterator[Round]:
    """Iterative magnitude pruning with rewinding: `count` trainings, each with `share` fewer weights than the last.

    `train` trains the model with these masks `held` and gives its score; `first` is the state that what is left is set
    back to, the model's own at the beginning unless given (later ones, after a few steps, are better for large models).
    """
    if count < 1:
        raise BadInput(f"count is {count}: give at least one round")
    first = {name: x.clone() for name, x in (model.state_dict() if first is None else first).items()}
    masks = all_weights(model) if masks is None else masks
    for number in range(count):
        model.load_state_dict(first)
        yield Round(masks=masks, score=train(model, masks))
        if number + 1 < count:
            masks = without_smallest(model, masks, share, scope=scope)
