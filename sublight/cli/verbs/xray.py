"""`sublight xray`: what a kernel really is."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, gpu_lists, op_and_file_names, split


def xray(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE[:KERNEL]|OP[:KERNEL] [-- ARGS]",
            help="A .py (imported, which runs it), .cu, .ptx or .cubin, a Triton cache, or an op.",
            autocompletion=op_and_file_names,
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="As in h200,a100: side by side.", autocompletion=gpu_lists),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Of several kernels each one's page, not a summary.")] = False,
    sig: Annotated[str, typer.Option(metavar="TYPES", help="Of a .py's kernel: 'x:*bf16, n:i32'.")] = "",
    const: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="BLOCK=1024, num_warps=8; with --diff after:BLOCK=2048."),
    ] = None,
    shape: Annotated[str, typer.Option(metavar="4096x1024", help="An op's sizes.")] = "",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="An op's data type; default: bf16.")] = "",
    arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="The launch's n=4096; of PTX by place: 0=4096.")
    ] = None,
    grid: Annotated[str, typer.Option(metavar="N[xN]", help="The launch's blocks.")] = "",
    threads: Annotated[
        str, typer.Option(metavar="N[xN]", help="A block's threads, where CUDA does not say; bare: --lanes.")
    ] = "",
    shared: Annotated[str, typer.Option(metavar="BYTES", help="Its dynamic shared memory: 48KiB.")] = "",
    nvcc: Annotated[str, typer.Option(metavar="FLAGS", help="For a .cu: '-std=c++20 -Iinclude'.")] = "",
    lanes: Annotated[
        bool,
        typer.Option("--lanes", help="Which lane holds which element, by Triton's layouts or CUDA C++'s addresses."),
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Run the script; look at what it launches.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Run the script on the CPU: races, bounds; exits 1 if any.")
    ] = False,
    at: Annotated[str, typer.Option(metavar="n=3_000_000_000", help="With --run: do offsets hold at this size?")] = "",
    no_exec: Annotated[bool, typer.Option("--no-exec", help="Run nobody's code: .ptx and .cubin only.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="What changed: xray --diff BEFORE AFTER.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Time it, and count where ncu may.")] = False,
    counted: Annotated[
        str, typer.Option("--import", metavar="FILE", help="Counters, .ncu-rep or ncu's .csv: alone or with a kernel.")
    ] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Source, TTGIR, PTX and SASS side by side.")] = "",
    json: Json = "",
) -> None:
    """What a kernel really is: registers, occupancy, instructions, sectors, bank conflicts; with or without a GPU.

    Of one kernel the whole page; of several a summary and what is to be mended.

    \b
    sublight xray softmax:_row_kernel --gpu a100,h200 --html page.html
    sublight xray train.py --record -- --steps 2
    sublight xray kernels.py:copy --sig 'x:*bf16, y:*bf16, n:i32' --const BLOCK=1024
    sublight xray kernel.cu --threads 256 --grid 16 --arg n=4096
    sublight xray examples/kernels/transpose.py --record --threads
    sublight xray --run script.py
    """
    from sublight.cli import xray as cli_xray

    cli_output.check_named(html=html)
    cli_output.check_writable(html, json)
    target, args = (words or [""])[0], (words or [])[1:]
    cli_output.check_apart((html, json), [target, counted])
    wanted = cli_xray.Wanted(
        target=target,
        args=tuple(args),
        gpus=tuple(split(gpu)),
        signature=sig,
        constants=tuple(const or ()),
        numbers=tuple(split(arg)),
        grid=grid,
        threads=threads,
        shared=shared,
        nvcc=nvcc,
        shape=shape,
        dtype=dtype,
        record=record,
        no_exec=no_exec,
        measure=measure,
        counted=counted,
        at=at,
        lanes=lanes,
        full=full,
        html=html,
        json=json,
    )
    status = cli_xray.command(wanted, run=run, diff=diff)
    if status:
        raise typer.Exit(status)
