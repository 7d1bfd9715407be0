"""The command: one verb a function. Heavy imports are inside, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sublight import __version__
from sublight.cli import output as cli_output
from sublight.errors import one_of

USAGE, INTERRUPTED = 2, 130  # 128 + the signal, as a shell says it
UsageError: Any = typer.BadParameter.__mro__[
    1
]  # typer carries a click of its own or uses the installed one: take its class

app = typer.Typer(
    name="sublight",
    help="How far below its limits this machine runs: measure the limits, then time ops against them.",
    rich_markup_mode=None,  # the plain help is out in half the time, and reads as well
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _op_names(incomplete: str) -> list[str]:
    """For the shell: the ops by their files, since asking OPS would cost an import of torch at every Tab."""
    import sublight

    return [name for name in dir(sublight) if name.startswith(incomplete) and sublight._is_op(name)]


def _gpu_names(incomplete: str) -> list[str]:
    from sublight import gpus as known

    return [gpu.key for gpu in known.all_gpus() if gpu.key.startswith(incomplete)]


def _gpu_lists(incomplete: str) -> list[str]:
    """The last of several, which commas part."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _gpu_names(last)]


def _op_and_file_names(incomplete: str) -> list[str]:
    """A shell that is given names offers no files of its own."""
    import glob

    found = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    files = [name for name in found if Path(name).suffix in (".py", ".cu", ".ptx", ".cubin")]
    return _op_names(incomplete) + files + [f"{name}/" for name in found if os.path.isdir(name)]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sublight {__version__}")
        raise typer.Exit


_Json = Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write JSON to FILE; - prints JSON alone.")]
_Device = Annotated[str, typer.Option(metavar="cuda|cpu", help="The GPU where there is one, unless told.")]
_Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="GPUs, as in h200 a100; all of them unless told.", autocompletion=_gpu_names),
]
_Explain = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Show the arithmetic behind the peaks; `this`: of this GPU.", autocompletion=_gpu_names
    ),
]
_Ops = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OP", help="Ops, as in softmax rms_norm; all of them unless told.", autocompletion=_op_names
    ),
]
_Target = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT|TRACE [-- ARGS]", help="A Python script with its arguments, a trace, or a folder."),
]


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def gpus(names: _Names = None, explain: _Explain = "", json: _Json = "") -> None:
    """Known GPUs, their figures with sources, their peaks."""
    from sublight import gpus as known
    from sublight.report import gpus as report

    if explain:
        gpu = _this_gpu() if explain == "this" else known.find(explain)
        return cli_output.show(report.explain(gpu), report.to_json([gpu], explained=True), json)
    found = [known.find(name) for name in names or ()] or known.all_gpus()
    cli_output.show(report.sheet(found) if names else report.overview(found), report.to_json(found), json)


@app.command()
def limits(
    quick: Annotated[bool, typer.Option("--quick", help="Under 20 s, less exact.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this limit or family; again for more.")
    ] = None,
    device: _Device = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Also write a page with the table and the curves.")] = "",
    json: _Json = "",
) -> None:
    """Measure what this machine can do. Ctrl-C keeps what was measured."""
    from sublight.limits import run
    from sublight.report import limits as report
    from sublight.report.draw import console, page

    cli_output.check_writable(html, json)
    with console.progress("limits") as progress:
        found = run.run(kind=_kind(device), quick=quick, only=_split(only), progress=progress)
    if html:
        page.write(page.limits(found), Path(html))
    cli_output.show(report.page(found), found.to_json(), json)
    if "interrupted" in found.source:
        raise typer.Exit(INTERRUPTED)


