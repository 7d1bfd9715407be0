"""The op table and the ranges of an Explanation."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from sublight.diagnose.case import Case
from sublight.diagnose.record import OpRow, RangeRow
from sublight.trace import costs
from sublight.trace.record import Kind

_OP, _KERNEL = int(Kind.OP), int(Kind.KERNEL)
_KERNELS = {  # what people call a kernel's work
    "matmul": "GEMM", "attention": "attention", "norm": "norm", "conv": "convolution", "softmax": "softmax",
    "pointwise": "elementwise", "reduction": "reduction", "copy": "copy", "communication": "collective",
    "fused": "fused elementwise", "embedding": "embedding", "sort": "sort", "index": "index", "dropout": "dropout",
    "optimizer": "optimizer", "loss": "loss",
}  # fmt: skip
_NVJET = re.compile(r"^nvjet_sm\d+[a-z]?_")  # newer names say the architecture before the data types
MOST_PLACES = 20_000  # rows whose source is looked up, the longest first


def kernel_words(kernel: str, family: str) -> tuple[str, str, str]:
    """A kernel that no op launched, as an op: what it does, its own name in the place of a shape, its data type.

    >>> kernel_words("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1", "matmul")
    ('GEMM', 'Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_User', 'bfloat16')
    >>> kernel_words("nvjet_sm90_tst_256x128_64x4", "matmul")[2]
    'bfloat16'
    >>> kernel_words("my_kernel(float*)", "other")
    ('my_kernel(float*)', '', 'float32')
    """
    name = _KERNELS.get(family, "")
    dtype = costs.kernel_dtype(_NVJET.sub("nvjet_", kernel)) or ""
    short = kernel.removeprefix("void ").partition("(")[0][:40]
    return (name, short, dtype) if name else (kernel, "", dtype)


def ops(case: Case) -> tuple[OpRow, ...]:
    """Items with the same name, shape, type and place together, by device time."""
    trace, busy, steps = case.trace, case.split.busy_s, case.model.steps
    together: dict[tuple[str, ...], list[int]] = defaultdict(list)
    looked_up = np.zeros(len(case.items), dtype=bool)
    looked_up[np.argsort(-busy, kind="stable")[:MOST_PLACES]] = True
    kinds = trace.kind[[item.row for item in case.items]].tolist() if case.items else []
    for at, (item, look) in enumerate(zip(case.items, looked_up.tolist(), strict=True)):
        source, module = case.attribution.place(item.row) if look else ("", "")
        name, shape, dtype = item.name, item.known.shape if item.known else "", item.dtype
        # a kernel that no op is known behind, as those of a graph, goes by what its name tells
        if kinds[at] == _KERNEL and trace.tool != "jax" and name == trace.name_of(item.row):
            name, shape, dtype = kernel_words(name, item.family)
        together[name, shape, dtype, module, source].append(at)
    rows = np.array([item.row for item in case.items], dtype=np.int64)
    host_s = np.where(trace.kind[rows] == Kind.OP, (trace.end_ns - trace.start_ns)[rows] * 1e-9, 0.0)
    # of an op that ran beside another one only the time that counts is compared, so of its floor no more either; a
    # floor that is wrong is not hidden by that
    floor_s = np.array([item.floor_s or 0.0 for item in case.items]) / steps
    wrong = np.array([item.too_good for item in case.items], dtype=bool)
    floor_s = np.where(wrong, floor_s, np.minimum(floor_s, busy))
    known = np.array([item.floor_s is not None for item in case.items], dtype=bool)
    table = []
    for (name, shape, dtype, module, source), members in together.items():
        items = [case.items[at] for at in members]
        known_costs = [item.cost for item in items if item.cost is not None]
        ran = [row for item in items for row in item.rows if trace.kind[row] != _OP]
        kernels = dict.fromkeys(trace.name[ran].tolist() if ran else ())
        table.append(
            OpRow(
                name=name,
                family=items[0].family,
                shape=shape,
                dtype=dtype,
                module=module,
                source=source,
                calls=len(members) / steps,
                cpu_s=float(host_s[members].sum()) / steps,
                device_s=float(busy[members].sum()),
                floor_s=float(floor_s[members].sum()) if known[members].all() else None,
                bound="cache" if items[0].cached else items[0].bound,
                flops=sum(cost.total_flops for cost in known_costs) / steps,
                bytes=sum(cost.bytes for cost in known_costs) / steps,
                kernels=tuple(trace.names[number] for number in kernels),
            )
        )
    return tuple(sorted(table, key=lambda row: -row.device_s))


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
