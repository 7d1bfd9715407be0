"""`sublight top`: how this machine is, now and from second to second."""

from __future__ import annotations

import itertools
import sys
from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json
from sublight.errors import BadInput


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look and end; the default in a pipe.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print a line for each problem; exits 1 if there is one.")
    ] = False,
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Half a minute of load, and a verdict.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks.")] = 1.0,
    looks: Annotated[int, typer.Option(metavar="N", help="End after so many looks; 0: never.")] = 0,
    csv: Annotated[str, typer.Option(metavar="FILE|-", help="Also write a row for each GPU and look.")] = "",
    record: Annotated[str, typer.Option(metavar="FILE", help="Also write every look, for --replay.")] = "",
    replay: Annotated[str, typer.Option(metavar="FILE", help="Show what --record wrote.")] = "",
    prometheus: Annotated[
        str, typer.Option(metavar=":9400", help="Serve DCGM's metrics; to this machine unless a host is named.")
    ] = "",
    json: Json = "",
) -> None:
    """How this machine is: what its GPUs do, what slows them, who holds their memory, what is not well."""
    from sublight.cli import top as cli_top

    cli_top.refuse_together(once=once, check=check, diagnose=diagnose, prometheus=prometheus)
    for name, value in {"replay": replay, "record": record, "csv": csv, "looks": looks}.items():
        cli_top.refuse_together(diagnose=diagnose, prometheus=prometheus, **{name: value})
    cli_top.refuse_together(prometheus=prometheus, json=json)
    if not cli_top.LEAST_EVERY_S <= every <= cli_top.MOST_EVERY_S:
        raise BadInput(f"--every takes {cli_top.LEAST_EVERY_S:g} seconds or more, at most a day")
    if not 0 <= looks <= sys.maxsize:
        raise BadInput(f"--looks takes 1 or more, at most {sys.maxsize}; 0 is without end")
    cli_output.check_named(record=record)
    cli_output.check_writable(csv, record, json)
    cli_output.check_apart((csv, record, json), (replay,))
    if prometheus:
        return cli_top.serve(prometheus)
    if diagnose:
        return cli_top.diagnose(json)
    source = cli_top.looks(replay)
    if check or once or json or not (sys.stdout.isatty() or csv or record or looks):
        return cli_top.once(
            source, looks or 1, csv=csv, record=record, is_check=check, json=json, replay=replay, every_s=every
        )
    cli_top.follow(itertools.islice(source, looks or None), csv=csv, record=record, every_s=every)