@app.command()
def bench(
    ops: _Ops = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="4096x1024", help="Sizes, or rows=4096,cols=1024.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="bf16", help="Data types: fp32, fp16, bf16.")] = None,
    against: Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Peers: liger,quack,compile.")] = None,
    direction: Annotated[list[str] | None, typer.Option(metavar="fwd|bwd", help="Only this one.")] = None,
    device: _Device = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, less time for each.")] = False,
    plot: Annotated[str, typer.Option(metavar="FILE", help="Roofline as .html, .svg or .png.")] = "",
    compare: Annotated[str, typer.Option(metavar="OLD.json", help="What changed; exits 1 if slower.")] = "",
    tune: Annotated[bool, typer.Option("--tune", help="Time every tile on this GPU anew; renews the table.")] = False,
    show: Annotated[str, typer.Option("--from", metavar="FILE.json", help="Show these results; measure nothing.")] = "",
    into: Annotated[str, typer.Option(metavar="ALL.json", help="Renew these rows of an earlier file.")] = "",
    json: _Json = "",
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
        _refuse(
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
        words = (shape or (), _split(dtype), _split(against), _split(direction))
        run, interrupted = cli_bench.measure(ops or (), _kind(device), *words, quick)
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


@app.command()
def explain(
    words: _Target = None,
    module: Annotated[str, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = "",
    diff: Annotated[bool, typer.Option("--diff", help="Compare two traces: explain --diff BEFORE AFTER.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Run it again with each cure: what that really saves.")] = False,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Floors of this GPU.", autocompletion=_gpu_names)] = "",
    limits: Annotated[str, typer.Option(metavar="FILE", help="Floors from `limits --json FILE`.")] = "",
    trace: Annotated[str, typer.Option(metavar="FILE", help="Keep the recorded trace, .json or .json.gz.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="The report; explain-NAME.html unless told.")] = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="Also the trace with its findings as a track.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Steps to profile.")] = 4,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Exit 1 if a step is slower: 50ms, 1.1x BASE.json.")] = "",
    json: _Json = "",
) -> None:
    """Why a script or a trace is slow, what to change, and what each change saves."""
    from sublight.cli import explain as cli_explain
    from sublight.cli.budget import parse
    from sublight.cli.explain_output import Wanted

    cli_output.check_writable(html, json, perfetto, trace)
    most, words = parse(budget, words or ())
    files: dict[str, Any] = {"trace": trace, "html": html, "perfetto": perfetto, "json": json}
    files = {name: os.path.abspath(file) if file not in ("", "-") else file for name, file in files.items()}
    cli_output.check_apart(files.values(), [*words[:2], limits, most.base if most else ""])
    limits = limits and os.path.abspath(limits)
    wanted = Wanted(gpu=gpu, limits=limits, steps=steps, fix=fix, budget=most, **files)
    if diff:
        return cli_explain.diff(words, module, wanted)
    status = cli_explain.explain(words, module, wanted)
    if status:
        raise typer.Exit(status)


@app.command()
def xray(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE[:KERNEL]|OP[:KERNEL] [-- ARGS]",
            help="A .py (imported, which runs it), .cu, .ptx or .cubin, a Triton cache, or an op.",
            autocompletion=_op_and_file_names,
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="As in h200,a100: side by side.", autocompletion=_gpu_lists),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Of several kernels each one's page, not a summary.")] = False,
    sig: Annotated[str, typer.Option(metavar="TYPES", help="Of a .py's kernel: 'x:*bf16, n:i32'.")] = "",
    const: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="BLOCK=1024, num_warps=8; with --diff after:BLOCK=2048."),
    ] = None,
    shape: Annotated[str, typer.Option(metavar="4096x1024", help="An op's sizes.")] = "",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="An op's data type; bf16 unless told.")] = "",
    arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="The launch's n=4096; of PTX by place: 0=4096.")
    ] = None,
    grid: Annotated[str, typer.Option(metavar="N[xN]", help="The launch's blocks.")] = "",
    threads: Annotated[str, typer.Option(metavar="N[xN]", help="A block's threads, where CUDA does not say.")] = "",
    shared: Annotated[str, typer.Option(metavar="BYTES", help="Its dynamic shared memory: 48KiB.")] = "",
    nvcc: Annotated[str, typer.Option(metavar="FLAGS", help="For a .cu: '-std=c++20 -Iinclude'.")] = "",
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
    json: _Json = "",
) -> None:
    """What a kernel really is: registers, occupancy, instructions, sectors, bank conflicts; with or without a GPU.

    Of one kernel the whole page; of several a summary and what is to be mended.

    \b
    sublight xray softmax:_row_kernel --gpu a100,h200 --html page.html
    sublight xray train.py --record -- --steps 2
    sublight xray kernels.py:copy --sig 'x:*bf16, y:*bf16, n:i32' --const BLOCK=1024
    sublight xray kernel.cu --threads 256 --grid 16 --arg n=4096
    sublight xray --run script.py
    """
    from sublight.cli import xray as cli_xray

    cli_output.check_writable(html, json)
    target, args = (words or [""])[0], (words or [])[1:]
    cli_output.check_apart((html, json), [target, counted])
    wanted = cli_xray.Wanted(
        target=target,
        args=tuple(args),
        gpus=tuple(_split(gpu)),
        signature=sig,
        constants=tuple(const or ()),
        numbers=tuple(_split(arg)),
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
        full=full,
        html=html,
        json=json,
    )
    status = cli_xray.command(wanted, run=run, diff=diff)
    if status:
        raise typer.Exit(status)


