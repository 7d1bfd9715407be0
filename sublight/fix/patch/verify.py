"""A patched model against itself unpatched: loss, outputs and every gradient, by the rule of twice PyTorch's error.

The truth is the same model in float64 (in float32 where that does not fit), the yardstick is the model as it was. What
fails is found rule by rule, undone, and said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sublight.correct import FACTOR, Error, error
from sublight.fix.patch.step import Step, step

DRAWS = 3  # of PyTorch's error, beside the first, where ours is beyond twice that
ROOM = 0.8  # of the free memory, for the model in float64 with its gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far a patched model is from the truth, next to how far the plain one is."""

    errors: tuple[Error, ...]
    missing: tuple[str, ...]  # outputs that the patched model saves: the logits
    lost: tuple[str, ...]  # gradients that the plain model gives and the patched one does not, or the other way round
    truth: str  # float64, or float32 and why

    @property
    def is_right(self) -> bool:
        return not self.lost and all(each.ok for each in self.errors)

    @property
    def sentence(self) -> str:
        if self.lost:
            return f"{self.lost[0]} is given by one of the two models only"
        worst = max(self.errors, key=lambda each: each.ratio, default=None)
        if worst is None:
            return "nothing could be compared"
        beyond = sum(not each.ok for each in self.errors)
        count = f"all {len(self.errors)} tensors within" if not beyond else f"{beyond} of {len(self.errors)} beyond"
        return f"{count} {FACTOR:g} times PyTorch's error against {self.truth}: {_extent(worst)}"


def _extent(worst: Error) -> str:
    if worst.misplaced:
        return f"{worst.name} has {worst.misplaced} elements that are infinite, NaN or another whole number"
    return f"the worst is {worst.ratio:.2g} times it, {worst.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The truth and the yardstick of one batch."""

    truth: Step
    plain: Step
    words: str
    nudged: tuple[Step, ...] = ()  # the plain model's steps with its parameters' last digits changed

    def judge(self, ours: Step) -> Verdict:
        """Every tensor that both models give."""
        true, plain, mine = self.truth.tensors, self.plain.tensors, ours.tensors
        compared = [name for name in plain if name in mine and name in true]
        errors = [error(name, mine[name], plain[name], true[name].double()) for name in compared]
        others = [{name: error(name, each.tensors[name], plain[name], true[name].double()) for name in compared}
                  for each in self.nudged]  # fmt: skip
        one_sided = set(self.plain.gradients) ^ set(ours.gradients)
        given = {**ours.gradients, **self.plain.gradients}
        return Verdict(
            errors=tuple(_widened(each, [draw[each.name] for draw in others]) for each in errors),
            missing=tuple(name for name in self.plain.outputs if name not in ours.outputs),
            lost=tuple(f"gradient of {name}" for name in sorted(one_sided) if bool(given[name].any())),
            truth=self.words,
        )


def _widened(one: Error, draws: Sequence[Error]) -> Error:
    """PyTorch's error is the largest over its draws."""
    return replace(
        one,
        torch_largest=max([one.torch_largest, *(each.largest for each in draws)]),
        torch_squares=max([one.torch_squares, *(each.squares for each in draws)]),
    )


def baseline(model: torch.nn.Module, batch: Any) -> Baseline:
    """The unpatched model's step, and the same in float64."""
    plain = step(model, batch)
    dtype, words = _wide(model)
    wide = copy.deepcopy(model).to(dtype)
    truth = step(wide, _cast(batch, dtype))
    return Baseline(truth=truth, plain=plain, words=words)


def with_draws(known: Baseline, model: torch.nn.Module, batch: Any) -> Baseline:
    """The baseline with more draws of PyTorch's error: one draw of a single number may be exact by luck.

    Each is the plain model's step with every parameter and input changed by at most its last digit: nobody can hold a
    result against a kernel that PyTorch gives for numbers which are the same up to rounding. A single number, such as
    the loss, may round to the same one in all draws: its own last digit is changed, too.
    """
    nudged = []
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.copy_(_nudged(parameter, generator))
        found = step(other, _each_tensor(batch, partial(_nudged, generator=generator)))
        nudged.append(replace(found, **{kind: _next(getattr(found, kind)) for kind in ("outputs", "gradients")}))
    return replace(known, nudged=tuple(nudged))


def _next(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each single number as the next one that its data type has."""
    return {
        name: x * (1 + torch.finfo(x.dtype).eps) if x.numel() == 1 and x.is_floating_point() else x
        for name, x in tensors.items()
    }


def _nudged(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    change = (2 * torch.rand(x.shape, generator=generator) - 1).to(x.device, wide) * torch.finfo(x.dtype).eps
    return (x.to(wide) * (1 + change)).to(x.dtype)


def wrong_rules(
    model: torch.nn.Module, batch: Any, known: Baseline, rules: Sequence[str], apply: Callable[[Sequence[str]], None]
) -> tuple[dict[str, str], Verdict]:
    """The rules whose swaps fail, each with what failed, and the verdict on the rest, which stays applied.

    `apply` patches the model with these rules alone. They are added one by one: one with which the model is no longer
    right goes, and what others do is not held against it.
    """
    apply(rules)
    whole = known.judge(step(model, batch))
    if whole.is_right or not rules:
        return {}, whole
    apply([])
    known = with_draws(known, model, batch)
    apply(rules)
    whole = known.judge(step(model, batch))
    if whole.is_right:
        return {}, whole
    wrong: dict[str, str] = {}
    kept: list[str] = []
    apply(kept)
    rest = known.judge(step(model, batch))
    for rule in rules:
        apply([*kept, rule])
        verdict = known.judge(step(model, batch))
        if verdict.is_right:
            kept, rest = [*kept, rule], verdict
            continue
        apply([rule])
        is_right_alone = known.judge(step(model, batch)).is_right if kept else False
        beside = f"right alone, but beside {', '.join(kept)} " if is_right_alone else ""
        wrong[rule] = beside + verdict.sentence
    apply(kept)
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
    return _each_tensor(batch, lambda x: x.to(dtype) if x.is_floating_point() else x)


def _each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _each_tensor(value, change) for name, value in batch.items()}
    return type(batch)(_each_tensor(value, change) for value in batch) if isinstance(batch, tuple | list) else batch
