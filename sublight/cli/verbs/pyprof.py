"""`sublight pyprof`: where a Python program's time goes."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli.options import Json

Target = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT|PROFILE [-- ARGS]", help="A Python script with its arguments, or a profile (.json)."
    ),
]


def pyprof(
    words: Target = None,
    module: Annotated[str, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = "",
    sample: Annotated[
        bool, typer.Option("--sample", help="Look at all threads' stacks at intervals (the default).")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Every call, with exact counts and times.")] = False,
    counts: Annotated[bool, typer.Option("--counts", help="Every call, counted and not timed: costs least.")] = False,
    builtins: Annotated[bool, typer.Option(help="Trace functions that are written in C, too.")] = True,
    rate: Annotated[float, typer.Option(metavar="HZ", min=0.1, max=10_000, help="Looks (samples) a second.")] = 100.0,
    pid: Annotated[int, typer.Option(metavar="PID", min=0, help="Look at a running process (needs py-spy).")] = 0,
    native: Annotated[bool, typer.Option("--native", help="Frames of C and C++, too (needs py-spy).")] = False,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.1, help="How long to look at --pid.")] = 10.0,
    gpu: Annotated[bool, typer.Option("--gpu", help="The device's time by the Python line that launched it.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Compare two profiles: pyprof --diff A.json B.json.")] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="The flame graph; default: pyprof-NAME.html.")] = "",
    speedscope: Annotated[str, typer.Option(metavar="FILE", help="Also for speedscope.app.")] = "",
    chrome: Annotated[str, typer.Option(metavar="FILE", help="Also for Perfetto and chrome://tracing.")] = "",
    collapsed: Annotated[str, typer.Option(metavar="FILE", help="Also as collapsed stacks (flamegraph.pl).")] = "",
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Functions to list.")] = 20,
    json: Json = "",
) -> None:
    """Where a Python program's time goes: by function, line and thread."""
    from sublight.cli import pyprof as cli_pyprof

    modes = [name for name, wanted in (("sample", sample), ("trace", trace), ("counts", counts)) if wanted]
    wanted = cli_pyprof.Wanted(
        modes=tuple(modes),
        builtins=builtins,
        rate=rate,
        pid=pid,
        native=native,
        seconds=seconds,
        gpu=gpu,
        diff=diff,
        top=top,
        files=cli_pyprof.Files(html=html, speedscope=speedscope, chrome=chrome, collapsed=collapsed, json=json),
    )
    status = cli_pyprof.pyprof(words or [], module, wanted)
    if status:
        raise typer.Exit(status)
