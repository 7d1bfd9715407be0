"""Which candidates win on a batch: one forward pass shows what modules are called with, their ops' plans decide."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from sublight import ops
from sublight.fix.patch.ahead import compile_for
from sublight.fix.patch.candidate import Candidate, put_in
from sublight.fix.patch.expect import saving_s
from sublight.fix.patch.record import Swap
from sublight.fix.patch.step import as_it_was, call
from sublight.fix.patch.twin import is_heard

Key = tuple[str, str]  # a candidate's name and rule: two rules may know one module


def asked(model: torch.nn.Module, found: Sequence[Candidate], batch: Any) -> list[Candidate]:
    """The candidates, of which those are left that lose a call, or that the batch does not reach."""
    asking = {_key(one): one for one in found if not one.left and one.swap is not None and one.swap.op}
    answers: dict[Key, tuple[bool, str]] = {}
    samples: dict[str, tuple[Any, ...]] = {}  # of alike modules on alike tensors, one call
    calls: dict[Key, list[str]] = {}  # of each candidate, which of them it makes

    heard = {one.module for one in asking.values() if is_heard(one.module)}
    inside: list[Key] = []  # whose forward is called once more, to see what it comes to

    def listen(name: Key, swap: Swap) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if inside:
                return
            if answers.get(name, (True, ""))[0]:  # one call that ours loses is enough, and says why
                inside.append(name)
                is_asked = swap.wins is None or module not in heard
                answers[name] = wins(swap, module, *args, **kwargs) if is_asked else (True, swap.why)
                inside.pop()
            if module is not model:  # whole, it is what `measure` times
                key = f"{swap.rule} {type(module)} {[getattr(x, 'shape', type(x)) for x in args]} {sorted(kwargs)}"
                samples.setdefault(key, (module, swap, args, kwargs))
                calls.setdefault(name, []).append(key)

        return hook

    handles = [
        one.module.register_forward_pre_hook(listen(name, one.swap), with_kwargs=True)
        for name, one in asking.items()
        if one.swap is not None
    ]
    try:
        with as_it_was(model), torch.no_grad():
            call(model, batch)
    except torch.OutOfMemoryError:
        return [replace(one, reason="unpatched, the batch does not fit: decided call by call") for one in found]
    finally:
        for handle in handles:
            handle.remove()
    won = [one for name, one in asking.items() if answers.get(name, (False, ""))[0]]
    needed = {key for one in won for key in calls.get(_key(one), ())}
    with _swapped(won), no_context_warning():  # so that a layer's saving is what it adds to its parts'
        compile_for(model, batch)
        with as_it_was(model), torch.no_grad():
            savings = {key: saving_s(*sample) for key, sample in samples.items() if key in needed}
    return [_answered(one, answers, savings, calls) if asking.get(_key(one)) is one else one for one in found]


def _key(one: Candidate) -> Key:
    return one.name, one.rule


def _answered(one: Candidate, answers: Any, savings: Any, calls: Any) -> Candidate:
    is_won, reason = answers.get(_key(one), (False, "the batch does not reach it"))
    if not is_won:
        return one.out(reason)
    known = [saved for key in calls.get(_key(one), ()) if (saved := savings[key]) is not None]
    return replace(one, reason=reason, saving_s=sum(known) if known else None)


def wins(swap: Swap, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Whether ours wins for this call, and why."""
    try:
        if swap.wins is not None:
            return swap.wins(module, *args, **kwargs)
        plan = ops.find(swap.op).plan(*swap.arguments(module, *args, **kwargs))
    except Exception as error:  # whatever a stranger's module may be called with
        return False, f"it is called with what {swap.op} does not take ({error})"
    return plan.provider != "torch" or plan.captured is not None, plan.reason  # what a host decides, a graph may not


@contextlib.contextmanager
def _swapped(won: Sequence[Candidate]) -> Iterator[None]:
    put_in(won, [one.rule for one in won])
    try:
        yield
    finally:
        put_in(won, [])


@contextlib.contextmanager
def no_context_warning() -> Iterator[None]:
    """cuBLAS warns where it is the first in a thread of autograd's to use the GPU: our kernels were left out there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no current CUDA context")
        yield
