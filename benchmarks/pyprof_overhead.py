"""What `sublight pyprof` costs: CPU time of looking, over alternating pairs, and of tracing, on the recursive fib.

    python benchmarks/pyprof_overhead.py [--pairs 20] [--json FILE]

Needs no library but this package, so it runs with every Python that is at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sublight.pyprof import native, recorder, tracer
from sublight.pyprof.recorder import Options
from sublight.results import write_file

RATES = ((100.0, 0.01), (1000.0, 0.03))  # looks a second, and what they may cost
DEPTH, FIB = 15, 22
NOTHING = ", nothing counted"
TURNS, TURN_S = 2, 0.25  # of each kind in a pair


def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def work(rounds: int, depth: int = DEPTH) -> int:
    """Calls some levels deep, builtins and arithmetic."""
    if depth:
        return work(rounds, depth - 1)
    total = 0
    for number in range(rounds):
        values = [number % 7, number % 11, number % 13]
        values.sort()
        total += sum(values) * len(str(number))
    return total


def cpu_s(run: Callable[[], object]) -> float:
    """Of this process, all of its threads."""
    before_s = time.process_time()
    run()
    return time.process_time() - before_s


def rounds_of_a_turn() -> int:
    """As many as take `TURN_S` on this machine: a fixed number took 10 ms on a fast one, and to begin and to end a
    recording, some 0.3 ms which a program pays once, stood for a third of what was measured."""
    few = 20_000
    return round(few * TURN_S / min(cpu_s(lambda: work(few)) for _ in range(5)))


def looking(hz: float, pairs: int) -> tuple[list[float], float, float]:
    """Of each pair, by which share the run that was looked at took more CPU; the looks a second that were made; and
    the CPU time that the sampler itself says it took, as a share.

    A pair is some short turns of each kind: what else the machine does meanwhile meets both.
    """
    one = recorder.make(Options(mode="sample", hz=hz))
    rounds = rounds_of_a_turn()
    extra, wall_s, watched_s = [], 0.0, 0.0
    looks_before, own_before_s = _so_far(one)
    for _ in range(pairs):
        times = {True: 0.0, False: 0.0}
        for turn in range(TURNS):
            for watched in (turn % 2 == 0, turn % 2 == 1):  # each goes first as often
                if watched:
                    one.start()
                began_s = time.perf_counter()
                times[watched] += cpu_s(lambda: work(rounds))
                if watched:
                    wall_s += time.perf_counter() - began_s
                    one.stop()
        extra.append(times[True] / times[False] - 1)
        watched_s += times[True]
    looks, own_s = _so_far(one)
    return extra, (looks - looks_before) / wall_s, (own_s - own_before_s) / watched_s


def _so_far(one: recorder.Recorder) -> tuple[int, float]:
    """Looks, and their CPU time, of this whole process: a recorder that begins again goes on counting."""
    seen = one.stop()
    assert seen.samples is not None
    return seen.looks, seen.samples.look_s


def tracing(rounds: int) -> dict[str, float]:
    """fib under each one, as a multiple of the plain one: the fastest of some rounds of each, taken in turns.

    Where nothing is counted, each event calls a C function that returns at once: what Python itself takes for them.
    """
    best: dict[str, float] = {}
    kinds: dict[str, Options | None] = {
        "plain": None,
        "counts, no builtins": Options(mode="counts", builtins=False),
        "counts": Options(mode="counts"),
        "timed, no builtins": Options(mode="trace", builtins=False),
        "timed": Options(mode="trace"),
    }
    kinds |= {name + NOTHING: options for name, options in kinds.items() if options}
    for _ in range(rounds):
        for name, options in kinds.items():
            one = recorder.make(options) if options else None
            if one:
                one.start()
            if one and name.endswith(NOTHING):
                one.hold()
            before_s = time.thread_time()
            fib(FIB)
            took_s = time.thread_time() - before_s
            calls = one.stop().calls if one else None
            if one and not name.endswith(NOTHING):
                assert calls is not None
                counted = sum(node.calls for one in calls.threads for node in one.nodes
                              if node.function >= 0 and calls.functions[node.function].function == "fib")  # fmt: skip
                assert counted == 2 * fib(FIB + 1) - 1, f"{name}: {counted} calls of fib"
            best[name] = min(best.get(name, took_s), took_s)
    return {name: took_s / best["plain"] for name, took_s in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", default="", help="write the figures there, too")
    args = parser.parse_args()
    pairs = max(args.pairs, 4)
    module = native.module(lambda line: print(line, file=sys.stderr))
    kind = "C part" if module else f"without the C part: {native.Native.reason}"
    clock = "the processor's counter" if tracer._has_counter() else "the system's clock"
    print(f"Python {platform.python_version()}, {kind}, {threading.active_count()} thread, calls timed by {clock}")
    figures: dict[str, object] = {
        "python": platform.python_version(),
        "c_part": bool(module),
        "pairs": pairs,
        "clock": clock,
    }
    figures["load_before"] = os.getloadavg()[0]
    for hz, most in RATES:
        extra, reached_hz, own = looking(hz, pairs)
        low, middle, high = statistics.quantiles(extra, n=4)
        error = 1.2533 * statistics.stdev(extra) / len(extra) ** 0.5  # of the median
        quartiles = f"quartiles {100 * low:+.2f}, {100 * high:+.2f}; {pairs} pairs, {reached_hz:.0f} looks a second"
        print(
            f"looking at {hz:g} Hz: {100 * middle:+.2f} % CPU (± {100 * error:.2f}; {quartiles}); "
            f"by its own clocks {100 * own:.2f} %; bar {100 * most:g} %"
        )
        figures[f"{hz:g} Hz"] = {"median": middle, "error": error, "own_clocks": own, "bar": most, "hz": reached_hz}
    figures["fib"] = fib_times = tracing(9)
    for name, times in fib_times.items():
        print(f"fib, {name}: {times:.2f} ×")
    if args.json:
        write_file(json.dumps(figures, indent=1) + "\n", Path(args.json))


if __name__ == "__main__":
    main()
