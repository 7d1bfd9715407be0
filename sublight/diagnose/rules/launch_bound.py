"""launch-bound: the device finishes each small kernel before the host has launched the next."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.advice import no_compiling, shapes_change
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.model import COMPUTE, Model
from sublight.diagnose.rules.unfused_optimizer import UNFUSED_OPTIMIZER
from sublight.fix.cure.graphed import GRAPH
from sublight.trace.intervals import distinct
from sublight.trace.record import Ints

GRAPH_LAUNCH_S = 10e-6  # of the host, once a step
NODE_GAP_S = 0.7e-6  # between two kernels of a graph
CPU_LEFT = 0.2  # of a CPU's time between ops, after torch.compile
LEAST = 0.02  # of the step


def check(case: Case) -> Change | None:
    idle_s = case.split.parts["launch"]
    if idle_s < LEAST * case.step_s:
        return None
    model = case.model
    calls = distinct(model.call[model.kind == COMPUTE])
    if not len(calls):
        return None
    host_s = float((model.before_s["launch"] + model.cost_s)[calls].sum()) / len(calls)
    events = np.flatnonzero(model.kind == COMPUTE)
    mean_s = float(np.mean(model.duration_s[events]))
    against, varies = no_compiling(case), shapes_change(case)
    return Change(
        title=_title(case, events, idle_s),
        evidence=(
            _compared(case, host_s, mean_s),
            f"{'idle meanwhile' if case.on_gpu else 'between ops'}: {units.text(idle_s, 's')} a step",
            *((f"torch.compile is no advice: {against}",) if against else ()),
        ),
        fix=_CPU_FIX if not case.on_gpu else _PADDED if varies else _GRAPH if against else _COMPILE + _GRAPH,
        cure=GRAPH.line if case.on_gpu else "",
        edit=_graphed if case.on_gpu else _compiled,
        most_s=idle_s * (1 - _of_optimizer(case)),
        rows=_rows(case),
    )


def _title(case: Case, events: Ints, idle_s: float) -> str:
    share, count = units.percent(idle_s / case.step_s), case.often(len(events))
    if not case.on_gpu:
        return f"{share} of the step passes between {count} ops, in calling them"
    return f"launching {count} kernels a step keeps the device idle for {share} of it"


def _compared(case: Case, host_s: float, mean_s: float) -> str:
    if not case.on_gpu:
        return f"from op to op the host takes {units.text(host_s, 's')}, an op {units.text(mean_s, 's')} on average"
    host, kernel = units.text(host_s, "s"), units.text(mean_s, "s")
    return f"a launch takes the host {host} on average, the kernel the device {kernel}"


def _of_optimizer(case: Case) -> float:
    """The share of the launching that an unfused optimizer does: that idle time is its finding's."""
    change = UNFUSED_OPTIMIZER.check(case)
    if change is None:
        return 0.0
    host = case.model.before_s["launch"] + case.model.cost_s
    calls = distinct(case.model.call[case.events(sorted(case.in_optimizer))])
    return float(host[calls].sum()) / max(float(host.sum()), 1e-12)


def _rows(case: Case) -> Ints:
    late: Ints = case.model.event_row[distinct(case.base.event[case.base.by_launch])]
    return late


def _graphed(model: Model) -> Model:
    """All launches of a step from one graph: what syncs, loads or computes in Python stays where it is."""
    launch, cost, delay = np.zeros(len(model.call_row)), model.cost_s.copy(), model.delay_s.copy()
    starts = distinct(model.call)
    cost[starts] = 0.0
    first_of_step = np.searchsorted(model.step, np.arange(model.steps))
    launch[first_of_step] = GRAPH_LAUNCH_S
    delay = np.minimum(delay, NODE_GAP_S)
    delay[model.kind == COMPUTE] = np.maximum(delay[model.kind == COMPUTE], NODE_GAP_S)
    return model.replace(cost_s=cost, delay_s=delay, before_s={**model.before_s, "launch": launch})


def _compiled(model: Model) -> Model:
    launch = CPU_LEFT * model.before_s["launch"]
    return model.replace(before_s={**model.before_s, "launch": launch})


_COMPILE = """\
model = torch.compile(model, mode="reduce-overhead")   # replays the step as CUDA graphs
# or, without compiling:
"""
_GRAPH = """\
graph = torch.cuda.CUDAGraph()                         # captured once, its inputs in buffers that stay
with torch.cuda.graph(graph):
    output = model(static_input)
static_input.copy_(batch); graph.replay()"""
_PADDED = (
    """\
# shapes differ from step to step, which a graph cannot: pad them to a few sizes, and capture one graph for each
"""
    + _GRAPH
)
_CPU_FIX = """\
# fewer, larger ops: a larger batch; one op over all rows instead of a loop over them"""

LAUNCH_BOUND = Rule(id="launch-bound", check=check)
