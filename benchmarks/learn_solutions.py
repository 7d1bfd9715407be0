"""Every solution on this GPU, right and timed as `sublight learn check` does it; then those who cheat the clock.

    python benchmarks/learn_solutions.py --json learn_solutions_h200.json      all of them, within 120 s
    python benchmarks/learn_solutions.py copy matmul --limit 30                some of them, and the cheats
    python benchmarks/learn_solutions.py dequantize=mine.py --cheats no        a submission of your own

Processes side by side check values at a check's sizes. Then the grader's timed runs, one after another: it owns all
memory, which a child maps, fills, poisons, times and judges at the goal's size; the child only launches. `of the limit`
is the goal's floor over the grader's time. A cheat must be refused, or be no faster than the honest kernel.
SUBLIGHT_LEARN_ARENA=ipc shares the memory by CUDA IPC instead of a descriptor.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sublight import correct
from sublight.correct import Error
from sublight.gpus import Gpu, detect
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.grade.cases import Case, cases_of
from sublight.learn.grade.check import order_of
from sublight.learn.grade.crew import Crew
from sublight.learn.grade.timed import Stopwatch
from sublight.learn.grade.timed_fakes import TIMED, TimedCheat
from sublight.learn.record import Exercise
from sublight.results import write_json

PROCESSES = (
    8  # that check values; also: submissions that compile at the same time, before their runs follow one another
)
DRAWS = 4  # draws of a case whose error may be bad luck
GAIN = 1.05  # a cheat that is refused nowhere may not be faster than the honest kernel by more
HONEST = "add"  # the exercise that the cheats pretend to solve


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submission, by a label of its own."""

    label: str
    exercise: str
    file: Path | None = None  # None: `source` is the submission
    source: str = ""

    @property
    def code(self) -> str:
        return self.file.read_text(encoding="utf-8") if self.file else self.source


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="exercises, NAME or NAME=FILE; all with a kernel unless named")
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--limit", type=float, default=120.0, metavar="S", help="begin nothing after S seconds")
    options.add_argument("--cheats", choices=("yes", "no"), default="yes", help="also those who cheat the clock")
    args = options.parse_args()
    gpu = detect()
    if gpu is None:
        raise SystemExit("no GPU here: `sublight learn check` judges a solution without one")
    until = time.monotonic() + args.limit
    jobs = [job_of(name) for name in args.names or [each.name for each in EXERCISES if each.kind == "kernel"]]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        wrong = dict(zip(jobs, pool.map(wrong_or_failed, jobs, [until] * len(jobs)), strict=True))
    cheats = TIMED if args.cheats == "yes" else ()
    fakes = [Job(label=cheat.name, exercise=HONEST, source=cheat.source) for cheat in cheats]
    if cheats and HONEST not in args.names and args.names:
        fakes.insert(0, job_of(HONEST))  # to compare them with
    rows: dict[str, dict[str, Any]] = {}
    with Crew(modes=("launch",), has_gpu=True) as crew, ThreadPoolExecutor(PROCESSES) as threads:
        every = [*jobs, *fakes]
        for start in range(0, len(every), PROCESSES):
            if time.monotonic() < until:
                rows |= timed(every[start : start + PROCESSES], gpu, crew, threads)
    solutions = [rows.get(job.label, row_start(job)) | {"wrong": wrong[job]} for job in jobs]
    honest_s = rows.get(HONEST, {}).get("seconds")
    outcomes = [outcome_of(cheat, rows[cheat.name], honest_s) for cheat in cheats if cheat.name in rows]
    print(table(solutions, outcomes))
    if args.json:
        write_json({"gpu": gpu.key, "rows": solutions, "cheats": outcomes}, args.json)


def job_of(name: str) -> Job:
    """`copy`: the exercise's solution; `copy=mine.py`: that file, as a submission of it."""
    exercise, _, file = name.partition("=")
    return Job(label=name, exercise=exercise, file=Path(file) if file else find(exercise).folder / "solution.py")


def wrong_or_failed(job: Job, until: float) -> str:
    """What is wrong with a submission on this GPU; empty where nothing is."""
    try:
        return wrong_case(job, "cuda", until)
    except Exception as error:  # a kernel that does not compile or launch is a result, too
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def wrong_case(job: Job, device: str, until: float = float("inf")) -> str:
    """The first size of a check at which it is not right by the rule."""
    exercise = find(job.exercise)
    call = function_of(job)
    for case in cases_of(exercise, random.Random(exercise.name)):
        if time.monotonic() > until:
            return f"no time for {case}"
        error = correct.settled(partial(errors, exercise, call, case, device), times=DRAWS)
        if not error.ok:
            return f"{case}: {error.name} is {error.ratio:.3g} times as far off as PyTorch, {error.misplaced} misplaced"
    return ""


