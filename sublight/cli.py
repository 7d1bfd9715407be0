"""The command: one verb a function. Heavy imports are inside, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublight import __version__
from sublight.op import DIRECTIONS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sublight.results import Run

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # 128 + the signal, as a shell says it
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
        return _show(report.explain(gpu), report.to_json([gpu], explained=True), json)
    found = [known.find(name) for name in names or ()] or known.all_gpus()
    _show(report.sheet(found) if names else report.overview(found), report.to_json(found), json)


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
    from sublight.report import console, page
    from sublight.report import limits as report

    _check_writable(html, json)
    with console.progress("limits") as progress:
        found = run.run(kind=_kind(device), quick=quick, only=_split(only), progress=progress)
    if html:
        page.write(page.limits(found), Path(html))
    _show(report.page(found), found.to_json(), json)
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
    json: _Json = "",
) -> None:
    """Time ops against their floors on this machine."""
    from sublight import results
    from sublight.report import bench as report
    from sublight.report import roofline

    if tune:
        return _tune(json)
    _check_writable(plot, json)
    roofline.check(plot)
    old = results.read_run(Path(compare)) if compare else None
    if show:
        _refuse(
            "--from measures nothing",
            shape=shape,
            dtype=dtype,
            against=against,
            direction=direction,
            device=device,
            quick=quick,
        )
        run, interrupted = _of_ops(results.read_run(Path(show)), ops or ()), False
    else:
        words = (shape or (), _split(dtype), _split(against), _split(direction))
        run, interrupted = _measure(ops or (), _kind(device), *words, quick)
    if plot:
        roofline.write(run, Path(plot))
    changes = results.compare(old.rows, run.rows) if old else None
    _show(report.everything(run, changes), report.to_json(run, changes), json)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(change.verdict == "slower" for change in changes or ()):
        raise typer.Exit(1)


@app.command()
def explain(
    words: _Target = None,
    module: Annotated[str, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = "",
    diff: Annotated[bool, typer.Option("--diff", help="Compare two traces: explain --diff BEFORE AFTER.")] = False,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Floors of this GPU.", autocompletion=_gpu_names)] = "",
    limits: Annotated[str, typer.Option(metavar="FILE", help="Floors from `limits --json FILE`.")] = "",
    trace: Annotated[str, typer.Option(metavar="FILE", help="Keep the recorded trace, .json or .json.gz.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="The report; explain-NAME.html unless told.")] = "",
    perfetto: Annotated[str, typer.Option(metavar="FILE", help="Also the trace with its findings as a track.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Steps to profile.")] = 4,
    json: _Json = "",
) -> None:
    """Why a script or a trace is slow, what to change, and what each change saves."""
    from sublight import cli_explain

    _check_writable(html, json, perfetto, trace)
    files = {"trace": trace, "html": html, "perfetto": perfetto, "json": json}
    files = {name: os.path.abspath(file) if file not in ("", "-") else file for name, file in files.items()}
    _check_apart(files.values(), [*(words or ())[:2], limits])
    wanted = cli_explain.Wanted(gpu=gpu, limits=limits and os.path.abspath(limits), steps=steps, show=_show, **files)
    if diff:
        return cli_explain.diff(words or [], module, wanted)
    status = cli_explain.explain(words or [], module, wanted)
    if status:
        raise typer.Exit(status)


@app.command()
def memory(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A memory snapshot (.pickle) or a trace.")],
    html: Annotated[str, typer.Option(metavar="FILE", help="Also write a page with the chart.")] = "",
    json: _Json = "",
) -> None:
    """What fills the GPU's memory at its peak, and what would lower it."""
    from sublight.op import BadInput
    from sublight.report import memory as report
    from sublight.report import page
    from sublight.trace import memory as analysis

    _check_writable(html, json)
    if not Path(file).is_file():
        raise BadInput(f"there is no file {file}: record one with torch.cuda.memory._record_memory_history()")
    found = analysis.read(Path(file))
    if html:
        page.write(report.html(found), Path(html))
    _show(report.page(found), report.to_json(found), json)


@app.command()
def doctor(json: _Json = "") -> None:
    """What works here, what does not, and the fix for each."""
    from sublight import doctor as diagnosis
    from sublight.report import doctor as report

    checks = diagnosis.examine()
    _show(report.page(checks), report.to_json(checks), json)
    if diagnosis.broken(checks):
        raise typer.Exit(1)


