"""Damaged traces through the whole of explain: an answer or one clear line, soon, in little memory, never a traceback.

`python -m sublight.trace.fuzz_test 10000` tries so many; CI tries a few hundred, the same ones every time. A case is
its number: `python -m sublight.trace.fuzz_test 1 4711` tries case 4711 again.
"""

from __future__ import annotations

import collections
import copy
import gzip
import io
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sublight.diagnose.explain import explain
from sublight.diagnose.record import BREAKDOWN, Explanation
from sublight.errors import BadInput
from sublight.report.explain import page as explain_page
from sublight.report.explain import terminal
from sublight.trace import load
from sublight.trace.read import chrome_fakes, nsight_test
from sublight.trace.record import Trace

CASES = int(os.environ.get("SUBLIGHT_FUZZ", "400"))
LONGEST_S = 5.0
MOST_MEMORY_BYTES = 256 << 20  # of a process that tries the cases and nothing else, libraries included
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e-300,
    1e300, -1e18, math.nan, math.inf, -math.inf, "", " ", "12", "-7", "NaN", "stream 7", "x" * 3000, "\ud800", "\0",
    "é\u202e", "</script><b>", "[bold]", "\x1b[31m", [], {}, [[]], [None], [1, "a"], [[[1]]], {"a": {"b": []}},
    [2**62, 2**62], [-3, 4], [0], [[64, -1], [0, 5]], "X", "B", "E", "M", "i", "s",
    "kernel", "cpu_op", "cuda_runtime", "Operator",
    "ProfilerStep#1", "aten::mm", "ncclDevKernel_AllReduce", "cudaGraphLaunch", "cudaStreamSynchronize",
)  # fmt: skip
TOKENS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"NaN", b"-Infinity",
    b"null", b"1e999", b'"ph"', b"},{", b"}, {\"ph\": \"X\"", b"]}", b"\"traceEvents\": [", b"9" * 400, b"[" * 2000,
    b"{\"a\":" * 300, b"//", b"'", b"\\ud800", b"inf",
)  # fmt: skip


def mutated_bytes(rng: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 40, 400, 4000))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = rng.choice(TOKENS)
            case 3:
                data[at:at] = data[at : at + length]
            case 4:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + length]
            case 5:
                data[at : at + length] = rng.randbytes(min(length, 40))
            case _:
                data = data[: max(at, 1)] if rng.random() < 0.3 else data
        if not data:
            return b""
    return bytes(data)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in it."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutated_values(rng: random.Random, found: Any) -> Any:
    found = copy.deepcopy(found)
    everywhere = list(places(found))
    for holder, key in rng.sample(everywhere, min(rng.choice((1, 2, 5, 20, 100)), len(everywhere))):
        if not (key in holder if isinstance(holder, dict) else key < len(holder)):
            continue  # an earlier change took it away
        value = holder[key]
        match rng.randrange(6):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(value))
            case 2 if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
                holder[key] = rng.choice(
                    (-value, value * 1000, value + rng.uniform(-1e3, 1e3), value + 1e13, value / 7)
                )
            case 3 if isinstance(holder, list):
                rng.shuffle(holder)
            case 4 if isinstance(holder, dict):
                other, name = rng.choice(everywhere)
                inside = name in other if isinstance(other, dict) else name < len(other)
                holder[key] = copy.deepcopy(other[name]) if inside and len(str(other[name])) < 2000 else None
            case _:
                holder[key] = rng.choice(ODD)
    return found


def written(rng: random.Random, found: Any) -> bytes:
    """As JSON in one of the ways it is met."""
    if rng.random() < 0.2 and isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
        found = found["traceEvents"]  # a plain array
    text = json.dumps(found, indent=rng.choice((None, 1, 4)), sort_keys=rng.random() < 0.2)
    text = text.replace("\n", "\r\n") if rng.random() < 0.1 else text
    return text.encode("utf-8", "replace")


