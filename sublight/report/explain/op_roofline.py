"""The roofline of a step's ops as data: what each op does for a byte, how fast it went, and the roofs above it."""

from __future__ import annotations

import math
from typing import Any

from sublight import units
from sublight.diagnose.record import Explanation, OpRow
from sublight.report.bench import dtype_text
from sublight.report.draw.roofline import Roof

MOST_DOTS = 200


def chart(explanation: Explanation, *, most: int = MOST_DOTS, characters: int = 120) -> dict[str, Any] | None:
    """None where no op has a known cost, or no limit is known.

    Ops without arithmetic have no place on the horizontal axis: they are drawn beside it, by bytes/s.
    """
    rows = [row for row in explanation.ops if _finite(row.device_s) and _finite(row.bytes)][:most]
    known = roofs(explanation)
    if not rows or not known:
        return None
    dots = []
    for row in rows:
        counted = _finite(row.flops)
        dots.append(
            {
                "intensity": row.flops / row.bytes if counted else None,
                "rate": (row.flops if counted else row.bytes) / row.device_s,  # FLOP/s, or B/s without arithmetic
                "time": row.device_s,
                "family": row.family,
                "label": label(row, characters),
            }
        )
    families = list(dict.fromkeys(row.family for row in rows))
    return {"dots": dots, "roofs": [_roof(roof) for roof in known], "families": families}


def _finite(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _roof(roof: Roof) -> dict[str, Any]:
    return {"value": roof.value, "flat": roof.flat, "label": roof.label}


def label(row: OpRow, characters: int) -> list[str]:
    """A line each: the op, its time beside its floor, its rates."""
    case = " ".join(filter(None, (row.name[:characters], row.shape[:characters], dtype_text(row.dtype))))
    time = f"{units.text(row.device_s, 's')}, floor {units.text(row.floor_s, 's')}"
    if row.fraction is not None:
        time += f", {units.percent(row.fraction)} of the limit ({row.bound})"
    moved = units.text(row.bytes / row.device_s, "B/s")
    if _finite(row.flops):
        rates = f"{units.text(row.flops / row.device_s, 'FLOP/s')}, {row.flops / row.bytes:.3g} FLOP/B, {moved}"
    else:
        rates = f"{moved}, no arithmetic"
    return [case, time, rates]


def roofs(explanation: Explanation) -> tuple[Roof, ...]:
    """The memory slope, and the arithmetic ceilings that matter for these ops; all ceilings where none does."""
    limits = explanation.limits
    rate = limits.memory_rate(1, 1)
    memory = [Roof(name="memory", value=rate, flat=False)] if rate else []
    flat = [limit for limit in limits.limits if limit.value and limit.name.startswith(("matmul_", "vector_"))]
    met = {row.bound for row in explanation.ops} | {f"matmul_{dtype_text(row.dtype)}" for row in explanation.ops}
    met_flat = [limit for limit in flat if limit.name in met or limit.name == "vector_fp32"]
    return (*memory, *(Roof(name=limit.name, value=limit.value or 0.0, flat=True) for limit in met_flat or flat))
