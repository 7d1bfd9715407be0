"""small-grid: kernels with fewer blocks than the GPU has SMs leave most of it empty."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Edit, Rule, edit_durations, fuse
from sublight.trace import costs
from sublight.trace.intervals import distinct, middle

FULL = 0.5  # of the SMs: fewer blocks than this is small
LONG_S = 8e-6  # a shorter kernel is a launch's matter
REACHED = 0.6
MOST_BODY, LEAST_REPEATS, MOSTLY = 12, 8, 0.8  # of a loop over pieces: events in its body, rounds a step, regular ones
SLICES = ("aten::select", "aten::slice", "aten::narrow", "aten::index", "aten::index_select")  # one a round
PIECES = (
    "aten::unbind",
    "aten::split",
    "aten::chunk",
    "aten::tensor_split",
    "aten::split_with_sizes",
    "aten::unsafe_split",
)
TOGETHER = ("aten::stack", "aten::cat")
GATES = ("aten::tanh", "aten::sigmoid")  # with a product, a recurrent cell: its rounds wait for each other


def check(case: Case) -> Change | None:
    sms = case.sms
    if not case.on_gpu or not sms:
        return None
    events, seconds = [], []
    for at, item in enumerate(case.items):
        if item.family in ("communication", "optimizer"):
            continue
        for event in case.events_of[at].tolist():
            row = int(case.model.event_row[event])
            blocks = math.prod(case.trace.detail_of(row).grid or (0,))
            duration = float(case.model.duration_s[event])
            if (
                not 0 < blocks < FULL * sms
                or duration < LONG_S
                or costs.kernel_family(case.trace.name_of(row))[0] == "communication"
            ):
                continue
            spread = duration * blocks / sms
            least = (item.floor_s or 0.0) / REACHED
            if max(spread, least) < duration:
                events.append(event)
                seconds.append(max(spread, least))
    if not events:
        return None
    chosen = np.array(events)
    times = np.array(seconds)
    body = _loop(case, chosen)
    rows = case.model.event_row[chosen]
    spent = case.device_s(chosen)
    typical = statistics.median(math.prod(case.trace.detail_of(row).grid) for row in rows.tolist())
    names = list(dict.fromkeys(case.trace.name_of(row) for row in rows.tolist()))
    lines = case.lines(rows.tolist())
    return Change(
        title=f"kernels of {typical:.0f} block{'s' if typical > 1 else ''} leave most of the {sms} SMs empty",
        evidence=(
            f"{case.often(len(chosen))} such kernels a step take {units.text(spent, 's')}, such as {names[0][:80]}",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_FIX,
        edit=_batched(case, chosen, times, body) if len(body) else edit_durations(chosen, times),
        most_s=math.inf if len(body) else spent - float(times.sum()) / case.model.steps,
        rows=rows,
    )


def _loop(case: Case, chosen: np.ndarray) -> np.ndarray:
    """The events of the loop around repeated small kernels: as many between each two of them, each time, over pieces of
    one tensor. The layers of a network repeat, too, but each needs the one before.
    """
    if len(chosen) < LEAST_REPEATS * case.model.steps:
        return np.empty(0, dtype=np.int64)
    gaps = np.diff(chosen)
    period = int(middle(gaps))
    if period > MOST_BODY or np.mean(gaps == period) < MOSTLY:
        return np.empty(0, dtype=np.int64)
    if not over_pieces(case, case.per_step(len(chosen))):
        return np.empty(0, dtype=np.int64)
    return distinct(np.concatenate([chosen - back for back in range(period)]).clip(0))


def over_pieces(case: Case, rounds: float) -> bool:
    """Whether a tensor is taken apart for these rounds: a slice in each, all pieces before them, or together after."""
    trace = case.trace
    rows = case.inside(case.attribution.top_ops)
    rows = rows[trace.start_ns[rows] >= case.steps.spans_ns[-1][0]]
    names = Counter(trace.name_of(row) for row in rows.tolist())
    products = sum(count for name, count in names.items() if name.removeprefix("aten::") in _PRODUCTS)
    if products >= rounds and sum(names[name] for name in GATES) >= rounds:
        return False
    if sum(names[name] for name in SLICES) >= MOSTLY * rounds or any(names[name] for name in PIECES):
        return True
    joined = [trace.detail_of(row).dims for row in rows.tolist() if trace.name_of(row) in TOGETHER]
    return any(dims and len(dims[0]) >= MOSTLY * rounds for dims in joined)


_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum")


def _batched(case: Case, chosen: np.ndarray, seconds: np.ndarray, body: np.ndarray) -> Edit:
    """One launch for each op of the loop: its pieces side by side fill the GPU."""
    duration = dict(zip(chosen.tolist(), seconds.tolist(), strict=True))
    together: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in body.tolist():
        item = case.items[case.model.item[event]]
        together[int(case.model.step[case.model.call[event]]), item.name].append(event)
        if event not in duration:
            floor = (item.floor_s or 0.0) / max(len(case.events_of[int(case.model.item[event])]), 1)
            duration[event] = min(float(case.model.duration_s[event]), floor / REACHED or math.inf)
    parts = [(np.array(events), sum(duration[event] for event in events)) for events in together.values()]
    return fuse(parts)


_FIX = """\
# do the small pieces at once: one batched op instead of a loop
y = torch.bmm(a, b)                        # (n, m, k) @ (n, k, l), not n times a[i] @ b[i]
# or a larger batch; or pieces on several streams"""

SMALL_GRID = Rule(id="small-grid", check=check)
