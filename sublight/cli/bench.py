"""What `sublight bench` does: parse the request, measure it, or renew the table of tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sublight.cli import output as cli_output
from sublight.cost import DIRECTIONS
from sublight.errors import BadInput, one_of

if TYPE_CHECKING:
    from sublight.results import Result, Run


def measure(
    names: Sequence[str],
    kind: Any,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    against: Sequence[str],
    directions: Sequence[str],
    quick: bool,
) -> tuple[Run, bool]:
    """Measure; also tells whether that was interrupted. A name like cuda:matmul is a ladder of CUDA C++ kernels."""
    from sublight import ops
    from sublight.limits.run import this_machine
    from sublight.report.draw import console

    steps = [case for name in names if is_ladder(name) for case in _steps(name, shapes, dtypes, quick)]
    if steps and (useless := [*against, *directions]):
        raise BadInput(f"{useless[0]} is not for ladders, whose steps are all timed, forward: leave it out")
    chosen = [ops.find(name) for name in names if not is_ladder(name)] or ([] if steps else ops.OPS)
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
    if steps and machine.kind != "cuda":
        raise BadInput(
            "CUDA C++ ladders are timed on an NVIDIA GPU: docs/cuda.md has an H200's figures, and "
            "`python benchmarks/cuda_ladders.py --check` checks the kernels on a CPU"
        )
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
        rows = list(run.rows)
        interrupted = len(rows) < count.total  # Ctrl-C keeps the rows that are done
        if steps and not interrupted:
            more, interrupted = _ladder_rows(steps, machine, limits, quick, progress)
            run = dataclasses.replace(run, rows=(*rows, *more))
    if not interrupted and not any(row.median_s for row in run.rows):
        raise BadInput(f"nothing could be measured: {next((row.unavailable for row in run.rows), 'no such case')}")
    return run, interrupted


BESIDE = {  # ladder: our op that computes the same of the same inputs
    **{"gelu": "gelu_tanh", "layer_norm": "layer_norm", "matmul": "matmul"},
    **{"softmax": "softmax", "transpose": "transpose"},
}


def is_ladder(name: str) -> bool:
    return name.startswith("cuda:")


def _steps(name: str, shapes: Sequence[str], dtypes: Sequence[str], quick: bool) -> list[Any]:
    from sublight.extensions import LADDERS, timed

    return timed.cases(timed.find(name, LADDERS), shapes, dtypes, is_quick=quick)


def _ladder_rows(
    steps: Sequence[Any], machine: Any, limits: Any, quick: bool, progress: Any
) -> tuple[list[Result], bool]:
    """Rows for PyTorch, our op that computes the same, and each step; and whether Ctrl-C cut them short."""
    from sublight import ops
    from sublight.cost import shape_text
    from sublight.extensions import timed

    rows: list[Result] = []
    try:
        for done, case in enumerate(steps):
            name = case.ladder.name
            op = ops.find(BESIDE[name]) if name in BESIDE else None
            others = {"sublight": op.call} if op and case.dtype in op.dtypes else {}
            if progress:
                progress(f"cuda:{name} {shape_text(case.shape)} {case.dtype}", done, len(steps))
            rows += timed.rows(
                case, machine.kind, machine.cache_bytes, limits, others=others, time_limit_s=0.05 if quick else None
            )
    except KeyboardInterrupt:
        return rows, True
    return rows, False


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
    """The run with the rows of these ops alone, or with all rows where no op is named."""
    known = list(dict.fromkeys(row.op for row in run.rows))
    wanted = [one_of("op in that file", name.removeprefix("cuda:"), known) for name in names] or known
    return dataclasses.replace(run, rows=tuple(row for row in run.rows if row.op in wanted))
