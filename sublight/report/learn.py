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
from sublight.learn.words import say
from sublight.report import roadmap

if TYPE_CHECKING:
    from rich.console import RenderableType

PRINTED_LINES = 20
_BARS = "▁▂▃▄▅▆▇█"


def markdown(words: str) -> RenderableType:
    from sublight.report.draw.wide import Markdown

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
        named = say(language, heading) if heading else ""
        table.add_column(named, justify="right" if heading in ("checks", "best") else "left")
    for number, (chapter, title) in enumerate(CHAPTERS.items(), 1):
        table.add_row("", Line(f"{number} {say(language, title)}", style="bold"))
        for exercise in (each for each in EXERCISES if each.chapter == chapter):
            state = states.get(exercise.name, State())
            mark = "✓" if state.has_passed else "→" if exercise is following else "·"
            checks = str(len(state.attempts)) if state.attempts else ""
            best = units.percent(state.best) if state.best else ""
            table.add_row(mark, exercise.name, text_of(exercise, language).title, checks, best, trend(state))
    lines: list[RenderableType] = [table, "", Line(roadmap.lead(states, language))]
    if len(days := path.days(states)) > 1:
        bars = "".join(_bar(day.share) for day in days[-40:])
        lines.append(say(language, "day by day: {bars}", bars=bars))
    lines += [_goal_line(goal, states, language, today) for goal in goals]
    done = [each.name for each in CUDA_EXERCISES if states.get(each.name, State()).has_passed]
    names = ", ".join(f"{each.name} ✓" if each.name in done else each.name for each in CUDA_EXERCISES)
    words = "in CUDA C++, too ({done} of {count} passed): {names}"
    lines.append(say(language, words, done=len(done), count=len(CUDA_EXERCISES), names=names))
    if following:
        lines.append(say(language, "next: sublight learn start {name}", name=following.name))
    else:
        lines.append(say(language, "all is done"))
    return Group(*lines)


def _goal_line(goal: DatedGoal, states: Mapping[str, State], language: str, today: date) -> str:
    left = len(path.way_to(find(goal.exercise), states))
    words = (say(language, "{left} left", left=left) if left else "", roadmap.standing(goal, left, today, language))
    standing = say(language, ", ").join(filter(None, words))
    if goal.due:
        return say(language, "goal: {name} by {due}: {standing}", name=goal.exercise, due=goal.due, standing=standing)
    return say(language, "goal: {name}: {standing}", name=goal.exercise, standing=standing)


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

    if is_new:
        line = say(text.language, "{file} is yours to fill in", file=file)
    else:
        line = say(text.language, "{file} was there already, and was left as it is", file=file)
    then = say(text.language, "then: sublight learn check {name}", name=exercise.name)
    return Group(markdown(text.page), "", line, then)


def verdict_page(verdict: Verdict, language: str = "en", *, is_watched: bool = False) -> RenderableType:
    """A check's verdict: what is wrong, or the limit's share reached. Findings in the code are in English."""
    from rich.console import Group
    from rich.text import Text as Line

    style = "bold green" if verdict.has_passed else "bold yellow" if verdict.is_right else "bold red"
    lines: list[RenderableType] = [Line(_sentence(verdict, language), style=style)]
    for fault in verdict.faults:
        lines.append("")
        if fault.line:
            lines.append(Line(f"  {verdict.file}:{fault.line}   {verdict.line(fault)}", style="cyan"))
        lines.append(Line(f"  {fault.text}"))
        if fault.case:
            lines.append(Line(f"  {say(language, 'at {case}', case=fault.case)}", style="dim"))
    if verdict.kernels:
        lines += ["", _figures(verdict, language)]
    lines += [Line(f"  {note}", style="dim") for note in verdict.notes]
    if verdict.printed.strip():
        lines += ["", Line(say(language, "it printed:"), style="dim")]
        lines += [Line(f"  {line}") for line in verdict.printed.rstrip().splitlines()[-PRINTED_LINES:]]
    lines += ["", _what_next(verdict, language, is_watched)]
    return Group(*lines)


def _sentence(verdict: Verdict, language: str) -> str:
    """`verdict.sentence` in the given language."""
    name, fraction = verdict.exercise, verdict.fraction
    if verdict.has_passed and fraction is None:
        return say(language, "{name}: passed", name=name)
    if verdict.has_passed and verdict.timing:
        words = "{name}: passed, and reaches {fraction} of this {gpu}'s limit"
        return say(language, words, name=name, fraction=units.percent(verdict.timing.fraction), gpu=verdict.gpu)
    if verdict.has_passed:
        words = "{name}: passed, and its code allows {fraction} of the {gpu}'s limit"
        return say(language, words, name=name, fraction=units.percent(fraction), gpu=verdict.gpu)
    if not verdict.is_right:
        return say(language, "{name}: not yet right", name=name)
    if any(fault.kind == "goal" for fault in verdict.faults):
        return say(language, "{name}: right, but not yet fast enough", name=name)
    return say(language, "{name}: right, but not yet answered", name=name)


