"""Every step of the CUDA C++ ladders, checked and timed beside PyTorch in one run.

    python benchmarks/cuda_ladders.py --json benchmarks/cuda_ladders_h200.json    on a GPU, about four minutes
    python benchmarks/cuda_ladders.py --only reduce,matmul                        some ladders
    python benchmarks/cuda_ladders.py --check                                     small shapes, no times

Needs nvcc (kernels are compiled at the first run, a minute) and PyTorch with CUDA. A step is checked by the one rule on
small shapes that cross its block boundaries and on the shape that is timed; compute-sanitizer is for --check. Without a
GPU only --check runs: kernels are played on the CPU. Exit status 1 where a step is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sublight import bench
from sublight.cost import shape_text
from sublight.errors import BadInput, one_of
from sublight.extensions import LADDERS
from sublight.extensions import timed as timed_steps
from sublight.extensions.check import error_of
from sublight.extensions.ladder import Ladder
from sublight.limits.run import Machine, this_machine
from sublight.results import Limits, Result, Run, write_json


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", default="", help=f"ladders, with commas: {', '.join(each.name for each in LADDERS)}")
    words.add_argument("--check", action="store_true", help="check on small shapes, time nothing")
    words.add_argument("--json", type=Path, help="where to write the rows")
    args = words.parse_args()
    try:
        names = [each.name for each in LADDERS]
        chosen = [one_of("ladder", name, names) for name in args.only.split(",")] if args.only else names
        ladders = [each for each in LADDERS if each.name in chosen]
        machine = this_machine("cuda" if not args.check else None)
        wrong = checked(ladders, machine.kind)
        if not args.check:
            wrong += timed(ladders, machine, args.json)
    except BadInput as error:
        print(f"cuda_ladders: {error}", file=sys.stderr)
        return 2
    print("\n".join(wrong) if wrong else "every step is right by the one rule")
    return 1 if wrong else 0


def checked(ladders: list[Ladder], device: str) -> list[str]:
    """Lines about the steps that are wrong on the small shapes, or that failed."""
    wrong = []
    for ladder in ladders:
        for rung in ladder.rungs:
            worst = 0.0
            for dtype in rung.dtypes:
                for shape in ladder.test_shapes:
                    case = f"{ladder.name} {rung.name} {dtype} {shape_text(shape)}"
                    try:
                        error = error_of(ladder, rung, shape, dtype, device)
                    except RuntimeError as failure:
                        wrong.append(f"{case}: {type(failure).__name__}: {str(failure).splitlines()[0]}")
                        continue
                    if error:
                        worst = max(worst, error.ratio)
                        if not error.ok:
                            wrong.append(
                                f"{case}: {error.ratio:.2f} times PyTorch's error, {error.misplaced} misplaced"
                            )
            print(f"{ladder.name:<11} {rung.name:<14} at most {worst:.2f} times PyTorch's error", flush=True)
    return wrong


def timed(ladders: list[Ladder], machine: Machine, path: Path | None) -> list[str]:
    import rich

    from sublight.report import bench as report

    limits = bench.limits_for(machine)
    rows = [row for ladder in ladders for row in ladder_rows(ladder, machine, limits)]
    run = Run(
        gpu=machine.gpu.key if machine.gpu else machine.device,
        driver=machine.driver,
        torch=_version("torch"),
        triton=_version("triton"),
        commit=bench.commit(),
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        limits=limits,
        rows=tuple(rows),
    )
    rich.print(report.page(run))
    if path:
        write_json(run.to_json(), path)
    return [f"{report.case_text(row)} {row.provider}: {report.note(row)}" for row in rows if is_wrong(row)]


def is_wrong(row: Result) -> bool:
    from sublight.report import bench as report

    return report.wrong(row) or report.too_good(row) or (row.ours and row.unavailable is not None)


def ladder_rows(ladder: Ladder, machine: Machine, limits: Limits) -> Iterator[Result]:
    for case in timed_steps.cases(ladder):
        yield from timed_steps.rows(case, machine.kind, machine.cache_bytes, limits)


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
