"""An optimizer's step in a few launches: ours for Adam and AdamW, else PyTorch's own fused one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sublight.backend import private
from sublight.fix.cure import place
from sublight.fix.cure.record import Changes, Cure, Edit

if TYPE_CHECKING:
    import torch

NAME = "fused optimizer"
OURS = ("Adam", "AdamW")


def line_for(name: str) -> str:
    """What to write for this optimizer."""
    return "sublight.patch(optimizer)" if name in OURS else f"torch.optim.{name}(..., fused=True)"


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    """Each optimizer at its first step, when its parameters are where they will be."""
    from torch.compiler import is_compiling
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: set[int] = set()

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling() or id(optimizer) in seen:
            return
        seen.add(id(optimizer))
        changes.left.pop(NAME, None)
        _treat(optimizer, changes)

    changes.left[NAME] = "no optimizer made a step"
    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _treat(optimizer: torch.optim.Optimizer, changes: Changes) -> None:
    from sublight.fix.patch.optimizer import patch_optimizer

    kind = type(optimizer).__name__
    (row,) = patch_optimizer(optimizer).rows or (None,)
    if row is not None and row.is_swapped:
        changes.did[NAME] = f"{kind}: {row.reason}"
        if where := place.before_use(optimizer):
            changes.edit(Edit(kind="before", file=where[0], line=where[1], text=f"sublight.patch({where[2]})"))
    elif reason := fuse(optimizer):
        changes.left[NAME] = f"{kind}: {reason}"
    else:
        changes.did[NAME] = f"{kind}: fused=True"
        if where := place.made(optimizer):
            changes.edit(Edit(kind="argument", file=where[0], line=where[1], text="fused=True", call=kind))


def fuse(optimizer: torch.optim.Optimizer) -> str:
    """Let PyTorch's fused kernels make the steps from now on; why not, where it cannot be."""
    groups = optimizer.param_groups
    if not all("fused" in group for group in groups):
        return "PyTorch has no fused one"
    if all(group["fused"] for group in groups):
        return "it is fused already"
    if optimizer.state:
        return "it has a state already, made without fused=True"
    params = [p for group in groups for p in group["params"]]
    if not all(p.is_floating_point() and p.device.type in private.fused_devices() for p in params):
        return "its parameters are of a kind that PyTorch cannot fuse"
    for group in groups:
        group["fused"], group["foreach"] = True, False
    return ""


OPTIMIZER = Cure(
    name=NAME,
    treats=("unfused-optimizer",),
    line="sublight.patch(optimizer)",
    where="after the optimizer is made",
    install=install,
)
