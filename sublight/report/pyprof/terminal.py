"""A Python profile in the terminal: functions and lines by their own time, threads by what they waited for."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sublight import units
from sublight.pyprof.record import PythonProfile
from sublight.pyprof.tables import Figure, Split, Tables, tables
from sublight.report.draw.tables import Fitting, plain, titled
from sublight.report.pyprof.names import file_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

LEAST_SHARE = 0.001  # functions with a smaller share of the time are not listed
FUNCTIONS, LINES, THREADS = 20, 10, 12
WIDE, NARROW = 44, 22  # the longest name, in a wide and in a narrow terminal


def page(profile: PythonProfile, *, most: int = FUNCTIONS) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    totals = tables(profile)
    parts: list[RenderableType] = [Text(headline(profile, totals), style="bold")]
    parts += [Text(line, style="dim") for line in remarks(profile, totals)]
    if not totals.functions:
        parts.append(Text("nothing was seen: the program was too short", style="dim"))
        return Group(*parts)
    parts += [Text(""), titled(title_of(profile), _functions(profile, totals, most))]
    if totals.lines:
        parts += [Text(""), titled("Lines, by own time", _lines(totals, min(most, LINES)))]
    if profile.mode != "counts" and (len(totals.threads) > 1 or profile.mode == "sample"):  # counts have no times
        parts += [Text(""), titled("Threads", _threads(profile, totals))]
    return Group(*parts)


def title_of(profile: PythonProfile) -> str:
    return "Functions, by calls" if profile.mode == "counts" else "Functions, by own time"


def headline(profile: PythonProfile, totals: Tables) -> str:
    took = f"{profile.command}: {units.text(profile.wall_s, 's')}"
    if profile.cpu_s:
        whose = " of its own, without the processes that it started" if len(profile.processes) > 1 else ""
        took += f", of which {units.text(profile.cpu_s, 's')} CPU{whose}"
    if profile.mode == "sample":
        return f"{took}; {totals.looks:,} looks at {profile.hz:g} Hz"
    functions = len(totals.functions)
    return f"{took}; {totals.calls:,} call{'s' * (totals.calls != 1)} of {functions:,} function{'s' * (functions != 1)}"


def remarks(profile: PythonProfile, totals: Tables) -> list[str]:
    """Remarks without which the figures could be misread."""
    lines = list(profile.notes)
    lines += sorted({process.how for process in profile.processes if "(" in process.how or ";" in process.how})
    if len(profile.processes) > 1:
        lines.append(
            f"{len(profile.processes)} processes: the program and {len(profile.processes) - 1} that it started"
        )
    if profile.mode == "trace":
        lines.append("times hold what tracing adds to each call: small functions look slower than they are")
    return lines


def place(figure: Figure, *, line: int = 0) -> str:
    frame = figure.frame
    if not frame.file:
        return "builtin"
    at = line or figure.line
    return f"{file_text(frame.file)}:{at}" if at else file_text(frame.file)


def _functions(profile: PythonProfile, totals: Tables, most: int) -> RenderableType:
    return Fitting(tuple(_functions_with(profile, totals, most, columns) for columns in _layouts(profile)))


def _layouts(profile: PythonProfile) -> tuple[tuple[str, ...], ...]:
    if profile.mode == "counts":
        return (("calls", "resumed", "function", "where", "thread"), ("calls", "function", "where"))
    if profile.mode == "trace":
        full = ("share", "own", "total", "calls", "a call", "function", "where", "thread")
        return (full, full[:-1], ("share", "own", "total", "calls", "function", "where"))
    if profile.processes and profile.processes[0].knows_waits:
        all_parts = ("share", "own", "total", "ran", "lock", "core", "idle", "function", "where", "thread")
        return (all_parts, all_parts[:-1], ("share", "own", "total", "idle", "function", "where"))
    known = ("ran", "idle") if profile.cpu_s else ()  # py-spy does not tell
    full = ("share", "own", "total", *known, "function", "where", "thread")
    return (full, full[:-1], ("share", "own", "total", "function", "where"))


def _functions_with(profile: PythonProfile, totals: Tables, most: int, columns: Sequence[str]) -> Table:
    figures = {"share", "own", "total", "ran", "lock", "core", "idle", "calls", "a call", "resumed"}
    out = plain(columns, right=figures)
    wide = WIDE if "thread" in columns or "a call" in columns or "lock" in columns else NARROW
    for figure in shown(totals, most):
        cells = {
            "share": units.percent(figure.own_s / totals.counted_s if totals.counted_s else 0.0),
            "own": units.text(figure.own_s, "s"),
            "total": units.text(figure.total_s, "s"),
            **_parts(figure.own),
            "calls": f"{figure.calls:,}",
            "resumed": f"{figure.resumes:,}",
            "a call": units.text(figure.total_s / figure.calls, "s") if figure.calls else "–",
            "function": escape(cut(figure.frame.function, wide)),
            "where": escape(cut(place(figure), wide)),
            "thread": escape(cut(thread_of(figure), 24)),
        }
        out.add_row(*(cells[name] for name in columns))
    return out


def shown(totals: Tables, most: int) -> list[Figure]:
    """What matters, by own time; of calls also what does not, where more are wanted than the usual few."""
    if totals.calls and most > FUNCTIONS:
        return list(totals.functions[:most])
    least_s = LEAST_SHARE * totals.counted_s
    worth = (one for one in totals.functions if max(one.own_s, 0.1 * one.total_s) > least_s)  # callers come last
    return list(worth if totals.counted_s else (one for one in totals.functions if one.calls))[:most]


def _parts(own: Split) -> dict[str, str]:
    """How a function's own time divides: running, waiting for the interpreter's lock, for a core, idle."""
    all_s = own.all_s or 1.0
    figures = {"ran": own.ran_s, "lock": own.gil_s, "core": own.core_s, "idle": own.idle_s}
    return {
        name: "–" if seconds < 0.005 * all_s else units.percent(seconds / all_s) for name, seconds in figures.items()
    }


def thread_of(figure: Figure) -> str:
    """The thread in which a function spent most of its time, and in how many others it ran."""
    most = max(figure.threads, key=figure.threads.__getitem__, default="")
    more = len(figure.threads) - 1
    return f"{most} +{more}" if more > 0 else most


def cut(words: str, most: int) -> str:
    """A name that is too long: without `.<locals>`, then cut at its beginning, since its end says more.

    >>> cut("package.module.Class.method", 15), cut("short", 15), cut("backward.<locals>.<genexpr>", 22)
    ('…e.Class.method', 'short', 'backward.<genexpr>')
    """
    if len(words) > most:
        words = words.replace(".<locals>", "")
    return words if len(words) <= most else f"…{words[len(words) - most + 1 :]}"


def escape(words: str) -> str:
    """Names may look like rich's markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(words.translate(dict.fromkeys(range(32), "?")))


