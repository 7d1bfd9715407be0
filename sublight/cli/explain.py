"""What `sublight explain` does: run or load, explain, write the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.cli import output as cli_output
from sublight.cli.explain_output import NOT_WRITTEN, Wanted, report, status
from sublight.errors import BadInput
from sublight.trace.load import is_trace

if TYPE_CHECKING:
    from sublight.diagnose.record import Explanation


RECORDED = "--steps is how many steps of a script to profile; those of a trace were recorded: leave it out"


def explain(words: Sequence[str], module: str, wanted: Wanted) -> int:
    """Explain a script, a module or a trace; returns the exit status, for a script its own."""
    if not module and not words:
        raise BadInput(
            "name a script or a trace: sublight explain train.py -- its args, or sublight explain trace.json.gz"
        )
    if not module:
        _check_target(Path(words[0]))
    if module or not is_trace(Path(words[0])):
        from sublight.cli.explain_script import explain_script  # imports the recorder, which a trace does not need

        return explain_script(words, module, wanted)
    if len(words) > 1:
        raise BadInput("one trace at a time: name a folder for several ranks, or use --diff BEFORE AFTER")
    if wanted.steps:
        raise BadInput(RECORDED)
    if wanted.trace:
        raise BadInput("a trace is not recorded again: leave out --trace")
    if wanted.fix:
        raise BadInput("a trace cannot be run again with its cures: --fix takes a script")
    explanation = _of_file(words[0], wanted)
    is_whole = report(explanation, wanted, name=words[0])
    return status(explanation, wanted) or (0 if is_whole else NOT_WRITTEN)


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

    if wanted.steps:
        raise BadInput(RECORDED)
    if wanted.trace or wanted.html or wanted.perfetto or wanted.fix or wanted.budget:
        raise BadInput("--diff compares in the terminal: leave out --trace, --html, --perfetto, --fix and --budget")
    difference = compare(*(_of_file(word, wanted) for word in words))
    cli_output.show(explain_diff.page(difference), difference.to_json(), wanted.json)


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
