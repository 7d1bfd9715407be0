"""`sublight pyprof`: what it runs or reads, and where its report goes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight.cli import output as cli_output
from sublight.cli.explain_output import NOT_WRITTEN, say, stem, written
from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.pyprof.record import PythonProfile

GIVEN_UP = "interrupted while the report was made: there is none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where the profile is written."""

    html: str
    speedscope: str
    chrome: str
    collapsed: str
    json: str

    def absolute(self) -> Files:
        """The same files by absolute paths: the program may change its working folder."""
        names = ("html", "speedscope", "chrome", "collapsed", "json")
        files = {name: getattr(self, name) for name in names}
        return Files(**{name: os.path.abspath(file) if file not in ("", "-") else file for name, file in files.items()})

    def all(self) -> tuple[str, ...]:
        return (self.html, self.speedscope, self.chrome, self.collapsed, self.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command's options."""

    modes: tuple[str, ...]
    builtins: bool
    rate: float
    pid: int
    native: bool
    seconds: float
    gpu: bool
    diff: bool
    top: int
    files: Files


def pyprof(words: Sequence[str], module: str, wanted: Wanted) -> int:
    """Profile a program, or show a profile; returns the exit status, the program's own where one is run."""
    if len(wanted.modes) > 1 and wanted.modes != ("trace", "counts"):
        raise BadInput(f"--{wanted.modes[0]} and --{wanted.modes[1]} exclude each other: choose one")
    if wanted.modes[-1:] not in ((), ("sample",)) and (wanted.pid or wanted.native):
        raise BadInput("a tracer runs inside the program: --pid and --native go with --sample")
    other = [f"--{mode}" for mode in wanted.modes if mode != "sample"] + ["--pid"] * bool(wanted.pid)
    if wanted.gpu and other:
        raise BadInput(f"--gpu runs the script under PyTorch's profiler: leave out {' and '.join(other)}, or --gpu")
    files = wanted.files
    cli_output.check_named(html=files.html, speedscope=files.speedscope, chrome=files.chrome, collapsed=files.collapsed)
    cli_output.check_writable(*files.all())
    script = [] if module else words[:1]
    cli_output.check_apart(wanted.files.all(), [*script, *(word for word in words if word.endswith(".json"))])
    if wanted.diff:
        return _diff(words, module, wanted)
    if wanted.pid:
        return _attach(words, module, wanted)
    if not words and not module:
        raise BadInput(
            "what shall be profiled? `sublight pyprof script.py`, `-m MODULE`, `--pid PID` or a profile.json"
        )
    if wanted.gpu:
        return _gpu(words, module, wanted)
    if not module and words[0].endswith(".json"):
        return _show_again(words, wanted)
    if wanted.native:
        return _run_outside(words, module, wanted)
    return _run(words, module, wanted)


def _run(words: Sequence[str], module: str, wanted: Wanted) -> int:
    from sublight.pyprof import run as pyprof_run
    from sublight.pyprof.recorder import Options
    from sublight.trace.capture import script
    from sublight.trace.capture.interrupt import INTERRUPTED, GivenUp, Interrupts

    name, args = (module, words) if module else (words[0], words[1:])
    target = script.check(name, args, module=bool(module), needs_torch=False)
    cli_output.check_apart(wanted.files.all(), target.files)
    mode: Any = wanted.modes[-1] if wanted.modes else "sample"
    options = Options(mode=mode, hz=wanted.rate, builtins=wanted.builtins)
    files, folder = wanted.files.absolute(), os.getcwd()
    interrupts = Interrupts()
    interrupts.begin()
    with cli_output.stdout_again() as open_again, contextlib.ExitStack() as stack:
        if files.json == "-":
            stack.enter_context(cli_output.stdout_kept())

        is_whole: list[bool] = []

        def report(profile: PythonProfile) -> None:
            stack.close()
            open_again()
            is_whole.append(out(profile, files, folder=folder, name=stem(name), top=wanted.top))

        try:
            status = pyprof_run.run(target, options, report=report, say=say, interrupts=interrupts)
            return status or (0 if all(is_whole) else NOT_WRITTEN)
        except GivenUp:
            say(GIVEN_UP)
            return INTERRUPTED
        finally:
            interrupts.put_back()


def out(profile: PythonProfile, files: Files, *, folder: str, name: str, top: int, default_page: bool = True) -> bool:
    """The files that are wanted, then the terminal; a file that could not be written is named behind the report.

    Whether all that were asked for are there; the page comes unasked, too.
    """
    from sublight.report.pyprof import formats
    from sublight.report.pyprof import page as pyprof_page
    from sublight.report.pyprof import terminal as report

    page = files.html
    if default_page and files.json != "-" and not page:
        page = os.path.join(folder, f"pyprof-{name}.html")
    no_page = written(page, lambda file: pyprof_page.write(profile, file))
    lost: list[str] = []
    writers: tuple[tuple[str, Callable[[PythonProfile, Path], None]], ...] = (
        (files.speedscope, formats.write_speedscope),
        (files.chrome, formats.write_chrome),
        (files.collapsed, formats.write_collapsed),
    )
    for file, write in writers:
        lost += written(file, lambda path, write=write: write(profile, path))  # type: ignore[misc]
    cli_output.show(report.page(profile, most=top), profile.to_json(), files.json)
    if page and not no_page and files.json != "-":
        say(f"flame graph: {os.path.relpath(page, folder)}")
    for line in (*no_page, *lost):
        say(line)
    return not (lost or (files.html and no_page))


def _show_again(words: Sequence[str], wanted: Wanted) -> int:
    from sublight.pyprof import record

    if len(words) > 1:
        raise BadInput(f"one profile at a time; to compare two: sublight pyprof --diff {words[0]} {words[1]}")
    if wanted.modes or wanted.native:
        way = wanted.modes[0] if wanted.modes else "native"
        raise BadInput(f"{words[0]} is shown as it was taken: leave --{way} out, or name a script")
    profile = record.read(words[0])
    is_whole = out(profile, wanted.files, folder=os.getcwd(), name=stem(words[0]), top=wanted.top, default_page=False)
    return 0 if is_whole else NOT_WRITTEN


def _attach(words: Sequence[str], module: str, wanted: Wanted) -> int:
    from sublight.pyprof import pyspy

    if words or module:
        raise BadInput("--pid looks at a process that runs: leave the script out")
    profile = pyspy.attach(wanted.pid, hz=wanted.rate, seconds=wanted.seconds, native=wanted.native, say=say)
    is_whole = out(profile, wanted.files, folder=os.getcwd(), name=str(wanted.pid), top=wanted.top)
    return 0 if is_whole else NOT_WRITTEN


def _run_outside(words: Sequence[str], module: str, wanted: Wanted) -> int:
    from sublight.pyprof import pyspy
    from sublight.trace.capture import script

    target = script.check(module or words[0], (), module=bool(module), needs_torch=False)
    cli_output.check_apart(wanted.files.all(), target.files)
    files, folder = wanted.files.absolute(), os.getcwd()
    with contextlib.ExitStack() as stack:
        if files.json == "-":
            stack.enter_context(cli_output.stdout_kept())
        profile = pyspy.run([*(["-m", module] if module else []), *words], hz=wanted.rate)
    is_whole = out(profile, files, folder=folder, name=stem(module or words[0]), top=wanted.top)
    return profile.exit_code or (0 if is_whole else NOT_WRITTEN)


def _diff(words: Sequence[str], module: str, wanted: Wanted) -> int:
    from sublight.pyprof import compare, record
    from sublight.report.pyprof import diff as report
    from sublight.report.pyprof import page as pyprof_page

    if module or len(words) != 2:
        raise BadInput("--diff compares two profiles: sublight pyprof --diff BEFORE.json AFTER.json")
    if wanted.modes or wanted.pid or wanted.gpu or wanted.native:
        raise BadInput("--diff reads two profiles and runs nothing: leave the other options out")
    before, after = record.read(words[0]), record.read(words[1])
    comparison = compare.compare(before, after)
    page = wanted.files.html or (f"pyprof-diff-{stem(words[1])}.html" if wanted.files.json != "-" else "")
    lost = written(page, lambda file: pyprof_page.write_two(before, after, file))
    cli_output.show(report.page(comparison, most=wanted.top), comparison.to_json(), wanted.files.json)
    for line in lost or ([f"flame graph of the differences: {page}"] if page else []):
        say(line)
    return NOT_WRITTEN if lost and wanted.files.html else 0


def _gpu(words: Sequence[str], module: str, wanted: Wanted) -> int:
    """--gpu: the device's time by line, from a script captured as `explain` does, or from a recorded trace."""
    from sublight.trace import load

    if any((wanted.files.html, wanted.files.speedscope, wanted.files.chrome, wanted.files.collapsed)):
        raise BadInput("--gpu prints a table: take --json FILE, or `sublight explain` for a page with the timeline")
    if not module and load.is_trace(Path(words[0])):
        traces = load.load(Path(words[0]))
        _show_device(traces[0], wanted)
        return 0
    return _gpu_of_script(words, module, wanted)


def _gpu_of_script(words: Sequence[str], module: str, wanted: Wanted) -> int:
    from sublight.trace.capture import profile as capture
    from sublight.trace.capture import script
    from sublight.trace.capture.folder import Folder
    from sublight.trace.capture.interrupt import INTERRUPTED, GivenUp, Interrupts

    name, args = (module, words) if module else (words[0], words[1:])
    target = script.check(name, args, module=bool(module))
    cli_output.check_apart(wanted.files.all(), target.files)
    folder = Folder.make()
    interrupts = Interrupts(folder.remove)
    interrupts.begin()
    with contextlib.ExitStack() as stack:
        if wanted.files.json == "-":
            stack.enter_context(cli_output.stdout_kept())

        def show(captured: capture.Captured) -> None:
            stack.close()
            if captured.trace is None:
                say(f"no report: {captured.reason}")
            else:
                _show_device(captured.trace, wanted)

        try:
            captured = capture.run_script(
                name, args, module=bool(module), say=say, folder=folder, interrupts=interrupts, at_os_exit=show
            )
            show(captured)
            return captured.exit_code
        except GivenUp:
            say(GIVEN_UP)
            return INTERRUPTED
        finally:
            folder.remove()
            interrupts.put_back()


def _show_device(trace: Any, wanted: Wanted) -> None:
    from sublight.pyprof import device
    from sublight.report.pyprof import device as report

    profile = device.device_profile(trace)
    cli_output.show(report.page(profile, most=wanted.top), profile.to_json(), wanted.files.json)
