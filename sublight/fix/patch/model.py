"""Swap what our ops do better, module by module, and undo it.

A module keeps its class, parameters, buffers, hooks and name: only its `forward` is set, on the instance. So state
dicts, optimizers, wrappers and checkpointing see the same model, a deep copy is patched as well, and a pickled one
comes back as it was: a method is pickled by its name, `forward`, which a loaded module finds in its class.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sublight import ops, units
from sublight.fix.patch import verify as verifying
from sublight.fix.patch.expect import saving_s
from sublight.fix.patch.pay import keep_what_pays
from sublight.fix.patch.probe import fingerprint
from sublight.fix.patch.record import Left, Patch, Row, Rule, Swap
from sublight.fix.patch.rules import RULES
from sublight.fix.patch.step import call
from sublight.op import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is known of a swap before it is made."""

    wins: bool
    reason: str
    saving_s: float | None = None  # of all calls in one forward pass


MARK = "__sublight__"  # on the function behind a swapped forward: the forward that the instance had before, or None


def patch(
    model: torch.nn.Module, batch: Any = None, *, verify: Any = None, measure: Any = None, rules: Sequence[Rule] = RULES
) -> Patch:
    """Swap in our forwards where they win, and say what was done.

    With a `batch` (a tensor, or a tuple or mapping of arguments) one forward pass tells the shapes, and a module is
    swapped where `sublight.why` says that ours wins for them; without, everything that is understood is swapped, and
    each call still goes to PyTorch where that is faster. `verify`: a batch on which loss, outputs and gradients must be
    right by the rule of twice PyTorch's error, else the swap is undone. `measure`: a batch whose step must not be
    slower, else the swap is undone.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"patch takes a torch.nn.Module or an optimizer, not {type(model).__name__}")
    batch = next((given for given in (batch, verify, measure) if given is not None), None)
    modules = dict(_each(model))
    found = _found(model, modules, rules)
    swaps = {name: told for name, told in found.items() if isinstance(told, Swap)}
    asked = dict.fromkeys(swaps, Asked(wins=True, reason="decided call by call"))
    if batch is not None:
        asked = _asked(model, modules, swaps, batch)
    chosen = {name: swap for name, swap in swaps.items() if asked[name].wins}
    known = verifying.baseline(model, verify) if verify is not None and chosen else None

    def only(names: Sequence[str]) -> None:
        """Of what is chosen, the swaps of these rules and no others."""
        for name, swap in chosen.items():
            undo(modules[name])
            if swap.rule in names:
                apply(modules[name], swap)

    used = list(dict.fromkeys(swap.rule for swap in chosen.values()))
    only(used)
    verdict = paid = None
    refused: dict[str, str] = {}
    if known is not None:
        wrong, verdict = verifying.wrong_rules(model, verify, known, used, only)
        refused |= {rule: f"undone: {told.sentence}" for rule, told in wrong.items()}
    if measure is not None and chosen:
        paid = keep_what_pays(model, measure, [rule for rule in used if rule not in refused], only)
        refused |= {rule: f"undone: it cost {units.text(cost_s, 's')} a step" for rule, cost_s in paid.undone}
    for name, swap in chosen.items():
        if swap.rule in refused:
            asked[name] = Asked(wins=False, reason=refused[swap.rule])
    return Patch(rows=tuple(_rows(modules, found, asked)), verdict=verdict, paid=paid)


def unpatch(model: torch.nn.Module) -> int:
    """Give every module its own forward back; how many had one of ours."""
    undone = 0
    for module in model.modules():
        undone += undo(module)
    return undone


@contextlib.contextmanager
def patched(model: torch.nn.Module, batch: Any = None) -> Iterator[Patch]:
    """Patched inside the block, as it was after it; what was patched before stays so."""
    before = {module for module in model.modules() if is_patched(module)}
    found = patch(model, batch)
    try:
        yield found
    finally:
        for module in model.modules():
            if module not in before:
                undo(module)


def apply(module: torch.nn.Module, swap: Swap) -> None:
    """Set the module's forward; a function of its own, so that each module remembers what it had."""
    function = types.FunctionType(
        swap.forward.__code__,
        swap.forward.__globals__,
        "forward",  # the name by which pickle finds the class's own again
        swap.forward.__defaults__,
        swap.forward.__closure__,
    )
    function.__kwdefaults__ = swap.forward.__kwdefaults__
    function.__dict__[MARK] = module.__dict__.get("forward")
    function.__dict__["__sublight_rule__"] = swap.rule
    module.forward = types.MethodType(function, module)


