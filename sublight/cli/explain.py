"""What `sublight explain` does: run or load, explain, write the report."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
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
    from sublight.trace.capture.folder import Folder
    from sublight.trace.capture.interrupt import Interrupts
    from sublight.trace.capture.profile import Captured

GIVEN_UP = "interrupted while the report was made: there is none"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is run, and how it is called in the report."""

    target: str
    args: tuple[str, ...]
    is_module: bool

    @property
    def command(self) -> str:
        return " ".join(["python", *(("-m",) if self.is_module else ()), self.target, *self.args])

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2] if self.is_module else self.target


class Work:
    """What is under way and must not be left behind."""

    def __init__(self) -> None:
        self.folder: Folder | None = None
        self.child: subprocess.Popen[bytes] | None = None

    def drop(self) -> None:
        if self.child is not None:
            with contextlib.suppress(OSError):
                self.child.kill()
        if self.folder is not None:
            self.folder.remove()


def _script(words: Sequence[str], module: str, wanted: Wanted) -> int:
    from sublight.trace.capture.interrupt import INTERRUPTED, GivenUp, Interrupts

    script = Script(target=module or words[0], args=tuple(words if module else words[1:]), is_module=bool(module))
    work = Work()
    interrupts = Interrupts(work.drop)
    interrupts.begin()
    try:
        _prepare(script, wanted, work)
        captured = _run(script, wanted, work, interrupts)
        _report_of_script(captured, script, wanted)
        return captured.exit_code
    except GivenUp:
        _say(GIVEN_UP)
        return INTERRUPTED
    finally:
        work.drop()
        interrupts.put_back()


def _prepare(script: Script, wanted: Wanted, work: Work) -> None:
    """What can be wrong is looked for before a second is spent."""
    from sublight import gpus
    from sublight.results import read_limits_file
    from sublight.trace.capture import script as capture_script
    from sublight.trace.capture.folder import Folder

    capture_script.check(script.target, script.args, module=script.is_module)
    if wanted.limits:
        read_limits_file(Path(wanted.limits))
    elif wanted.gpu:
        gpus.find(wanted.gpu)
    else:
        _measure_limits(work)
    work.folder = Folder.make()


def _run(script: Script, wanted: Wanted, work: Work, interrupts: Interrupts) -> Captured:
    from sublight.trace.capture import profile as capture
    from sublight.trace.capture.interrupt import GivenUp

    _say(
        f"running {script.name}: some of its first steps are watched, then it goes on alone; "
        "Ctrl-C ends it with the report"
    )
    with contextlib.ExitStack() as stack:
        if wanted.json == "-":
            stack.enter_context(_stdout_for_json())

        def leave(captured: Captured) -> None:
            """The script calls os._exit: nothing comes after."""
            stack.close()
            try:
                _report_of_script(captured, script, wanted)
            except GivenUp:
                _say(GIVEN_UP)
            except BadInput as error:
                _say(str(error))
            finally:
                work.drop()
                sys.stdout.flush()

        return capture.run_script(
            script.target,
            script.args,
            module=script.is_module,
            profiled=wanted.steps,
            say=_say,
            show=_progress_line(),
            folder=work.folder,
            interrupts=interrupts,
            at_os_exit=leave,
        )


def _report_of_script(captured: Captured, script: Script, wanted: Wanted) -> None:
    from sublight.diagnose.explain import explain as explain_traces

    if captured.trace is None:
        _say(f"no report: {captured.reason}")
        return
    lost = _written(wanted.trace, lambda file: _keep(captured.trace_file, file))
    explanation = explain_traces([captured.trace], gpu=wanted.gpu, limits_file=wanted.limits, source=script.command)
    explanation = replace(explanation, notes=(*explanation.notes, *captured.notes))
    fixed = None
    if wanted.fix and not captured.interrupted:
        run = cli_fix.Script(target=script.target, args=script.args, module=script.is_module, folder=wanted.folder)
        fixed = cli_fix.fix(explanation, run, say=_say)
    _report(explanation, wanted, name=script.name, fixed=fixed, lost=lost)


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


def _measure_limits(work: Work) -> None:
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
        work.child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        work.child.wait()
        work.child = None


def _keep(recorded: Path, wanted: Path) -> None:
    from sublight.results import write_file

    text = recorded.read_bytes()
    if wanted.suffix == ".gz":
        import gzip

        text = gzip.compress(text, compresslevel=6)
    write_file(text, wanted)


def _written(name: str, write: Callable[[Path], None]) -> list[str]:
    """Write a file where one is wanted; what goes wrong costs that file, not the report, and comes back as a line."""
    try:
        if name:
            write(Path(name))
    except (BadInput, OSError) as error:
        return [str(error)]
    return []


def _report(
    explanation: Explanation, wanted: Wanted, *, name: str, fixed: Fixed | None = None, lost: Sequence[str] = ()
) -> None:
    """The files that are wanted, then the terminal; a file that could not be written is named behind the report."""
    from sublight.report.explain import fix as explain_fix
    from sublight.report.explain import page as explain_page
    from sublight.report.explain import perfetto
    from sublight.report.explain import terminal as report

    page = wanted.html
    if wanted.json != "-" and not page:
        page = os.path.join(wanted.folder, f"explain-{_stem(name)}.html")
    section = explain_fix.section(fixed) if fixed else ""
    no_page = _written(page, lambda file: explain_page.write(explanation, file, section))
    no_tracks = _written(wanted.perfetto, lambda file: perfetto.write(explanation, file))
    shown, data = report.page(explanation), explanation.to_json()
    if fixed is not None:
        shown, data = explain_fix.page(shown, fixed), explain_fix.to_json(data, fixed)
    cli_output.show(shown, data, wanted.json)
    if page and not no_page and wanted.json != "-":
        _say(f"report: {os.path.relpath(page, wanted.folder)}")
    for line in (*lost, *no_page, *no_tracks):
        _say(line)


def _stem(name: str) -> str:
    stem = Path(name).name
    for ending in (".gz", ".json", ".sqlite", ".nsys-rep", ".py", ".pt.trace"):
        stem = stem.removesuffix(ending)
    return stem or "report"


def _progress_line() -> Callable[[str], None]:
    """Writes a line that the next one replaces; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        return lambda line: None

    def show(line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r\x1b[K{'sublight: ' if line else ''}{line}")
            sys.stderr.flush()

    return show


def _say(line: str) -> None:
    print(f"sublight: {line}", file=sys.stderr, flush=True)
