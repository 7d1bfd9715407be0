"""The table of ops: one row for equal calls, wherever they ran, which opens into one a place."""

from __future__ import annotations

from html import escape

from sublight import units
from sublight.diagnose.record import Explanation, OpRow
from sublight.report.bench import TOO_GOOD_MEANS, dtype_text
from sublight.report.explain import terminal as explain
from sublight.report.explain.room import Room, time_text
from sublight.results import TOO_GOOD

COLUMNS = (  # heading and class
    ("op", ""), ("shape", ""), ("dtype", ""), ("calls", "r"), ("CPU", "r"), ("GPU", "r"), ("floor", "r"),
    ("of limit", "r"), ("bound", ""), ("where", ""), ("kernel", ""),
)  # fmt: skip


def section(explanation: Explanation, room: Room) -> str:
    groups = explain.together(explanation.ops)
    if not groups:
        return '<section id="ops" tabindex="-1"><h2>Ops</h2><p class="why">No op was seen in these steps.</p></section>'
    names = [(explain.device_word(explanation) if name == "GPU" else name, side) for name, side in COLUMNS]
    head = "".join(
        f'<th scope="col" class="{side}" aria-sort="{"descending" if at == 5 else "none"}"><button type="button">{name}'
        "</button></th>"
        for at, (name, side) in enumerate(names)
    )
    body, shown, left = "", 0, room.ops
    for number, (whole, members) in enumerate(groups):
        if left <= 0:
            break
        body += _group(number, whole, members[: max(left, 1)], room)
        shown, left = shown + 1, left - len(members)
    hidden = len(groups) - shown
    more = f" The {hidden} smallest are left out; --json has all." if hidden else ""
    return (
        f'<section id="ops" tabindex="-1"><h2>Ops, per {explanation.span}</h2><div class="tools"><label>search '
        '<input type="search" id="search" autocomplete="off" spellcheck="false" '
        'placeholder="op, shape, module, kernel"></label>'
        f'<span id="matches" role="status">{shown} {"op" if shown == 1 else "ops"}.{escape(more)}</span></div>'
        '<div class="wide tall" tabindex="0" role="region" aria-label="Table of ops">'
        f'<table id="optable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>'
    )  # fmt: skip


def _group(number: int, whole: OpRow, members: list[OpRow], room: Room) -> str:
    """The row of all, and below it, folded, one a place."""
    if len(members) < 2:
        return _row(members[0], room, f'data-group="{number}"', "")
    label = f"{len(members)} places of {whole.name}"
    button = (
        f'<button type="button" class="open" aria-expanded="false" aria-label="{escape(room.cut(label))}"></button>'
    )
    rows = [_row(whole, room, f'data-group="{number}"', button)]
    rows += [_row(row, room, f'data-of="{number}" hidden', "") for row in members]
    return "".join(rows)


def _row(row: OpRow, room: Room, attributes: str, button: str) -> str:
    too_good = row.fraction is not None and row.fraction > TOO_GOOD
    kernels = "; ".join(row.kernels)
    share = min(max(row.fraction or 0.0, 0.0), 1.0)
    meter = f'<span class="of"><i style="width:{100 * share:.0f}%"></i></span>' if row.fraction is not None else ""
    cells: tuple[tuple[str, float | None, str], ...] = (
        ("n", None, f"{button}{escape(room.cut(row.name))}"),
        ("s", None, escape(room.cut(row.shape))),
        ("", None, escape(room.cut(dtype_text(row.dtype)))),
        ("r", row.calls, escape(units.count(row.calls))),
        ("r", row.cpu_s, escape(time_text(row.cpu_s))),
        ("r", row.device_s, escape(time_text(row.device_s))),
        ("r", -1.0 if row.floor_s is None else row.floor_s, escape(time_text(row.floor_s))),
        ("r", -1.0 if row.fraction is None else row.fraction, f"{meter}{escape(units.percent(row.fraction))}"),
        ("", None, escape(room.cut(explain.bound_text(row)))),
        ("w", None, escape(room.cut(explain.where_text(row)))),
        ("k", None, f'<span title="{escape(room.cut(kernels))}">{escape(kernels[:60])}</span>'),
    )
    made = "".join(
        f'<td class="{kind}"' + (f' data-v="{value:.9g}"' if value is not None else "") + f">{words}</td>"
        for kind, value, words in cells
    )
    bad = f' class="bad" title="{escape(TOO_GOOD_MEANS)}"' if too_good else ""
    return f"<tr {attributes}{bad}>{made}</tr>"
