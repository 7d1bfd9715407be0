"""host-sync: the host waits for the device, so nothing is queued when the device is done."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sublight import units
from sublight.diagnose import breakdown, fusion, replay
from sublight.diagnose.case import Case, Change, Edit, Rule, drop, no_wait
from sublight.diagnose.events import SMALL_COPY, WAITS
from sublight.diagnose.model import COMPUTE, COPY, Model
from sublight.diagnose.record import BREAKDOWN, BUSY
from sublight.trace.attribute import ENGINE
from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, Ints

SELDOM = 0.5  # a step: a wait every few steps is how to do it
LOOKED_BACK = 12  # ops before a read that may be there for it alone
PYTHON_NAMES = {  # an op as it is written
    "aten::item": ".item()",
    "aten::_local_scalar_dense": ".item()",
    "aten::is_nonzero": "`if tensor`",
    "aten::nonzero": ".nonzero()",
    "aten::equal": "torch.equal()",
    "aten::masked_select": "masked_select()",
    "aten::to": ".to() or .cpu()",
    "aten::copy_": ".copy_() or .cpu()",
}
_CHECKS = frozenset(
    ("isnan", "isinf", "isfinite", "any", "all", "eq", "ne", "lt", "gt", "le", "ge", "count_nonzero", "argmax", "topk")
)
_FEEDS = _CHECKS | {  # what turns tensors into the one value that is read
    *("logical_and", "logical_or", "logical_not", "abs", "norm", "linalg_vector_norm", "mean", "sum", "amax", "amin"),
    *("max", "min", "to", "_to_copy", "sqrt", "div", "mul", "sub", "stack"),
}
_VIEWS = frozenset(
    ("detach", "select", "view", "reshape", "squeeze", "unsqueeze", "flatten", "_unsafe_view", "alias", "t", "expand")
)


def check(case: Case) -> Change | None:
    calls = syncs(case)
    if case.per_step(len(calls)) < SELDOM:
        return None
    rows = case.model.call_row[calls]
    count = case.per_step(len(calls))
    times = units.count(count)
    ops = Counter(_op(case, int(row)) for row in rows.tolist() if row != NONE)
    lines = case.lines(rows.tolist())
    often = ", ".join(f"{name} ×{case.often(count)}" for name, count in ops.most_common(3))
    fed = feeding(case, rows[rows != NONE])
    names = Counter(case.trace.name_of(row) for row in fed)
    feeds = ", ".join(f"{name} ×{case.often(count)}" for name, count in names.most_common(4))
    main = ops.most_common(1)[0][0] if ops else "API"
    which = f"{PYTHON_NAMES.get(main, main)} call{'s' if count > 1.5 else ''}"
    launches = 2 * np.isin(calls, distinct(case.model.call[case.model.kind == COMPUTE])).sum() > len(calls)
    waits = f"all {times} launches a step wait for their kernels" if launches else ""
    edit = _edit(case, calls, fed)
    return Change(
        title=waits or f"the host waits on {times} {which} a step",
        evidence=(
            f"calls that waited, a step: {often}",
            *((f"at {lines}",) if lines else ()),
            f"idle after a wait: {units.text(case.split.parts['sync'], 's')} a step: the device has nothing queued",
            *_elsewhere(case, edit(case.model)),
            *((f"ops that only feed these reads, a step: {feeds}",) if feeds else ()),
        ),
        fix=(_UNBLOCK if _is_cuda(case) else _UNBLOCK_OTHER) if launches else _FIX,
        edit=edit,
        rows=rows[rows != NONE],
        ops=tuple(name for name, _ in ops.most_common(5)),
    )


def _elsewhere(case: Case, model: Model) -> tuple[str, ...]:
    """Idle time of another name that goes with the waits, as a host that is ahead launches a collective earlier: where
    it is more than what is idle after them.
    """
    after = breakdown.split(model, replay.run(model), case.items, fusion.saved(case.items, case.groups)).parts
    less = {name: case.split.parts[name] - after[name] for name in BREAKDOWN if name not in (*BUSY, "sync")}
    more = [name for name in sorted(less, key=lambda name: -less[name]) if less[name] > case.split.parts["sync"]]
    parts = [f"{units.text(less[name], 's')} of '{BREAKDOWN[name]}'" for name in more[:3]]
    return (f"with the host ahead, a step also loses {', '.join(parts)}",) if parts else ()


def _is_cuda(case: Case) -> bool:
    return any(name.startswith(("cuda", "hip")) for name in case.trace.names)


def syncs(case: Case) -> Ints:
    """The calls that waited for anything but the bytes of a large copy, which is another finding's."""
    model, base = case.model, case.base
    waited = distinct(base.call[base.wait_end > base.wait_start])
    mine = waited[model.wait_kind[waited] == WAITS.index("sync")]
    target = model.waits_for[mine]
    rows = model.event_row[target]
    large = (model.kind[target] == COPY) & (case.trace.bytes[rows] >= SMALL_COPY)
    others: Ints = mine[~large]
    return others


