"""`sublight explain SCRIPT`: run it, record some of its steps, and end well whatever it does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight.cli import output as cli_output
from sublight.cli import ranks as cli_ranks
from sublight.cli.explain_output import NOT_WRITTEN, Wanted, progress_line, report, report_of_rank, say, status, written
from sublight.cli.ranks import Rank
from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.cli.explain_fix import Trying
    from sublight.diagnose.record import Explanation
    from sublight.trace.capture.folder import Folder
    from sublight.trace.capture.interrupt import Interrupts
    from sublight.trace.capture.profile import Captured

PROFILED = 4  # steps
GIVEN_UP = "interrupted while the report was made: there is none"
NOT_KEPT = "not kept; --trace FILE keeps it"
NEEDED = {  # what the floors of a model's ops ask for
    "cpu": ("host_copy", "matmul_fp32", "launch_eager"),
    "cuda": ("hbm_copy", "matmul_fp32", "matmul_tf32", "matmul_bf16", "h2d_pinned", "launch_graph_node", "host_copy"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The script or module to run, and its name in the report."""

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
    """What a run has started and must not leave behind."""

    def __init__(self, rank: Rank | None) -> None:
        self.folder: Folder | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.rank = rank
        self.trying: Trying | None = None  # the trials of --fix
        self.is_whole = True  # the report was written, with every file that was asked for

    def drop(self) -> None:
        if self.child is not None:
            with contextlib.suppress(OSError):
                self.child.kill()
        if self.folder is not None:
            self.folder.remove()
        if self.rank is not None and self.rank.is_first:
            self.rank.remove()


def explain_script(words: Sequence[str], module: str, wanted: Wanted) -> int:
    """Run and explain a script or a module; returns its exit status."""
    from sublight.trace.capture.interrupt import INTERRUPTED, GivenUp, Interrupts

    script = Script(target=module or words[0], args=tuple(words if module else words[1:]), is_module=bool(module))
    wanted = replace(wanted, rank=cli_ranks.this_rank(wanted.folder))
    work = Work(wanted.rank)
    interrupts = Interrupts(work.drop)
    interrupts.begin()
    try:
        _prepare(script, wanted, work)
        with cli_output.stdout_again() as open_again:
            captured = _run(script, wanted, work, interrupts, open_again)
            open_again()
            explanation = _report_of_script(captured, script, wanted, work)
        judged = wanted.rank is None or wanted.rank.is_first  # the budget is judged once, by rank 0's joint report
        if own := captured.exit_code or (status(explanation, wanted) if judged else 0):
            return own
        return 0 if work.is_whole else NOT_WRITTEN
    except GivenUp:
        say(GIVEN_UP)
        return INTERRUPTED
    finally:
        work.drop()
        interrupts.put_back()


def _prepare(script: Script, wanted: Wanted, work: Work) -> None:
    """Check all options and files before the script runs."""
    from sublight import gpus
    from sublight.results import read_limits_file
    from sublight.trace.capture import script as capture_script
    from sublight.trace.capture.folder import Folder

    capture_script.check(script.target, script.args, module=script.is_module)
    if wanted.rank is not None and wanted.fix:
        raise BadInput("--fix runs the script again by itself: leave it out under torchrun")
    if wanted.limits:
        read_limits_file(Path(wanted.limits))
    elif wanted.gpu:
        gpus.find(wanted.gpu)
    if wanted.fix:
        from sublight.cli.explain_fix import Trying

        work.trying = Trying(script.target, script.args, is_module=script.is_module, wanted=wanted)
        work.trying.agree()
    if not wanted.limits and not wanted.gpu:
        _measure_limits(work)
    work.folder = Folder.make()
    if wanted.rank is not None:
        wanted.rank.begin()


def _run(
    script: Script, wanted: Wanted, work: Work, interrupts: Interrupts, open_again: Callable[[], None]
) -> Captured:
    from sublight.trace.capture import profile as capture
    from sublight.trace.capture.interrupt import GivenUp

    speaks = wanted.rank is None or wanted.rank.is_first  # of several ranks the first alone prints
    tell = say if speaks else lambda line: None
    tell(
        f"running {script.name}: some of its first steps are watched, then it goes on alone; "
        "Ctrl-C ends it with the report"
    )
    with contextlib.ExitStack() as stack:
        if wanted.json == "-":
            stack.enter_context(_stdout_for_json())

        def leave(captured: Captured) -> None:
            """Called in place of os._exit, after which nothing runs: report first."""
            stack.close()
            open_again()
            try:
                _report_of_script(captured, script, wanted, work)
            except GivenUp:
                say(GIVEN_UP)
            except BadInput as error:
                say(str(error))
            finally:
                work.drop()
                sys.stdout.flush()

        return capture.run_script(
            script.target,
            script.args,
            module=script.is_module,
            profiled=wanted.steps or PROFILED,
            say=tell,
            show=progress_line(),
            folder=work.folder,
            interrupts=interrupts,
            at_os_exit=leave,
        )


