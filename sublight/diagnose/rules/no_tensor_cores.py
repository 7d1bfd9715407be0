"""no-tensor-cores: products that tensor cores could do run on the ordinary ones."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import PRODUCTS, Case, Change, Edit, Rule, edit_durations
from sublight.fix.cure.tf32 import TF32
from sublight.trace import costs
from sublight.trace.intervals import Floats
from sublight.trace.record import Ints

REACHED = 0.7  # of the limit, for half-precision products that get onto tensor cores


def check(case: Case) -> Change | None:
    found = slow_products(case)
    if found is None:
        return None
    events, seconds, items = found
    spent = case.device_s(events)
    rows = case.model.event_row[events]
    dtypes = sorted({case.items[at].dtype for at in items})
    kernels = list(dict.fromkeys(case.trace.name_of(row) for row in rows.tolist()))
    single = "float32" in dtypes
    lines = case.lines(rows.tolist())
    return Change(
        title=f"{' and '.join(dtypes)} products, {units.percent(spent / case.step_s)} of the step, use no tensor cores",
        evidence=(
            f"{units.text(spent, 's')} a step in kernels such as {kernels[0][:80]}",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_TF32 if single else _ALIGN,
        cure=TF32.line if single else "",
        edit=edit_durations(events, seconds),
        rows=rows,
        ops=tuple(dict.fromkeys(case.items[at].name for at in items)),
    )


def slow_products(case: Case) -> tuple[Ints, Floats, list[int]] | None:
    """Events of products on ordinary cores, what each would take on tensor cores, and their items."""
    if not case.on_gpu:
        return None
    plain, tensor = case.limits.value("matmul_fp32"), case.limits.value("matmul_tf32")
    items, events, seconds = [], [], []
    for at, item in enumerate(case.items):
        if item.family not in PRODUCTS or item.known is None:
            continue
        mine = case.events_of[at]
        tensor_cores = {costs.kernel_family(case.trace.name_of(row))[1] for row in case.model.event_row[mine].tolist()}
        if True in tensor_cores or False not in tensor_cores:
            continue
        duration = case.model.duration_s[mine]
        memory = case.limits.memory_rate(item.known.cost.read_bytes, item.known.cost.write_bytes)
        least = item.known.cost.bytes / memory / 0.9 if memory else 0.0
        if item.dtype == "float32" and plain and tensor:
            faster = float(duration.sum()) * plain / tensor
        elif item.dtype in ("float16", "bfloat16") and item.floor_s is not None:
            faster = item.floor_s / REACHED
        else:
            continue
        if faster < duration.sum():
            items.append(at)
            events.append(mine)
            seconds.append(duration * max(faster, least) / max(float(duration.sum()), 1e-12))
    if not items:
        return None
    return np.concatenate(events), np.concatenate(seconds), items


def on_tensor_cores(case: Case) -> Edit | None:
    """The change that this finding asks for, for findings that come on top of it."""
    found = slow_products(case)
    return edit_durations(found[0], found[1]) if found else None


_TF32 = """\
torch.set_float32_matmul_precision("high")     # TF32: float32 in and out, 10 bits of mantissa inside
torch.backends.cudnn.allow_tf32 = True         # the same for convolutions
# or bfloat16: with torch.autocast("cuda", dtype=torch.bfloat16): ..."""
_ALIGN = """\
# tensor cores want sizes that are multiples of 8 (16-bit types): pad the vocabulary, the hidden size, the batch
vocabulary = -(-vocabulary // 64) * 64"""

NO_TENSOR_CORES = Rule(id="no-tensor-cores", check=check)
