"""What `patch` may swap: one list, each entry a module and a rule, with the proof it has or the one that is missing.

A candidate is found and proven by its rule, asked for its worth on a batch, verified, measured; each step gives the
list again, with `left` on those that it takes out. Whoever has nothing in `left` at the end is swapped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sublight.fix.patch.probe import fingerprint, is_plain_tensor, is_sharded
from sublight.fix.patch.record import Left, Row, Rule, Swap
from sublight.fix.patch.rewrite import NotUnderstood
from sublight.fix.patch.swap import apply, is_its_own, is_patched, undo

ANY = "any"  # in the table, where no rule was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A module that a rule knows."""

    name: str
    module: torch.nn.Module
    rule: str
    swap: Swap | None  # None: it is not proven
    left: str = ""  # why it is not swapped; empty: it is
    reason: str = ""  # why it is
    saving_s: float | None = None  # of all calls in one step, on the device

    @property
    def joins(self) -> bool:
        """Whether it goes beside another swap, in one forward."""
        return self.swap is not None and self.swap.over is not None

    def out(self, why: str) -> Candidate:
        return replace(self, left=why, saving_s=None)


def each(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module once, by its first name."""
    for name, module in model.named_modules():
        yield name or "(model)", module


def candidates(model: torch.nn.Module, rules: Sequence[Rule]) -> list[Candidate]:
    """All that the rules know in a model; of several rules for one module the first, and those that join it."""
    modules = [(name, module) for name, module in each(model) if not is_patched(module)]
    joined = [one for one in _known(model, modules, [rule for rule in rules if rule.joins]) if one.rule != ANY]
    known = {one.module for one in joined if one.swap is not None and one.swap.op}
    whole = {rule.name for rule in rules if rule.reads == "behaviour"}  # rules for what a module is as a whole
    plain = _known(model, modules, [rule for rule in rules if not rule.joins])
    found = [*(one for one in plain if one.swap or one.rule not in whole or one.module not in known), *joined]
    return [_beside(one, found) if one.joins else one for one in found]


def _known(
    model: torch.nn.Module, modules: Sequence[tuple[str, torch.nn.Module]], rules: Sequence[Rule]
) -> Iterator[Candidate]:
    """Alike modules, as layers are, are looked at once.

    Layers differ by their numbers. A forward rebuilt from its source still reads its own; what was seen of a module's
    behaviour holds for its number alone.
    """
    tried = {rule.name for rule in rules if rule.reads == "behaviour"}
    known: dict[Hashable, Swap | Left | None] = {}
    for name, module in modules:
        kind, numbers = fingerprint(module)
        key = kind if kind in known else (kind, numbers)
        if key not in known:
            answer = _find(module, model, rules)
            key = (kind, numbers) if isinstance(answer, Swap) and answer.rule in tried else kind
            known[key] = answer
        answer = known[key]
        if isinstance(answer, Swap):
            yield Candidate(name=name, module=module, rule=answer.rule, swap=answer, reason=answer.why)
        elif answer is not None:
            yield Candidate(name=name, module=module, rule=answer.rule, swap=None, left=answer.reason)


def _find(module: torch.nn.Module, model: torch.nn.Module, rules: Sequence[Rule]) -> Swap | Left | None:
    if isinstance(module, torch.jit.ScriptModule):
        return Left(rule=ANY, reason="TorchScript has compiled it: its forward cannot be set")
    if not is_its_own(module):
        return Left(rule=ANY, reason="somebody else has set its forward")
    answer = next((answer for rule in rules if (answer := rule.find(module, model))), None)
    if isinstance(answer, Swap) and (odd := _odd_tensor(module, answer.hides)):
        return Left(rule=answer.rule, reason=f"{odd}, whose ops may be its own")
    return answer


def _odd_tensor(module: torch.nn.Module, hides: Sequence[str]) -> str:
    """A parameter or buffer, of the module or of a child that is not called any more, which is no plain tensor."""
    for each in (module, *map(module.get_submodule, hides)):
        for name, x in (*each._parameters.items(), *each._buffers.items()):
            if x is not None and not is_plain_tensor(x) and not is_sharded(x):
                return f"its {name} is a {type(x).__name__}"
    return ""


def _beside(one: Candidate, found: Sequence[Candidate]) -> Candidate:
    """A candidate that joins others; left where it cannot go into the forward that the module gets."""
    other = next((each for each in found if each.module is one.module and each.swap and not each.joins), None)
    if other is not None and other.swap is not None and one.swap is not None:
        try:
            in_one(other.swap, one.swap)
        except NotUnderstood:
            return one.out(f"{other.rule} gives it another forward")
    return one


def in_one(first: Swap, second: Swap | None = None) -> Swap:
    """A swap, or two in one forward; raises NotUnderstood."""
    if second is None or second.over is None:
        return first
    return replace(first, forward=second.over(first.forward))


def put_in(found: Sequence[Candidate], rules: Sequence[str]) -> None:
    """Of those that are not left, the swaps of these rules and no others."""
    kept = [one for one in found if not one.left and one.swap is not None]
    for module in dict.fromkeys(one.module for one in kept):
        undo(module)
        mine = [one for one in kept if one.module is module and one.rule in rules]
        swaps = [one.swap for one in sorted(mine, key=lambda one: one.joins) if one.swap is not None]
        if swaps:
            apply(module, in_one(*swaps[:2]))


def rows(found: Sequence[Candidate]) -> Iterator[Row]:
    """The table: modules of one kind, swapped or left for one reason, in one line."""
    groups: dict[tuple[str, str, bool, str], list[Candidate]] = {}
    for one in found:
        what = one.swap.what if one.swap is not None else ""
        kind = f"{type(one.module).__name__}{f' ({what})' * bool(what)}"
        groups.setdefault((one.rule, kind, not one.left, one.left or one.reason), []).append(one)
    for (rule, kind, is_swapped, reason), alike in groups.items():
        savings = [one.saving_s for one in alike if one.saving_s is not None]
        yield Row(
            rule=rule,
            kind=kind,
            names=tuple(one.name for one in alike),
            is_swapped=is_swapped,
            reason=reason,
            saving_s=sum(savings) if savings and is_swapped else None,
        )
