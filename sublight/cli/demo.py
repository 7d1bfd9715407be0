"""What `sublight demo` does: list the demonstrations, run one or all, or show a GPU's recorded figures."""

from __future__ import annotations

from pathlib import Path

from sublight.cli import output as cli_output
from sublight.errors import BadInput
from sublight.extensions.demos import DEMOS, run
from sublight.extensions.demos.demo import Record, read_record
from sublight.extensions.demos.gpu import why_no_gpu
from sublight.report import demo as report
from sublight.report.draw import console, page


def show_list(json: str, html: str) -> None:
    recorded = read_record()
    if html:
        if recorded is None:
            raise BadInput("nothing to draw: no GPU run is recorded; name a demo, or run --all on a GPU")
        page.write(report.document(recorded), Path(html))
    cli_output.show(report.listing(DEMOS, recorded), report.list_json(DEMOS, recorded), json)


def run_one(name: str, json: str, html: str) -> None:
    demo, recorded = run.find(name), read_record()
    why_not = why_no_gpu()
    with cli_output.stdout_kept():
        here = run.without_a_gpu(demo) if why_not else run.on_this_gpu(demo)
    shown = report.Shown(demo=demo, here=here, why_not=why_not, recorded=recorded)
    if html:
        page.write(report.one_document(shown), Path(html))
    cli_output.show(report.page(shown), report.one_json(shown), json)


def run_all(name: str, json: str, html: str) -> None:
    from sublight import bench

    if name:
        raise BadInput(f"--all runs every demo: leave out {name!r}, or --all")
    with console.progress("demos") as progress, cli_output.stdout_kept():
        record: Record = run.record(run.run_all(progress), bench.commit())
    if html:
        page.write(report.document(record), Path(html))
    cli_output.show(report.whole(record), record.to_json(), json)
