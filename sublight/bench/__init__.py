"""Ops × shapes × data types × providers × directions: each checked, timed alone, and set against its floor.

Every provider of a case gets the same inputs in the same run. What ran is read from the profiler, not assumed: `ours`
is true only where a kernel of this project was seen.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sublight.backend import native
from sublight.bench.case import Case, cases, check_providers, providers
from sublight.bench.measure import CaseBench
from sublight.cost import Direction, shape_text
from sublight.health.check import wrong_with
from sublight.health.read import this_gpu
from sublight.limits import busy
from sublight.limits import run as limits_run
from sublight.limits.run import Machine
from sublight.op import Op
from sublight.results import Limits, Result, Run

Progress = Callable[[str, int, int], None]
NEEDED = {  # the limits that a floor is made of
    "cuda": ("hbm_copy", "launch_graph_node", "vector_fp32", "matmul_bf16"),
    "cpu": ("host_copy", "launch_eager"),
}


def missing_limits(machine: Machine, needed: Sequence[str] = ()) -> list[str]:
    """Limits that floors need and that were never measured here, or only while others used the machine, now idle."""
    cached, wanted = limits_run.cached(machine), needed or NEEDED[machine.kind]
    if cached is None:
        return list(wanted)
    missing = [name for name in wanted if cached.value(name) is None]
    again = [name for name in limits_run.measured_busy(cached) if name in wanted and name not in missing]
    return [*missing, *again] if not again or busy.is_quiet() else missing


def limits_for(machine: Machine, progress: Progress | None = None) -> Limits:
    """The limits measured on this machine before; what a floor needs beyond them is measured now, quickly, and kept."""
    cached = limits_run.cached(machine)
    missing = missing_limits(machine)
    if not missing and cached is not None:
        return cached
    measured = limits_run.run(kind=machine.kind, quick=True, only=missing, progress=progress)
    kept = {limit.name: limit for limit in (cached.limits if cached else ()) if limit.value is not None}
    known = {limit.name: limit for limit in measured.limits} | kept
    return replace(measured, limits=tuple(known.values()), source="measured just now (--quick)")


def run(
    ops: Sequence[Op],
    *,
    machine: Machine,
    limits: Limits,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    against: Sequence[str] = (),
    directions: Sequence[Direction] = (),
    quick: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Measure; Ctrl-C keeps the rows that are done."""
    check_providers(ops, against)
    limits_run.check_room(machine)
    if machine.kind == "cuda" and ops:
        native.wait()  # time calls as users have them from their second minute on: through the native path
    work = [
        (case, name)
        for case in cases(ops, machine, shapes, dtypes, directions, quick)
        for name in providers(case.op, against)
    ]
    rows: list[Result] = []
    unwell = wrong_with(this_gpu()) if machine.kind == "cuda" else []
    watch = busy.Watch()
    try:
        for case, group in _grouped(work):
            bench = CaseBench(case, machine, limits, quick)
            for name in group:
                if progress:
                    progress(f"{case.op.name} {shape_text(case.shape)} {case.direction} {name}", len(rows), len(work))
                rows.append(bench.measure(name))
            rows[-len(group) :] = bench.with_calls(rows[-len(group) :])
            bench.release()
    except KeyboardInterrupt:
        pass
    if machine.kind == "cuda":
        unwell += wrong_with(this_gpu())
    elif "compile" not in against:  # its workers, which live on, would count as others
        unwell += busy.words(watch.share())
    return Run(
        gpu=machine.gpu.key if machine.gpu else machine.device,
        driver=machine.driver,
        torch=_version("torch"),
        triton=_version("triton"),
        commit=commit(),
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        limits=limits,
        rows=tuple(rows),
        unwell=tuple(dict.fromkeys(unwell)),
    )


def _grouped(work: Sequence[tuple[Case, str]]) -> Iterator[tuple[Case, list[str]]]:
    by_case: dict[int, tuple[Case, list[str]]] = {}
    for case, name in work:
        by_case.setdefault(id(case), (case, []))[1].append(name)
    yield from by_case.values()


def commit() -> str:
    """The commit of the checkout that this runs from, with a mark where the checkout has changes."""
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
        return answer.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
