"""slow-kernel: one op far above its own floor, and no other finding says why."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule, edit_durations
from sublight.diagnose.unprofiled import crowded
from sublight.diagnose.work import COPIES, Item

FAR = 0.25  # of the limit
REACHED = 0.8
LONG_S = 20e-6  # a shorter one is bound by its launch
LEAST = 0.03
MOSTLY = 0.5  # of the calls with these shapes: a few slow ones among many were interrupted


def check(case: Case) -> Change | None:
    if not case.on_gpu and crowded(case.trace):
        return None  # ops that other programs kept from the cores: another kernel would wait as long
    grouped = {at for group in case.groups for at in group.items}
    slow: dict[tuple[str, str], list[int]] = defaultdict(list)
    calls_of = Counter(_kind(item) for item in case.items)
    for at, item in enumerate(case.items):
        duration = float(case.model.duration_s[case.events_of[at]].sum())
        if item.floor_s is None or at in grouped or item.family in ("communication", "optimizer") or duration < LONG_S:
            continue
        if item.name.startswith(COPIES) or item.cost is None or not item.cost.read_bytes:
            continue  # over the link: other findings; and what only writes may draw random numbers
        if item.floor_s / REACHED < FAR * duration:
            slow[_kind(item)].append(at)
    by_name: dict[str, list[int]] = defaultdict(list)
    for kind, found in slow.items():
        if len(found) >= MOSTLY * calls_of[kind]:
            by_name[kind[0]] += found
    if not by_name:
        return None
    name = max(by_name, key=lambda name: case.device_s(case.events(by_name[name])))
    chosen = by_name[name]
    events = case.events(chosen)
    spent = case.device_s(events)
    floor = sum(case.items[at].floor_s or 0.0 for at in chosen) / case.model.steps
    if spent - floor < LEAST * case.step_s:
        return None
    durations = case.model.duration_s[events]
    seconds = durations * (floor / REACHED) / spent
    rows = case.model.event_row[events]
    calls = case.often(len(chosen))
    known = case.items[chosen[0]].known
    kernels = list(dict.fromkeys(case.trace.name_of(row) for row in rows.tolist()))
    lines = case.lines([case.items[at].row for at in chosen][:200])
    return Change(
        title=f"{name} reaches {units.percent(floor / spent)} of its limit",
        evidence=(
            f"{calls} {'call a step takes' if calls == '1' else 'calls a step take'} {units.text(spent, 's')}; "
            f"{units.text(floor, 's')} would do" + (f": {known.shape} {known.dtype}" if known else ""),
            f"kernels: {', '.join(kernel[:60] for kernel in kernels[:2])}",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_ODD_FIX if all(_is_odd_product(case.items[at]) for at in chosen) else _FIX,
        edit=edit_durations(events, np.asarray(seconds)),
        most_s=spent,
        rows=rows,
        ops=(name,),
    )


def _kind(item: Item) -> tuple[str, str]:
    return item.name, item.known.shape if item.known is not None else ""


def _is_odd_product(item: Item) -> bool:
    """A product in 16 bits with a size that is no multiple of 8: cuBLAS falls to a third or a sixth there."""
    sizes = [int(size) for size in re.findall(r"\d+", item.known.shape)] if item.known is not None else []
    return item.family == "matmul" and item.dtype in ("bfloat16", "float16") and any(size % 8 for size in sizes[-3:])


_ODD_FIX = """\
sublight.patch(model, only=["linear"])  # odd sizes: on an H200 4096x700 @ 700x100000 took 0.32 of cuBLAS's time
# or sizes that are multiples of 8: a vocabulary of 50304 in place of 50257"""

_FIX = """\
# another kernel for the same op: another layout (channels_last, contiguous rows), sizes that are multiples of 64,
# a library's kernel; `sublight bench` and `sublight why` show what reaches the limit here"""

SLOW_KERNEL = Rule(id="slow-kernel", check=check)
