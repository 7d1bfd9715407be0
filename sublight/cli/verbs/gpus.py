"""`sublight gpus`: known GPUs and their peaks."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, gpu_names
from sublight.errors import BadInput

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="GPUs, as in h200 a100; default: all of them.", autocompletion=gpu_names),
]
Explain = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Show the arithmetic behind the peaks; `this`: of this GPU.", autocompletion=gpu_names
    ),
]


def gpus(names: Names = None, explain: Explain = "", json: Json = "") -> None:
    """Known GPUs, their figures with sources, their peaks."""
    from sublight import gpus as known
    from sublight.report import gpus as report

    if explain:
        gpu = this_gpu() if explain == "this" else known.find(explain)
        return cli_output.show(report.explain(gpu), report.to_json([gpu], explained=True), json)
    chosen = [known.find(name) for name in names or ()] or known.all_gpus()
    cli_output.show(report.sheet(chosen) if names else report.overview(chosen), report.to_json(chosen), json)


def this_gpu() -> Any:
    from sublight import gpus as known

    gpu = known.detect()
    if gpu is None:
        raise BadInput("no GPU that torch can use here: name one, such as --explain h200; `sublight doctor` says why")
    return gpu
