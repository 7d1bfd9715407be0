"""A float32 model's forward in bfloat16 where that serves: the user's to decide, and named as such."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sublight.backend import private
from sublight.fix.cure.first_call import at_first_call
from sublight.fix.cure.record import Changes, Cure

if TYPE_CHECKING:
    import torch

NAME = "autocast"
LINE = 'with torch.autocast("cuda", dtype=torch.bfloat16):'


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    def act(models: list[torch.nn.Module]) -> None:
        changes.left[NAME] = "no model on a GPU was called"
        for model in models:
            if any(p.is_cuda for p in model.parameters()):
                changes.left.pop(NAME, None)
                changes.did[NAME] = "the model's products in bfloat16, its weights in float32"
                model.forward = casting(model.forward, "cuda")

    changes.left[NAME] = "no module was called"
    with at_first_call(act):
        yield


def casting(own: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The forward inside autocast; its results in float32 again, for the script's loss was written for that."""
    import torch

    def widened(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.dtype == torch.bfloat16 else x

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return private.pytree.tree_map_only(torch.Tensor, widened, own(*args, **kwargs))

    return forward


AUTOCAST = Cure(
    name=NAME,
    treats=("fp32-where-bf16-serves",),
    line=LINE,
    where="around the forward pass and the loss",
    install=install,
    needs_gpu=True,
    tolerance=1e-2,
)