def _lines(totals: Tables, most: int) -> RenderableType:
    from sublight.report.draw.tables import note

    out = plain(("share", "own", "where", "line"), right=("share", "own"))
    out.columns[-1].no_wrap = False
    for figure in [one for one in totals.lines if one.own_s > LEAST_SHARE * totals.counted_s][:most]:
        source = linecache.getline(figure.frame.file, figure.frame.line).strip()
        out.add_row(
            units.percent(figure.own_s / totals.counted_s),
            units.text(figure.own_s, "s"),
            escape(cut(place(figure, line=figure.frame.line), 34)),
            note(source),
        )
    return out


def _threads(profile: PythonProfile, totals: Tables) -> RenderableType:
    knows = profile.mode == "sample" and profile.processes[0].knows_waits
    names: tuple[str, ...] = ("thread", "in calls" if profile.mode != "sample" else "seen")
    if profile.mode == "sample" and profile.cpu_s:
        names = ("thread", "ran", "for the lock", "for a core", "idle") if knows else ("thread", "ran", "waited")
    out = plain(names, right=names[1:], fold=("thread",))
    for name, part in totals.threads[:THREADS]:
        waits = (part.gil_s, part.core_s, part.idle_s) if knows else (part.idle_s,)
        cells = (part.ran_s, *waits) if len(names) > 2 else (part.all_s,)
        out.add_row(escape(name), *(units.text(seconds, "s") for seconds in cells))
    if len(totals.threads) > THREADS:
        out.add_row(f"{len(totals.threads) - THREADS} more", *("" for _ in names[1:]))
    return out