def zipped(rng: random.Random, text: bytes) -> bytes:
    data = gzip.compress(text, 1)
    match rng.randrange(4):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            return data + rng.choice((b"\0" * 64, b"garbage", data, b"\x1f\x8b", b"\x1f\x8b\x08\0bad"))
        case 2:
            return mutated_bytes(rng, data)
        case _:
            return data


def chrome_case(rng: random.Random) -> bytes:
    found = chrome_fakes.trace(steps=rng.choice((1, 2, 3)), start=rng.choice((0.0, 5e6, 1_700_000_000_000_000.125)))
    if rng.random() < 0.6:
        found = mutated_values(rng, found)
    text = written(rng, found)
    if rng.random() < 0.5:
        text = mutated_bytes(rng, text)
    if rng.random() < 0.15:
        text = text[: rng.randrange(len(text) + 1)]
    return zipped(rng, text) if rng.random() < 0.25 else text


def database(path: Path, change: Callable[[Any], Any] = lambda tables: tables) -> bytes:
    path.unlink(missing_ok=True)
    made = nsight_test
    tables: Any = {
        made.RUNTIME: [made.call(1_300 + 900 * at, 1_320 + 900 * at, at) for at in range(6)],
        made.KERNEL: [made.kernel(1_330 + 900 * at, 1_700 + 900 * at, at, gridX=at + 1) for at in range(6)],
        made.MEMCPY: [made.work(1_800, 1_900, 13, bytes=4096, copyKind=1, srcKind=0, dstKind=2, graphNodeId=None)],
        made.MEMSET: [made.work(1_910, 1_920, 14, bytes=64, value=0, memKind=2)],
        made.SYNC: [made.work(1_920, 1_930, 15, syncType=3)],
        "NVTX_EVENTS": [
            made.span(1_295, 1_325, "aten::mm, seq = 5, op_id = 12, sizes = [[2, 3], [3, 4]]"),
            made.span(1_290, 3_900, "step 1"),
            made.span(3_950, 6_900, "step 2"),
        ],
        "PROCESSES": [{"globalPid": made.global_id(made.PID), "pid": made.PID, "name": "/usr/bin/python3"}],
        "TARGET_INFO_GPU": [
            {"id": 3, "name": "NVIDIA H200", "smCount": 132, "totalMemory": 150_000_000_000, "cuDevice": 0}
        ],
    }
    return made.write(path, change(tables)).read_bytes()


def database_case(rng: random.Random, path: Path) -> bytes:
    def change(tables: Any) -> Any:
        for rows in tables.values():
            for row in rows:
                for key in row:
                    if rng.random() < 0.03:
                        odd = rng.choice(ODD)
                        fits = isinstance(odd, int | float) and abs(odd) < 2**63
                        row[key] = odd if odd is None or fits else repr(odd).replace("\ud800", "?")
        return {name: rows for name, rows in tables.items() if rng.random() > 0.05}

    data = database(path, change if rng.random() < 0.6 else lambda tables: tables)
    return mutated_bytes(rng, data) if rng.random() < 0.6 else data


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Of this process's own CPU time, so that what else runs on the machine does not count."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s of CPU time")

    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def peak_memory_bytes() -> int:
    """The most that this process had in memory since it started.

    On Linux `ru_maxrss` also counts the parent's memory from before the `exec`; `VmHWM` counts this program alone.
    """
    status = Path("/proc/self/status")
    if not status.exists():  # macOS counts in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, int | float):
        yield value


def check_trace(trace: Trace) -> None:
    assert len(trace) > 0
    assert (trace.end_ns >= trace.start_ns).all() and trace.start_ns.min() == 0
    assert (trace.start_ns[1:] >= trace.start_ns[:-1]).all()
    json.dumps([trace.names, [lane.label for lane in trace.lanes], trace.lost]).encode()
    "".join((*trace.names, *(lane.process for lane in trace.lanes), *trace.lost)).encode()  # no half a surrogate


