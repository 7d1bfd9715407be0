"""`sublight demo`: questions about the GPU, answered by running."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, demo_names


def demo(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which one; without it they are listed.", autocompletion=demo_names)
    ] = "",
    all_: Annotated[bool, typer.Option("--all", help="Run all of them on this GPU, within 150 s.")] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="Tables and timelines as one page.")] = "",
    json: Json = "",
) -> None:
    """Questions about the GPU, answered by running: memories, streams, barriers, occupancy, graphs.

    \b
    sublight demo                      what there is
    sublight demo overlap --html o.html
    sublight demo --all --json F       every one; make docs takes the file

    Each is a file to read. Without a GPU it says what would be seen, and shows recorded figures.
    """
    from sublight.cli import demo as work

    cli_output.check_named(html=html)
    cli_output.check_writable(json, html)
    cli_output.check_apart((json, html), ())
    if all_:
        work.run_all(name, json, html)
    elif name:
        work.run_one(name, json, html)
    else:
        work.show_list(json, html)
