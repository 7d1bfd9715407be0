"""The command: its verbs, each in a file of its own (`verbs/`), and what the user did wrong in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sublight import __version__
from sublight.cli.options import INTERRUPTED, bare_threads
from sublight.cli.verbs import (
    bench,
    board,
    demo,
    doctor,
    explain,
    generate,
    gpus,
    learn,
    limits,
    mcp,
    memory,
    new,
    predict,
    pyprof,
    serve,
    timers,
    top,
    train,
    why,
    xray,
)

USAGE = 2
UsageError: Any = typer.BadParameter.__mro__[1]  # of the click that typer carries, or of the installed one


class _Verbs(TyperGroup):
    """Ctrl-C inside a verb stays Ctrl-C: newer typer makes a silent status 130 of it."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except KeyboardInterrupt:
            raise typer.Abort from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    name="sublight",
    cls=_Verbs,
    help="How far below its limits this machine runs: measure the limits, then time ops against them.",
    rich_markup_mode=None,  # the plain help is out in half the time, and reads as well
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sublight {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_MEASURE = (gpus.gpus, limits.limits, bench.bench, why.why, timers.timers)
_EXPLAIN = (explain.explain, predict.predict, xray.xray, memory.memory, pyprof.pyprof)
_ENGINES = (train.train, generate.generate, serve.serve)
_LEARN = (learn.learn, demo.demo, board.board)
for _verb in (*_MEASURE, *_EXPLAIN, *_ENGINES, *_LEARN, mcp.mcp, new.new, top.top, doctor.doctor):
    app.command()(_verb)


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status; what the user did wrong is one line on stderr, never a traceback."""
    from sublight.errors import BadInput
    from sublight.gpus import UnknownFigure, UnknownGpu
    from sublight.trace.capture.profile import set_up_profiler

    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["xray"]:
        words = bare_threads(words)
    set_up_profiler()
    try:
        status = typer.main.get_command(app)(args=words or ["--help"], prog_name="sublight", standalone_mode=False)
    except (BadInput, UnknownGpu, UnknownFigure) as error:
        return _complain(str(error))
    except UsageError as error:
        hint = "see `sublight --help`"
        if words[:1] in (["explain"], ["pyprof"], ["xray"]) and "No such option" in error.format_message():
            verb = "xray --record" if words[0] == "xray" else words[0]
            hint = f"a script's own arguments go after --, as in `sublight {verb} train.py -- --lr 3`"
        return _complain(f"{error.format_message().rstrip('.')}; {hint}")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("torch", "triton", "numpy"):
            raise
        return _complain(f"this needs {package}, which is not installed: pip install 'sublight[torch]'")
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; naming it would import torch
            raise
        return _complain("the GPU's memory is full: `nvidia-smi` shows who holds it; stop that, or use --device cpu")
    return int(status or 0)


def _complain(words: str, status: int = USAGE) -> int:
    print("sublight: " + " ".join(words.split()), file=sys.stderr)
    return status


def main() -> None:
    sys.exit(run())
