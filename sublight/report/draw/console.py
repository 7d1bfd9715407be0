"""The terminal: where tables go, and how progress is shown without disturbing what is measured."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]  # what is being measured, how many are done, of how many
PIPED_COLUMNS = 200  # a table takes only what it needs; in a pipe or a file there is no edge to wrap at


def stdout() -> Console:
    """The console that results are printed to."""
    from rich.console import Console

    if os.environ.get("COLUMNS", "").lstrip("0"):
        width = None  # Console reads it, and would print nothing into 0 columns
    elif sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    else:
        width = PIPED_COLUMNS
    return Console(width=width, highlight=False)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Progress | None]:
    """A bar on stderr for as long as the block runs; nothing where stderr is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # no refresh thread: on a small machine it would take a core from what is being timed
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(label, total=None)
        bar.refresh()

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{label}: {what}", completed=done, total=total, refresh=True)

        yield update


@dataclass(slots=True)
class Count:
    """Passes progress on, and remembers the total."""

    shown: Progress | None
    total: int = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.total = total
        if self.shown is not None:
            self.shown(what, done, total)
