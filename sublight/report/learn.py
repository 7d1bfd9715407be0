"""`sublight learn` in the terminal: the map, pages of an exercise, and what a check has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.learn import path
from sublight.learn.exercises import CHAPTERS, CUDA_EXERCISES, EXERCISES, find
from sublight.learn.progress import DatedGoal, State
from sublight.learn.record import Exercise
from sublight.learn.texts import Text, text_of
from sublight.learn.verdict import Verdict
from sublight.report import roadmap

if TYPE_CHECKING:
    from rich.console import RenderableType

PRINTED_LINES = 20
_BARS = "▁▂▃▄▅▆▇█"


def markdown(words: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(words, code_theme="ansi_dark")


def trend(state: State) -> str:
    """The fraction over the checks that were right enough to have one, the last eight.

    >>> from sublight.learn.progress import Attempt
    >>> trend(State(attempts=tuple(Attempt(at="", passed=False, fraction=f) for f in (0.1, 0.5, 1.0))))
    '▁▄█'
    """
    reached = [each.fraction for each in state.attempts if each.fraction is not None][-8:]
    return "".join(map(_bar, reached))


def _bar(fraction: float) -> str:
    return _BARS[min(7, int(fraction * 8 - 1e-9))]


def map_page(states: Mapping[str, State], goals: Sequence[DatedGoal], language: str, today: date) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Line

    following = path.next_one(states, goals)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "exercise", "what", "checks", "best", "trend"):
        table.add_column(heading, justify="right" if heading in ("checks", "best") else "left")
    for number, (chapter, title) in enumerate(CHAPTERS.items(), 1):
        table.add_row("", Line(f"{number} {title}", style="bold"))
        for exercise in (each for each in EXERCISES if each.chapter == chapter):
            state = states.get(exercise.name, State())
            mark = "✓" if state.has_passed else "→" if exercise is following else "·"
            checks = str(len(state.attempts)) if state.attempts else ""
            best = units.percent(state.best) if state.best else ""
            table.add_row(mark, exercise.name, text_of(exercise, language).title, checks, best, trend(state))
    lines: list[RenderableType] = [table, "", Line(roadmap.lead(states))]
    if len(days := path.days(states)) > 1:
        lines.append(f"day by day: {''.join(_bar(day.share) for day in days[-40:])}")
    for goal in goals:
        left = len(path.way_to(find(goal.exercise), states))
        words = filter(None, (f"{left} left" if left else "", roadmap.standing(goal, left, today)))
        lines.append(f"goal: {goal.exercise}{f' by {goal.due}' if goal.due else ''}: {', '.join(words)}")
    done = [each.name for each in CUDA_EXERCISES if states.get(each.name, State()).has_passed]
    names = ", ".join(f"{each.name} ✓" if each.name in done else each.name for each in CUDA_EXERCISES)
    lines.append(f"in CUDA C++, too ({len(done)} of {len(CUDA_EXERCISES)} passed): {names}")
    lines.append(f"next: sublight learn start {following.name}" if following else "all is done")
    return Group(*lines)


def map_json(states: Mapping[str, State], goals: Sequence[DatedGoal]) -> dict[str, Any]:
    following = path.next_one(states, goals)
    return {
        "exercises": [
            {
                "name": each.name,
                "chapter": each.chapter,
                "needs": list(each.needs),
                "passed": states.get(each.name, State()).has_passed,
                "checks": len(states.get(each.name, State()).attempts),
                "hints": states.get(each.name, State()).hints,
                "best_fraction": states.get(each.name, State()).best,
            }
            for each in EXERCISES
        ],
        "next": following.name if following else None,
        "goals": [
            {
                "exercise": goal.exercise,
                "by": goal.due or None,
                "left": [each.name for each in path.way_to(find(goal.exercise), states)],
            }
            for goal in goals
        ],
        "days": [{"date": day.date, "share": day.share, "passed": day.passed} for day in path.days(states)],
    }


def start_page(exercise: Exercise, text: Text, file: Path, *, is_new: bool) -> RenderableType:
    from rich.console import Group

    line = f"{file} is yours to fill in" if is_new else f"{file} was there already, and was left as it is"
    return Group(markdown(text.page), "", line, f"then: sublight learn check {exercise.name}")


def verdict_page(verdict: Verdict, *, is_watched: bool = False) -> RenderableType:
    from rich.console import Group
    from rich.text import Text as Line

    style = "bold green" if verdict.has_passed else "bold yellow" if verdict.is_right else "bold red"
    lines: list[RenderableType] = [Line(verdict.sentence, style=style)]
    for fault in verdict.faults:
        lines.append("")
        if fault.line:
            lines.append(Line(f"  {verdict.file}:{fault.line}   {verdict.line(fault)}", style="cyan"))
        lines.append(Line(f"  {fault.text}"))
        if fault.case:
            lines.append(Line(f"  at {fault.case}", style="dim"))
    if verdict.kernels:
        lines += ["", _figures(verdict)]
    lines += [Line(f"  {note}", style="dim") for note in verdict.notes]
    if verdict.printed.strip():
        lines += ["", Line("it printed:", style="dim")]
        lines += [Line(f"  {line}") for line in verdict.printed.rstrip().splitlines()[-PRINTED_LINES:]]
    lines += ["", *_what_next(verdict, is_watched)]
    return Group(*lines)


def _what_next(verdict: Verdict, is_watched: bool) -> list[str]:
    if verdict.has_passed:
        return [f"sublight learn solution {verdict.exercise}   compares with ours; sublight learn next   goes on"]
    if is_watched:
        return [f"watching {verdict.file}: save to check again, Ctrl-C ends"]
    return [f"sublight learn hint {verdict.exercise}   gives a hint"]


def _figures(verdict: Verdict) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Line

    table = Table(box=None, pad_edge=False)
    headings = ("kernel", "registers", "spilled", "occupancy", "sectors/ideal", "programs", "at best")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for each in verdict.kernels:
        ratio = f"{each.sectors / each.ideal_sectors:.2f}" if each.ideal_sectors else "–"
        table.add_row(
            each.name,
            str(each.registers),
            units.text(each.spill_bytes, "B"),
            units.percent(each.occupancy),
            ratio,
            f"{each.programs:,}",
            units.text(each.seconds, "s"),
        )
    least = f"{units.text(verdict.least_bytes, 'B')} must move, which takes {units.text(verdict.floor_s, 's')}"
    allowed = f"this code allows {units.percent(verdict.fraction)} of that speed"
    words = f"on {verdict.gpu} at {verdict.goal_case}: {least}; {allowed}"
    lines: list[RenderableType] = [table, Line(words)]
    lines.append(Line("  read off the compiled code: a bound, not a measurement", style="dim"))
    if timed := verdict.timing:
        reached = f"{units.text(timed.seconds, 's')} a call, {units.percent(timed.fraction)} of the limit"
        lines.append(Line(f"measured on this {verdict.gpu} at {timed.case}: {reached}"))
    return Group(*lines)


def hint_page(name: str, hint: str, level: int, levels: int) -> RenderableType:
    from rich.console import Group

    more = f"sublight learn hint {name}   gives the next" if level < levels else "that was the last hint"
    return Group(markdown(hint), "", f"hint {level} of {levels}; {more}")


def solution_page(exercise: Exercise, text: Text) -> RenderableType:
    from rich.console import Group

    language = "cuda" if exercise.kind == "cuda" else "python"
    return Group(markdown(f"```{language}\n{exercise.solution().rstrip()}\n```\n\n{text.explanation}"))


def next_page(following: Exercise | None, language: str) -> RenderableType:
    if following is None:
        return "every exercise has passed"
    return f"{following.name}: {text_of(following, language).title}\nsublight learn start {following.name}"


def goal_page(goal: DatedGoal, way: Sequence[Exercise], language: str) -> RenderableType:
    name, due = goal.exercise, goal.due
    if not way:
        return f"{name} has passed: the goal is reached"
    lines = [f"to {name}{f' by {due}' if due else ''}: {len(way)} left"]
    lines += [f"  {number}. {each.name}: {text_of(each, language).title}" for number, each in enumerate(way, 1)]
    return "\n".join([*lines, f"sublight learn start {way[0].name}"])


def entry_page(entry: Mapping[str, Any], url: str) -> RenderableType:
    """What became of an entry on a board; what the board says is shown as text."""
    from rich.text import Text as Line

    from sublight.learn.address import plain

    state, fraction = str(entry["state"]), entry.get("fraction")
    said = {
        "verified": f"the board has run it: {units.percent(fraction)} of the {entry.get('gpu')}'s limit",
        "rejected": f"the board has run it, and it has not passed: {entry.get('reason')}",
        "not_rerun": f"kept, but not run and not ranked: {entry.get('reason')}",
    }.get(state, f"it still waits ({state}): the page shows what becomes of it")
    return Line(plain(f"{entry.get('exercise')}: {said}\n{url}/entry/{entry['id']}"))
