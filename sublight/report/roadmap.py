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
from sublight.learn.words import say
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
    body = [STYLE, *_over_time(states, language), *_goals(states, goals, today, language)]
    if chosen:
        name = f"<code>{escape(chosen.exercise)}</code>"
        body += [f"<h2>{say(language, 'The shortest way to {name}', name=name)}</h2>", _way(way, language)]
    for number, (chapter, title) in enumerate(CHAPTERS.items(), 1):
        cards = [
            _card(each, states.get(each.name, State()), language, is_next=each is following, is_way=each in way)
            for each in EXERCISES
            if each.chapter == chapter
        ]
        body.append(f'<h2>{number} {escape(say(language, title))}</h2><div class="map">{"".join(cards)}</div>')
    return document(say(language, "Your way to fast kernels"), lead(states, language), *body, language=language)


def lead(states: Mapping[str, State], language: str) -> str:
    """How far along, and whether that is further than on the day before.

    >>> lead({}, "en")
    '0 of 41 passed: `sublight learn start copy` begins'
    """
    days, count = path.days(states), len(EXERCISES)
    if not days:
        words = "0 of {count} passed: `sublight learn start {first}` begins"
        return say(language, words, count=count, first=EXERCISES[0].name)
    last, share = days[-1], units.percent(days[-1].share)
    words = "{passed} of {count} passed, {share} of the way on {date}"
    standing = say(language, words, passed=last.passed, count=count, share=share, date=last.date)
    if len(days) < 2:
        return standing
    gain, before = last.share - days[-2].share, days[-2].date
    if gain > 0:
        words = "{standing}: {gain} more than on {date}"
        return say(language, words, standing=standing, gain=units.percent(gain), date=before)
    return say(language, "{standing}: as far as on {date}", standing=standing, date=before)


def _over_time(states: Mapping[str, State], language: str) -> list[str]:
    days = path.days(states)
    if len(days) < 2:
        return []
    first = datetime.date.fromisoformat(days[0].date)
    points = [((datetime.date.fromisoformat(day.date) - first).days, 100 * day.share) for day in days]
    curve = Curve(name=say(language, "of the way"), points=points, marked=True)
    across = say(language, "days since {first}", first=first)
    picture = curves(say(language, "how far along"), [curve], across=across, up="%")
    return [f"<h2>{say(language, 'Day by day')}</h2>", picture]


def _goals(states: Mapping[str, State], goals: Sequence[DatedGoal], today: datetime.date, language: str) -> list[str]:
    if not goals:
        command = "<code>sublight learn goal flash_attention --by 2027-01-31</code>"
        return [f"<p>{say(language, 'No goal is set: {command} sets one.', command=command)}</p>"]
    rows = []
    for goal in goals:
        left = len(path.way_to(find(goal.exercise), states))
        words = standing(goal, left, today, language)
        rows.append(("", [("", goal.exercise), ("", goal.due or "–"), ("r", str(left)), ("", words)]))
    headings = [("", say(language, "goal")), ("", say(language, "by")), ("r", say(language, "left to do")), ("", "")]
    return [f"<h2>{say(language, 'Goals')}</h2>", table(headings, rows)]


def standing(goal: DatedGoal, left: int, today: datetime.date, language: str) -> str:
    """
    >>> standing(DatedGoal(exercise="softmax", due="2027-01-31"), 6, datetime.date(2027, 1, 17), "en")
    '14 days: 3.0 exercises a week'
    """
    remaining = path.days_left(goal, today)
    if not left:
        return say(language, "reached")
    if remaining is None:
        return ""
    if remaining < 0:
        return say(language, "{days} days late", days=-remaining)
    rate = f"{7 * left / max(1, remaining):.1f}"
    return say(language, "{days} days: {rate} exercises a week", days=remaining, rate=rate)


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
        foot.append(say(language, "{best} of the limit", best=units.percent(state.best)))
    elif len(state.attempts) == 1:
        foot.append(say(language, "1 check"))
    elif state.attempts:
        foot.append(say(language, "{count} checks", count=len(state.attempts)))
    elif exercise.needs:
        foot.append(say(language, "after {names}", names=", ".join(exercise.needs)))
    fractions = [each.fraction for each in state.attempts if each.fraction is not None]
    line = _line(fractions[-20:], say(language, "from check to check")) if len(fractions) > 1 else ""
    return (
        f'<div class="{names}"><b>{escape(exercise.name)}</b>'
        f'<div class="what">{escape(text_of(exercise, language).title)}</div>'
        f'<div class="foot"><span>{escape("; ".join(foot))}</span>{line}</div></div>'
    )


def _line(fractions: Sequence[float], title: str) -> str:
    """The fraction from check to check."""
    step = LINE_WIDTH / (len(fractions) - 1)
    points = " ".join(
        f"{place * step:.1f},{LINE_HEIGHT - 1 - (LINE_HEIGHT - 2) * min(1.0, fraction):.1f}"
        for place, fraction in enumerate(fractions)
    )
    size = f'width="{LINE_WIDTH}" height="{LINE_HEIGHT}" viewBox="0 0 {LINE_WIDTH} {LINE_HEIGHT}"'
    return f'<svg {size} role="img"><title>{title}</title><polyline points="{points}"/></svg>'
