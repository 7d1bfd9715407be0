"""unfused-optimizer: the update of many tensors as many small kernels, instead of a few over all of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

import numpy as np

from sublight import units
from sublight.cost import Cost
from sublight.diagnose.case import Case, Change, Rule, fuse
from sublight.fix.cure.optimizer import line_for
from sublight.trace.intervals import distinct
from sublight.trace.record import Kind

REACHED = 0.8  # of the copy rate, by torch's fused AdamW
TENSORS = {"adam": (4, 3), "sgd": (3, 2)}  # read and written by one update: parameter, gradient, two moments
HAVE_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
OTHERWISE = ("LBFGS", "SparseAdam", "Muon")  # their step is no pass over each parameter, and has no lists of tensors
FEW = 8  # kernels: already fused


def check(case: Case) -> Change | None:
    chosen = sorted(case.in_optimizer)
    events = case.events(chosen)
    if case.per_step(len(events)) <= FEW or any(case.items[at].name.startswith("aten::_fused_") for at in chosen):
        return None
    name = _optimizer(case)
    elements, element_bytes = _parameters(case, chosen)
    if not elements or name in OTHERWISE:
        return None
    read, written = TENSORS["adam" if "adam" in name.lower() else "sgd"]
    size = elements * element_bytes
    floor = case.limits.floor(Cost(read_bytes=int(read * size), write_bytes=int(written * size)))
    if floor is None:
        return None
    fused_s = floor.seconds / REACHED
    step = case.model.step[case.model.call[events]]
    parts = [(np.sort(events[step == number]), fused_s) for number in distinct(step).tolist()]
    spent = case.device_s(events)
    return Change(
        title=f"{name} updates its parameters with {case.often(len(events))} kernels a step",
        evidence=(
            f"{units.text(spent, 's')} of device time a step for {units.text(elements, '')}parameters; fused, about "
            f"{units.text(fused_s, 's')}",
            f"{case.often(len(chosen))} ops a step to launch from the host",
        ),
        fix=_FUSED.format(name=name) if name in HAVE_FUSED else _OTHER,
        cure=line_for(name) if name in HAVE_FUSED and case.on_gpu else "",
        edit=fuse(parts),
        rows=case.model.event_row[events],
        ops=tuple(dict.fromkeys(case.items[at].name for at in chosen))[:6],
    )


def _optimizer(case: Case) -> str:
    rows = case.trace.rows_named(lambda name: name.startswith("Optimizer.step"))
    return case.trace.name_of(int(rows[0])).partition("#")[2].partition(".")[0] or "the optimizer"


def _parameters(case: Case, chosen: list[int]) -> tuple[float, int]:
    """Elements that one step updates, and the bytes of one: most ops go over all of them once, some twice."""
    by_name: dict[str, int] = defaultdict(int)
    element = 4
    for at in chosen:
        item = case.items[at]
        if case.trace.kind[item.row] != Kind.OP:
            continue
        dims = case.trace.detail_of(item.row).dims
        if dims and dims[0]:
            by_name[item.name] += _elements(dims[0])
            element = {"bfloat16": 2, "float16": 2, "float64": 8}.get(item.dtype, 4)
    all_of_them = [count for count in by_name.values() if count > max(by_name.values()) / 4]
    return (statistics.median_low(all_of_them) if all_of_them else 0) / case.model.steps, element


def _elements(dims: Any) -> int:
    """The elements of a tensor, or of a list of tensors.

    >>> _elements((4, 4)), _elements(((4, 4), (8,)))
    (16, 24)
    """
    if all(isinstance(size, int) for size in dims):
        return math.prod(dims)
    return sum(math.prod(shape) for shape in dims if isinstance(shape, tuple))


_FUSED = """\
optimizer = torch.optim.{name}(model.parameters(), ..., fused=True)"""
_OTHER = """\
optimizer = Optimizer(model.parameters(), ..., foreach=True)   # over lists of tensors, not one by one"""

UNFUSED_OPTIMIZER = Rule(id="unfused-optimizer", check=check)