def check(found: Explanation) -> None:
    assert math.isfinite(found.step_s) and found.step_s > 0, found.step_s
    assert found.breakdown.keys() == BREAKDOWN.keys()
    assert all(part >= 0 for part in found.breakdown.values()), found.breakdown
    assert abs(sum(found.breakdown.values()) - found.step_s) <= 1e-6 * found.step_s, (found.breakdown, found.step_s)
    assert 0 <= found.floor_s <= found.op_floor_s <= found.step_s * (1 + 1e-9)
    assert all(0 <= finding.saving_s <= found.step_s * (1 + 1e-9) for finding in found.findings), found.findings
    said = found.to_json()
    json.dumps(said, allow_nan=False).encode()
    assert all(math.isfinite(number) for number in numbers(said))
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal.page(found))
    explain_page.document(found).encode()


def run(path: Path, data: bytes) -> str:
    """What came of this file: explained, or the first words of why not."""
    path.write_bytes(data)
    begun = time.process_time()
    try:
        with at_most(2 * LONGEST_S):
            traces = load.load(path)
            for trace in traces:
                check_trace(trace)
            check(explain(traces))
    except BadInput as error:
        assert "\n" not in str(error) and str(error)
        return "refused"
    assert time.process_time() - begun < LONGEST_S
    return "explained in part" if any(trace.lost for trace in traces) else "explained"


def case(number: int, folder: Path) -> tuple[Path, bytes]:
    rng = random.Random(number)
    if number % 8 == 7:
        return folder / "case.sqlite", database_case(rng, folder / "made.sqlite")
    return folder / rng.choice(("case.json", "case.json.gz", "case")), chrome_case(rng)


def try_cases(cases: range, folder: Path) -> collections.Counter[str]:
    outcomes: collections.Counter[str] = collections.Counter()
    for number in cases:
        try:
            outcomes[run(*case(number, folder))] += 1
        except Exception as error:
            error.add_note(f"fuzz case {number}")
            raise
    return outcomes


def in_a_child(cases: range) -> tuple[collections.Counter[str], int]:
    """What came of the cases, and the peak memory of a process that tried them alone."""
    numbers = f"range({cases.start}, {cases.stop}, {cases.step})"
    code = f"from sublight.trace import fuzz_test; fuzz_test.print_outcomes({numbers})"
    child = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    outcomes, peak_bytes = json.loads(child.stdout.splitlines()[-1])
    return collections.Counter(outcomes), peak_bytes


def print_outcomes(cases: range) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = try_cases(cases, Path(folder))
    print(json.dumps((outcomes, peak_memory_bytes())))


@pytest.mark.parametrize("part", range(4))
def test_damaged_files_are_explained_or_refused(part: int) -> None:
    cases = range(part, CASES, 4)
    outcomes, peak_bytes = in_a_child(cases)
    assert outcomes.total() == len(cases)
    assert peak_bytes < MOST_MEMORY_BYTES, f"{peak_bytes >> 20} MiB"
    if part == 3 or CASES < 100:  # the databases
        return
    assert outcomes["explained in part"] > outcomes.total() / 5  # damage costs what it hits, not the file
    assert outcomes["explained"] and outcomes["refused"]


def test_the_unbroken_ones_are_explained(tmp_path: Path) -> None:
    assert run(tmp_path / "whole.json", chrome_fakes.text()) == "explained"
    assert run(tmp_path / "whole.sqlite", database(tmp_path / "made.sqlite")) == "explained"


def main(count: int, first: int = 0) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    failed: dict[str, list[int]] = collections.defaultdict(list)
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            begun = time.perf_counter()
            try:
                outcomes.update(try_cases(range(number, number + 1), Path(folder)))
            except Exception as error:
                where = error.__traceback__
                while where and where.tb_next:
                    where = where.tb_next
                line = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else ""
                failed[f"{type(error).__name__}: {str(error)[:150]} at {line}"].append(number)
                if count == 1:
                    raise
            longest = max(longest, time.perf_counter() - begun)
    print(dict(outcomes), f"longest {longest:.2f} s, {peak_memory_bytes() >> 20} MiB at most")
    for what, numbers_of in sorted(failed.items(), key=lambda pair: -len(pair[1])):
        print(len(numbers_of), what, numbers_of[:5])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
