"""pageable-copy: batches travel from pageable memory, through a staging buffer, while the host waits."""

from __future__ import annotations

import re

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Edit, Rule
from sublight.diagnose.events import SMALL_COPY
from sublight.diagnose.model import COPY, Model
from sublight.diagnose.source import PLACE, text_of
from sublight.diagnose.work import LOADING
from sublight.fix.cure.pinned import PINNED
from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, Ints

PINNED_BYTES_PER_S = 25e9  # PCIe 4.0, where the link was not measured
TRANSFERS = 3  # of torch's copy on the host for each byte: it reads the source, what it overwrites, and writes
VIEWS = re.compile(r"from_numpy|as_tensor|frombuffer|from_dlpack")  # a new tensor each time, of memory that stays


def check(case: Case) -> Change | None:
    events = link_copies(case, "Pageable")
    if not len(events):
        return None
    trace, rows = case.trace, case.model.event_row[events]
    size = case.per_step(int(trace.bytes[rows].sum()))
    seconds = case.device_s(events)
    rate = size / seconds if seconds else 0.0
    best = link_rate(case)
    lines = case.lines(rows.tolist())
    back = rows[np.isin(rows, trace.rows_named(lambda name: name.startswith("Memcpy DtoH")))]
    way = "to" if trace.bytes[back].sum() * 2 > trace.bytes[rows].sum() else "from"
    return Change(
        title=f"{units.text(size, 'B')} a step are copied {way} pageable memory, which holds up the host",
        evidence=(
            f"{case.often(len(events))} copies a step take {units.text(seconds, 's')}, at {units.text(rate, 'B/s')}; "
            f"from pinned memory they reach {units.text(best, 'B/s')}",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_FIX if way == "from" else _BACK,
        cure=PINNED.line if way == "from" else "",
        cures=((PINNED.name, when_asked(case, events, is_new=is_new(case, rows))),),
        edit=overlapped(case, events),
        rows=rows,
    )


def link_copies(case: Case, memory: str) -> Ints:
    """Events that copy over the link, to or from this kind of host memory, and not just a few bytes."""
    model, trace = case.model, case.trace
    names = np.array([memory in name for name in trace.names], dtype=bool)
    rows = model.event_row
    return np.flatnonzero((model.kind == COPY) & names[trace.name[rows]] & (trace.bytes[rows] >= SMALL_COPY))


def link_rate(case: Case) -> float:
    return case.limits.value("h2d_pinned") or PINNED_BYTES_PER_S


def overlapped(case: Case, events: Ints) -> Edit:
    """The copies from pinned memory on a stream of their own, a step ahead: nobody waits for them."""
    sizes = case.trace.bytes[case.model.event_row[events]]
    seconds = np.maximum(sizes, 0) / link_rate(case)

    def edit(model: Model) -> Model:
        stream, duration = model.stream.copy(), model.duration_s.copy()
        waits_for, tail, cost = model.waits_for.copy(), model.tail_s.copy(), model.cost_s.copy()
        after, delay = model.after.copy(), model.delay_s.copy()
        stream[events] = int(model.stream.max()) + 1
        duration[events] = np.minimum(duration[events], seconds)
        after[np.isin(after, events)] = NONE
        after[events] = NONE
        delay[events] = 0.0
        calls = distinct(np.concatenate((model.call[events], np.flatnonzero(np.isin(waits_for, events)))))
        waits_for[calls], tail[calls] = NONE, 0.0
        cost[calls] = np.minimum(cost[calls], 10e-6)
        return model.replace(
            stream=stream,
            duration_s=duration,
            waits_for=waits_for,
            tail_s=tail,
            cost_s=cost,
            after=after,
            delay_s=delay,
        )

    return edit


def is_new(case: Case, rows: Ints) -> bool:
    """Whether the batches are new tensors in each step: a loader makes them, or the step does."""
    trace, memory = case.trace, case.trace.memory
    inside = case.inside(trace.rows_named(lambda name: name.startswith(LOADING) or bool(VIEWS.search(name))))
    places = {PLACE.match(case.attribution.place(row)[0]) for row in rows.tolist()}
    lines = [text_of(trace, place["file"], int(place["line"])) for place in places if place]
    if len(inside) or any(map(VIEWS.search, lines)):
        return True
    if memory is None:
        return False
    (begin, _), (_, end) = case.steps.spans_ns[0], case.steps.spans_ns[-1]
    made = (memory.device == NONE) & (memory.delta_bytes > 0) & (memory.time_ns >= begin) & (memory.time_ns < end)
    return bool(memory.delta_bytes[made].sum() > trace.bytes[rows].sum() / 2)


def when_asked(case: Case, events: Ints, *, is_new: bool) -> Edit:
    """What `pinned copies` does: each copy on its own stream when the script asks for it; the kernels behind it wait.

    A batch that comes again is pinned where it lies, and the host waits for its copy. One that is new is first copied
    to pinned memory by the host.
    """
    sizes = np.maximum(case.trace.bytes[case.model.event_row[events]], 0).astype(np.float64)
    rate = case.limits.value("host_copy")
    staged = sizes * TRANSFERS / (2 * rate) if rate else case.model.duration_s[events]  # a limit counts two transfers

    def edit(model: Model) -> Model:
        before, calls, line = model.before_s["launch"].copy(), model.call[events], model.stream.copy()
        duration, delay, after = model.duration_s.copy(), model.delay_s.copy(), model.after.copy()
        waits_for, tail, cost = model.waits_for.copy(), model.tail_s.copy(), model.cost_s.copy()
        waiting = distinct(np.concatenate((calls, np.flatnonzero(np.isin(waits_for, events)))))
        cost[waiting] = np.minimum(cost[waiting], 10e-6)
        tail[waiting] = np.minimum(tail[waiting], 10e-6)
        if is_new:
            np.add.at(before, calls, staged)
            waits_for[waiting] = NONE
        line[events] = int(model.stream.max()) + 1
        duration[events] = np.minimum(duration[events], sizes / link_rate(case))
        after[events], delay[events] = NONE, 0.0
        for event in events.tolist():
            behind = event + 1 + np.flatnonzero(line[event + 1 :] == model.stream[event])[:1]
            after[behind[after[behind] == NONE]] = event
        return model.replace(
            before_s={**model.before_s, "launch": before},
            stream=line,
            duration_s=duration,
            delay_s=delay,
            after=after,
            waits_for=waits_for,
            tail_s=tail,
            cost_s=cost,
        )

    return edit


_FIX = """\
loader = DataLoader(dataset, ..., pin_memory=True)
batch = batch.to(device, non_blocking=True)        # and fetch the next batch before this step's work:
# with torch.cuda.stream(copies): following = following.to(device, non_blocking=True)"""

_BACK = """\
kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)     # once, before the loop
kept.copy_(x, non_blocking=True)                                # and read it after the stream was synchronized"""

PAGEABLE_COPY = Rule(id="pageable-copy", check=check)
