"""The command: its verbs, each in a file of its own (`verbs/`), and what the user did wrong in one line."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sublight import __version__
from sublight.cli.options import INTERRUPTED, bare_threads
from sublight.cli.output import drop_stdout
from sublight.cli.start import command_for
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
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)  # errors of merely asking whether a file with such a name exists
UsageError: Any = typer.BadParameter.__mro__[1]  # from the click that typer bundles, or from the installed one

VERBS: dict[str, dict[Callable[..., Any], str]] = {  # section -> verb -> its line in the help
    "Measure": {
        gpus.gpus: "known GPUs: figures with their sources, and their peaks",
        limits.limits: "measure what this machine can do",
        bench.bench: "time ops against their floors and their peers",
        why.why: "which kernel a call of an op gets on a GPU, and why",
        timers.timers: "what clocks measure and cost here, and the mistakes with them",
        top.top: "how this machine is: what its GPUs do, what slows them",
    },
    "Explain": {
        explain.explain: "why a script or a trace is slow, what to change (--fix)",
        memory.memory: "what fills the GPU's memory at its peak, what would lower it",
        pyprof.pyprof: "where a Python program's time goes: function, line, thread",
        xray.xray: "what a kernel really is: registers, occupancy, instructions",
        predict.predict: "what a model will do on a GPU that you do not have",
    },
    "Prove": {
        train.train: "train a GPT-2 from scratch; kill it at any time and --resume",
        generate.generate: "text from a model's folder, many prompts at once",
        serve.serve: "serve a model's folder to OpenAI's clients",
    },
    "Learn": {
        learn.learn: "write GPU kernels, step by step, with or without a GPU",
        demo.demo: "questions about the GPU, answered by running",
        board.board: "serve a leaderboard that runs what it ranks",
        new.new: "write an op for PyTorch as a project that builds and tests itself",
    },
    "Set up": {
        doctor.doctor: "what works here, what does not, and the fix for each",
        mcp.mcp: "offer these verbs to an assistant (MCP)",
    },
}


class Verbs(TyperGroup):
    """The help has them under their sections; Ctrl-C inside one stays Ctrl-C: newer typer makes a silent status 130
    of it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, verbs in VERBS.items():
            with formatter.section(title):
                formatter.write_dl([(verb.__name__, line) for verb, line in verbs.items()])

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
    cls=Verbs,
    help="Nothing on a GPU runs faster than its memory and tensor cores allow. sublight measures that limit, explains"
    " what runs below it, fixes it, proves the gain, and teaches how.",
    rich_markup_mode=None,  # without rich the help takes half the time, and reads as well
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sublight {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _verbs in VERBS.values():
    for _verb in _verbs:
        app.command()(_verb)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. A user's mistake is one line on stderr, never a traceback."""
    from sublight.errors import BadInput
    from sublight.gpus import UnknownFigure, UnknownGpu
    from sublight.trace.capture.settings import set_up_profiler

    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["xray"]:
        words = bare_threads(words)
    set_up_profiler()
    try:
        status = command_for(app, words)(args=words or ["--help"], prog_name="sublight", standalone_mode=False)
    except (BadInput, UnknownGpu, UnknownFigure) as error:
        return _complain(str(error))
    except UsageError as error:
        known = {verb.__name__ for verbs in VERBS.values() for verb in verbs}
        hint = f"see `sublight {words[0]} --help`" if words[0] in known else "see `sublight --help`"
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
    except OSError as error:
        if error.errno in NO_NAMES:
            return _complain(f"{str(error.filename)[:80]}: {error.strerror}; name another file")
        if error.errno not in NO_ROOM or error.filename:
            raise
        drop_stdout()  # usually stdout itself is a file on the full disk
        return _complain(f"cannot write what was found: {error.strerror}")
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # by name, to import no torch
            raise
        return _complain("the GPU's memory is full: `nvidia-smi` shows who holds it; stop that, or use --device cpu")
    return int(status or 0)


def _complain(words: str, status: int = USAGE) -> int:
    print("sublight: " + " ".join(words.split()), file=sys.stderr)
    return status


def main() -> None:
    sys.exit(run())
