"""What `sublight bench` does: parse what is asked for, measure it, or renew the table of tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sublight.cli import output as cli_output
from sublight.cost import DIRECTIONS
from sublight.errors import BadInput, one_of

if TYPE_CHECKING:
    from sublight.results import Run


def measure(
    names: Sequence[str],
    kind: Any,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    against: Sequence[str],
    directions: Sequence[str],
    quick: bool,
) -> tuple[Run, bool]:
    """The run, and whether it was interrupted."""
    from sublight import ops
    from sublight.limits.run import this_machine
    from sublight.report.draw import console

    chosen = [ops.find(name) for name in names] or ops.OPS
    for op in chosen if shapes else ():
        for words in shapes:
            op.parse_shape(words)  # before anything is measured: a mistake must not cost a minute
    types = list(dtypes)
    for op in chosen:
        for words in dtypes:
            op.parse_dtype(words)
    ways: Any = [one_of("direction", word, DIRECTIONS) for word in directions]
    cli_output.say_what_is_passed_over(kind or "")
    machine = this_machine(kind)
    from sublight import bench

    with console.progress("limits") as progress:
        limits = bench.limits_for(machine, progress)
    with console.progress("bench") as progress:
        count = console.Count(progress)
        run = bench.run(
            chosen,
            machine=machine,
            limits=limits,
            shapes=shapes,
            dtypes=types,
            against=against,
            directions=ways,
            quick=quick,
            progress=count,
        )
    interrupted = len(run.rows) < count.total  # Ctrl-C keeps the rows that are done
    if not interrupted and not any(row.median_s for row in run.rows):
        raise BadInput(f"nothing could be measured: {next((row.unavailable for row in run.rows), 'no such case')}")
    return run, interrupted


def tune(json: str) -> None:
    """Renew the table that launches go by; `--json` keeps every trial."""
    from rich.text import Text

    from sublight.limits.run import this_machine

    this_machine("cuda")
    from sublight.ops.record import tune as tiles
    from sublight.ops.record import tuning
    from sublight.report.draw import console
    from sublight.results import write_json

    with console.progress("tiles") as progress:
        table, trials = tiles.tune(progress)
    write_json(tuning.to_json(table), tuning.TABLE)
    cli_output.show(Text(f"{len(table)} tiles chosen from {len(trials)} trials: {tuning.TABLE}"), trials, json)


def of_ops(run: Run, names: Iterable[str]) -> Run:
    """The rows of these ops, or all."""
    import dataclasses

    known = list(dict.fromkeys(row.op for row in run.rows))
    wanted = [one_of("op in that file", name, known) for name in names] or known
    return dataclasses.replace(run, rows=tuple(row for row in run.rows if row.op in wanted))