@app.command()
def memory(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A memory snapshot (.pickle) or a trace.")],
    html: Annotated[str, typer.Option(metavar="FILE", help="Also write a page with the chart.")] = "",
    json: _Json = "",
) -> None:
    """What fills the GPU's memory at its peak, and what would lower it."""
    from sublight.errors import BadInput
    from sublight.report import memory as report
    from sublight.report.draw import page
    from sublight.trace.memory import report as analysis

    cli_output.check_writable(html, json)
    if Path(file).is_dir():
        raise BadInput(f"{file} is a folder: name one file, a memory snapshot (.pickle) or a trace (.json.gz)")
    if not Path(file).is_file():
        raise BadInput(f"there is no file {file}: record one with torch.cuda.memory._record_memory_history()")
    found = analysis.read(Path(file))
    if html:
        page.write(report.html(found), Path(html))
    cli_output.show(report.page(found), report.to_json(found), json)


@app.command()
def doctor(json: _Json = "") -> None:
    """What works here, what does not, and the fix for each."""
    from sublight import doctor as diagnosis
    from sublight.report import doctor as report

    checks = diagnosis.examine()
    cli_output.show(report.page(checks), report.to_json(checks), json)
    if diagnosis.broken(checks):
        raise typer.Exit(1)


def _this_gpu() -> Any:
    from sublight import gpus as known
    from sublight.errors import BadInput

    gpu = known.detect()
    if gpu is None:
        raise BadInput("no GPU that torch can use here: name one, such as --explain h200; `sublight doctor` says why")
    return gpu


def _kind(device: str) -> Any:
    if device.lower() in ("gpu", "rocm"):  # what people call it; torch calls both cuda
        return "cuda"
    return one_of("device", device.lower(), ("cuda", "cpu")) if device else None


def _split(words: Iterable[str] | None) -> list[str]:
    """Options that take several words take them apart or with commas."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def _refuse(why: str, **options: Any) -> None:
    from sublight.errors import BadInput

    given = ", ".join(f"--{name}" for name, value in options.items() if value)
    if given:
        raise BadInput(f"{why}: leave out {given}, or leave out --from")


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status; what the user did wrong is one line on stderr, never a traceback."""
    from sublight.errors import BadInput
    from sublight.gpus import UnknownFigure, UnknownGpu
    from sublight.trace.capture.profile import set_up_profiler

    words = sys.argv[1:] if arguments is None else list(arguments)
    set_up_profiler()
    try:
        status = typer.main.get_command(app)(args=words or ["--help"], prog_name="sublight", standalone_mode=False)
    except (BadInput, UnknownGpu, UnknownFigure) as error:
        return _complain(str(error))
    except UsageError as error:
        hint = "see `sublight --help`"
        if words[:1] in (["explain"], ["xray"]) and "No such option" in error.format_message():
            verb = "xray --record" if words[0] == "xray" else words[0]
            hint = f"a script's own arguments go after --, as in `sublight {verb} train.py -- --lr 3`"
        return _complain(f"{error.format_message().rstrip('.')}; {hint}")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("torch", "triton", "numpy"):
            raise
        return _complain(f"this needs {package}, which is not installed: pip install 'sublight[torch]'")
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; naming it would import torch
            raise
        return _complain("the GPU's memory is full: `nvidia-smi` shows who holds it; stop that, or use --device cpu")
    return int(status or 0)


def _complain(words: str, status: int = USAGE) -> int:
    print("sublight: " + " ".join(words.split()), file=sys.stderr)
    return status


def main() -> None:
    sys.exit(run())
