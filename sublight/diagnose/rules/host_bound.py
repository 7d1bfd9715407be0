"""host-bound: Python on the critical path, with no torch op running; by the samples of its stacks, which Python."""

from __future__ import annotations

import re

import numpy as np

from sublight import units
from sublight.diagnose import python, python_advice
from sublight.diagnose.case import Case, Change, Rule, drop
from sublight.diagnose.python import Spot
from sublight.diagnose.rules.data_loading import workers_here
from sublight.diagnose.source import PLACE, text_of
from sublight.diagnose.unprofiled import crowded
from sublight.trace.record import NONE

SHOWN = 3  # functions that are named
LEAST = 0.1  # of the Python time, for one to be named
LOOKED_UP = 30_000  # ops whose place is looked up


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
    if not case.on_gpu and (change := _printing(case, per_step_s)):
        return change
    spots = python.spots(case, apart=lambda line: _is_torchs(line, case))  # main() has the user's own work, and torch's
    hot = [spot for spot in spots if spot.share >= LEAST][:SHOWN]
    if hot and not case.on_gpu and crowded(case.trace) and all(_is_torchs(spot, case) for spot in hot):
        return None  # a step needs it, and what made it long is the other programs
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


def _is_torchs(spot: Spot, case: Case) -> bool:
    return python_advice.kind_of(spot, case.trace) in python_advice.OF_TORCH


def _printing(case: Case, python_s: float) -> Change | None:
    """A tensor that is printed runs ops to be shown, with Python between them: more of that than of other Python."""
    trace, places = case.trace, dict[str, bool]()
    tops = case.inside(case.attribution.top_ops)
    if not case.attribution.has_places or len(tops) > LOOKED_UP:
        return None
    shown: dict[int, str] = {}
    for row in tops.tolist():
        place = case.attribution.place(row)[0] if case.attribution.forward(row) == NONE else ""
        if place not in places:
            match = PLACE.match(place)
            text = text_of(trace, match["file"], int(match["line"])) if match else ""
            places[place] = ";" not in text and bool(re.search(python_advice.PRINT.text, text))  # the line does no more
        if places[place]:
            shown[row] = place
    top = (
        (event, (case.attribution.ops_above(row) or [row])[-1])
        for event, row in enumerate(case.model.event_row.tolist())
    )
    events = np.array([event for event, op in top if op in shown], dtype=np.int64)
    spent_s = case.step_s - case.replayed_s(drop(case.model, events)) if len(events) else 0.0
    if spent_s <= max(python_s, LEAST * case.step_s):
        return None
    place = max(shown.values(), key=list(shown.values()).count)
    return Change(
        title=f"{place.partition(' ')[0]} prints tensors: {units.text(spent_s, 's')} of each step",
        evidence=(f"{case.often(len(events))} ops a step run to show them, with Python between them",),
        fix=python_advice.PRINT.fix,
        edit=lambda model: drop(model, events),
        rows=np.array(sorted(shown), dtype=np.int64),
    )


def _named(case: Case, hot: list[Spot], per_step_s: float, stretch: str, rows: np.ndarray) -> Change:
    hot = sorted(hot, key=lambda spot: _is_torchs(spot, case))  # the user's own work first
    first = hot[0]
    kind = python_advice.kind_of(first, case.trace)
    named = min(1.0, first.share + sum(spot.share for spot in hot[1:] if _is_called_by(spot, first)))
    title = f"{called(first)} {kind.does}: {units.text(named * per_step_s, 's')} of each step"
    if first.share <= 0.5:
        whole, share = units.text(per_step_s, "s"), units.percent(first.share)
        title = f"Python outside of torch takes {whole} of each step, {share} of it in {called(first)}"
        own = [spot for spot in hot if not _is_torchs(spot, case)]  # what torch's own Python takes, a step needs
        named = min(1.0, sum(spot.share for spot in own or hot))
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
        fix=kind.fix.replace("{workers}", str(workers_here(case)))
        + (_GRAPHS if case.on_gpu and kind == python_advice.CALL else ""),
        edit=lambda model: model.without("python", share=named),  # of what is not named, nothing is known to go
        rows=rows,
        at=tuple((spot.place, f"{units.percent(spot.line_share)} of the Python time") for spot in hot),
    )


def _is_called_by(spot: Spot, first: Spot) -> bool:
    line = (first.file, first.function, first.line)
    return any((frame.file, python.owner(frame.function), frame.line) == line for frame in spot.stack)


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
_GRAPHS = """
# or without Python: the step as a CUDA graph, torch.compile(model, mode="reduce-overhead") or sublight.graph(step)"""
_RECORD = """
# which lines: sublight explain SCRIPT names them, where a trace alone does not"""

HOST_BOUND = Rule(id="host-bound", check=check)
