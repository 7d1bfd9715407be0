"""The learner's roadmap as one HTML file: how far along, goals with dates, and every exercise with what it needs."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from html import escape

from sublight import units
from sublight.learn import path
from sublight.learn.exercises import CHAPTERS, EXERCISES, find
from sublight.learn.progress import DatedGoal, State
from sublight.learn.record import Exercise
from sublight.learn.texts import text_of
from sublight.report.draw.curves import Curve, curves
from sublight.report.draw.page import document, table

LINE_WIDTH, LINE_HEIGHT = 84, 20  # of the small curve on a card
STYLE = """
<style>
.map{display:grid;grid-template-columns:repeat(auto-fill,minmax(212px,1fr));gap:10px;margin:0 0 26px}
.card{border:1px solid var(--line);border-radius:8px;padding:9px 12px;min-height:92px}
.card b{font:600 14px ui-monospace,monospace}.card .what{font-size:13px;line-height:1.35}
.card .foot{color:var(--faint);font-size:12px;display:flex;gap:8px;align-items:center;margin-top:4px}
.card.done b::before{content:"✓ ";color:var(--good)}.card.next{border-color:var(--good);border-width:2px}
.card.way{border-left:4px solid var(--bad)}.card.done{opacity:.8}.card polyline{fill:none;stroke:var(--good)}
ol.way li{margin:2px 0}ol.way code,h3 code{font:600 14px ui-monospace,monospace}
</style>
"""


def page(states: Mapping[str, State], goals: Sequence[DatedGoal], language: str, today: datetime.date) -> str:
    """The whole file."""
    following = path.next_one(states, goals)
    chosen = next((goal for goal in goals if path.way_to(find(goal.exercise), states)), None)
    way = path.way_to(find(chosen.exercise), states) if chosen else []
    body = [STYLE, *_over_time(states), *_goals(states, goals, today)]
    if chosen:
        body += [f"<h2>The shortest way to <code>{escape(chosen.exercise)}</code></h2>", _way(way, language)]
    for number, (chapter, title) in enumerate(CHAPTERS.items(), 1):
        cards = [
            _card(each, states.get(each.name, State()), language, is_next=each is following, is_way=each in way)
            for each in EXERCISES
            if each.chapter == chapter
        ]
        body.append(f'<h2>{number} {escape(title)}</h2><div class="map">{"".join(cards)}</div>')
    return document("Your way to fast kernels", lead(states), *body)


def lead(states: Mapping[str, State]) -> str:
    """How far along, and whether that is further than on the day before.

    >>> lead({})
    '0 of 41 passed: `sublight learn start copy` begins'
    """
    days = path.days(states)
    if not days:
        return f"0 of {len(EXERCISES)} passed: `sublight learn start {EXERCISES[0].name}` begins"
    last = days[-1]
    words = f"{last.passed} of {len(EXERCISES)} passed, {units.percent(last.share)} of the way on {last.date}"
    if len(days) < 2:
        return words
    gain = last.share - days[-2].share
    more = f"{units.percent(gain)} more than" if gain > 0 else "as far as"
    return f"{words}: {more} on {days[-2].date}"


def _over_time(states: Mapping[str, State]) -> list[str]:
    days = path.days(states)
    if len(days) < 2:
        return []
    first = datetime.date.fromisoformat(days[0].date)
    points = [((datetime.date.fromisoformat(day.date) - first).days, 100 * day.share) for day in days]
    picture = curves(
        "how far along", [Curve(name="of the way", points=points, marked=True)], across=f"days since {first}", up="%"
    )
    return ["<h2>Day by day</h2>", picture]


def _goals(states: Mapping[str, State], goals: Sequence[DatedGoal], today: datetime.date) -> list[str]:
    if not goals:
        return ["<p>No goal is set: <code>sublight learn goal flash_attention --by 2027-01-31</code> sets one.</p>"]
    rows = []
    for goal in goals:
        left = len(path.way_to(find(goal.exercise), states))
        rows.append(
            ("", [("", goal.exercise), ("", goal.due or "–"), ("r", str(left)), ("", standing(goal, left, today))])
        )
    return ["<h2>Goals</h2>", table([("", "goal"), ("", "by"), ("r", "left to do"), ("", "")], rows)]


def standing(goal: DatedGoal, left: int, today: datetime.date) -> str:
    """
    >>> standing(DatedGoal(exercise="softmax", due="2027-01-31"), 6, datetime.date(2027, 1, 17))
    '14 days: 3.0 exercises a week'
    """
    remaining = path.days_left(goal, today)
    if not left:
        return "reached"
    if remaining is None:
        return ""
    if remaining < 0:
        return f"{-remaining} days late"
    return f"{remaining} days: {7 * left / max(1, remaining):.1f} exercises a week"


def _way(way: Sequence[Exercise], language: str) -> str:
    steps = "".join(
        f"<li><code>{escape(each.name)}</code> {escape(text_of(each, language).title)}</li>" for each in way
    )
    return f'<ol class="way">{steps}</ol>'


def _card(exercise: Exercise, state: State, language: str, *, is_next: bool, is_way: bool) -> str:
    kinds = {"done": state.has_passed, "next": is_next, "way": is_way and not state.has_passed}
    names = " ".join(["card", *(name for name, holds in kinds.items() if holds)])
    foot = []
    if state.has_passed and state.best:
        foot.append(f"{units.percent(state.best)} of the limit")
    elif state.attempts:
        foot.append(f"{len(state.attempts)} check{'s' * (len(state.attempts) > 1)}")
    elif exercise.needs:
        foot.append(f"after {', '.join(exercise.needs)}")
    fractions = [each.fraction for each in state.attempts if each.fraction is not None]
    line = _line(fractions[-20:]) if len(fractions) > 1 else ""
    return (
        f'<div class="{names}"><b>{escape(exercise.name)}</b>'
        f'<div class="what">{escape(text_of(exercise, language).title)}</div>'
        f'<div class="foot"><span>{escape("; ".join(foot))}</span>{line}</div></div>'
    )


def _line(fractions: Sequence[float]) -> str:
    """The fraction from check to check."""
    step = LINE_WIDTH / (len(fractions) - 1)
    points = " ".join(
        f"{place * step:.1f},{LINE_HEIGHT - 1 - (LINE_HEIGHT - 2) * min(1.0, fraction):.1f}"
        for place, fraction in enumerate(fractions)
    )
    size = f'width="{LINE_WIDTH}" height="{LINE_HEIGHT}" viewBox="0 0 {LINE_WIDTH} {LINE_HEIGHT}"'
    return f'<svg {size} role="img"><title>from check to check</title><polyline points="{points}"/></svg>'
