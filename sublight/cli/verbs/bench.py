"""`sublight bench`: ops against their floors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import INTERRUPTED, Device, Json, kind_of, op_names, split
from sublight.errors import BadInput

Ops = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OP",
        help="Ops, as in softmax rms_norm, or CUDA C++ ladders, as in cuda:matmul; default: all ops.",
        autocompletion=op_names,
    ),
]


def bench(
    ops: Ops = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="4096x1024", help="Sizes, or rows=4096,cols=1024.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="bf16", help="Data types: fp32, fp16, bf16.")] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Also time these: liger,quack,compile.")
    ] = None,
    direction: Annotated[list[str] | None, typer.Option(metavar="fwd|bwd", help="Only this pass.")] = None,
    device: Device = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, less time for each.")] = False,
    plot: Annotated[str, typer.Option(metavar="FILE", help="Roofline as .html, .svg or .png.")] = "",
    compare: Annotated[str, typer.Option(metavar="OLD.json", help="What changed; exits 1 if slower.")] = "",
    tune: Annotated[bool, typer.Option("--tune", help="Time every tile on this GPU anew; renews the table.")] = False,
    show: Annotated[str, typer.Option("--from", metavar="FILE.json", help="Show these results; measure nothing.")] = "",
    into: Annotated[str, typer.Option(metavar="ALL.json", help="Put these rows into an earlier results file.")] = "",
    json: Json = "",
) -> None:
    """Time ops against their floors on this machine."""
    from sublight import results
    from sublight.cli import bench as cli_bench
    from sublight.report import bench as report
    from sublight.report.draw import plot as draw_plot

    if tune:
        return cli_bench.tune(json)
    cli_output.check_writable(plot, json)
    draw_plot.check(plot)
    old = results.read_run(Path(compare)) if compare else None
    whole = results.read_run(Path(into)) if into else None  # before an hour is spent
    if show:
        refuse(
            "--from measures nothing",
            into=into,
            shape=shape,
            dtype=dtype,
            against=against,
            direction=direction,
            device=device,
            quick=quick,
        )
        run, interrupted = cli_bench.of_ops(results.read_run(Path(show)), ops or ()), False
    else:
        words = (shape or (), split(dtype), split(against), split(direction))
        run, interrupted = cli_bench.measure(ops or (), kind_of(device), *words, quick)
    if plot:
        draw_plot.write(run, Path(plot))
    changes = results.compare(old.rows, run.rows) if old else None
    cli_output.show(report.everything(run, changes, draw_plot.terminal(run)), report.to_json(run, changes), json)
    if whole:
        results.write_json(whole.merged(run).to_json(), Path(into))
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(change.verdict == "slower" for change in changes or ()):
        raise typer.Exit(1)


def refuse(why: str, **options: Any) -> None:
    flags = ", ".join(f"--{name}" for name, value in options.items() if value)
    if flags:
        raise BadInput(f"{why}: leave out {flags}, or leave out --from")
