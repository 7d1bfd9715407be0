"""`sublight explain`: why a script or a trace is slow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, gpu_names

if TYPE_CHECKING:
    from sublight.cli.explain_output import FixOptions

Target = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT|TRACE [-- ARGS]", help="A Python script with its arguments, a trace, or a folder."),
]


def explain(
    words: Target = None,
    module: Annotated[str, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = "",
    diff: Annotated[bool, typer.Option("--diff", help="Compare two traces: explain --diff BEFORE AFTER.")] = False,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Run it again with each cure, in scratch copies of this folder (1 GB at most), each for a limited "
            "time: what that really saves, and a diff that was run. Says how many runs, and asks, before the first.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: do not ask.")] = False,
    limit: Annotated[str, typer.Option(metavar="TIME", help="With --fix: of each run, 90s or 10min.")] = "",
    write: Annotated[str, typer.Option(metavar="FILE", help="With --fix: a new file for the diff.")] = "",
    exclude: Annotated[
        list[str] | None,
        typer.Option("--scratch-exclude", metavar="NAME", help="With --fix: not copied; read where it lies."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--scratch-allow", metavar="FOLDER", help="With --fix: runs may write there, too."),
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Floors of this GPU.", autocompletion=gpu_names)] = "",
    limits: Annotated[str, typer.Option(metavar="FILE", help="Floors from `limits --json FILE`.")] = "",
    trace: Annotated[str, typer.Option(metavar="FILE", help="Keep the recorded trace, .json or .json.gz.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="The report; default: explain-NAME.html.")] = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="Also the trace with its findings as a track.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, max=100, metavar="N", help="Steps to profile (4).")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Exit 1 if a step is slower: 50ms, 1.1x BASE.json.")] = "",
    json: Json = "",
) -> None:
    """Why a script or a trace is slow, what to change, and what each change saves."""
    from sublight.cli import explain as cli_explain
    from sublight.cli.budget import parse
    from sublight.cli.explain_output import Wanted

    fix_options = _fix_options(fix, yes=yes, limit=limit, write=write, exclude=exclude or [], allow=allow or [])
    cli_output.check_named(html=html, perfetto=perfetto, trace=trace, write=write)
    cli_output.check_writable(html, json, perfetto, trace, write)
    most, words = parse(budget, words or ())
    files: dict[str, Any] = {"trace": trace, "html": html, "perfetto": perfetto, "json": json}
    files = {name: os.path.abspath(file) if file not in ("", "-") else file for name, file in files.items()}
    cli_output.check_apart([*files.values(), fix_options.write], [*words[:2], limits, most.base if most else ""])
    limits = limits and os.path.abspath(limits)
    wanted = Wanted(gpu=gpu, limits=limits, steps=steps, fix=fix, fix_options=fix_options, budget=most, **files)
    if diff:
        return cli_explain.diff(words, module, wanted)
    status = cli_explain.explain(words, module, wanted)
    if status:
        raise typer.Exit(status)


def _fix_options(fix: bool, *, yes: bool, limit: str, write: str, exclude: list[str], allow: list[str]) -> FixOptions:
    """The options of --fix, checked."""
    from sublight import units
    from sublight.cli.explain_output import FixOptions
    from sublight.errors import BadInput

    given = {"--yes": yes, "--limit": limit, "--write": write, "--scratch-exclude": exclude, "--scratch-allow": allow}
    if not fix and (name := next((name for name, value in given.items() if value), "")):
        raise BadInput(f"{name} goes with --fix: add it, or leave {name} out")
    if write and os.path.lexists(write):
        raise BadInput(f"--write {write}: there is such a file; name another, or remove it")
    try:
        limit_s = units.parse_seconds(limit) if limit else None
    except ValueError as error:
        raise BadInput(f"--limit: {error}") from None
    return FixOptions(
        yes=yes,
        limit_s=limit_s,
        write=write and os.path.abspath(write),
        exclude=tuple(exclude),
        allow=tuple(os.path.abspath(path) for path in allow),
    )
