"""Attention on a GPU in one call: each step of the ladder checked against float64, then timed beside cuDNN and flash 2.

    python benchmarks/attention.py --json attention.json       everything, about six minutes
    python benchmarks/attention.py --only forward,decode       parts of it
    python benchmarks/attention.py --from attention.json       the tables of an earlier run

Every part runs in a process of its own with a time limit, so that a kernel that hangs or breaks the GPU's context costs
its own rows and no others: `hopper`, which no GPU has run yet, comes last. The check is the tests of the family; the
times are `sublight bench`'s, which holds every timed call against float64 once more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = "sublight/ops/attention"
PEERS = "cudnn,flash2"
BAR = {"fwd": "cudnn", "bwd": "cudnn"}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process."""

    words: tuple[str, ...]  # after `python`
    limit_s: float
    is_bench: bool = True


def bench(*words: str, limit_s: float) -> Part:
    return Part(words=("-m", "sublight", "bench", *words), limit_s=limit_s)


PARTS: dict[str, tuple[Part, ...]] = {
    "check": (
        Part(words=("-m", "pytest", "-q", "-x", TESTS, "-k", "not hopper"), limit_s=150, is_bench=False),
        Part(words=("-m", "pytest", "-q", "-x", TESTS, "-k", "hopper"), limit_s=60, is_bench=False),
    ),
    "forward": (
        bench("attention", "--direction", "fwd", "--against", f"{PEERS},online,flash", limit_s=120),
        bench("attention", "--direction", "fwd", "--against", f"{PEERS},hopper", limit_s=90),
    ),
    "backward": (bench("attention", "--direction", "bwd", "--against", f"{PEERS},flash", limit_s=150),),
    "decode": (bench("paged_attention", "kv_write", "--against", "launch", limit_s=90),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"parts, with commas: {', '.join(PARTS)}")
    parser.add_argument("--json", help="write the rows here as well", metavar="FILE")
    parser.add_argument("--from", dest="source", help="show the rows of this file, measure nothing", metavar="FILE")
    given = parser.parse_args()
    names = [name.strip() for name in (given.only or ",".join(PARTS)).split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: use {', '.join(PARTS)}")
    if given.source:
        try:
            rows = json.loads(Path(given.source).read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"cannot read rows from {given.source}: {type(error).__name__}")
    else:
        rows = measure(names)
    print("\n".join(tables(rows)))
    if given.json:
        Path(given.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def measure(names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of these parts; what went wrong is printed, and the next part begins."""
    rows: list[dict[str, Any]] = []
    for name in names:
        for part in PARTS[name]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rows.json"
                words = [*part.words, *(("--json", str(file)) if part.is_bench else ())]
                print(f"{name}: python {' '.join(part.words)}", flush=True)
                try:
                    done = subprocess.run(
                        [sys.executable, *words], capture_output=True, text=True, timeout=part.limit_s, check=False
                    )
                except subprocess.TimeoutExpired:
                    print(f"  not done after {part.limit_s:.0f} s: stopped", flush=True)
                    continue
                if done.returncode or not part.is_bench:
                    lines = (done.stdout + done.stderr).strip().splitlines()
                    print("\n".join(f"  {line}" for line in lines[-6:]), flush=True)
                if file.exists():
                    known = {key(row) for row in rows}
                    rows += [row for row in json.loads(file.read_text())["rows"] if key(row) not in known]
    return rows


def key(row: Row) -> tuple[Any, ...]:
    return row["op"], row["direction"], tuple(row["shape"].items()), row["dtype"], row["provider"]


def tables(rows: Sequence[Row]) -> list[str]:
    """A line a case, a column a provider: TFLOP/s, or TB/s of what only moves bytes; `!` where float64 disagrees."""
    lines = []
    for op, direction in dict.fromkeys((row["op"], row["direction"]) for row in rows):
        mine = [row for row in rows if (row["op"], row["direction"]) == (op, direction)]
        providers = list(dict.fromkeys(row["provider"] for row in mine))
        unit = "TFLOP/s" if op == "attention" else "TB/s"
        lines += ["", f"{op} {direction}, {unit}", "".join(f"{each:>10}" for each in ["", *providers])]
        by_case: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in mine:
            by_case.setdefault((*row["shape"].items(), row["dtype"]), {})[row["provider"]] = row
        for case, found in by_case.items():
            words = " ".join(f"{name}{value}" for name, value in case[:-1])
            cells = "".join(f"{cell(found.get(each), unit):>10}" for each in providers)
            lines.append(f"  {words}\n{'':>10}{cells}{ratio(found, BAR.get(direction, ''))}")
        lines += [f"  {row['provider']}: {row['unavailable']}" for row in mine if row.get("unavailable")]
    return lines


def cell(row: Row | None, unit: str) -> str:
    if row is None or not row.get("median_s"):
        return "-"
    work = row["flops"] if unit == "TFLOP/s" else row["bytes"]
    wrong = "!" if row.get("error", 0.0) > 2 else ""
    return f"{work / row['median_s'] / 1e12:.{0 if unit == 'TFLOP/s' else 2}f}{wrong}"


def ratio(found: Mapping[str, Row], peer: str) -> str:
    """The best of ours over the peer, of those that are right."""
    ours = [row for row in found.values() if row.get("ours") and row.get("median_s") and row.get("error", 0.0) <= 2]
    theirs = found.get(peer)
    if not ours or not theirs or not theirs.get("median_s"):
        return ""
    best = min(ours, key=lambda row: row["median_s"])
    return f"   {best['provider']} {theirs['median_s'] / best['median_s']:.2f} x {peer}"


if __name__ == "__main__":
    main()
