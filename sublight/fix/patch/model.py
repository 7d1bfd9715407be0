"""Swap what our ops do better, module by module, and undo it.

A module keeps its class, parameters, buffers, hooks and name: only its `forward` is set, on the instance. So state
dicts, optimizers, wrappers and checkpointing see the same model, a deep copy is patched as well, and a pickled one
comes back as it was: a method is pickled by its name, `forward`, which a loaded module finds in its class.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sublight import units
from sublight.backend.compile_ahead import start_driver
from sublight.backend.device import is_interpreted
from sublight.errors import BadInput
from sublight.fix.patch import verify as verifying
from sublight.fix.patch.ahead import begin, can_launch, device_of
from sublight.fix.patch.ask import asked, no_context_warning
from sublight.fix.patch.candidate import Candidate, candidates, put_in, rows
from sublight.fix.patch.pay import Paid, keep_what_pays
from sublight.fix.patch.record import Patch, Rule
from sublight.fix.patch.rules import RULES
from sublight.fix.patch.swap import apply, is_patched, undo

__all__ = ["apply", "is_patched", "patch", "patched", "undo", "unpatch"]

ONE_AT_A_TIME = threading.RLock()  # a second thread that patches a model finds it patched


def patch(
    model: torch.nn.Module, batch: Any = None, *, verify: Any = None, measure: Any = None, rules: Sequence[Rule] = RULES
) -> Patch:
    """Swap in our forwards where they win, and say what was done.

    With a `batch` (a tensor, or a tuple or mapping of arguments) one forward pass tells the shapes, and a module is
    swapped where `sublight.why` says that ours wins for them; without, everything that is proven is swapped, and each
    call still goes to PyTorch where that is faster. `verify`: a batch on which loss, outputs and gradients must be
    right by the rule of twice PyTorch's error, else the swap is undone. `measure`: a batch whose step must not be
    slower, else the swap is undone.
    """
    _refuse_others("patch", model)
    if any(map(torch.nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise BadInput("a lazy module does not know its shapes yet: call the model once, then patch it")
    with ONE_AT_A_TIME:
        before = sum(map(is_patched, model.modules()))
        found = _proven(model, rules, starts_driver=any(each is not None for each in (batch, verify, measure)))
        batch = next((given for given in (batch, verify, measure) if given is not None), None)
        if batch is not None:
            found = asked(model, found, batch)
        known = verifying.baseline(model, verify) if verify is not None and _kept(found) else None
        verdict = paid = None
        try:
            put_in(found, _kept(found))
            if known is not None:
                found, verdict = _verified(model, verify, known, found)
            if measure is not None and _kept(found):
                found, paid = _measured(model, measure, found)
        except BaseException:  # a step that fails, or somebody who does not want to wait
            put_in(found, [])
            raise
    notes = _notes(model, found, before, verify=verify is not None, measure=measure is not None)
    return Patch(rows=tuple(rows(found)), verdict=verdict, paid=paid, notes=tuple(notes), before=before)


def _proven(model: torch.nn.Module, rules: Sequence[Rule], starts_driver: bool) -> list[Candidate]:
    """The candidates; the GPU's driver starts meanwhile. Probes are small: threads would only wait for one another."""
    driver = begin(start_driver) if starts_driver and can_launch(device_of(model)) else None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), _on_the_cpu():  # wherever patch is called
            return candidates(model, rules)
    finally:
        torch.set_num_threads(threads)
        if driver is not None:
            driver.join()


@contextlib.contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Trials are made there, of values that may overflow: the user's default device and anomaly mode are for others."""
    with contextlib.ExitStack() as stack:
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch.get_default_device().type != "cpu":  # asked first: each function of PyTorch's costs more inside
            stack.enter_context(torch.device("cpu"))
        yield


def _kept(found: Sequence[Candidate]) -> list[str]:
    """The rules of what is not left, each once."""
    return list(dict.fromkeys(one.rule for one in found if not one.left))


def _verified(
    model: torch.nn.Module, batch: Any, known: verifying.Baseline, found: list[Candidate]
) -> tuple[list[Candidate], verifying.Verdict]:
    with no_context_warning():
        wrong, verdict = verifying.wrong_rules(model, batch, known, _kept(found), lambda names: put_in(found, names))
    return [
        one.out(f"undone: {wrong[one.rule]}") if one.rule in wrong and not one.left else one for one in found
    ], verdict


def _measured(model: torch.nn.Module, batch: Any, found: list[Candidate]) -> tuple[list[Candidate], Paid]:
    kept = _kept(found)
    always = [rule for rule in kept if _is_always(rule, found)]  # a step does not tell its worth
    timed = [rule for rule in kept if rule not in always]
    with no_context_warning():
        paid = keep_what_pays(model, batch, timed, lambda names: put_in(found, [*names, *always]))
    cost = {rule: f"undone: it cost {units.text(cost_s, 's')} a step" for rule, cost_s in paid.undone}
    return [one.out(cost[one.rule]) if one.rule in cost and not one.left else one for one in found], paid


def _is_always(rule: str, found: Sequence[Candidate]) -> bool:
    """Whether its swaps join others and have no op."""
    return all(
        one.joins and one.swap is not None and not one.swap.op for one in found if one.rule == rule and not one.left
    )


def _notes(
    model: torch.nn.Module, found: Sequence[Candidate], before: int, verify: bool, measure: bool
) -> Iterator[str]:
    swapped = any(not one.left for one in found)
    device = device_of(model)
    if before:
        yield f"{before} modules had been patched before and stay so"
    if swapped and device.type == "cpu" and not is_interpreted():
        yield "the model is on a CPU, where PyTorch's ops run: our kernels take over once it is on a GPU"
    undone = any(one.left.startswith("undone: ") for one in found)
    for word, given in (("verify", verify), ("measure", measure)):
        if given and not swapped and not undone:
            yield f"{word} did nothing: no module was swapped, so there was nothing to compare"


def unpatch(model: torch.nn.Module) -> int:
    """Give every module its own forward back; how many had one of ours."""
    _refuse_others("unpatch", model)
    with ONE_AT_A_TIME:
        return sum(undo(module) for module in model.modules())


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
