"""Attention's bars on an H200: the cases that have one, each checked against float64 and timed, in a given time.

    python benchmarks/attention.py --jobs 14 --limit 150 --json attention.json --into benchmarks/h200.json
    python benchmarks/attention.py --only decode,forward          parts of it, in the order of worth
    python benchmarks/attention.py --from benchmarks/h200.json    the table of bars of an earlier run

The rows are `sublight bench`'s, one process for all; they are written after every case, so that a run that ends early
keeps what it has. With `--jobs` kernels are compiled in so many processes first. A bar is met where a row of a result
that float64 agrees with reaches it; what has no row is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sublight.results import Result, Run

sys.path.insert(0, str(Path(__file__).parent))
from predict_rows import COMPILE_S, compile_first

ALLOWED = 2.0  # our error may be this many times PyTorch's
PEERS = "cudnn,hopper,flash"
STEPS = {"forward": "fwd", "backward": "bwd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a case must reach: a multiple of cuDNN's rate, a number of bytes a second, or a time."""

    part: str  # the part of this script that measures it
    name: str
    shape: str  # as `bench --shape` has it
    ratio: float = 0.0
    bytes_per_s: float = 0.0
    seconds: float = 0.0

    @property
    def op(self) -> str:
        return "paged_attention" if self.part == "decode" else "attention"

    @property
    def direction(self) -> str:
        return STEPS.get(self.part, "fwd")


def _square(part: str, length: int, dim: int, ratio: float) -> list[Bar]:
    sizes = f"{length}x{length}x{dim}"
    return [
        Bar(part=part, name=f"heads of {dim}, {length}, {kind}", shape=f"4x16x16x{sizes},causal={flag}", ratio=ratio)
        for flag, kind in enumerate(("full", "causal"))
    ]


BARS = (
    Bar(part="decode", name="one sequence of 4096", shape="1x32x8x1x4096x128,page=16,ragged=0", seconds=9e-6),
    Bar(part="decode", name="one of 32768", shape="1x32x8x1x32768x128,page=16,ragged=0", bytes_per_s=3.8e12),
    Bar(part="decode", name="16 of 8192", shape="16x32x8x1x8192x128,page=16,ragged=0", bytes_per_s=4.1e12),
    Bar(part="decode", name="128 of 1 to 4095", shape="128x32x8x1x4095x128,page=16,ragged=1", bytes_per_s=3.8e12),
    *_square("forward", 4096, 128, 1.08),
    *_square("forward", 4096, 64, 1.02),
    *_square("backward", 4096, 128, 1.02),
    *_square("backward", 4096, 64, 0.96),
    *_square("forward", 16384, 128, 1.08),
)
MEANS = (  # part, provider, size of head, least geometric mean of the ratios to cuDNN
    ("forward", "hopper", "128", 1.03),
    ("forward", "flash", "128", 0.82),
    ("forward", "flash", "", 0.82),
    ("backward", "flash", "", 0.7),
    ("backward", "hopper", "", 0.85),
)
OTHERS = (  # the family's other ops, at their own shapes
    *("kv_write", "paged_prefill", "mla_decode", "cascade", "kv_gather", "kv_copy", "rope_kv_write"),
    "packed_attention",
)
PARTS = ("decode", "forward", "backward", "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"parts, with commas: {', '.join(PARTS)}")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no further case is begun")
    parser.add_argument("--json", type=Path, help="write the run here, as `sublight bench` does", metavar="FILE")
    parser.add_argument("--into", type=Path, help="renew these rows of an earlier file", metavar="ALL.json")
    parser.add_argument("--from", dest="source", type=Path, help="show this file's bars, measure nothing")
    parser.add_argument("--jobs", type=int, default=0, help="compile kernels in so many processes first")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of --jobs: this process compiles
    args = parser.parse_args()
    parts = [name.strip() for name in (args.only or ",".join(PARTS)).split(",")]
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: use {', '.join(PARTS)}")
    from sublight import results
    from sublight.errors import BadInput

    began = time.monotonic()
    if args.part is not None:
        return compiled(parts, args.part, args.jobs)
    if args.jobs:
        compile_first(args.jobs)
        print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    try:
        whole = results.read_run(args.into) if args.into else None  # before anything is measured
        run = results.read_run(args.source) if args.source else measured(parts, began + args.limit, args.json)
        if whole is not None:
            newer = dataclasses.replace(run, limits=whole.limits)  # a short run measures but those that it needs
            results.write_json(whole.merged(newer).to_json(), args.into)
    except BadInput as error:
        parser.error(str(error))
    print("\n".join(table(run.rows)))


def compiled(parts: Sequence[str], part: int, jobs: int) -> None:
    """This process's share of the cases, each run once: their kernels are then in Triton's cache."""
    import torch

    from sublight import ops
    from sublight.bench.case import cases as cases_of
    from sublight.bench.case import providers
    from sublight.bench.measure import CaseBench
    from sublight.limits.run import this_machine

    began, machine = time.monotonic(), this_machine("cuda")
    work = [
        (case, provider)
        for name, shapes, direction, against in cases(parts)
        for case in cases_of([ops.find(name)], machine, shapes, ("bfloat16",), (direction,), False)
        for provider in providers(case.op, against.split(",") if against else ())
        if provider in ("sublight", "hopper", "flash")
    ]
    for case, provider in work[part::jobs]:
        if time.monotonic() - began > COMPILE_S:
            break
        with contextlib.suppress(Exception), torch.set_grad_enabled(case.direction != "fwd"):  # the run says what fails
            inputs = case.op.inputs(case.shape, case.dtype, "cuda", 0)
            CaseBench(case, machine, None, False).thunk(provider, inputs)()  # type: ignore[arg-type]


