"""weight-bound: products of a few rows, as decoding has them, take as long as reading their weights; of 4 bits each
these are a quarter of the bytes.

What that saves is taken from a run on an H200 (benchmarks/products_h200.json, `low-bit`, groups of 128), between the
shapes that were measured there and on that GPU alone: on another one it is not claimed.
"""

from __future__ import annotations

import math
import re

import numpy as np

from sublight import units
from sublight.diagnose import known
from sublight.diagnose.case import Case, Change, Rule, edit_durations
from sublight.trace.attribute import ENGINE

GPU = "h200"
SMALL, LARGE = 4096 * 4096, 14336 * 4096  # weights that were measured
MEASURED = {  # rows: the time of 4 bits by that of cuBLAS in bf16, of the small and the large one
    1: (0.58, 0.43),
    4: (0.62, 0.48),
    16: (0.75, 0.69),
}
LEAST = 0.1  # of the step
_PRODUCT = re.compile(r"((?:\d+x)+)(\d+) @ \d+x(\d+)")  # rows in one dimension or several


def check(case: Case) -> Change | None:
    gpu = known.find(known.device_name(case.trace), case.trace) if case.on_gpu else None
    if gpu is None or gpu.key != GPU or case.trace.rows_named(lambda name: name.startswith(ENGINE)).size:
        return None  # with a backward pass the weights are trained
    shares = {at: share for at in range(len(case.items)) if (share := _share(case, at)) is not None}
    events = case.events(shares)
    spent = case.device_s(events)
    if spent < LEAST * case.step_s:
        return None
    left = np.concatenate([np.full(len(case.events_of[at]), share) for at, share in shares.items()])
    read_bytes = sum(_weights(case, at)[1] * 2 for at in shares) / case.model.steps
    low, high = min(shares.values()), max(shares.values())
    took = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
    return Change(
        title=f"products of a few rows read {units.text(read_bytes, 'B')} of weights a step, "
        f"{units.percent(spent / case.step_s)} of it",
        evidence=(
            f"{case.often(len(shares))} of them take {units.text(spent, 's')} a step",
            f"with weights of 4 bits in groups of 128 they took {took} of cuBLAS's time in bfloat16 on an H200",
        ),
        fix=_FIX,
        edit=edit_durations(events, case.model.duration_s[events] * left),
        most_s=spent,
        rows=case.model.event_row[events],
        ops=tuple(dict.fromkeys(case.items[at].name for at in shares)),
    )


def _weights(case: Case, at: int) -> tuple[int, int]:
    """Rows, and how many weights they meet; none where the item is no such product."""
    item = case.items[at]
    shape = _PRODUCT.fullmatch(item.known.shape) if item.known is not None and item.family == "matmul" else None
    if shape is None or item.dtype not in ("bfloat16", "float16"):
        return 0, 0
    rows, k, n = shape.groups()
    return math.prod(map(int, rows.split("x")[:-1])), int(n) * int(k)


def _share(case: Case, at: int) -> float | None:
    """The share of a product's time that 4-bit weights would take; None where no such shape was measured."""
    rows, weights = _weights(case, at)
    measured = next((shares for most, shares in MEASURED.items() if 0 < rows <= most), None)
    if measured is None or weights < SMALL:
        return None
    return measured[weights >= LARGE]


_FIX = """\
sublight.quantize(model, "w4a16", verify=batch)  # prints what it packs, and how the loss changes
# sublight.unpatch(model) undoes it; "w8a16" changes less and saves less"""

WEIGHT_BOUND = Rule(id="weight-bound", check=check)
