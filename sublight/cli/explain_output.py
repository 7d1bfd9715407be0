"""Where `sublight explain` puts its report: the terminal, files; a file that cannot be written costs itself alone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.cli import output as cli_output
from sublight.cli.budget import Budget
from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.cli.ranks import Rank
    from sublight.diagnose.record import Explanation
    from sublight.fix.cure.record import Fixed

NOT_WRITTEN = 2  # the exit status where a file that was asked for could not be written, and nothing else went wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class FixOptions:
    """The options of --fix."""

    yes: bool = False  # do not ask before the first run
    limit_s: float | None = None  # for each run; None: derived from the first run's time
    write: str = ""  # a file for the diff
    exclude: tuple[str, ...] = ()  # names that the scratch copy leaves out
    allow: tuple[str, ...] = ()  # folders outside the scratch copy that runs may write to


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command's options."""

    gpu: str
    limits: str
    trace: str
    html: str
    perfetto: str
    steps: int | None  # to profile; None: as many as is usual
    json: str
    budget: Budget | None = None  # how long a step may take
    fix: bool = False  # also run the script again with each cure
    fix_options: FixOptions = field(default_factory=lambda: FixOptions())
    rank: Rank | None = None  # this process among those that torchrun started
    folder: str = field(default_factory=os.getcwd)  # the user's working folder; a script may change its own


def written(name: str, write: Callable[[Path], None]) -> list[str]:
    """Write a file if one is wanted. A failure costs that file alone, not the report, and is returned as a line."""
    try:
        if name:
            write(Path(name))
    except (BadInput, OSError) as error:
        return [str(error)]
    return []


def report(
    explanation: Explanation, wanted: Wanted, *, name: str, fixed: Fixed | None = None, lost: Sequence[str] = ()
) -> bool:
    """The files that are wanted, then the terminal; a file that could not be written is named behind the report.

    Whether all that were asked for are there; the page comes unasked, too.
    """
    from sublight.report.explain import fix as explain_fix
    from sublight.report.explain import page as explain_page
    from sublight.report.explain import perfetto
    from sublight.report.explain import terminal as report

    page = wanted.html
    if wanted.json != "-" and not page:
        page = os.path.join(wanted.folder, f"explain-{stem(name)}.html")
    section = explain_fix.section(fixed) if fixed else ""
    explanation = explain_fix.as_measured(explanation, fixed) if fixed else explanation
    no_page = written(page, lambda file: explain_page.write(explanation, file, section))
    no_tracks = written(wanted.perfetto, lambda file: perfetto.write(explanation, file))
    shown, data = report.page(explanation), explanation.to_json()
    if fixed is not None:
        shown, data = explain_fix.page(shown, fixed), explain_fix.to_json(data, fixed)
    if wanted.budget is not None:
        data = {**data, "budget": wanted.budget.to_json(explanation)}
    cli_output.show(shown, data, wanted.json)
    no_diff = _give_diff(fixed, wanted) if fixed else []
    if page and not no_page and wanted.json != "-":
        say(f"report: {os.path.relpath(page, wanted.folder)}")
    for line in (*lost, *no_page, *no_tracks):
        say(line)
    return not (lost or no_diff or no_tracks or (wanted.html and no_page))


def _give_diff(fixed: Fixed, wanted: Wanted) -> list[str]:
    """Print the diff, and write it to the file that was asked for; returns why that could not be written."""
    from sublight.report.explain import fix as explain_fix
    from sublight.results import write_file

    if fixed.diff and wanted.json != "-":
        print(explain_fix.diff_text(fixed), end="", flush=True)
    if not wanted.fix_options.write:
        return []
    name = os.path.relpath(wanted.fix_options.write, wanted.folder)
    lost = written(wanted.fix_options.write if fixed.diff else "", lambda file: write_file(fixed.diff.encode(), file))
    say(lost[0] if lost else f"diff: {name}" if fixed.diff else f"no diff came out: {name} was not written")
    return lost


def status(explanation: Explanation | None, wanted: Wanted) -> int:
    """The exit status of the budget; prints whether it was kept."""
    if wanted.budget is None:
        return 0
    code, reason = wanted.budget.check(explanation)
    say(reason)
    return code


def report_of_rank(explanation: Explanation, wanted: Wanted, rank: Rank, *, name: str, lost: Sequence[str]) -> None:
    """Write this rank's files; the terminal is for the joint report of all ranks."""
    from sublight.cli import ranks as cli_ranks
    from sublight.report.explain import page as explain_page
    from sublight.report.explain import perfetto
    from sublight.results import write_json

    def own(file: str) -> str:
        return cli_ranks.name_of(file, rank.number)

    page = own(wanted.html or os.path.join(wanted.folder, f"explain-{stem(name)}.html"))
    lines = [*lost, *written(page, lambda file: explain_page.write(explanation, file, ""))]
    lines += written(own(wanted.perfetto), lambda file: perfetto.write(explanation, file))
    if wanted.json != "-":
        lines += written(own(wanted.json), lambda file: write_json(explanation.to_json(), file))
    for line in lines or [f"report of rank {rank.number}: {os.path.relpath(page, wanted.folder)}"]:
        say(line)


def stem(name: str) -> str:
    stem = Path(name).name
    for ending in (".gz", ".json", ".sqlite", ".nsys-rep", ".py", ".pt.trace"):
        stem = stem.removesuffix(ending)
    return stem or "report"


def progress_line() -> Callable[[str], None]:
    """A function that writes a line which the next one replaces; it writes nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        return lambda line: None

    def show(line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r\x1b[K{'sublight: ' if line else ''}{line}")
            sys.stderr.flush()

    return show


def say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a script may have closed it
        print(f"sublight: {line}", file=sys.stderr, flush=True)