def undo(module: torch.nn.Module) -> bool:
    if not is_patched(module):
        return False
    before = module.__dict__["forward"].__func__.__dict__[MARK]
    if before is None:
        del module.__dict__["forward"]
    else:
        module.forward = before
    return True


def is_patched(module: torch.nn.Module) -> bool:
    return MARK in getattr(getattr(module.__dict__.get("forward"), "__func__", None), "__dict__", {})


def _each(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module once, by its first name."""
    for name, module in model.named_modules():
        yield name or "(model)", module


def _found(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], rules: Sequence[Rule]
) -> dict[str, Swap | Left]:
    """What each module is; alike modules, as layers are, are looked at once."""
    known: dict[Hashable, Swap | Left | None] = {}
    found: dict[str, Swap | Left] = {}
    for name, module in modules.items():
        key = fingerprint(module)
        if key not in known:
            known[key] = _find(module, model, rules)
        if (told := known[key]) is not None:
            found[name] = told
    return found


def _find(module: torch.nn.Module, model: torch.nn.Module, rules: Sequence[Rule]) -> Swap | Left | None:
    if is_patched(module):
        return None
    if "forward" in module.__dict__:
        return Left(rule="any", reason="somebody else has set its forward")
    return next((told for rule in rules if (told := rule.find(module, model))), None)


def _asked(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], swaps: Mapping[str, Swap], batch: Any
) -> dict[str, Asked]:
    """Of each swap, whether ours wins for what the module is called with, and why; and what it would save."""
    told: dict[str, Asked] = {}
    savings: dict[str, float | None] = {}  # alike modules on alike tensors are timed once
    handles: list[Any] = []
    timing: list[str] = []  # the module that is being timed: what it calls is not asked again

    def asking(name: str, swap: Swap) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if timing:
                return
            choice = ops.find(swap.op).choose(*swap.arguments(module, *args, **kwargs))
            wins = choice.provider == "sublight"
            key = f"{type(module)} {[getattr(x, 'shape', x) for x in args]} {sorted(kwargs)}"
            if wins and key not in savings:
                timing.append(name)
                savings[key] = None if module is model else saving_s(module, swap, args, kwargs)
                timing.clear()
            before = told.get(name)
            saved = savings.get(key) if wins else None
            total = None if saved is None else saved + (before.saving_s or 0.0 if before else 0.0)
            told[name] = Asked(wins=wins and (before is None or before.wins), reason=choice.reason, saving_s=total)

        return hook

    for name, swap in swaps.items():
        handles.append(modules[name].register_forward_pre_hook(asking(name, swap), with_kwargs=True))
    try:
        with torch.no_grad():
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: told.get(name, Asked(wins=False, reason="the batch does not reach it")) for name in swaps}


def _rows(
    modules: Mapping[str, torch.nn.Module], found: Mapping[str, Swap | Left], asked: Mapping[str, Asked]
) -> Iterator[Row]:
    groups: dict[tuple[str, str, bool, str], list[str]] = {}
    for name, told in found.items():
        answer = asked[name] if isinstance(told, Swap) else Asked(wins=False, reason=told.reason)
        kind = told.what if isinstance(told, Swap) and told.what else ""
        kind = f"{type(modules[name]).__name__}{f' ({kind})' * bool(kind)}"
        groups.setdefault((told.rule, kind, answer.wins, answer.reason), []).append(name)
    for (rule, kind, is_swapped, reason), names in groups.items():
        savings = [saved for name in names if name in asked and (saved := asked[name].saving_s) is not None]
        total = sum(savings) if savings and is_swapped else None
        yield Row(rule=rule, kind=kind, names=tuple(names), is_swapped=is_swapped, reason=reason, saving_s=total)