def measured(parts: Sequence[str], end: float, json: Path | None) -> Run:
    """Measure cases, the most valuable first, until time is up."""
    from sublight import bench, ops, results
    from sublight.limits.run import this_machine

    machine = this_machine("cuda")
    limits = bench.limits_for(machine)
    run = bench.run((), machine=machine, limits=limits)
    for op, shapes, direction, against in cases(parts):
        name = f"{op} {' '.join(shapes)} {direction}"
        if time.monotonic() > end:
            print(f"no time left for {name}", flush=True)
            continue
        measured_run = bench.run(
            [ops.find(op)], machine=machine, limits=limits, shapes=shapes, dtypes=("bfloat16",),
            against=against.split(",") if against else (), directions=(direction,),
        )  # fmt: skip
        run = dataclasses.replace(measured_run, rows=(*run.rows, *measured_run.rows))
        if json:
            results.write_json(run.to_json(), json)
        print(f"{end - time.monotonic():5.0f} s left  {name}: {'; '.join(map(_short, measured_run.rows))}", flush=True)
    return run


def cases(parts: Sequence[str]) -> list[tuple[str, tuple[str, ...], Any, str]]:
    """Each op with its shapes (none: the op's own), direction, and the peers timed beside it and PyTorch."""
    of_bars = [
        (bar.op, (bar.shape,), bar.direction, "flash" if bar.part == "decode" else PEERS)
        for bar in BARS
        if bar.part in parts
    ]
    return [*of_bars, *((name, (), "fwd", "") for name in OTHERS if "others" in parts)]


def _short(row: Result) -> str:
    if not row.median_s:
        return f"{row.provider} {row.unavailable}"
    wrong = f", {row.error:.1f} times PyTorch's error" if row.error and row.error > ALLOWED else ""
    return f"{row.provider} {1e6 * row.median_s:.4g} µs{wrong}"


def table(rows: Iterable[Result]) -> list[str]:
    """In Markdown: the cases with a bar, then the means over them."""
    rows_of: dict[tuple[str, str], dict[str, Result]] = {}
    for row in rows:
        if row.median_s and (row.error or 0.0) <= ALLOWED:
            rows_of.setdefault((_key(row.op, row.shape), row.direction), {})[row.provider] = row
    of_bar = {bar: rows_of.get((_key(bar.op, _shape(bar)), bar.direction), {}) for bar in BARS}
    lines = ["| part | case | PyTorch | cuDNN | `hopper` | `flash` | bar | reached |", f"|{' --- |' * 8}"]
    for bar, by in of_bar.items():
        # a call without a name goes to `hopper` in decoding, which `bench` shows as the call
        ours = by.get("sublight" if bar.part == "decode" else "hopper")
        cells = (by.get("torch"), by.get("cudnn"), ours, by.get("flash"))
        shown = " | ".join(_rate(row, bar) for row in cells)
        lines.append(f"| {bar.part} | {bar.name} | {shown} | {_wanted(bar)} | {_reached(bar, ours, by.get('cudnn'))} |")
    for part, provider, dim, least in MEANS:
        ratios = [
            by["cudnn"].median_s / by[provider].median_s  # type: ignore[operator]
            for bar, by in of_bar.items()
            if bar.part == part and f"heads of {dim}" in bar.name and {"cudnn", provider} <= by.keys()
        ]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        reached = f"{mean:.2f} x over {len(ratios)}: {_verdict(mean >= least)}" if ratios else "not measured"
        which = f"heads of {dim}, " if dim else ""
        lines.append(f"| {part} | {which}`{provider}`, geometric mean | | | | | {least:g} x cuDNN | {reached} |")
    return lines


def _shape(bar: Bar) -> Mapping[str, int]:
    from sublight import ops

    return ops.find(bar.op).parse_shape(bar.shape)


def _key(op: str, shape: Mapping[str, int]) -> str:
    return f"{op} {sorted(shape.items())}"


def _rate(row: Result | None, bar: Bar) -> str:
    if row is None or not row.median_s:
        return ""
    if bar.part == "decode":
        return f"{1e6 * row.median_s:.3g} µs, {row.bytes / row.median_s / 1e12:.2f} TB/s"
    return f"{row.flops / row.median_s / 1e12:.0f}"


def _wanted(bar: Bar) -> str:
    if bar.ratio:
        return f"{bar.ratio:g} x cuDNN"
    return f"{1e6 * bar.seconds:g} µs" if bar.seconds else f"{bar.bytes_per_s / 1e12:g} TB/s"


def _reached(bar: Bar, ours: Result | None, peer: Result | None) -> str:
    if ours is None or not ours.median_s or (bar.ratio and (peer is None or not peer.median_s)):
        return "not measured"
    if bar.ratio:
        ratio = peer.median_s / ours.median_s  # type: ignore[union-attr, operator]
        return f"{ratio:.2f} x: {_verdict(ratio >= bar.ratio)}"
    if bar.seconds:
        return _verdict(ours.median_s <= bar.seconds)
    return _verdict(ours.bytes / ours.median_s >= bar.bytes_per_s)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "not met"


if __name__ == "__main__":
    sys.exit(main())
