"""anomaly-mode: autograd looks for NaN after every node of the backward pass, and waits for each answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule, drop, no_wait
from sublight.diagnose.model import Model
from sublight.trace.attribute import ENGINE
from sublight.trace.intervals import distinct
from sublight.trace.record import Ints, Kind

CHECK = "aten::isnan"
_REST = (CHECK, "aten::any", "aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::ne", "aten::abs")
MOSTLY = 0.5  # of the nodes: a script's own check of a loss or a gradient is none of each node
FEWEST = 4  # nodes a step
TRACEBACK_S = 30e-6  # of the host, to write down where an op was called, at the least: a deep stack takes milliseconds
LEAST_S = 10e-6  # of the host's time for an op
SLOWEST = 0.1  # of the limit, that a plain op on a CPU reaches


def check(case: Case) -> Change | None:
    trace = case.trace
    nodes = case.inside(trace.rows_named(lambda name: name.startswith(ENGINE)))
    checks = _under(case, nodes, lambda name: name == CHECK)
    if case.per_step(len(nodes)) < FEWEST or len(checks) < MOSTLY * len(nodes):
        return None
    ops = _under(case, nodes, lambda name: name in _REST)
    inner = case.attribution.forward_of.values()  # the op that has a node may lie in the one that is called
    traced = np.array(sorted({*inner, *((case.attribution.ops_above(row) or [row])[-1] for row in inner)}), dtype=int)
    forward = _of_ops(case, case.model.event_row, case.inside(traced))
    events, calls = _of_ops(case, case.model.event_row, ops), _of_ops(case, case.model.call_row, ops)
    spent = case.device_s(events)

    def edit(model: Model) -> Model:
        model = drop(no_wait(model, calls), events)
        launch, cost = model.before_s["launch"].copy(), model.cost_s.copy()
        launch[calls] = 0.0
        cost[calls] = 0.0
        model = model.replace(cost_s=cost, before_s={**model.before_s, "launch": launch})
        return _without_tracebacks(case, model, forward)

    return Change(
        title=f"anomaly mode is on: autograd checks {case.often(len(checks))} gradients a step for NaN",
        evidence=(
            f"{case.often(len(checks))} isnan checks after {case.often(len(nodes))} nodes of the backward pass a step, "
            f"{units.text(spent, 's')} of {'device' if case.on_gpu else 'op'} time",
            *((f"the host waits for {case.often(len(calls))} API calls of them a step",) if case.on_gpu else ()),
            "it also keeps a Python traceback of every op of the forward pass, about "
            f"{units.text(TRACEBACK_S, 's')} or more of the host's time each",
        ),
        fix=_FIX,
        edit=edit,
        rows=checks,
        ops=(CHECK, "aten::any"),
    )


def _without_tracebacks(case: Case, model: Model, forward: Ints) -> Model:
    """On a CPU the traceback is part of the op's time, with a GPU of the host's time to launch it."""
    calls = distinct(model.call[forward])
    launch, duration = model.before_s["launch"].copy(), model.duration_s.copy()
    if case.on_gpu:
        launch[calls] = np.maximum(launch[calls] - TRACEBACK_S, np.minimum(launch[calls], LEAST_S))
    else:
        floor = np.array([case.items[number].floor_s or 0.0 for number in model.item[forward].tolist()])
        duration[forward] = np.minimum(duration[forward], np.maximum(duration[forward] / 5, floor / SLOWEST + LEAST_S))
    return model.replace(duration_s=duration, before_s={**model.before_s, "launch": launch})


def _under(case: Case, nodes: Ints, wanted: Callable[[str], bool]) -> Ints:
    """Ops with these names inside the engine's nodes."""
    trace = case.trace
    rows = trace.rows_named(wanted)
    rows = case.inside(rows[trace.kind[rows] == Kind.OP])
    if not len(nodes) or not len(rows):
        return rows[:0]
    last = np.searchsorted(trace.start_ns[nodes], trace.start_ns[rows], side="right") - 1
    inside = (last >= 0) & (trace.start_ns[rows] < trace.end_ns[nodes[np.maximum(last, 0)]])
    found: Ints = rows[inside]
    return found


def _of_ops(case: Case, rows: Ints, ops: Ints) -> Ints:
    """Which of these rows are such ops, or lie in one."""
    mine = set(ops.tolist())
    found = [at for at, row in enumerate(rows.tolist()) if row >= 0 and mine & {row, *case.attribution.ops_above(row)}]
    return np.array(found, dtype=np.int64)


_FIX = """\
# for finding a NaN, not for training: take it out once it is found
# torch.autograd.set_detect_anomaly(True), with torch.autograd.detect_anomaly():, Trainer(detect_anomaly=True)
torch.autograd.set_detect_anomaly(False)"""

ANOMALY_MODE = Rule(id="anomaly-mode", check=check)
