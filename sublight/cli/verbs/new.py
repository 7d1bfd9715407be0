"""`sublight new`: a project to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, like_names, way_names


def new(
    what: Annotated[str, typer.Argument(metavar="op", help="What to make: an op for PyTorch.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, in small letters, digits and _.")],
    ship: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="inline, load, setuptools, cmake, nvrtc or triton: how it gets into PyTorch.",
            autocompletion=way_names,
        ),
    ] = "inline",
    like: Annotated[
        str,
        typer.Option(metavar="add2|rms_norm", help="What it computes, until you change it.", autocompletion=like_names),
    ] = "add2",
    into: Annotated[str, typer.Option(metavar="FOLDER", help="A folder that is not there yet; default: NAME.")] = "",
    json: Json = "",
) -> None:
    """Write an op for PyTorch as a project that builds, tests and benches itself.

    \b
    sublight new op my_norm --like rms_norm --ship setuptools
    cd my_norm && make
    """
    from sublight.errors import one_of
    from sublight.extensions import projects, toolchain
    from sublight.extensions.projects.ways import way_of
    from sublight.report import new as report

    cli_output.check_writable(json)
    one_of("kind of project", what, ("op",))
    project = projects.write(name, ship, like, Path(into or name))
    missing = toolchain.troubles(way_of(ship).tools)
    cli_output.show(report.page(project, missing), report.to_json(project, missing), json)
