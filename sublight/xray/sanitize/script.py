"""What the process does that runs a user's scripts under watch; `process.py` starts it.

ORDER is a JSON file: {"scripts": [{"file", "args", "at"}], "answers": FILE, "jobs": FILE}. TRITON_INTERPRET=1 is set by
the process that starts this one, before Triton loads.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from sublight.backend.listen import Proceed, Request, listening
from sublight.gpus import find as find_gpu
from sublight.xray.pretend.torch_cuda import cuda_of
from sublight.xray.pretend.triton_driver import driver_of, nothing_timed
from sublight.xray.record import Finding, Place
from sublight.xray.sanitize import children
from sublight.xray.sanitize import torch_hooks as sanitize_torch
from sublight.xray.sanitize.interpreter import Session, Watch
from sublight.xray.sanitize.job import describe
from sublight.xray.sanitize.notes import Stack
from sublight.xray.sanitize.order import LockKept
from sublight.xray.sanitize.tuned import Tuned

GPU = find_gpu("h100")  # that scripts find, whatever machine this is


def main(order_file: str) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    order = json.loads(Path(order_file).read_text(encoding="utf-8"))
    watch = Watch(Stack.of_libraries(), describe)
    watch.install()

    def tried(tuner: Any) -> None:
        assert watch.session is not None
        watch.session.tuned[tuner.base_fn] = Tuned.of(tuner)

    with cuda_of(GPU), driver_of(GPU), nothing_timed(leave_out, tried), sanitize_torch.plain_comparisons():
        answers, jobs = _run_all(order, watch)
    sys.stdout.flush()
    Path(order["answers"]).write_text(json.dumps(answers), encoding="utf-8")
    Path(order["jobs"]).write_bytes(pickle.dumps(jobs))


def _run_all(order: dict[str, Any], watch: Watch) -> tuple[list[Any], list[Any]]:
    answers, jobs = [], []
    for script in order["scripts"]:
        session = Session(script["at"])
        watch.session = session
        with children.watching(session, Path(order["answers"]).parent), listening(refuse_gluon):
            failure = run(Path(script["file"]), script["args"], session, watch.stack)
        session.memory.finish()
        jobs.append(list(session.kernels.values()))
        answers.append(
            {
                "findings": [_as_json(finding) for finding in session.notes.findings()],
                "launches": session.launches,
                "kernels": list(session.names),
                "arguments": list(session.arguments),
                "unused": [name for name in script["at"] if name not in session.replaced],
                "failure": failure,
            }
        )
    return answers, jobs


def leave_out(mark: Any, *args: Any, **kwargs: Any) -> None:
    """In place of a benchmark's `run`: its sizes are for GPUs, and nobody waits for the interpreter there."""


def run(file: Path, args: list[str], session: Session, stack: Stack) -> str:
    """Run it as `python file args` would; how it failed, or nothing."""
    kept = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(file), *args], [str(file.parent), *sys.path]
    failed: BaseException | None = None
    try:
        with sanitize_torch.watching(session.memory):
            runpy.run_path(str(file), run_name="__main__")
    except SystemExit as error:
        failed = error if error.code not in (None, 0) else None
    except BaseException as error:  # the script's own; a KeyboardInterrupt ends it, too
        failed = error
    finally:
        sys.argv, sys.path[:] = kept
    if failed is None:
        return ""
    return _note_failure(failed, file, session, stack)


def _note_failure(failed: BaseException, file: Path, session: Session, stack: Stack) -> str:
    cause: BaseException = failed
    while cause.__cause__ is not None:
        cause = cause.__cause__
    words = traceback.format_exception_only(cause)[-1].strip().splitlines()[0]
    place = stack.place_of(failed) or Place(file=str(file), line=0)
    if isinstance(cause, SyntaxError) and cause.filename:
        place = Place(file=cause.filename, line=cause.lineno or 0)
    kernel = "" if type(failed).__name__ != "InterpreterError" else next(reversed(session.names), "")
    if isinstance(cause, LockKept):
        return "a kernel that waits for ever"  # noted where it waits
    is_unknown = kernel and "Did you forget to add @triton.jit" in words  # a builtin that the interpreter lacks
    if is_unknown or (isinstance(cause, NotImplementedError) and "interpreter" in words):
        detail = f"Triton's interpreter cannot run this, so the rest was not looked at: {words}"
        session.notes.add("not-interpreted", kernel, place, detail, is_information=True)
    else:
        session.notes.add("script-failed", kernel, place, f"the script ended here: {words}")
    return words


def _as_json(finding: Finding) -> dict[str, Any]:
    return {**finding.to_json(), "is_information": finding.is_information}


def refuse_gluon(request: Request, proceed: Proceed) -> Any:
    """Gluon's kernels are never interpreted; Triton would look for a GPU instead and say something else."""
    name = request.kernel.__name__
    raise NotImplementedError(f"{name} is a Gluon kernel, which Triton's interpreter cannot run")
