"""What `sublight top` does: takes snapshots of this machine, or of a recorded one, and passes each to its outputs."""

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

LEAST_EVERY_S = 0.1  # NVIDIA's GPM counters need at least this time
MOST_EVERY_S = 86400.0
UNWELL = 1  # the exit status of --check


class Sink(Protocol):
    def add(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


class Keys:
    """Waits for the next look, or for the key q; where stdin is no terminal it only waits."""

    def __init__(self) -> None:
        self._saved: Any = None

    def __enter__(self) -> Keys:
        with contextlib.suppress(ImportError):  # a system without termios
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
        """Wait so long; True as soon as q is pressed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._saved is None:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
                return True
        return False


def looks(replay: str) -> Iterator[Snapshot]:
    """Snapshots of this machine without end, or a recorded file's; that is read whole before anything is written."""
    if replay:
        from sublight.top.record import read

        return iter(read(Path(replay)))
    return _looks_now()


def _looks_now() -> Iterator[Snapshot]:
    from sublight.health.read import Reader

    reader = Reader()
    while True:
        yield reader.read()


def sinks(csv: str, record: str) -> list[Sink]:
    """Open the outputs that get each look besides the screen."""
    from sublight.top import record as recorded
    from sublight.top import table

    opened: list[Sink] = []
    if csv:
        opened.append(table.Writer(csv))
    if record:
        opened.append(recorded.Writer(Path(record)))
    return opened


def watch(source: Iterable[Snapshot], into: Iterable[Sink], console: Console | None, keys: Keys, every_s: float) -> int:
    """Follow until q, Ctrl-C or the end; returns the number of looks. Draws where there is a console."""
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
    """Serve metrics until Ctrl-C."""
    from sublight.health.read import Reader
    from sublight.top import prometheus

    reader = Reader()
    with prometheus.server(words, reader.read) as server:
        host, port = server.server_address[:2]
        print(f"sublight: http://{host!s}:{port}/metrics until Ctrl-C", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt), ended_like_ctrl_c():
            server.serve_forever()


def diagnose(json: str) -> None:
    """--diagnose: half a minute of load and a verdict; exits 1 where the GPU is not well."""
    import typer

    from sublight.cli import output
    from sublight.health.read import this_gpu
    from sublight.health.record import to_json
    from sublight.report import top as report
    from sublight.report.draw import console
    from sublight.top import diagnose as load

    loads = load.gpu_loads()
    with console.progress("diagnose") as progress:
        diagnosis = load.run(loads, this_gpu, name=load.gpu_name(), progress=progress)
    output.show(report.diagnosis(diagnosis), to_json(diagnosis), json)
    if not diagnosis.is_well:
        raise typer.Exit(UNWELL)


def refuse_together(**chosen: Any) -> None:
    """Refuse options that exclude one another."""
    if len(flags := [f"--{name}" for name, value in chosen.items() if value]) > 1:
        raise BadInput(f"{' and '.join(flags)} exclude each other: leave one out")


def _spaced(source: Iterator[Snapshot], count: int, every_s: float) -> Iterator[Snapshot]:
    """So many looks, and the time between them: shares are of that time."""
    for number in range(count):
        if number:
            time.sleep(every_s)
        yield next(source)


def once(
    source: Iterator[Snapshot],
    count: int,
    *,
    csv: str,
    record: str,
    is_check: bool,
    json: str,
    replay: str,
    every_s: float,
) -> None:
    """Show the last of so many looks (of a recorded session: of all) as a page, as problems, or as JSON."""
    import typer
    from rich.text import Text

    from sublight.cli import output
    from sublight.health.check import problems
    from sublight.health.record import to_json
    from sublight.report import top as report
    from sublight.top.history import History

    history, into = History(), sinks(csv, record)
    for snapshot in source if replay else _spaced(source, count, every_s):
        history.add(snapshot)
        for sink in into:
            sink.add(snapshot)
    for sink in into:
        sink.close()
    troubles = problems(snapshot)
    wrong = [problem for problem in troubles if problem.weight == "wrong"]
    data = {**to_json(snapshot), "problems": [to_json(problem) for problem in troubles]}
    if is_check:
        output.show(Text("\n".join(report.check_lines(wrong, snapshot))), data, json, whole_lines=True)
    elif json or csv != "-":  # a table on stdout stands there alone
        output.show(report.page(snapshot, history), data, json)
    if is_check and wrong:
        raise typer.Exit(UNWELL)


def follow(source: Iterable[Snapshot], *, csv: str, record: str, every_s: float) -> None:
    """Show look after look, drawn where there is a terminal."""
    from rich.console import Console

    into = sinks(csv, record)
    console = Console(highlight=False) if sys.stdout.isatty() and csv != "-" else None
    try:
        with ended_like_ctrl_c():
            count = watch(source, into, console, Keys(), every_s)
    except BrokenPipeError:  # the reader of --csv - has closed the pipe
        return
    finally:
        for sink in into:
            sink.close()
    if files := ", ".join(name for name in (csv, record) if name not in ("", "-")):
        print(f"sublight: {count} look{'s' if count != 1 else ''} in {files}", file=sys.stderr)