def feeding(case: Case, rows: Ints) -> list[int]:
    """Top-level ops that are there for these reads alone: a check or a metric right before one, which is not kept for
    the backward pass. A loss or a norm that is logged may as well stay on the device until it is read.
    """
    trace, tops = case.trace, case.attribution.top_ops
    reads = sorted({_top(case, row) for row in rows.tolist()} - {NONE})
    kept = _kept_for_backward(case)
    found: set[int] = set()
    for lane in distinct(trace.lane[reads]).tolist() if reads else ():
        line = tops[trace.lane[tops] == lane]
        for read in (row for row in reads if trace.lane[row] == lane):
            source = case.attribution.place(read)[0]
            place = int(np.searchsorted(line, read))
            chain: dict[int, str] = {}
            for row in line[max(place - LOOKED_BACK, 0) : place][::-1].tolist():
                name = trace.name_of(row).removeprefix("aten::")
                elsewhere = bool(source) and case.attribution.place(row)[0] != source
                if row in kept or row in reads or elsewhere or name not in _FEEDS | _VIEWS:
                    break
                chain[row] = name
            if set(chain.values()) & _CHECKS:
                found |= {row for row, name in chain.items() if name not in _VIEWS}
    return sorted(found)


def _kept_for_backward(case: Case) -> frozenset[int]:
    """Forward ops that a node of the backward pass belongs to."""
    trace = case.trace
    nodes = trace.rows_named(lambda name: name.startswith(ENGINE) or "Backward" in name)
    numbers = distinct(trace.sequence[nodes])
    forward = case.attribution.forward_of
    return frozenset(forward[number] for number in numbers.tolist() if number in forward)


def _edit(case: Case, calls: Ints, fed: list[int]) -> Edit:
    """Without the waits, and without what is there for them: a copy of a few bytes, ops that make the value."""
    model, trace = case.model, case.trace
    ops = {_top(case, row) for row in model.call_row[calls].tolist() if row != NONE} - {NONE}
    small = np.flatnonzero((model.kind == COPY) & (trace.bytes[model.event_row] < SMALL_COPY))
    read = [event for event in small.tolist() if _top(case, int(model.event_row[event])) in ops]
    gone = np.array(sorted({*read, *_events_of(case, fed)}), dtype=np.int64)

    def edit(changed: Model) -> Model:
        changed = drop(no_wait(changed, calls), gone) if len(gone) else no_wait(changed, calls)
        launch, cost = changed.before_s["launch"].copy(), changed.cost_s.copy()
        launch[calls] = 0.0
        cost[calls] = 0.0
        return changed.replace(cost_s=cost, before_s={**changed.before_s, "launch": launch})

    return edit


def _events_of(case: Case, ops: list[int]) -> list[int]:
    """The model's events that these ops launched."""
    launch = case.attribution.launch[case.model.event_row]
    order = np.argsort(launch, kind="stable")
    started = launch[order]
    found: list[int] = []
    for row in ops:
        inside = slice(np.searchsorted(started, row), np.searchsorted(started, _last_inside(case, row), side="right"))
        mine = order[inside]
        found += mine[case.trace.lane[launch[mine]] == case.trace.lane[row]].tolist()
    return found


def _last_inside(case: Case, row: int) -> int:
    """The last row that starts before this one ends."""
    return int(np.searchsorted(case.trace.start_ns, case.trace.end_ns[row], side="left")) - 1


def _top(case: Case, row: int) -> int:
    chain = case.attribution.ops_above(row)
    return chain[-1] if chain else NONE


def _op(case: Case, row: int) -> str:
    """The op that a user knows it by: aten::item rather than cudaStreamSynchronize."""
    chain = case.attribution.ops_above(row)
    return case.trace.name_of(chain[-1] if chain else row)


_FIX = """\
# keep values on the device, and read them seldom, all at once
losses.append(loss.detach())            # not loss.item(), float(loss), print(loss), .cpu(), .nonzero()
if step % 100 == 0:
    print(torch.stack(losses).mean().item()); losses.clear()
# torch.cuda.set_sync_debug_mode("warn") names every one that is left"""

_UNBLOCK = """\
# CUDA_LAUNCH_BLOCKING=1 (HIP_LAUNCH_BLOCKING, AMD_SERIALIZE_KERNEL) is for finding errors: unset it
unset CUDA_LAUNCH_BLOCKING"""

_UNBLOCK_OTHER = """\
# a debugging mode of the device, in which each launch waits for its kernel: turn it off"""

HOST_SYNC = Rule(id="host-sync", check=check)
