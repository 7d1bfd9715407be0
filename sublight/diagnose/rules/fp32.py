"""fp32-where-bf16-serves: a model in float32, where bfloat16 halves the bytes and doubles the products' rate."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import PRODUCTS, Case, Change, Rule, edit_durations
from sublight.diagnose.model import Model
from sublight.diagnose.rules.no_tensor_cores import on_tensor_cores
from sublight.fix.cure.autocast import AUTOCAST
from sublight.trace.intervals import Floats
from sublight.trace.record import Ints

MEMORY_FAMILIES = ("pointwise", "norm", "softmax", "dropout", "copy", "reduction", "fused", "loss")
STAY = {  # families that autocast leaves in float32: bytes of its casts there and back by those of forward and backward
    "softmax": (12 / 8, 12 / 12),
    "norm": (6 / 8, 6 / 12),
    "loss": (0.0, 0.0),
}
MOSTLY = 0.5  # of the products' time
CAST = 1.1  # autocast also casts the weights
FLASH = 0.4  # of the limit, by the flash kernels


def check(case: Case) -> Change | None:
    full, half = case.limits.value("matmul_tf32"), case.limits.value("matmul_bf16")
    if not case.on_gpu or not full or not half:
        return None
    products = [at for at, item in enumerate(case.items) if item.family in PRODUCTS]
    single = [at for at in products if case.items[at].dtype == "float32"]
    busy = case.split.busy_s
    if not single or busy[single].sum() < MOSTLY * busy[products].sum():
        return None
    moved = [
        at
        for at, item in enumerate(case.items)
        if item.family in MEMORY_FAMILIES and item.dtype == "float32" and at not in case.in_optimizer
    ]
    kept = [at for at in moved if case.items[at].family in STAY]
    slow, light = case.events(single), case.events(at for at in moved if case.items[at].family not in STAY)
    given = on_tensor_cores(case)
    start = given(case.model).duration_s if given else case.model.duration_s
    events = np.concatenate((slow, light))
    seconds = np.concatenate((_in_half(case, single, start, full / half), start[light] / 2 * CAST))
    faster, casts = edit_durations(events, seconds), [(case.events_of[at], _with_casts(case, at)) for at in kept]
    share = float(busy[single].sum()) / case.step_s
    return Change(
        title=f"the model runs in float32, its products for {units.percent(share)} of the step",
        evidence=(
            f"{case.often(len(single))} float32 products a step take {units.text(float(busy[single].sum()), 's')}; in "
            f"bfloat16 they run {half / full:.1f} times as fast",
            f"{units.text(float(busy[moved].sum()), 's')} a step in float32 ops that move bytes",
            *(("counted on top of TF32: no-tensor-cores has the rest",) if given else ()),
        ),
        fix=_FIX,
        cure=AUTOCAST.line,
        edit=lambda model: _longer(faster(model), casts),
        given=given,
        rows=case.model.event_row[slow],
        ops=tuple(dict.fromkeys(case.items[at].name for at in single)),
    )


def _with_casts(case: Case, at: int) -> float:
    """How many times as long an op takes that stays in float32, with autocast's casts around it."""
    item, limit = case.items[at], float(case.split.floor_s[at] / max(case.split.busy_s[at], 1e-12))
    return 1 + STAY[item.family]["backward" in item.name] * min(limit, 1.0)  # casts run at the limit


def _longer(model: Model, factors: list[tuple[Ints, float]]) -> Model:
    duration = model.duration_s.copy()
    for events, factor in factors:
        duration[events] *= factor
    return model.replace(duration_s=duration)


def _in_half(case: Case, products: list[int], duration: Floats, ratio: float) -> Floats:
    """Each product's time in bfloat16: by the ratio of the limits; attention gets kernels that float32 has not."""
    parts = []
    for at in products:
        events, item = case.events_of[at], case.items[at]
        spent = duration[events]
        if item.family == "attention" and item.cost is not None and (rate := case.limits.value("matmul_bf16")):
            share = min(item.cost.total_flops / rate / FLASH / max(float(spent.sum()), 1e-12), 1.0)
            parts.append(spent * share)
        else:
            parts.append(spent * ratio * CAST)
    return np.concatenate(parts)


_FIX = """\
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(batch)
loss.backward()          # weights and optimizer state stay in float32"""

FP32_WHERE_BF16_SERVES = Rule(id="fp32-where-bf16-serves", check=check)
