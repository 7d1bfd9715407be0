"""Swap what our ops do better, module by module, and undo it.

A module keeps its class, parameters, buffers, hooks and name: only its `forward` is set, on the instance. So state
dicts, optimizers, wrappers and checkpointing see the same model, a deep copy is patched as well, and a pickled one
comes back as it was: a method is pickled by its name, `forward`, which a loaded module finds in its class.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sublight import ops, units
from sublight.backend.compile_ahead import start_driver
from sublight.errors import BadInput
from sublight.fix.patch import verify as verifying
from sublight.fix.patch.ahead import begin, can_launch, compile_for, device_of
from sublight.fix.patch.expect import saving_s
from sublight.fix.patch.pay import keep_what_pays
from sublight.fix.patch.probe import fingerprint
from sublight.fix.patch.record import Left, Patch, Row, Rule, Swap
from sublight.fix.patch.rewrite import NotUnderstood
from sublight.fix.patch.rules import RULES
from sublight.fix.patch.step import as_it_was, call


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is known of a swap before it is made."""

    wins: bool
    reason: str
    saving_s: float | None = None  # of all calls in one step, on the device


ANY = "any"  # in the table, where no rule was asked
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
    _refuse_others("patch", model)
    if any(map(torch.nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise BadInput("a lazy module does not know its shapes yet: call the model once, then patch it")
    batch = next((given for given in (batch, verify, measure) if given is not None), None)
    driver = begin(start_driver) if batch is not None and can_launch(device_of(model)) else None
    modules = dict(_each(model))
    found = _found(model, modules, [rule for rule in rules if not rule.joins])
    if driver is not None:
        driver.join()
    beside = _beside(model, modules, [rule for rule in rules if rule.joins], found)
    swaps = {name: told for name, told in found.items() if isinstance(told, Swap)}
    asked = {name: Asked(wins=True, reason=swap.why) for name, swap in swaps.items()}
    if batch is not None:
        asked = _asked(model, modules, swaps, batch)
    chosen = {name: swap for name, swap in swaps.items() if asked[name].wins}
    joined = {name: told for name, told in beside.items() if isinstance(told, Swap)}
    asked_beside = {name: Asked(wins=True, reason=swap.why) for name, swap in joined.items()}
    known = verifying.baseline(model, verify) if verify is not None and chosen else None

    def only(names: Sequence[str]) -> None:
        """Of what is chosen, the swaps of these rules and no others."""
        for name in dict.fromkeys([*chosen, *joined]):
            undo(modules[name])
            both = [swap for swap in (chosen.get(name), joined.get(name)) if swap is not None and swap.rule in names]
            if both:
                apply(modules[name], _in_one(*both))

    used = list(dict.fromkeys(swap.rule for swap in (*chosen.values(), *joined.values())))
    verdict = paid = None
    refused: dict[str, str] = {}
    try:
        only(used)
        if known is not None:
            wrong, verdict = verifying.wrong_rules(model, verify, known, used, only)
            refused |= {rule: f"undone: {why}" for rule, why in wrong.items()}
        if measure is not None and chosen:
            kept = [rule for rule in used if rule not in refused]
            always = [rule.name for rule in rules if rule.joins and rule.name in kept]  # a step does not tell its worth
            timed = [rule for rule in kept if rule not in always]
            paid = keep_what_pays(model, measure, timed, lambda names: only([*names, *always]))
            refused |= {rule: f"undone: it cost {units.text(cost_s, 's')} a step" for rule, cost_s in paid.undone}
    except BaseException:  # a step that fails, or somebody who does not want to wait
        only([])
        raise
    for answers, made in ((asked, chosen), (asked_beside, joined)):
        for name, swap in made.items():
            if swap.rule in refused:
                answers[name] = Asked(wins=False, reason=refused[swap.rule])
    rows = (*_rows(modules, found, asked), *_rows(modules, beside, asked_beside))
    return Patch(rows=rows, verdict=verdict, paid=paid)


def unpatch(model: torch.nn.Module) -> int:
    """Give every module its own forward back; how many had one of ours."""
    _refuse_others("unpatch", model)
    undone = 0
    for module in model.modules():
        undone += undo(module)
    return undone


@contextlib.contextmanager
def patched(model: torch.nn.Module, batch: Any = None) -> Iterator[Patch]:
    """Patched inside the block, as it was after it; what was patched before stays so."""
    _refuse_others("patched", model)
    before = {module for module in model.modules() if is_patched(module)}
    found = patch(model, batch)
    try:
        yield found
    finally:
        for module in model.modules():
            if module not in before:
                undo(module)


def _refuse_others(call: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        also = "" if call == "patched" else " or an optimizer"
        raise BadInput(f"{call} takes a torch.nn.Module{also}, not {type(model).__name__}")


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
    """What each module is; alike modules, as layers are, are looked at once.

    Layers differ by their numbers. A forward rebuilt from its source still reads its own; what was seen of a module's
    behaviour holds for its number alone.
    """
    tried = {rule.name for rule in rules if rule.reads == "behaviour"}
    known: dict[Hashable, Swap | Left | None] = {}
    found: dict[str, Swap | Left] = {}
    for name, module in modules.items():
        kind, numbers = fingerprint(module)
        key = kind if kind in known else (kind, numbers)
        if key not in known:
            told = _find(module, model, rules)
            key = (kind, numbers) if isinstance(told, Swap) and told.rule in tried else kind
            known[key] = told
        if (told := known[key]) is not None:
            found[name] = told
    return found


def _beside(
    model: torch.nn.Module,
    modules: Mapping[str, torch.nn.Module],
    rules: Sequence[Rule],
    found: Mapping[str, Swap | Left],
) -> dict[str, Swap | Left]:
    """What rules that join others find; where another rule has the forward, only what can go into that one."""
    beside = {name: told for name, told in _found(model, modules, rules).items() if told.rule != ANY}
    for name, told in beside.items():
        other = found.get(name)
        if isinstance(told, Swap) and isinstance(other, Swap):
            try:
                _in_one(other, told)
            except NotUnderstood:
                beside[name] = Left(rule=told.rule, reason=f"{other.rule} gives it another forward")
    return beside


def _in_one(first: Swap, second: Swap | None = None) -> Swap:
    """A swap, or two in one forward; raises NotUnderstood."""
    if second is None or second.over is None:
        return first
    return replace(first, forward=second.over(first.forward))


def _find(module: torch.nn.Module, model: torch.nn.Module, rules: Sequence[Rule]) -> Swap | Left | None:
    if is_patched(module):
        return None
    if "forward" in module.__dict__:
        return Left(rule=ANY, reason="somebody else has set its forward")
    return next((told for rule in rules if (told := rule.find(module, model))), None)


def _asked(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], swaps: Mapping[str, Swap], batch: Any
) -> dict[str, Asked]:
    """Of each swap, whether ours wins for what the module is called with, and why; and what it would save."""
    told: dict[str, Asked] = {}
    samples: dict[str, tuple[Any, ...]] = {}  # of alike modules on alike tensors, one call
    calls: dict[str, list[str]] = {}  # of each module, which of them it makes

    def asking(name: str, swap: Swap) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in told or told[name].wins:  # one call that ours loses is enough, and says why
                told[name] = _choice(swap, module, *args, **kwargs)
            if module is not model:  # whole, it is what `measure` times
                key = f"{type(module)} {[getattr(x, 'shape', type(x)) for x in args]} {sorted(kwargs)}"
                samples.setdefault(key, (module, swap, args, kwargs))
                calls.setdefault(name, []).append(key)

        return hook

    handles = [
        modules[name].register_forward_pre_hook(asking(name, swap), with_kwargs=True) for name, swap in swaps.items()
    ]
    try:
        with as_it_was(model), torch.no_grad():
            call(model, batch)
    except torch.OutOfMemoryError:
        return dict.fromkeys(swaps, Asked(wins=True, reason="unpatched, the batch does not fit: decided call by call"))
    finally:
        for handle in handles:
            handle.remove()
    won = {name: swaps[name] for name, answer in told.items() if answer.wins}
    needed = {key for name in won for key in calls.get(name, ())}
    with _swapped(modules, won):  # so that a layer's saving is what it adds to its parts'
        compile_for(model, batch)
        with as_it_was(model), torch.no_grad():
            savings = {key: saving_s(*sample) for key, sample in samples.items() if key in needed}
    for name in won:
        known = [saved for key in calls.get(name, ()) if (saved := savings[key]) is not None]
        told[name] = replace(told[name], saving_s=sum(known) if known else None)
    return {name: told.get(name, Asked(wins=False, reason="the batch does not reach it")) for name in swaps}


def _choice(swap: Swap, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Asked:
    """Whether ours wins for this call."""
    try:
        plan = ops.find(swap.op).plan(*swap.arguments(module, *args, **kwargs))
    except Exception as error:  # whatever a stranger's module may be called with
        return Asked(wins=False, reason=f"it is called with what {swap.op} does not take ({error})")
    wins = plan.provider != "torch" or plan.captured is not None  # what the host decides, a graph decides otherwise
    return Asked(wins=wins, reason=plan.reason)


@contextlib.contextmanager
def _swapped(modules: Mapping[str, torch.nn.Module], swaps: Mapping[str, Swap]) -> Iterator[None]:
    for name, swap in swaps.items():
        apply(modules[name], swap)
    try:
        yield
    finally:
        for name in swaps:
            undo(modules[name])


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
