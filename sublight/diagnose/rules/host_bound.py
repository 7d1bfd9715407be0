"""host-bound: Python on the critical path, with no torch op running; by the samples of its stacks, which Python."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose import python, python_advice
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.python import Spot
from sublight.diagnose.rules.data_loading import workers_here
from sublight.trace.record import NONE

SHOWN = 3  # functions that are named
LEAST = 0.1  # of the Python time, for one to be named


def check(case: Case) -> Change | None:
    before_s = case.model.before_s["python"]
    per_step_s = float(before_s.sum()) / case.model.steps
    if per_step_s <= 0:
        return None
    longest = np.argsort(before_s)[::-1][:5]
    longest = longest[before_s[longest] > 0]
    rows = case.model.call_row[longest]
    rows = rows[rows != NONE]
    stretches = np.count_nonzero(before_s) / case.model.steps
    stretch = f"{stretches:.1f} stretches a step in which no op ran, up to {units.text(float(before_s.max()), 's')}"
    hot = [spot for spot in python.spots(case) if spot.share >= LEAST][:SHOWN]
    if hot:
        return _named(case, hot, per_step_s, stretch, rows)
    lines = case.lines(rows.tolist())
    return Change(
        title=f"Python outside of torch takes {units.text(per_step_s, 's')} of each step",
        evidence=(stretch, *((f"the longest end at {lines}",) if lines else ())),
        fix=_FIX + ("" if "samples" in case.trace.meta else _RECORD),
        edit=lambda model: model.without("python"),
        rows=rows,
    )


def _named(case: Case, hot: list[Spot], per_step_s: float, stretch: str, rows: np.ndarray) -> Change:
    first = hot[0]
    kind = python_advice.kind_of(first, case.trace)
    spent = units.text(first.share * per_step_s, "s")
    title = f"{called(first)} {kind.does}: {spent} of each step"
    if first.share <= 0.5:
        whole = units.text(per_step_s, "s")
        title = f"Python outside of torch takes {whole} of each step, the largest part in {called(first)}"
    return Change(
        title=title,
        evidence=(
            stretch,
            *(
                f"{called(spot)} takes {units.percent(spot.share)} of that Python time, "
                f"{units.percent(spot.line_share)} on line {spot.line}{_waits(spot)}{_calls(spot)}"
                for spot in hot
            ),
            f"by {sum(spot.looks for spot in hot)} looks at the main thread's stack",
        ),
        fix=kind.fix.replace("{workers}", str(workers_here(case))),
        edit=lambda model: model.without("python"),
        rows=rows,
        at=tuple((spot.place, f"{units.percent(spot.line_share)} of the Python time") for spot in hot),
    )


def called(spot: Spot) -> str:
    """A function as a reader looks for it.

    >>> spot = Spot(file="a.py", function="f", line=3, share=1, line_share=1, looks=9, waited=0, called=(), stack=())
    >>> called(spot)
    'f() in a.py:3'
    """
    if spot.function == "<module>":
        return f"{spot.file}:{spot.line}"
    name = spot.function.replace(".<locals>", "")
    return f"{name}() in {spot.file}:{spot.line}" if "<" not in name else f"{name} in {spot.file}:{spot.line}"


def _waits(spot: Spot) -> str:
    return " (it waits there)" if spot.waited > python_advice.WAITS else ""


def _calls(spot: Spot) -> str:
    if not spot.called:
        return ""
    deepest = spot.called[0]
    return f", in {deepest.function}() of {deepest.file}"


_FIX = """\
# do it once, before the loop; or with tensor ops on the device; or in DataLoader workers"""
_RECORD = """
# which lines: sublight explain SCRIPT names them, where a trace alone does not"""

HOST_BOUND = Rule(id="host-bound", check=check)
