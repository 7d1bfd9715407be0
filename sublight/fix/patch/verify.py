"""A patched model against itself unpatched: loss, outputs and every gradient, by the rule of twice PyTorch's error.

The truth is the same model in float64 (in float32 where that does not fit), the yardstick is the model as it was. What
fails is found rule by rule, undone, and said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sublight.correct import FACTOR, Error, error
from sublight.fix.patch.step import Step, step

ROOM = 0.8  # of the free memory, for the model in float64 with its gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far a patched model is from the truth, next to how far the plain one is."""

    errors: tuple[Error, ...]
    missing: tuple[str, ...]  # what the plain model gives and the patched one does not
    truth: str  # float64, or float32 and why

    @property
    def is_right(self) -> bool:
        return all(each.ok for each in self.errors)

    @property
    def sentence(self) -> str:
        worst = max(self.errors, key=lambda each: each.ratio, default=None)
        if worst is None:
            return "nothing could be compared"
        count = len(self.errors)
        verb = "within" if self.is_right else "beyond"
        return (
            f"{count} tensors {verb} {FACTOR:g} times PyTorch's error against {self.truth}: "
            f"the worst is {worst.ratio:.2g} times it, {worst.name}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The truth and the yardstick of one batch."""

    truth: Step
    plain: Step
    words: str

    def judge(self, ours: Step) -> Verdict:
        found, missing = [], []
        true, plain, mine = self.truth.tensors, self.plain.tensors, ours.tensors
        for name, tensor in plain.items():
            if name not in mine:
                missing.append(name)
            elif name in true:
                found.append(error(name, mine[name], tensor, true[name].to(torch.float64)))
        return Verdict(errors=tuple(found), missing=tuple(missing), truth=self.words)


def baseline(model: torch.nn.Module, batch: Any) -> Baseline:
    """The unpatched model's step, and the same in float64."""
    plain = step(model, batch)
    dtype, words = _wide(model)
    wide = copy.deepcopy(model).to(dtype)
    truth = step(wide, _cast(batch, dtype))
    return Baseline(truth=truth, plain=plain, words=words)


def wrong_rules(
    model: torch.nn.Module, batch: Any, known: Baseline, rules: Sequence[str], apply: Callable[[Sequence[str]], None]
) -> tuple[dict[str, Verdict], Verdict]:
    """The rules whose swaps fail, each with its verdict, and the verdict on the rest, which stays applied.

    `apply` patches the model with these rules alone. Where every rule passes alone and all together fail, all go.
    """
    apply(rules)
    whole = known.judge(step(model, batch))
    if whole.is_right or not rules:
        return {}, whole
    wrong: dict[str, Verdict] = {}
    for rule in rules:
        apply([rule])
        alone = known.judge(step(model, batch))
        if not alone.is_right:
            wrong[rule] = alone
    kept = [rule for rule in rules if rule not in wrong] if wrong else []
    apply(kept)
    rest = known.judge(step(model, batch))
    if not wrong or not rest.is_right:
        apply([])
        return {rule: wrong.get(rule, whole) for rule in rules}, known.judge(step(model, batch))
    return wrong, rest


def _wide(model: torch.nn.Module) -> tuple[torch.dtype, str]:
    numbers = sum(parameter.numel() for parameter in model.parameters())
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    for device in devices:
        free, _ = torch.cuda.mem_get_info(device)
        if 2 * 8 * numbers > ROOM * free:
            return torch.float32, "float32 (float64 does not fit beside the model)"
    return torch.float64, "float64"


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of a batch in that data type."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {name: _cast(value, dtype) for name, value in batch.items()}
    return type(batch)(_cast(value, dtype) for value in batch) if isinstance(batch, tuple | list) else batch