def _report_of_script(captured: Captured, script: Script, wanted: Wanted, work: Work) -> Explanation | None:
    """The explanation that the report shows; None where no step was captured."""
    from sublight.diagnose.explain import explain as explain_traces

    rank = wanted.rank
    if rank is not None:
        rank.end(captured.trace_file if captured.trace else None, captured.reason)
    if captured.trace is None:
        say(f"no report{f' of rank {rank.number}' if rank else ''}: {captured.reason}")
        return None
    kept = cli_ranks.name_of(wanted.trace, rank.number) if rank else wanted.trace
    lost = written(kept, lambda file: _keep(captured.trace_file, file))
    captured = replace(captured, trace=replace(captured.trace, source=kept or NOT_KEPT))  # not in a folder that goes
    assert captured.trace is not None
    trace = captured.trace

    def of_steps(meta: dict[str, Any]) -> Explanation:
        traces = [replace(trace, meta={**trace.meta, **meta})]
        return explain_traces(traces, gpu=wanted.gpu, limits_file=wanted.limits, source=script.command)

    explanation = of_steps({})
    explanation = replace(explanation, notes=(*explanation.notes, *captured.notes))
    fixed = None
    if work.trying is not None and not captured.interrupted:
        fixed = work.trying.make(
            explanation, lambda step_s: of_steps({"unprofiled_total_s": step_s, "unprofiled_steps": 1})
        )
    if rank is None:
        work.is_whole = report(explanation, wanted, name=script.name, fixed=fixed, lost=lost)
        return explanation
    report_of_rank(explanation, wanted, rank, name=script.name, lost=lost)
    if rank.is_first:
        explanation = _of_all_ranks(captured, wanted, rank, script)
        work.is_whole = report(explanation, replace(wanted, perfetto=""), name=script.name)
    return explanation


def _of_all_ranks(captured: Captured, wanted: Wanted, rank: Rank, script: Script) -> Explanation:
    """Explain rank 0's steps beside those of the other ranks."""
    from sublight.diagnose.explain import explain as explain_traces
    from sublight.trace.read import chrome

    assert captured.trace is not None
    show, waits_for = progress_line(), list[int]()

    def waiting(ranks: list[int]) -> None:
        names = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
        if ranks != waits_for:
            show(f"waiting for rank{'s' * (len(ranks) > 1)} {names}")
            waits_for[:] = ranks

    missing = rank.wait(waiting=waiting)
    show("")
    traces, notes = [replace(captured.trace, rank=rank.number)], list(captured.notes)
    for number, file in rank.traces().items():
        try:
            traces.append(replace(chrome.load(file), rank=number))
        except BadInput as error:
            missing[number] = str(error)
    notes += [f"Rank {number} is not in this report: {why}." for number, why in sorted(missing.items())]
    explanation = explain_traces(traces, gpu=wanted.gpu, limits_file=wanted.limits, source=script.command)
    return replace(explanation, notes=(*explanation.notes, *notes))


@contextlib.contextmanager
def _stdout_for_json() -> Iterator[None]:
    """Send what the script and its children print to stderr: stdout is for the JSON alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _measure_limits(work: Work) -> None:
    """Measure the limits in a process of its own, once a machine: the script must find CUDA untouched, the GPU free."""
    from sublight import bench, nvml
    from sublight.limits import run

    health = nvml.health()
    if health is None:
        machine = run.this_machine("cpu")
    else:  # NVML names the cache's file: asking torch would start CUDA
        machine = run.Machine(kind="cuda", device="", uuid=health.uuid, driver=health.driver, gpu=None)
    if bench.missing_limits(machine, NEEDED[machine.kind]):
        say("measuring this machine's limits, once: some 10 s")
        words = [sys.executable, "-P", "-m", "sublight", "limits", "--quick", "--json", os.devnull]
        words += ["--device", machine.kind]
        ours = str(Path(__file__).resolve().parents[2])  # with -P not from the working folder, which is the user's
        paths = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths}
        work.child = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        work.child.wait()
        work.child = None


def _keep(recorded: Path, wanted: Path) -> None:
    from sublight.results import write_file

    text = recorded.read_bytes()
    if wanted.suffix == ".gz":
        import gzip

        text = gzip.compress(text, compresslevel=6)
    write_file(text, wanted)
