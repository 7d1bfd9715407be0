"""The op table and the ranges of an Explanation."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sublight.diagnose.case import Case
from sublight.diagnose.record import OpRow, RangeRow
from sublight.trace.record import Kind

MOST_PLACES = 20_000  # rows whose source is looked up, the longest first


def ops(case: Case) -> tuple[OpRow, ...]:
    """Items with the same name, shape, type and place together, by device time."""
    trace, busy = case.trace, case.split.busy_s
    together: dict[tuple[str, ...], list[int]] = defaultdict(list)
    by_time = np.argsort(-busy, kind="stable")
    looked_up = set(by_time[:MOST_PLACES].tolist())
    for at, item in enumerate(case.items):
        source, module = case.attribution.place(item.row) if at in looked_up else ("", "")
        shape = item.known.shape if item.known else ""
        together[item.name, shape, item.dtype, module, source].append(at)
    steps = case.model.steps
    rows = []
    for (name, shape, dtype, module, source), members in together.items():
        items = [case.items[at] for at in members]
        # of an op that ran beside another one only the time that counts is compared, so of its floor no more either;
        # a floor that is wrong is not hidden by that
        floors = [
            item.floor_s / steps if item.too_good else min(item.floor_s / steps, float(busy[at]))
            for at, item in zip(members, items, strict=True)
            if item.floor_s is not None
        ]
        costs = [item.cost for item in items if item.cost is not None]
        kernels = dict.fromkeys(trace.name_of(row) for item in items for row in item.rows if row != item.row)
        own = [item.row for item in items if trace.kind[item.row] == Kind.OP]
        rows.append(
            OpRow(
                name=name,
                family=items[0].family,
                shape=shape,
                dtype=dtype,
                module=module,
                source=source,
                calls=len(members) / steps,
                cpu_s=float((trace.end_ns[own] - trace.start_ns[own]).sum()) * 1e-9 / steps,
                device_s=float(busy[members].sum()),
                floor_s=sum(floors) if len(floors) == len(items) else None,
                bound="cache" if items[0].cached else items[0].bound,
                flops=sum(cost.total_flops for cost in costs) / steps,
                bytes=sum(cost.bytes for cost in costs) / steps,
                kernels=tuple(kernels),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.device_s))


def ranges(case: Case) -> tuple[RangeRow, ...]:
    """The user's ranges inside the steps; device time by stream: first kernel's start to last kernel's end."""
    trace, steps = case.trace, case.model.steps
    rows = case.inside(trace.of_kind(Kind.RANGE))
    events = case.model.event_row
    launch = case.attribution.launch[events] if trace.on_gpu else np.empty(0, dtype=np.int64)
    launched = np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], -1)
    order = np.argsort(launched, kind="stable")
    sorted_launch = launched[order]
    found: dict[str, list[float]] = {}
    streams: dict[str, set[int]] = defaultdict(set)
    for row in rows.tolist():
        name = trace.name_of(row)
        if name.startswith("ProfilerStep"):
            continue
        start, end = int(trace.start_ns[row]), int(trace.end_ns[row])
        mine = events[order[np.searchsorted(sorted_launch, start) : np.searchsorted(sorted_launch, end)]]
        device = 0.0
        for lane in set(trace.lane[mine].tolist()):
            here = mine[trace.lane[mine] == lane]
            device += float(trace.end_ns[here].max() - trace.start_ns[here].min()) * 1e-9
            streams[name].add(lane)
        entry = found.setdefault(name, [0.0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += (end - start) * 1e-9
        entry[2] += device
    table = [
        RangeRow(
            name=name, calls=calls / steps, host_s=host / steps, device_s=device / steps, streams=len(streams[name])
        )
        for name, (calls, host, device) in found.items()
    ]
    return tuple(sorted(table, key=lambda row: -max(row.device_s, row.host_s)))
