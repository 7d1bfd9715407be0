"""Measures ops on this GPU, as `predict_fit.py` reads them, or holds predictions against them.

    python benchmarks/predict_rows.py --json benchmarks/h200_products.json     rows for the tables, about three minutes
    python benchmarks/predict_rows.py --only "memory-bound op" --jobs 14 --limit 60
                                                                               some kinds; kernels are compiled in 14
                                                                               processes first; no more than a minute
    python benchmarks/predict_rows.py --ops rms_norm:bwd,sample --most 60
                                                                               memory-bound ops, these alone
    python benchmarks/predict_rows.py --check --seed 1                         errors on shapes that are in no table
    python benchmarks/predict_rows.py --tiny                                   a few small shapes, on whatever there is

`sublight/predict/rows.py` says what is measured, and how shapes are drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from sublight import cost
from sublight.predict import analytic, expected, machine, memory_ops
from sublight.predict.operation import Kind, Operation
from sublight.predict.rows import COUNTS, calls_of, cases, measured

COMPILE_S = 25.0  # that --jobs may take
BARS = dict.fromkeys(COUNTS, (0.05, 0.12)) | {"memory-bound op": (0.04, 0.10)}
SMALL = "op that a launch bounds"  # a memory-bound op of so few bytes that its floor is a launch: no bar


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--seed", type=int, default=0, help="another one draws other shapes")
    options.add_argument("--check", action="store_true", help="print how far predictions are off")
    options.add_argument("--gpu", default="", help="of the predictions; this one unless told")
    options.add_argument("--tiny", action="store_true", help="a few small shapes")
    options.add_argument("--limit", type=float, default=math.inf, metavar="S", help="begin no shape after S seconds")
    options.add_argument("--only", action="append", choices=list(COUNTS), help="a kind of op; may be given again")
    options.add_argument("--ops", default="", help="memory-bound ops alone: names, each with :bwd where that is meant")
    options.add_argument("--most", type=int, help="so many shapes, where all would take too long")
    options.add_argument("--jobs", type=int, default=0, help="compile kernels in so many processes first")
    options.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of --jobs: this process compiles
    args = options.parse_args()
    begin = time.monotonic()
    if args.jobs and args.part is None:
        compile_first(args.jobs)
        print(f"kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    device, key = this_device()
    only = ("memory-bound op",) if args.ops else args.only or tuple(COUNTS)
    streams = chosen(args.ops) if args.ops else memory_ops.OPS
    drawn = list(cases(args.seed, tiny=args.tiny, only=only, streams=streams))[: args.most]
    if args.part is not None:
        for kind, shape in drawn[args.part :: args.jobs]:
            if time.monotonic() - begin < COMPILE_S:
                with contextlib.suppress(RuntimeError):  # the run itself says what failed
                    calls_of(kind, shape, device, 1)[0]()
        return
    rows: list[dict[str, Any]] = []
    for kind, shape in drawn:
        if time.monotonic() - begin > args.limit:
            break
        try:
            rows.append(measured(kind, shape, device))
        except RuntimeError as error:
            print(f"not measured: {kind} {shape}: {str(error).splitlines()[0]}", flush=True)
        if args.json and len(rows) % 20 == 0:  # what there is, whatever happens next
            write(args.json, key, rows)
    if args.json:
        write(args.json, key, rows)
    print(f"{len(rows)} of {len(drawn)} rows on {key} in {time.monotonic() - begin:.0f} s")
    if args.check:
        print(table(errors(rows, machine.find(args.gpu or key))))


def chosen(names: str) -> tuple[memory_ops.MemoryOp, ...]:
    """
    >>> chosen("sample,rms_norm:bwd")
    (MemoryOp(op='sample', direction='fwd'), MemoryOp(op='rms_norm', direction='bwd'))
    """
    known = {each.op if each.direction == "fwd" else f"{each.op}:{each.direction}": each for each in memory_ops.OPS}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise SystemExit(f"--ops {unknown[0]}: give some of {', '.join(known)}")
    return tuple(known[name] for name in names.split(","))


def compile_first(jobs: int) -> None:
    """Every case runs once in one of several processes, which leave their kernels in Triton's cache."""
    command = [sys.executable, *sys.argv]
    started = [subprocess.Popen([*command, "--part", str(part)], stdout=subprocess.DEVNULL) for part in range(jobs)]
    for process in started:
        process.wait()


def this_device() -> tuple[str, str]:
    """torch's device, and the GPU's key in the table."""
    import torch

    from sublight import gpus

    gpu = gpus.detect()
    return ("cuda", gpu.key) if torch.cuda.is_available() and gpu else ("cpu", "h200")


def operation(row: dict[str, Any]) -> Operation:
    kind: Kind = {"matmul": "product", "attention": "attention"}.get(row["op"], "stream")  # type: ignore[assignment]
    spent = cost.find(row["op"])(row["shape"], "bfloat16", row["direction"])
    if kind == "attention":  # and the write of the cache
        shape = row["shape"]
        numel = shape["batch"] * shape["q_len"] * shape["kv_heads"] * shape["head_dim"]
        spent = spent + cost.Cost(read_bytes=4 * numel, write_bytes=4 * numel)
    return Operation(
        name=kind,
        op=row["op"],
        kind=kind,
        shape=row["shape"],
        dtype="bfloat16",
        direction=row["direction"],
        count=1,
        cost=spent,
    )


def errors(rows: list[dict[str, Any]], here: machine.Machine) -> list[dict[str, Any]]:
    """Median and 90th percentile of |predicted / measured - 1|, of the prediction and of the pure roofline."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        cold = analytic.cold_share(row["bytes"] * row["buffer_sets"], here.gpu.l2_bytes or 1)
        predicted = expected.timed(operation(row), here, cold).expected_s
        rate = here.gpu.memory_bytes_per_s or 1.0
        roof = max(row["flops"] / here.peak("bfloat16"), row["bytes"] / rate)
        pair = (abs(predicted / row["median_s"] - 1), abs(roof / row["median_s"] - 1))
        by_kind.setdefault(kind_of(row, here), []).append(pair)
    return [
        {
            "what": kind,
            "rows": len(pairs),
            "predicted": spread([pair[0] for pair in pairs]),
            "roofline": spread([pair[1] for pair in pairs]),
        }
        for kind, pairs in by_kind.items()
    ]


def kind_of(row: dict[str, Any], here: machine.Machine) -> str:
    if row["op"] == "attention":
        return "prefill attention" if row["shape"]["q_len"] > 1 else "decode attention"
    if row["op"] == "matmul":
        return "product"
    floor = here.limits.floor(operation(row).cost)
    return SMALL if floor and floor.bound == "launch" else "memory-bound op"


def spread(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':24} {'rows':>5} {'predicted':>16} {'roofline':>16} {'bar':>14}"]
    for row in rows:
        cells = [f"{100 * row[name][0]:.1f} % · {100 * row[name][1]:.0f} %" for name in ("predicted", "roofline")]
        bar = " · ".join(f"{100 * value:.0f} %" for value in BARS.get(row["what"], ())) or "none"
        lines.append(f"{row['what']:24} {row['rows']:>5} {cells[0]:>16} {cells[1]:>16} {bar:>14}")
    return "\n".join(lines)


def write(path: Path, key: str, rows: list[dict[str, Any]]) -> None:
    import torch

    from sublight.bench import commit
    from sublight.results import write_json

    head = {"gpu": key, "torch": torch.__version__, "commit": commit()}
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    write_json({**head, "date": date, "rows": rows}, path)


if __name__ == "__main__":
    main()