def errors(exercise: Exercise, call: Callable[..., Any], case: Case, device: str, seed: int) -> list[Error]:
    """The submission's results and PyTorch's in the same data type, each against float64."""
    problem = exercise.problem()
    inputs = problem.inputs(case.shape, case.dtype, device, seed)
    theirs = problem.outputs(inputs)
    truth = problem.outputs(tuple(x.double() if x.is_floating_point() else x for x in inputs))
    ours = tuple(y.new_empty(y.shape).fill_(float("nan") if y.is_floating_point() else -1) for y in theirs)
    call(*inputs, *ours)
    return [correct.error(*each) for each in zip(exercise.outputs, ours, theirs, truth, strict=True)]


def function_of(job: Job) -> Callable[..., Any]:
    """The submission's function, from its file: Triton reads a kernel's source."""
    assert job.file
    spec = importlib.util.spec_from_file_location(f"solution_{job.exercise}", job.file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, job.exercise)  # type: ignore[no-any-return]


def timed(jobs: Sequence[Job], gpu: Gpu, crew: Crew, pool: ThreadPoolExecutor) -> dict[str, dict[str, Any]]:
    """Some submissions: their first calls at the same time, their timed runs one after another."""
    with ExitStack() as stack:
        watches = {}
        for job in jobs:
            exercise, folder = find(job.exercise), Path(stack.enter_context(crew.folder()))
            order = order_of(exercise, job.code, folder, gpu)
            watches[job] = Stopwatch(exercise=exercise, gpu=gpu, order=order, crew=crew)
            stack.callback(watches[job].close)
        failures = dict(zip(watches, pool.map(begun, watches.values()), strict=True))
        return {job.label: row_of(job, watch, failures[job]) for job, watch in watches.items()}


def begun(watch: Stopwatch) -> str:
    """Why it could not begin, for no fault of the submission's; empty where it did."""
    try:
        watch.begin()
    except Exception as error:  # shown in the table: the others go on
        return f"{type(error).__name__}: {error}"
    return ""


def row_start(job: Job) -> dict[str, Any]:
    goal = find(job.exercise).goal
    assert goal
    return {"name": job.label, "exercise": job.exercise, "goal": goal.fraction, "shape": goal.timed_shape,
            "failure": "", "faults": []}  # fmt: skip


def row_of(job: Job, watch: Stopwatch, failure: str) -> dict[str, Any]:
    """One submission's time, or why there is none."""
    row = row_start(job)
    if failure:
        return row | {"failure": failure}
    began_s = time.monotonic()
    try:
        timing = watch.timing()
    except Exception as error:
        return row | {"failure": f"{type(error).__name__}: {error}"}
    row |= {"faults": [f"{fault.kind}: {fault.text}" for fault in watch.faults], "took_s": time.monotonic() - began_s}
    if timing is None:
        return row
    return row | {"seconds": timing.seconds, "runs_s": timing.runs_s, "calls": timing.calls, "sets": timing.sets,
                  "method": timing.method, "fraction": timing.fraction}  # fmt: skip


def outcome_of(cheat: TimedCheat, row: dict[str, Any], honest_s: float | None) -> dict[str, Any]:
    """How a cheat ended, and whether it ended as it must."""
    if row["failure"]:
        return {"name": cheat.name, "is_held": False, "words": row["failure"]}
    if row["faults"]:
        is_meant = any(fault.startswith(cheat.kinds) and cheat.word in fault for fault in row["faults"])
        return {"name": cheat.name, "is_held": bool(cheat.kinds) and is_meant, "words": "; ".join(row["faults"])[:160]}
    gain = honest_s / row["seconds"] if honest_s else float("inf")
    words = f"{row['seconds'] * 1e6:.1f} µs, {gain:.2f} times as fast as the honest one"
    return {"name": cheat.name, "is_held": not cheat.kinds and gain < GAIN, "words": words}


def table(rows: list[dict[str, Any]], outcomes: list[dict[str, Any]]) -> str:
    """A line for each solution and for each cheat; after each kind, how many are as they must be."""
    lines = [f"{'solution':20} {'time':>10} {'of the limit':>13} {'goal':>6}"]
    for row in rows:
        wrong = "; ".join(filter(None, (row["wrong"], row["failure"], *row["faults"])))
        if "fraction" in row:
            wrong = wrong or ("" if row["fraction"] >= row["goal"] else "below its goal")
            words = f"{row['seconds'] * 1e6:>7.1f} µs {row['fraction']:>13.2f} {row['goal']:>6.2f}  {wrong}"
            lines.append(f"{row['name']:20} {words}".rstrip())
        else:
            lines.append(f"{row['name']:20} {wrong or 'not timed: no time left'}")
    timed_rows = [row for row in rows if "fraction" in row]
    met = sum(row["fraction"] >= row["goal"] for row in timed_rows)
    right = sum(not (row["wrong"] or row["faults"] or row["failure"]) for row in rows)
    lines.append(f"{right} of {len(rows)} right, {met} of {len(timed_rows)} timed reach their goal")
    lines += [f"{'held' if each['is_held'] else 'NOT HELD'}: {each['name']}: {each['words']}" for each in outcomes]
    if outcomes:
        lines.append(f"{sum(each['is_held'] for each in outcomes)} of {len(outcomes)} cheats held")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
