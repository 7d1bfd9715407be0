"""fp32-where-bf16-serves: a model in float32, where bfloat16 halves the bytes and doubles the products' rate."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.autocast import Autocast
from sublight.diagnose.case import PRODUCTS, Case, Change, Rule
from sublight.diagnose.rules.no_tensor_cores import on_tensor_cores
from sublight.fix.cure.autocast import AUTOCAST

MEMORY_FAMILIES = ("pointwise", "norm", "softmax", "dropout", "copy", "reduction", "fused", "loss")
MOSTLY = 0.5  # of the products' time


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
    given = on_tensor_cores(case)
    start_s = given(case.model).duration_s if given else case.model.duration_s
    factor = np.ones(len(start_s))
    for at, by in Autocast(case, start_s, full / half).factors():
        factor[case.events_of[at]] = by
    slow = case.events(single)
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
        edit=lambda model: model.replace(duration_s=model.duration_s * factor),
        given=given,
        rows=case.model.event_row[slow],
        ops=tuple(dict.fromkeys(case.items[at].name for at in single)),
    )


_FIX = """\
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(batch)
loss.backward()          # weights and optimizer state stay in float32"""

FP32_WHERE_BF16_SERVES = Rule(id="fp32-where-bf16-serves", check=check)