def _what_next(verdict: Verdict, language: str, is_watched: bool) -> str:
    name = verdict.exercise
    if verdict.has_passed:
        words = "sublight learn solution {name}   compares with ours; sublight learn next   goes on"
        return say(language, words, name=name)
    if is_watched:
        return say(language, "watching {file}: save to check again, Ctrl-C ends", file=verdict.file)
    return say(language, "sublight learn hint {name}   gives a hint", name=name)


def _figures(verdict: Verdict, language: str) -> RenderableType:
    """The headings are the names that pages and xray use."""
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
            "–" if verdict.is_unknown(each) else units.text(each.seconds, "s"),
        )
    words = "on {gpu} at {case}: {least} must move, which takes {floor}"
    if verdict.fraction is not None:
        words = "on {gpu} at {case}: {least} must move, which takes {floor}; this code allows {fraction} of that speed"
    at_goal = say(
        language,
        words,
        gpu=verdict.gpu,
        case=verdict.goal_case,
        least=units.text(verdict.least_bytes, "B"),
        floor=units.text(verdict.floor_s, "s"),
        fraction=units.percent(verdict.fraction),
    )
    bound = say(language, "read off the compiled code: a bound, not a measurement")
    lines: list[RenderableType] = [table, Line(at_goal), Line(f"  {bound}", style="dim")]
    if timed := verdict.timing:
        words = say(
            language,
            "measured on this {gpu} at {case}: {seconds} a call, {fraction} of the limit",
            gpu=verdict.gpu,
            case=timed.case,
            seconds=units.text(timed.seconds, "s"),
            fraction=units.percent(timed.fraction),
        )
        lines.append(Line(words))
    return Group(*lines)


def hint_page(name: str, text: Text, level: int, levels: int) -> RenderableType:
    from rich.console import Group

    if level < levels:
        words = "hint {level} of {levels}; sublight learn hint {name}   gives the next"
    elif level == levels:
        words = "hint {level} of {levels}; that was the last hint"
    else:
        words = "all {levels} hints; there is no other"
    line = say(text.language, words, level=level, levels=levels, name=name)
    return Group(markdown(text.hint(level)), "", line)


def solution_page(exercise: Exercise, text: Text) -> RenderableType:
    from rich.console import Group

    language = "cuda" if exercise.kind == "cuda" else "python"
    return Group(markdown(f"```{language}\n{exercise.solution().rstrip()}\n```\n\n{text.explanation}"))


def next_page(following: Exercise | None, language: str) -> RenderableType:
    if following is None:
        return say(language, "every exercise has passed")
    return f"{_titled(following, language)}\nsublight learn start {following.name}"


def _titled(exercise: Exercise, language: str) -> str:
    return say(language, "{name}: {title}", name=exercise.name, title=text_of(exercise, language).title)


def goal_page(goal: DatedGoal, way: Sequence[Exercise], language: str) -> RenderableType:
    name, due = goal.exercise, goal.due
    if not way:
        return say(language, "{name} has passed: the goal is reached", name=name)
    words = "to {name} by {due}: {left} left" if due else "to {name}: {left} left"
    lines = [say(language, words, name=name, due=due, left=len(way))]
    lines += [f"  {number}. {_titled(each, language)}" for number, each in enumerate(way, 1)]
    return "\n".join([*lines, f"sublight learn start {way[0].name}"])


def entry_page(entry: Mapping[str, Any], url: str, language: str = "en") -> RenderableType:
    """What became of an entry on a board; the board's own words are shown as plain text, never as markup."""
    from rich.text import Text as Line

    from sublight.learn.address import plain

    state = str(entry["state"])
    words = {
        "verified": "the board has run it: {fraction} of the {gpu}'s limit",
        "rejected": "the board has run it, and it has not passed: {reason}",
        "not_rerun": "kept, but not run and not ranked: {reason}",
    }.get(state, "it still waits ({state}): the page shows what becomes of it")
    fraction, gpu, reason = units.percent(entry.get("fraction")), entry.get("gpu"), entry.get("reason")
    outcome = say(language, words, fraction=fraction, gpu=gpu, reason=reason, state=state)
    named = say(language, "{name}: {title}", name=entry.get("exercise"), title=outcome)
    return Line(plain(f"{named}\n{url}/entry/{entry['id']}"))
