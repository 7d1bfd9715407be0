"""Every exercise's solution on this GPU: is it right at a check's sizes and at the goal's, does it reach its goal?

    python benchmarks/learn_solutions.py --json learn_solutions_h200.json      all of them, within 90 s
    python benchmarks/learn_solutions.py copy matmul --limit 20                some of them

Processes side by side check values, and so fill Triton's cache; then one process times the goal's size, one exercise
after another. `of the limit` is the goal's floor over the measured time.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sublight import correct, timing
from sublight.correct import Error
from sublight.gpus import Gpu, detect
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.grade.cases import Case, cases_of
from sublight.learn.grade.goal import floor_s
from sublight.learn.record import Exercise
from sublight.results import write_json

PROCESSES = 8
EACH_S = 0.1  # of timing, for an exercise
L2_BYTES = 64 << 20
DRAWS = 4  # of a case where luck may have decided
MOST_SETS = 64  # of buffers, so that the L2 holds none from one call to the next


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="exercises; all with a kernel unless named")
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--limit", type=float, default=90.0, metavar="S", help="begin nothing after S seconds")
    given = options.parse_args()
    gpu = detect()
    if gpu is None:
        raise SystemExit("no GPU here: `sublight learn check` judges a solution without one")
    until = time.monotonic() + given.limit
    names = given.names or [each.name for each in EXERCISES if each.kind == "kernel"]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        wrong = dict(zip(names, pool.map(wrong_or_failed, names, [until] * len(names)), strict=True))
    rows = [row_of(find(name), wrong[name], gpu, until) for name in names]
    print(table(rows))
    if given.json:
        write_json({"gpu": gpu.key, "rows": rows}, given.json)


def wrong_or_failed(name: str, until: float) -> str:
    """What is wrong with a solution on this GPU; empty where nothing is."""
    try:
        return wrong_case(find(name), "cuda", until)
    except Exception as error:  # a kernel that does not compile or launch is a result, too
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def wrong_case(exercise: Exercise, device: str, until: float = float("inf")) -> str:
    """The first size at which the solution is not right by the rule."""
    call = solution_of(exercise)
    cases = cases_of(exercise, random.Random(exercise.name))
    if exercise.goal and device == "cuda":
        cases.append(Case(shape=exercise.goal.shape, dtype=exercise.goal.dtype))
    for case in cases:
        if time.monotonic() > until:
            return f"no time for {case}"
        found = correct.settled(partial(errors, exercise, call, case, device), times=DRAWS)
        if not found.ok:
            return f"{case}: {found.name} is {found.ratio:.3g} times as far off as PyTorch, {found.misplaced} misplaced"
    return ""


def errors(exercise: Exercise, call: Callable[..., Any], case: Case, device: str, seed: int) -> list[Error]:
    """The solution's results and PyTorch's in the same data type, each against float64."""
    problem = exercise.problem()
    inputs = problem.inputs(case.shape, case.dtype, device, seed)
    theirs = problem.outputs(inputs)
    truth = problem.outputs(tuple(x.double() if x.is_floating_point() else x for x in inputs))
    ours = poisoned(theirs)
    call(*inputs, *ours)
    return [correct.error(*each) for each in zip(exercise.outputs, ours, theirs, truth, strict=True)]


def poisoned(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Room for results in which nothing is right yet."""
    return tuple(y.new_empty(y.shape).fill_(float("nan") if y.is_floating_point() else -1) for y in results)


def solution_of(exercise: Exercise) -> Callable[..., Any]:
    """The solution's function, from its file: Triton reads a kernel's source."""
    spec = importlib.util.spec_from_file_location(f"solution_{exercise.name}", exercise.folder / "solution.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, exercise.name)  # type: ignore[no-any-return]


def row_of(exercise: Exercise, wrong: str, gpu: Gpu, until: float) -> dict[str, Any]:
    """One exercise: what was wrong, its time at the goal's size, and the share of the limit that this is."""
    goal = exercise.goal
    assert goal
    shape = goal.timed_shape
    row: dict[str, Any] = {"exercise": exercise.name, "goal": goal.fraction, "wrong": wrong, "shape": shape}
    if wrong or time.monotonic() > until:
        return row
    least = exercise.least_cost(shape, goal.dtype)
    problem, call = exercise.problem(), solution_of(exercise)
    thunks = []
    for seed in range(min(MOST_SETS, timing.sets_for(least.bytes, L2_BYTES))):
        inputs = problem.inputs(shape, goal.dtype, "cuda", seed)
        thunks.append(partial(call, *inputs, *poisoned(problem.outputs(inputs))))
    samples = timing.measure(thunks, time_limit_s=EACH_S)
    floor = floor_s(gpu, least)
    fraction = floor / samples.median_s
    return row | {"median_s": samples.median_s, "floor_s": floor, "fraction": fraction, "method": samples.method}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each exercise; last, how many were right and how many reached their goal."""
    lines = [f"{'exercise':20} {'time':>10} {'of the limit':>13} {'goal':>6}"]
    for row in rows:
        if "fraction" not in row:
            lines.append(f"{row['exercise']:20} {row['wrong'] or 'not timed: no time left'}")
            continue
        note = "" if row["fraction"] >= row["goal"] else "  below its goal"
        timed = f"{row['median_s'] * 1e6:>7.1f} µs {row['fraction']:>13.2f} {row['goal']:>6.2f}"
        lines.append(f"{row['exercise']:20} {timed}{note}")
    timed_rows = [row for row in rows if "fraction" in row]
    met = sum(row["fraction"] >= row["goal"] for row in timed_rows)
    right = sum(not row["wrong"] for row in rows)
    return "\n".join([*lines, f"{right} of {len(rows)} right, {met} of {len(timed_rows)} timed reach their goal"])


if __name__ == "__main__":
    main()
