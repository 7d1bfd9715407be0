"""What `sublight top` does: looks at the machine again and again, or at a recorded one, and hands each look on."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sublight.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from sublight.health.record import Snapshot

LEAST_EVERY_S = 0.1  # GPM counts over no less
UNWELL = 1  # the exit status of --check


class Sink(Protocol):
    def add(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


class Keys:
    """Waits for the next look, or for q; where nobody types, it only waits."""

    def __init__(self) -> None:
        self._saved: Any = None

    def __enter__(self) -> Keys:
        with contextlib.suppress(ImportError):  # no terminals of this kind on this system
            import termios
            import tty

            if sys.stdin.isatty():
                self._saved = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    def quit_within(self, seconds: float) -> bool:
        """Whether q was pressed before that time was over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._saved is None:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
                return True
        return False


def looks(replay: str) -> Iterator[Snapshot]:
    """This machine without end, or what a file holds."""
    if replay:
        from sublight.top.record import read

        yield from read(Path(replay))
        return
    from sublight.health.read import Reader

    reader = Reader()
    while True:
        yield reader.read()


def sinks(csv: str, record: str) -> list[Sink]:
    """Where each look goes besides the screen."""
    from sublight.top import record as recorded
    from sublight.top import table

    found: list[Sink] = []
    if csv:
        found.append(table.Writer(csv))
    if record:
        found.append(recorded.Writer(Path(record)))
    return found


def watch(source: Iterable[Snapshot], into: Iterable[Sink], console: Console | None, keys: Keys, every_s: float) -> int:
    """Until q, Ctrl-C, or the source's end; how many looks there were. Draws where there is a console."""
    from rich.live import Live

    from sublight.report.top import page
    from sublight.top.history import History

    history, count = History(), 0
    shown: Any = contextlib.nullcontext()
    if console:
        shown = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with contextlib.suppress(KeyboardInterrupt), shown as live, keys:
        for snapshot in source:
            count += 1
            history.add(snapshot)
            for sink in into:
                sink.add(snapshot)
            if console:
                live.update(page(snapshot, history, lines=console.height), refresh=True)
            if keys.quit_within(every_s):
                break
    return count


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """`kill` ends a look as Ctrl-C does: the terminal is put back, files are closed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(words: str) -> None:
    """Until Ctrl-C."""
    from sublight.health.read import Reader
    from sublight.top import prometheus

    reader = Reader()
    with prometheus.server(words, reader.read) as server:
        host, port = server.server_address[:2]
        print(f"sublight: http://{host!s}:{port}/metrics until Ctrl-C", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt), ended_like_ctrl_c():
            server.serve_forever()


def diagnose(json: str) -> None:
    """Half a minute of load; exits 1 where the GPU is not well."""
    import typer

    from sublight.cli import output
    from sublight.health.read import this_gpu
    from sublight.health.record import to_json
    from sublight.report import top as report
    from sublight.report.draw import console
    from sublight.top import diagnose as load

    loads = load.gpu_loads()
    with console.progress("diagnose") as progress:
        found = load.run(loads, this_gpu, name=load.gpu_name(), progress=progress)
    output.show(report.diagnosis(found), to_json(found), json)
    if not found.is_well:
        raise typer.Exit(UNWELL)


def refuse_together(**chosen: Any) -> None:
    """Ways to look that exclude one another."""
    if len(given := [f"--{name}" for name, value in chosen.items() if value]) > 1:
        raise BadInput(f"{' and '.join(given)} exclude each other: leave one out")


def once(
    source: Iterator[Snapshot], count: int, *, csv: str, record: str, is_check: bool, json: str, replay: str
) -> None:
    """The last of so many looks (of a recorded session, of all), as a page, as problems, or as JSON."""
    import itertools

    import typer
    from rich.text import Text

    from sublight.cli import output
    from sublight.health.check import problems
    from sublight.health.record import to_json
    from sublight.report import top as report
    from sublight.top.history import History

    history, into = History(), sinks(csv, record)
    for snapshot in source if replay else itertools.islice(source, count):
        history.add(snapshot)
        for sink in into:
            sink.add(snapshot)
    for sink in into:
        sink.close()
    found = problems(snapshot)
    wrong = [problem for problem in found if problem.weight == "wrong"]
    data = {**to_json(snapshot), "problems": [to_json(problem) for problem in found]}
    if is_check:
        output.show(Text("\n".join(report.check_lines(wrong, snapshot))), data, json, whole_lines=True)
    elif json or csv != "-":  # a table on stdout stands there alone
        output.show(report.page(snapshot, history), data, json)
    if is_check and wrong:
        raise typer.Exit(UNWELL)


def follow(source: Iterable[Snapshot], *, csv: str, record: str, every_s: float) -> None:
    """Look after look, drawn where there is a terminal."""
    from rich.console import Console

    into = sinks(csv, record)
    console = Console(highlight=False) if sys.stdout.isatty() and csv != "-" else None
    try:
        with ended_like_ctrl_c():
            count = watch(source, into, console, Keys(), every_s)
    except BrokenPipeError:  # whoever read --csv - has enough
        return
    finally:
        for sink in into:
            sink.close()
    if files := ", ".join(name for name in (csv, record) if name not in ("", "-")):
        print(f"sublight: {count} look{'s' if count != 1 else ''} in {files}", file=sys.stderr)
