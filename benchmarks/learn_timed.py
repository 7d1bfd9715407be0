"""Every exercise's solution through the grader's timed runs on this GPU, and submissions that cheat the clock.

    python benchmarks/learn_timed.py --json learn_timed_h200.json      all of them, within 60 s
    python benchmarks/learn_timed.py copy matmul --limit 20            some of them, and the cheats

The grader owns all memory (CUDA IPC), fills, poisons, times and judges; a child only launches. `of the limit` is the
goal's floor over the grader's time. A cheat must be refused, or be no faster than the honest kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sublight.gpus import Gpu, detect
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.grade.check import order_of
from sublight.learn.grade.crew import Crew
from sublight.learn.grade.goal import floor_s
from sublight.learn.grade.timed import Stopwatch
from sublight.learn.grade.timed_fakes import TIMED, TimedCheat
from sublight.learn.record import Exercise
from sublight.results import write_json

TOGETHER = 8  # submissions that compile at the same time; their runs follow one another
GAIN = 1.05  # a cheat that is refused nowhere may not be faster than the honest kernel by more


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="exercises; all with a kernel unless named")
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--limit", type=float, default=60.0, metavar="S", help="begin nothing after S seconds")
    given = options.parse_args()
    gpu = detect()
    if gpu is None:
        raise SystemExit("no GPU here: sublight/learn/grade/timed_test.py runs the protocol on a CPU")
    until = time.monotonic() + given.limit
    names = given.names or [each.name for each in EXERCISES if each.kind == "kernel"]
    jobs = [(cheat.name, find("add"), cheat.source) for cheat in TIMED]
    jobs = [("add", find("add"), find("add").solution()), *jobs]
    jobs += [(name, find(name), find(name).solution()) for name in names if name != "add"]
    rows: dict[str, dict[str, Any]] = {}
    with Crew(modes=("launch",), has_gpu=True) as crew, ThreadPoolExecutor(TOGETHER) as pool:
        for start in range(0, len(jobs), TOGETHER):
            if time.monotonic() < until:
                rows |= timed(jobs[start : start + TOGETHER], gpu, crew, pool)
    print(table(rows, TIMED))
    if given.json:
        write_json({"gpu": gpu.key, "rows": list(rows.values())}, given.json)


def timed(
    jobs: Sequence[tuple[str, Exercise, str]], gpu: Gpu, crew: Crew, pool: ThreadPoolExecutor
) -> dict[str, dict[str, Any]]:
    """Some submissions: their first calls at the same time, their timed runs one after another."""
    with ExitStack() as stack:
        watches = {}
        for label, exercise, source in jobs:
            folder = Path(stack.enter_context(crew.folder()))
            order = order_of(exercise, source, folder, gpu)
            watches[label] = Stopwatch(exercise=exercise, gpu=gpu, order=order, crew=crew, folder=folder)
            stack.callback(watches[label].close)
        failures = dict(zip(watches, pool.map(begun, watches.values()), strict=True))
        return {label: row_of(label, watch, failures[label], gpu) for label, watch in watches.items()}


def begun(watch: Stopwatch) -> str:
    """Why it could not begin, for no fault of the submission's; empty where it did."""
    try:
        watch.begin()
    except Exception as error:  # shown in the table: the others go on
        return f"{type(error).__name__}: {error}"
    return ""


def row_of(label: str, watch: Stopwatch, failure: str, gpu: Gpu) -> dict[str, Any]:
    goal = watch.exercise.goal
    assert goal
    row: dict[str, Any] = {"name": label, "exercise": watch.exercise.name, "goal": goal.fraction, "failure": failure}
    if failure:
        return row
    began_s = time.monotonic()
    try:
        found = watch.timing()
    except Exception as error:
        return row | {"failure": f"{type(error).__name__}: {error}"}
    row |= {"faults": [f"{fault.kind}: {fault.text}" for fault in watch.faults], "took_s": time.monotonic() - began_s}
    if found is None:
        return row
    floor = floor_s(gpu, watch.exercise.least_cost(goal.shape, goal.dtype))
    return row | {"seconds": found.seconds, "runs_s": found.runs_s, "calls": found.calls, "sets": found.sets,
                  "method": found.method, "fraction": floor / found.seconds}  # fmt: skip


def table(rows: dict[str, dict[str, Any]], cheats: Sequence[TimedCheat]) -> str:
    """Solutions with their times, then cheats with why each failed, or that it gained nothing."""
    by_name = {cheat.name: cheat for cheat in cheats}
    lines = [f"{'solution':20} {'time':>10} {'of the limit':>13} {'goal':>6}"]
    for name, row in rows.items():
        if name in by_name:
            continue
        if "fraction" in row:
            note = "" if row["fraction"] >= row["goal"] else "  below its goal"
            timed = f"{row['seconds'] * 1e6:>7.1f} µs {row['fraction']:>13.2f} {row['goal']:>6.2f}"
            lines.append(f"{name:20} {timed}{note}")
        else:
            lines.append(f"{name:20} {row['failure'] or '; '.join(row['faults'])}")
    honest, held = rows.get("add", {}).get("seconds"), 0
    for name, cheat in by_name.items():
        if name not in rows:
            continue
        outcome, is_held = outcome_of(cheat, rows[name], honest)
        held += is_held
        lines.append(f"{'held' if is_held else 'NOT HELD'}: {name}: {outcome}")
    return "\n".join([*lines, f"{held} of {sum(name in rows for name in by_name)} cheats held"])


def outcome_of(cheat: TimedCheat, row: dict[str, Any], honest_s: float | None) -> tuple[str, bool]:
    """What became of a cheat, and whether it is what must become of it."""
    if row["failure"]:
        return row["failure"], False
    if row["faults"]:
        is_meant = any(fault.startswith(cheat.kinds) and cheat.word in fault for fault in row["faults"])
        return "; ".join(row["faults"])[:160], bool(cheat.kinds) and is_meant
    gain = honest_s / row["seconds"] if honest_s else float("nan")
    return f"{row['seconds'] * 1e6:.1f} µs, {gain:.2f} times as fast as the honest one", not cheat.kinds and gain < GAIN


if __name__ == "__main__":
    main()
