"""`sublight memory`: what fills the memory at its peak."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json
from sublight.errors import BadInput


def memory(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A memory snapshot (.pickle) or a trace.")],
    html: Annotated[str, typer.Option(metavar="FILE", help="Also write a page with the chart.")] = "",
    json: Json = "",
) -> None:
    """What fills the GPU's memory at its peak, and what would lower it."""
    from sublight.report import memory as report
    from sublight.report.draw import page
    from sublight.trace.memory import report as analysis

    cli_output.check_named(html=html)
    cli_output.check_writable(html, json)
    cli_output.check_apart((html, json), (file,))
    if Path(file).is_dir():
        raise BadInput(f"{file} is a folder: name one file, a memory snapshot (.pickle) or a trace (.json.gz)")
    if file.endswith(".py"):
        raise BadInput(
            f"{file} is a script, and memory reads what one recorded: begin it with "
            "torch.cuda.memory._record_memory_history(), end it with torch.cuda.memory._dump_snapshot('m.pickle'), "
            "then `sublight memory m.pickle`"
        )
    if not Path(file).is_file():
        raise BadInput(f"there is no file {file}: record one with torch.cuda.memory._record_memory_history()")
    usage = analysis.read(Path(file))
    if html:
        page.write(report.html(usage), Path(html))
    cli_output.show(report.page(usage), report.to_json(usage), json)
