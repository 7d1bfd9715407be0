"""Part of `sublight.patch` on the models of a script that runs, by the rules that a finding is about."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sublight.fix.cure import place
from sublight.fix.cure.first_call import at_first_call, precision
from sublight.fix.cure.record import Changes, Edit

if TYPE_CHECKING:
    import torch

NOT_SEEN = "no module was called"
LINE = "sublight.patch(model)"
WHERE = "after the model is made, before it is compiled"


@contextlib.contextmanager
def patched(changes: Changes, name: str, rules: tuple[str, ...]) -> Iterator[None]:
    from sublight.fix.patch import model as patching
    from sublight.fix.patch.rules import RULES

    chosen = [rule for rule in RULES if rule.name in rules]

    def act(models: list[torch.nn.Module]) -> None:
        changes.left.pop(name, None)
        swapped, kinds, reasons = 0, [], []
        for model in models:
            found = patching.patch(model, rules=chosen)
            swapped += found.swapped
            kinds += [row.kind for row in found.rows if row.is_swapped]
            reasons += [row.reason for row in found.rows if not row.is_swapped]
            if found.swapped and (where := place.before_use(model)):
                used = list(dict.fromkeys(row.rule for row in found.rows if row.is_swapped))
                text = f"sublight.patch({where[2]}, only={json.dumps(used)})"  # no other rule was tried
                changes.edit(Edit(kind="before", file=where[0], line=where[1], text=text))
        if swapped:
            changes.did[name] = (
                f"{swapped} module{'s' * (swapped > 1)} swapped: {', '.join(dict.fromkeys(kinds))}; "
                f"in {precision(models[0])}"
            )
            if not any(p.is_cuda for model in models for p in model.parameters()):
                changes.did[name] += "; on a CPU each call still goes to PyTorch, which wins there"
        else:
            changes.left[name] = reasons[0] if reasons else "no module here that our ops do"

    changes.left[name] = NOT_SEEN
    with at_first_call(act):
        yield
