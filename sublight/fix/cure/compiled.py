"""A model's forward compiled by PyTorch, which makes one kernel of a chain that no op of ours is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sublight.fix.cure import place
from sublight.fix.cure.first_call import at_first_call, has_parameters, precision
from sublight.fix.cure.record import Changes, Cure, Edit

if TYPE_CHECKING:
    import torch

NAME = "compile"
LINE = "model = torch.compile(model)"


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    def act(models: list[torch.nn.Module]) -> None:
        import torch

        changes.left[NAME] = "the model is compiled already, or not on a GPU: a CPU's compiler costs more than it saves"
        for model in models:
            if hasattr(model, "_orig_mod") or not any(p.is_cuda for p in model.parameters()):
                continue
            changes.left.pop(NAME, None)
            changes.did[NAME] = f"the model's forward compiled by torch.compile, in {precision(model)}"
            where = place.before_use(model)
            model.forward = torch.compile(model.forward)  # not the call: hooks on the model stay outside
            if where and has_parameters(model):
                text = f"{where[2]}.forward = torch.compile({where[2]}.forward)"  # whoever else holds the model has it
                changes.edit(Edit(kind="before", file=where[0], line=where[1], text=text))

    changes.left[NAME] = "no module was called"
    with at_first_call(act):
        yield


COMPILE = Cure(
    name=NAME,
    treats=("unfused-pointwise", "unfused-attention"),
    line=LINE,
    where="after the model is made and moved",
    install=install,
    needs_gpu=True,
)
