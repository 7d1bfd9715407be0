"""One check: scan, run on sizes that nobody knows beforehand, judge every result, compile for a GPU, hold to a goal."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sublight.cost import shape_text
from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.learn.grade.answers import wrong_answers
from sublight.learn.grade.cases import cases_of
from sublight.learn.grade.crew import Crew
from sublight.learn.grade.goal import floor_s, held_to_goal
from sublight.learn.grade.mistakes import (
    branches,
    counted_beside,
    joins_blocks,
    rebound,
    stores_nothing,
    unread,
    words_between_blocks,
)
from sublight.learn.grade.running import Running
from sublight.learn.grade.sandbox import Budget
from sublight.learn.grade.scan import MODULES, ON_PAPER, runnable, scan
from sublight.learn.grade.scratch import tail
from sublight.learn.record import Exercise
from sublight.learn.verdict import Fault, Verdict, visible

_JOIN = "blocks are joined by & and |, with parentheses around each side"
PRINTED_BYTES = 4000  # of what a submission printed


def check(
    exercise: Exercise, source: str, *, crew: Crew, gpu: Gpu, file: str = "", budget: Budget | None = None
) -> Verdict:
    """Judge a submission; everything that it is comes from `source`."""
    if exercise.kind == "cuda":
        from sublight.learn.grade.cuda.check import check as check_cuda

        return check_cuda(exercise, source, gpu=gpu, file=file, budget=budget)
    goal = exercise.goal
    verdict = Verdict(
        exercise=exercise.name,
        file=file or f"{exercise.name}.py",
        faults=tuple(scan(source, exercise.name, ON_PAPER if exercise.kind == "paper" else MODULES)),
        gpu=gpu.key,
        source=source,
        goal_case=f"{shape_text(goal.shape)} {goal.dtype}" if goal else "",
        goal_fraction=goal.fraction if goal else 0.0,
    )
    if verdict.faults:
        return verdict
    problem = exercise.problem()
    shown = problem.inputs(exercise.shown, exercise.dtypes[0], exercise.sizes_on, 0)
    problem.outputs(shown)  # loads more of torch, while the crew gets ready
    began = time.process_time()
    with crew.folder() as name, ThreadPoolExecutor(1) as pool, _one_thread():
        running = Running(exercise=exercise, problem=problem, crew=crew, folder=Path(name), gpu=gpu,
                          budget=budget or Budget(), order=order_of(exercise, source, Path(name), gpu))  # fmt: skip
        cases = cases_of(exercise, secrets.SystemRandom())
        faults, right = running.values(cases, pool if exercise.goal else None)
        if faults:
            running.stop_compiling()
        if any(fault.kind in ("unwritten", "launch") for fault in faults) and exercise.kind != "paper":
            for line, name in rebound(source, exercise.function, exercise.outputs):
                running.notes[f"line {line}: from here on {name} is another tensor: write into the one given"] = None
            if stores_nothing(source):
                running.notes["no kernel stores anything yet: tl.store(addresses, values, mask=mask) writes"] = None
        if faults and exercise.kind != "paper":
            for line, axis in counted_beside(source):
                words = (
                    f"tl.program_id({axis}) is 0 in every program of a grid of one number: tl.program_id(0) counts them"
                )
                running.notes[f"line {line}: {words}"] = None
        if any(fault.kind == "values" for fault in faults) and exercise.kind != "paper":
            for line, kernel, name in unread(source):
                running.notes[f"line {line}: {kernel} gets {name} and does not use it"] = None
        if faults and branches(source):
            words = f"`and`, `or` and `a < b < c` are for single numbers: {_JOIN}"
            lines, wrong = words_between_blocks(source), joins_blocks(source)
            joined = [Fault(kind="compile", line=line, text=words) for line in lines if line in wrong]
            faults = running.refusals() + joined + faults  # what is wrong further on may come of it
            running.notes |= {f"line {line}: {words}": None for line in lines if line not in wrong}
        is_by_data = any(not x.is_floating_point() for x in shown)
        verdict = replace(verdict, faults=tuple(faults), cases=tuple(right), is_by_data=is_by_data)
        if exercise.goal:
            verdict = _at_goal(verdict, running, exercise)
        if verdict.is_right:
            verdict = replace(verdict, faults=(*verdict.faults, *wrong_answers(exercise, source)))
        printed = tail(Path(name) / "printed", PRINTED_BYTES).decode(errors="replace")
        paths = name + "/"
    if goal and not verdict.faults and (timer := crew.timer(gpu)):
        verdict = _by_the_clock(verdict, exercise, source, timer, gpu)
    return replace(
        verdict,
        faults=tuple(replace(fault, text=visible(fault.text.replace(paths, ""))) for fault in verdict.faults),
        notes=tuple(visible(note.replace(paths, "")) for note in (*running.notes, *verdict.notes)),
        printed=visible(printed),
        cpu_s=sum(running.spent_s) + time.process_time() - began,
    )


def order_of(exercise: Exercise, source: str, folder: Path, gpu: Gpu) -> dict[str, Any]:
    """What the processes that run the submission need to know."""
    script = folder / f"{exercise.name}.py"
    script.write_text(runnable(source), encoding="utf-8")
    return {
        "source": str(script),
        "function": exercise.name,
        "kind": exercise.kind,
        "outputs": exercise.outputs,
        "folder": str(folder),
        "log": str(folder / "printed"),
        "gpu": gpu.key,
    }


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other by spinning: at a check's small sizes that is most of what they do."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _at_goal(verdict: Verdict, running: Running, exercise: Exercise) -> Verdict:
    """What its code allows at the goal's size, and whether it still computes there what it did before."""
    assert exercise.goal
    cost = exercise.least_cost(exercise.goal.shape, exercise.goal.dtype)
    verdict = replace(verdict, least_bytes=cost.bytes, floor_s=floor_s(running.gpu, cost))
    if verdict.faults:
        return verdict
    assert running.compiling
    faults, kernels = running.compiling.result()
    for kernel in kernels:
        if kernel.uncounted:
            running.notes[f"{kernel.name}: {kernel.uncounted}: that is not counted in its best time"] = None
    verdict = replace(verdict, faults=tuple(faults), kernels=kernels)
    faults = faults or held_to_goal(verdict) or running.at_goal()
    return replace(verdict, faults=tuple(faults))


def _by_the_clock(verdict: Verdict, exercise: Exercise, source: str, timer: Crew, gpu: Gpu) -> Verdict:
    """What has passed so far, timed on this machine's GPU; where that cannot be, a note says why."""
    from sublight.extensions.driver import DriverError
    from sublight.learn.grade.timed import timed

    with timer.folder() as name:
        order = order_of(exercise, source, Path(name), gpu)
        try:
            faults, timing = timed(exercise, order, crew=timer, gpu=gpu)
        except (DriverError, RuntimeError, BadInput) as error:
            note = f"it was not timed on this GPU: {str(error).splitlines()[0]}"
            return replace(verdict, notes=(*verdict.notes, note))
    return replace(verdict, faults=tuple(faults), timing=timing)
