"""Where a command's results go: files are tried before anything is measured, written whole, never over an input."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

BROKEN_PIPE = 141  # 128 + the signal, as a shell says it


def check_writable(*names: str) -> None:
    """Try whether files can be written, before anything is measured: finding out later would cost the user minutes."""
    import tempfile

    from sublight.errors import BadInput

    for name in names:
        if not name or name == "-":
            continue
        path = Path(os.path.realpath(name))
        folder = next((parent for parent in path.parents if parent.exists()), path)
        if path.is_dir():
            raise BadInput(f"cannot write {name}: it is a folder; name another file")
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise BadInput(f"cannot write {name}: {error.strerror}; name another file") from None


def check_named(**names: str) -> None:
    """Refuse - where nothing is printed: it would become a file of that name."""
    from sublight.errors import BadInput

    if option := next((option for option, name in names.items() if name == "-"), ""):
        raise BadInput(f"--{option} - is not printed: name a file")


def check_apart(outputs: Iterable[str], inputs: Iterable[str]) -> None:
    """Refuse two outputs to one file, and an output over an input."""
    from sublight.errors import BadInput

    outputs = tuple(outputs)
    if outputs.count("-") > 1:
        raise BadInput("two outputs are to be printed (-): name a file for all but one")
    written = [os.path.realpath(name) for name in outputs if name not in ("", "-", os.devnull)]
    read = [os.path.realpath(name) for name in inputs if name]
    if twice := next((name for name in written if written.count(name) > 1 or name in read), None):
        raise BadInput(f"{twice} is named twice: an output must not replace another, nor what is read")


def say_what_is_passed_over(device: str) -> None:
    """Say which accelerator of this machine is not measured, so that the figures are not taken for its."""
    from sublight.limits.run import passed_over

    if not device and (kind := passed_over()):
        print(f"sublight: torch finds an {kind} here, which is not measured yet: the CPU is", file=sys.stderr)


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """For results alone: what a user's script, its children or a compiler print meanwhile goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # the script may have closed stdout
            sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def stdout_again() -> Iterator[Callable[[], None]]:
    """A function that makes stdout ours again for what follows, where a user's script has put something else in its
    place, or has closed it or its file descriptor. What the script had put there is back at the end, for its exit.
    """
    own, scripts = sys.stdout, sys.stdout
    try:
        kept = os.dup(1)
    except OSError:  # it was closed before us
        kept = -1

    def open_again() -> None:
        nonlocal scripts
        if sys.stdout is not own:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
            scripts, sys.stdout = sys.stdout, own
        try:
            sys.stdout.flush()
            os.fstat(1)
        except (OSError, ValueError, AttributeError):
            if kept >= 0:
                os.dup2(kept, 1)
                sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115

    try:
        yield open_again
    finally:
        if scripts is not own:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            sys.stdout = scripts
        if kept >= 0:
            with contextlib.suppress(OSError):
                os.close(kept)


def stream(pieces: Iterable[str], *, silent: bool) -> str:
    """Print pieces of text as they come, unless `silent`; returns the whole text."""
    whole = []
    _replace_unknown()
    try:
        for piece in pieces:
            whole.append(piece)
            if not silent:
                print(piece, end="", flush=True)
    except BrokenPipeError:
        _give_up()
    return "".join(whole)


def show(renderable: RenderableType, data: Any, json: str, *, whole_lines: bool = False) -> None:
    """The result for people, or as JSON alone; the file first, so that a closed pipe does not lose it.

    `whole_lines` are not broken at the terminal's width: programs read them.
    """
    from sublight.report.draw import console

    try:
        if json == "-":
            from json import dumps

            is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
            print(dumps(data, indent=1, ensure_ascii=not is_unicode, allow_nan=False), flush=True)
            return
        if json:
            from sublight.results import write_json  # here, since it imports every op's cost

            write_json(data, Path(json))
        _replace_unknown()
        console.stdout().print(renderable, soft_wrap=whole_lines)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich raises SystemExit where the pipe is closed
        _give_up()


def _replace_unknown() -> None:
    """A character that stdout's encoding does not have (Latin-1, ASCII) becomes a ?, instead of a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def drop_stdout() -> None:
    """Send what is still buffered for stdout to nowhere: Python would fail to flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _give_up() -> NoReturn:
    """End quietly: nobody reads stdout any more."""
    drop_stdout()
    raise typer.Exit(BROKEN_PIPE) from None
