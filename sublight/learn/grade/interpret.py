"""A submission on the CPU: its kernels run in Triton's interpreter under watch, on tensors that the grader owns."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from sublight.backend.listen import listening
from sublight.gpus import Gpu
from sublight.gpus import find as find_gpu
from sublight.learn.grade import child, hints
from sublight.learn.grade.buffers import Spec, mapped
from sublight.learn.grade.guard import Guard
from sublight.learn.grade.launches import words_of
from sublight.learn.grade.paper import computed
from sublight.xray.pretend.torch_cuda import cuda_of
from sublight.xray.pretend.triton_driver import driver_of, nothing_timed
from sublight.xray.sanitize import torch_hooks
from sublight.xray.sanitize.interpreter import Session, Watch
from sublight.xray.sanitize.notes import Stack
from sublight.xray.sanitize.sample import Sample
from sublight.xray.sanitize.script import leave_out, refuse_gluon

OF_THE_JUDGE = ("unwritten-output", "not-compiled")  # the grader tells of the first, the compiler of the second


def prepared() -> child.Serve:
    """Everything that every check needs; what it gives is called in a process of its own."""
    libraries = Stack.of_libraries()
    stack = Stack(foreign=(*libraries.foreign, os.path.join(os.path.dirname(__file__), "")))
    watch = Watch(stack, lambda jit, bound, options: (jit.__name__, None))
    watch.install()

    def promised(words: str, is_number: bool) -> None:
        """Of blocks, at the goal's size alone: of a block that wraps round at an edge (row % rows) nobody minds."""
        if watch.session and (is_number or watch.session.sample):
            watch.note("false-promise", stack.place(), words)

    hints.install(promised)
    # a number too large shows in the result; the warning would show only where Triton's interpreter lies
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")

    def serve(channel: Connection, order: dict[str, Any]) -> None:
        tuned = Tuned()
        with child.answering(channel) as answer:
            try:
                with _pretended(find_gpu(order["gpu"]), tuned):
                    function = child.load(order, programs=False)
                    answer(failure=None)
                    known: dict[Spec, Any] = {}  # a shape that comes again has the same addresses
                    for case in child.orders(channel):
                        tensors = _tensors(case, known)
                        tuned.is_first = case.get("is_goal", False)
                        if order["kind"] == "paper":
                            answer(**computed(function, tensors, order["outputs"], order["source"]))
                            continue
                        session = Session({}, sample=Sample(**case["sample"]) if "sample" in case else None)
                        answer(**_ran(watch, session, function, tensors, order["source"]))
            except BaseException as error:  # of the submission's own top level
                answer(failure=child.failure_of(error, order["source"]))

    return serve


@dataclass(slots=True)
class Tuned:
    """Which configuration an autotuner takes: any of them, since a GPU may find any the fastest, so each must be right;
    at the goal's size the first, as where it is compiled."""

    is_first: bool = False

    def seconds(self) -> float:
        return 1.0 if self.is_first else random.SystemRandom().random()


@contextlib.contextmanager
def _pretended(gpu: Gpu, tuned: Tuned) -> Iterator[None]:
    untimed = nothing_timed(leave_out, lambda tuner: None, tuned.seconds)
    with cuda_of(gpu), driver_of(gpu), untimed, listening(refuse_gluon):
        yield


def _tensors(case: dict[str, Any], known: dict[Spec, Any]) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs."""
    specs = [[Spec.from_json(spec) for spec in case[name]] for name in ("inputs", "outputs")]
    for spec in (*specs[0], *specs[1]):
        if spec not in known:
            known[spec] = mapped(spec).tensor
    return [known[spec] for spec in specs[0]], [known[spec] for spec in specs[1]]


def _ran(
    watch: Watch, session: Session, function: Any, tensors: tuple[list[Any], list[Any]], file: str
) -> dict[str, Any]:
    """One call, and all that was seen of it."""
    inputs, outputs = tensors
    made: list[str] = []
    session.on_launch = lambda jit, grid, given: made.append(words_of(jit, grid, given, [*inputs, *outputs]))
    watch.session = session
    guard, failure, returned = Guard(file), None, None
    try:
        with torch_hooks.watching(session.memory):
            for output in outputs:
                session.memory.created_empty(output)
            with guard:
                returned = function(*inputs, *outputs)
    except BaseException as error:  # the submission's; a MemoryError and a SystemExit, too
        failure = child.failure_of(error, file)
    session.memory.finish()
    return {
        "failure": failure,
        "findings": [
            {"id": each.id, "line": each.place.line if each.place else 0, "detail": each.detail,
             "is_information": each.is_information}
            for each in session.notes.findings()
            if each.id not in OF_THE_JUDGE
        ],
        "launches": session.launches,
        "made": made,
        "written": [_written(session, output) for output in outputs],
        "has_atomics": session.has_atomics,
        "kernels": list(session.names),
        "torch": guard.noted,
        "has_returned": returned is not None,
    }  # fmt: skip


def _written(session: Session, output: Any) -> list[dict[str, Any]]:
    """What each program that ran stored to an output, by launches."""
    launches = session.written.get(output.untyped_storage().data_ptr(), ())
    return [{"total": each.total, "counts": each.counts} for each in launches]
