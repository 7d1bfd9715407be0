"""`sublight limits`: what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import INTERRUPTED, Device, Json, kind_of, split
from sublight.errors import BadInput


def limits(
    quick: Annotated[bool, typer.Option("--quick", help="Under 20 s, less exact.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this limit or family; again for more.")
    ] = None,
    device: Device = "",
    kept: Annotated[bool, typer.Option("--kept", help="Show what was measured before; measure nothing.")] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="Also write a page with the table and the curves.")] = "",
    json: Json = "",
) -> None:
    """Measure what this machine can do. Ctrl-C keeps what was measured."""
    from sublight.limits import run
    from sublight.report import limits as report
    from sublight.report.draw import console, page

    cli_output.check_named(html=html)
    cli_output.check_writable(html, json)
    if kept and (quick or only):
        raise BadInput("--kept measures nothing: leave out --quick and --only")
    if kept:
        measured, better = run.kept(kind_of(device)), []
    else:
        cli_output.say_what_is_passed_over(device)
        with console.progress("limits") as progress:
            measured = run.run(kind=kind_of(device), quick=quick, only=split(only), progress=progress)
        better = run.better_before(measured)
    if html:
        page.write(page.limits(measured), Path(html))
    cli_output.show(report.page(measured, better), measured.to_json(), json)
    if "interrupted" in measured.source:
        raise typer.Exit(INTERRUPTED)
