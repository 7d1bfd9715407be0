"""`sublight explain`: why a script or a trace is slow."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, gpu_names

Target = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT|TRACE [-- ARGS]", help="A Python script with its arguments, a trace, or a folder."),
]


def explain(
    words: Target = None,
    module: Annotated[str, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = "",
    diff: Annotated[bool, typer.Option("--diff", help="Compare two traces: explain --diff BEFORE AFTER.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Run it again with each cure: what that really saves.")] = False,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Floors of this GPU.", autocompletion=gpu_names)] = "",
    limits: Annotated[str, typer.Option(metavar="FILE", help="Floors from `limits --json FILE`.")] = "",
    trace: Annotated[str, typer.Option(metavar="FILE", help="Keep the recorded trace, .json or .json.gz.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="The report; explain-NAME.html unless told.")] = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="Also the trace with its findings as a track.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Steps to profile.")] = 4,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Exit 1 if a step is slower: 50ms, 1.1x BASE.json.")] = "",
    json: Json = "",
) -> None:
    """Why a script or a trace is slow, what to change, and what each change saves."""
    from sublight.cli import explain as cli_explain
    from sublight.cli.budget import parse
    from sublight.cli.explain_output import Wanted

    cli_output.check_writable(html, json, perfetto, trace)
    most, words = parse(budget, words or ())
    files: dict[str, Any] = {"trace": trace, "html": html, "perfetto": perfetto, "json": json}
    files = {name: os.path.abspath(file) if file not in ("", "-") else file for name, file in files.items()}
    cli_output.check_apart(files.values(), [*words[:2], limits, most.base if most else ""])
    limits = limits and os.path.abspath(limits)
    wanted = Wanted(gpu=gpu, limits=limits, steps=steps, fix=fix, budget=most, **files)
    if diff:
        return cli_explain.diff(words, module, wanted)
    status = cli_explain.explain(words, module, wanted)
    if status:
        raise typer.Exit(status)