def _measure(
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
    from sublight.op import BadInput, parse_dtype
    from sublight.report import console

    chosen = [ops.find(name) for name in names] or ops.OPS
    for op in chosen if shapes else ():
        for words in shapes:
            op.parse_shape(words)  # before anything is measured: a mistake must not cost a minute
    types = [parse_dtype(words) for words in dtypes]
    ways: Any = [_one_of("direction", word, DIRECTIONS) for word in directions]
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


def _tune(json: str) -> None:
    """Renew the table that launches go by; `--json` keeps every trial."""
    from rich.text import Text

    from sublight.limits.run import this_machine

    this_machine("cuda")
    from sublight import tune
    from sublight.ops import tuning
    from sublight.report import console
    from sublight.results import write_json

    with console.progress("tiles") as progress:
        table, trials = tune.tune(progress)
    write_json(tuning.to_json(table), tuning.TABLE)
    _show(Text(f"{len(table)} tiles chosen from {len(trials)} trials: {tuning.TABLE}"), trials, json)


def _of_ops(run: Run, names: Iterable[str]) -> Run:
    """The rows of these ops, or all."""
    import dataclasses

    known = list(dict.fromkeys(row.op for row in run.rows))
    wanted = [_one_of("op in that file", name, known) for name in names] or known
    return dataclasses.replace(run, rows=tuple(row for row in run.rows if row.op in wanted))


def _this_gpu() -> Any:
    from sublight import gpus as known
    from sublight.op import BadInput

    gpu = known.detect()
    if gpu is None:
        raise BadInput("no GPU that torch can use here: name one, such as --explain h200; `sublight doctor` says why")
    return gpu


def _kind(device: str) -> Any:
    if device.lower() in ("gpu", "rocm"):  # what people call it; torch calls both cuda
        return "cuda"
    return _one_of("device", device.lower(), ("cuda", "cpu")) if device else None


def _one_of(what: str, word: str, known: Sequence[str]) -> str:
    from sublight.op import BadInput, nearest

    if word not in known:
        few = " or ".join(known) if len(known) < 3 else nearest(word, list(known))
        raise BadInput(f"unknown {what} {word!r}: use {few}")
    return word


def _split(words: Iterable[str] | None) -> list[str]:
    """Options that take several words take them apart or with commas."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def _refuse(why: str, **options: Any) -> None:
    from sublight.op import BadInput

    given = ", ".join(f"--{name}" for name, value in options.items() if value)
    if given:
        raise BadInput(f"{why}: leave out {given}, or leave out --from")


def _check_writable(*names: str) -> None:
    """Before anything is measured, by trying: a file that cannot be written must not cost the user two minutes."""
    import tempfile

    from sublight.op import BadInput

    for name in names:
        if not name or name == "-":
            continue
        path = Path(os.path.realpath(name))
        folder = next((parent for parent in path.parents if parent.exists()), path)
        if path.is_dir():
            raise BadInput(f"cannot write {name}: it is a folder; name another file")
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise BadInput(f"cannot write {name}: {error.strerror}; name another file") from None


def _check_apart(outputs: Iterable[str], inputs: Iterable[str]) -> None:
    """No output over another, or over what is read."""
    from sublight.op import BadInput

    written = [os.path.realpath(name) for name in outputs if name not in ("", "-", os.devnull)]
    read = [os.path.realpath(name) for name in inputs if name]
    if twice := next((name for name in written if written.count(name) > 1 or name in read), None):
        raise BadInput(f"{twice} is named twice: an output must not replace another, nor what is read")


def _show(renderable: RenderableType, data: Any, json: str) -> None:
    """The result for people, or as JSON alone; the file first, so that a closed pipe does not lose it."""
    from sublight.report import console
    from sublight.results import write_json

    try:
        if json == "-":
            from json import dumps

            print(dumps(data, indent=1, ensure_ascii=False, allow_nan=False), flush=True)
            return
        if json:
            write_json(data, Path(json))
        console.stdout().print(renderable)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich leaves with SystemExit where the pipe is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        raise typer.Exit(BROKEN_PIPE) from None


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status; what the user did wrong is one line on stderr, never a traceback."""
    from sublight.gpus import UnknownFigure, UnknownGpu
    from sublight.op import BadInput
    from sublight.trace.capture import set_up_profiler

    words = sys.argv[1:] if arguments is None else list(arguments)
    set_up_profiler()
    try:
        status = typer.main.get_command(app)(args=words or ["--help"], prog_name="sublight", standalone_mode=False)
    except (BadInput, UnknownGpu, UnknownFigure) as error:
        return _complain(str(error))
    except UsageError as error:
        hint = "see `sublight --help`"
        if words[:1] == ["explain"] and "No such option" in error.format_message():
            hint = "a script's own arguments go after --, as in `sublight explain train.py -- --lr 3`"
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
