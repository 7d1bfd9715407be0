"""What a call of ours costs beside PyTorch's, host and device: the bars of host time, judged and measured again.

    python -m benchmarks.host_time                                   judge benchmarks/h200.json
    python -m benchmarks.host_time --measure 60 --json rows.json     time rows anew for 60 s, those beyond a bar first

In eager mode a caller waits for the slower of host and device: that of our call is at most 1.05 times PyTorch's, or
within 1.5 µs of it. Where our kernel runs, the host's time is at most 1.5 times PyTorch's forward and 1.8 times with a
gradient. `--measure` goes on with the rows where the host decides, then with the others; what it wrote is merged into
benchmarks/h200.json (`results.Run.merged`) by `--into`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sublight import results
from sublight.cost import shape_text
from sublight.results import Result, Run

H200 = Path(__file__).parent / "h200.json"
SLOWER, NEAR_S = 1.05, 1.5e-6  # allowed factor and difference, each by the slower of host and device
HOST = {"fwd": 1.5, "bwd": 1.8, "fwd+bwd": 1.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One case: our call and PyTorch's."""

    ours: Result
    theirs: Result

    @property
    def slower(self) -> float:
        """Our call's time over PyTorch's: of each the slower of host and device."""
        return _seconds(self.ours) / _seconds(self.theirs)

    @property
    def host(self) -> float:
        return (self.ours.call_s or 0.0) / (self.theirs.call_s or 1.0)

    @property
    def host_decides(self) -> bool:
        return (self.ours.call_s or 0.0) > 0.9 * (self.ours.median_s or 0.0)

    @property
    def misses(self) -> str:
        """The bar that is missed; empty: none."""
        if self.slower > SLOWER and _seconds(self.ours) - _seconds(self.theirs) > NEAR_S:
            return f"{SLOWER:g} x"
        if self.ours.ours and self.host > HOST[self.ours.direction]:
            return f"host {HOST[self.ours.direction]:g} x"
        return ""

    def line(self) -> str:
        ours, theirs = self.ours, self.theirs
        times = " ".join(
            f"{name} {1e6 * (a or 0):7.1f} /{1e6 * (b or 0):7.1f}"
            for name, a, b in (("host", ours.call_s, theirs.call_s), ("device", ours.median_s, theirs.median_s))
        )
        case = f"{ours.op} {ours.direction} {shape_text(ours.shape)}"
        return f"{self.misses:10} {self.slower:5.2f} {case:45} {times}  {ours.kernel[:40]}"


def _seconds(row: Result) -> float:
    return max(row.call_s or 0.0, row.median_s or 0.0)


def pairs(rows: Sequence[Result]) -> list[Pair]:
    """Our call and PyTorch's of each case that has both, with their host times."""
    timed = {row.key: row for row in rows if row.call_s and row.median_s}
    ours = [row for row in timed.values() if row.provider == "sublight"]
    both = [(row, timed.get((*row.key[:-1], "torch"))) for row in ours]
    return [Pair(ours=one, theirs=other) for one, other in both if other is not None]


def in_order(known: Sequence[Pair]) -> list[Pair]:
    """Pairs that miss a bar first, then those where the host decides; the worst first in each group."""
    return sorted(known, key=lambda pair: (not pair.misses, not pair.host_decides, -pair.slower))


def measured(known: Sequence[Pair], seconds: float) -> Iterator[Run]:
    """A run a case, one after the other, until the seconds are over."""
    from sublight import bench
    from sublight.limits.run import this_machine
    from sublight.ops import find

    machine, limits = this_machine("cuda"), results.read_run(H200).limits
    end = time.monotonic() + seconds
    for pair in in_order(known):
        if time.monotonic() > end:
            return
        row = pair.ours
        words = ",".join(f"{key}={size}" for key, size in row.shape.items())
        yield bench.run(
            [find(row.op)], machine=machine, limits=limits, shapes=[words], dtypes=[row.dtype],
            directions=[row.direction], quick=True,  # type: ignore[list-item]
        )  # fmt: skip


def report(known: Sequence[Pair]) -> None:
    missed = [pair for pair in in_order(known) if pair.misses]
    print("\n".join(pair.line() for pair in missed))
    slower = sum(pair.misses == f"{SLOWER:g} x" for pair in missed)
    print(f"{len(known)} cases: {slower} beyond {SLOWER:g} x, {len(missed) - slower} others beyond the host's bars")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, default=H200, help="results to judge, or to begin from")
    parser.add_argument("--measure", type=float, metavar="SECONDS", help="time rows anew on this GPU")
    parser.add_argument("--json", type=Path, help="write the rows that were measured")
    parser.add_argument("--into", type=Path, help="and merge them into these results")
    options = parser.parse_args(words)
    known = pairs(results.read_run(options.source).rows)
    if options.measure is None:
        report(known)
        return 0
    runs = list(measured(known, options.measure))
    run = replace(runs[0], rows=tuple(row for each in runs for row in each.rows))
    if options.json:
        results.write_json(run.to_json(), options.json)
    if options.into:
        results.write_json(results.read_run(options.into).merged(run).to_json(), options.into)
    report(pairs(run.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
