"""What `sublight explain` does: run or load, explain, write the report."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.cli import output as cli_output
from sublight.diagnose import cures as cli_fix
from sublight.errors import BadInput
from sublight.trace.load import is_trace

if TYPE_CHECKING:
    from sublight.diagnose.record import Explanation
    from sublight.fix.cure.record import Fixed


NEEDED = {  # what the floors of a model's ops ask for
    "cpu": ("host_copy", "matmul_fp32", "launch_eager"),
    "cuda": ("hbm_copy", "matmul_fp32", "matmul_tf32", "matmul_bf16", "h2d_pinned", "launch_graph_node"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command's options."""

    gpu: str
    limits: str
    trace: str
    html: str
    perfetto: str
    steps: int
    json: str
    fix: bool = False  # also run the script again with each cure
    folder: str = field(default_factory=os.getcwd)  # where the user is; a script may go elsewhere


def explain(words: Sequence[str], module: str, wanted: Wanted) -> int:
    """Explain a script, a module or a trace; gives the exit status, which is the script's own."""
    if not module and not words:
        raise BadInput(
            "name a script or a trace: sublight explain train.py -- its args, or sublight explain trace.json.gz"
        )
    if not module:
        _check_target(Path(words[0]))
    if module or not is_trace(Path(words[0])):
        return _script(words, module, wanted)
    if len(words) > 1:
        raise BadInput("one trace at a time: name a folder for several ranks, or use --diff BEFORE AFTER")
    if wanted.trace:
        raise BadInput("a trace is not recorded again: leave out --trace")
    if wanted.fix:
        raise BadInput("a trace cannot be run again with its cures: --fix takes a script")
    _report(_of_file(words[0], wanted), wanted, name=words[0])
    return 0


def _check_target(path: Path) -> None:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise BadInput(f"{path} is not a regular file: save the trace to one first")
    if path.is_file() and path.suffix not in ("", ".py", ".pyw") and not is_trace(path):
        raise BadInput(f"{path} is neither a Python script nor a trace")


def diff(words: Sequence[str], module: str, wanted: Wanted) -> None:
    """What changed between two traces."""
    if len(words) != 2 or module:
        raise BadInput("--diff takes two traces: sublight explain --diff before.json.gz after.json.gz")
    from sublight.diagnose.diff import diff as compare
    from sublight.report.explain import diff as explain_diff

    if wanted.trace or wanted.html or wanted.perfetto or wanted.fix:
        raise BadInput("--diff compares in the terminal: leave out --trace, --html, --perfetto and --fix")
    found = compare(*(_of_file(word, wanted) for word in words))
    cli_output.show(explain_diff.page(found), found.to_json(), wanted.json)


def _of_file(name: str, wanted: Wanted) -> Explanation:
    from sublight.diagnose.explain import explain as explain_traces
    from sublight.report.draw import console
    from sublight.trace.load import load

    with console.progress("explain") as progress:
        if progress:
            progress(f"reading {Path(name).name}", 0, 2)
        traces = load(Path(name))
        if progress:
            progress("analysing", 1, 2)
        return explain_traces(traces, gpu=wanted.gpu, limits_file=wanted.limits, source=name)


def _script(words: Sequence[str], module: str, wanted: Wanted) -> int:
    from sublight.diagnose.explain import explain as explain_traces
    from sublight.trace.capture import profile as capture
    from sublight.trace.capture import script as capture_script

    target, args = (module, list(words)) if module else (words[0], list(words[1:]))
    capture_script.check(target, args, module=bool(module))  # before a second is spent on limits
    if not wanted.limits and not wanted.gpu:
        _measure_limits()
    with _stdout_for_json() if wanted.json == "-" else contextlib.nullcontext():
        captured = capture.run_script(target, args, module=bool(module), profiled=wanted.steps, say=_say)
    try:
        if captured.trace is None:
            _say(" ".join([*captured.notes, "nothing was recorded, so there is nothing to explain"]))
            return captured.exit_code
        if wanted.trace:
            _keep(captured.trace_file, Path(wanted.trace))
        command = " ".join(["python", *(("-m",) if module else ()), target, *args])
        explanation = explain_traces([captured.trace], gpu=wanted.gpu, limits_file=wanted.limits, source=command)
        explanation = replace(explanation, notes=(*explanation.notes, *captured.notes))
        fixed = None
        if wanted.fix and not captured.interrupted:
            run = cli_fix.Script(target=target, args=tuple(args), module=bool(module), folder=wanted.folder)
            fixed = cli_fix.fix(explanation, run, say=_say)
        _report(explanation, wanted, name=target.rpartition(".")[2] if module else target, fixed=fixed)
    finally:
        captured.trace_file.unlink(missing_ok=True)
    return captured.exit_code


@contextlib.contextmanager
def _stdout_for_json() -> Iterator[None]:
    """What the script prints goes to stderr, its children's words too: stdout is for the JSON alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _measure_limits() -> None:
    """Once a machine, in a process of its own: the script must find CUDA untouched, and the device free."""
    from sublight import bench, nvml
    from sublight.limits import run

    health = nvml.health()
    if health is None:
        machine = run.this_machine("cpu")
    else:  # the cache is named by what NVML says; torch would wake the GPU
        machine = run.Machine(kind="cuda", device="", uuid=health.uuid, driver=health.driver, gpu=None)
    if bench.missing_limits(machine, NEEDED[machine.kind]):
        _say("measuring this machine's limits, once: some 10 s")
        words = [sys.executable, "-m", "sublight", "limits", "--quick", "--json", os.devnull, "--device", machine.kind]
        subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _keep(recorded: Path, wanted: Path) -> None:
    from sublight.results import write_file

    text = recorded.read_bytes()
    if wanted.suffix == ".gz":
        import gzip

        text = gzip.compress(text, compresslevel=6)
    write_file(text, wanted)


def _report(explanation: Explanation, wanted: Wanted, *, name: str, fixed: Fixed | None = None) -> None:
    from sublight.report.explain import fix as explain_fix
    from sublight.report.explain import terminal as report

    if wanted.perfetto:
        from sublight.report.explain import perfetto

        perfetto.write(explanation, Path(wanted.perfetto))
    page = wanted.html
    if wanted.json != "-" or wanted.html:
        from sublight.report.explain import page as explain_page

        page = page or os.path.join(wanted.folder, f"explain-{_stem(name)}.html")
        explain_page.write(explanation, Path(page), explain_fix.section(fixed) if fixed else "")
    shown, data = report.page(explanation), explanation.to_json()
    if fixed is not None:
        shown, data = explain_fix.page(shown, fixed), explain_fix.to_json(data, fixed)
    cli_output.show(shown, data, wanted.json)
    if page and wanted.json != "-":
        _say(f"report: {os.path.relpath(page, wanted.folder)}")


def _stem(name: str) -> str:
    stem = Path(name).name
    for ending in (".gz", ".json", ".sqlite", ".nsys-rep", ".py", ".pt.trace"):
        stem = stem.removesuffix(ending)
    return stem or "report"


def _say(line: str) -> None:
    print(f"sublight: {line}", file=sys.stderr, flush=True)
