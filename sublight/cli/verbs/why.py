"""`sublight why`: which kernel a call gets, and the reason."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, gpu_names, op_names


def why(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op, as in softmax.", autocompletion=op_names)],
    shape: Annotated[str, typer.Option(metavar="4096x1024", help="Sizes, or rows=4096,cols=1024.")] = "",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Data type.")] = "bf16",
    gpu: Annotated[
        str,
        typer.Option(metavar="h200", help="Plan for this GPU; else this machine's, or h200.", autocompletion=gpu_names),
    ] = "",
    json: Json = "",
) -> None:
    """Which kernel a call of an op gets on a GPU, here or not, and why."""
    from sublight.cli import why as cli_why

    cli_output.check_writable(json)
    plan = cli_why.planned(op, shape, dtype, gpu)
    cli_output.show(cli_why.page(plan), plan, json)
