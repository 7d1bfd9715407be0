"""Real looks: who ran, who slept, who waited for the interpreter's lock; ours are left out of the stacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sublight
from sublight.pyprof import native, recorder
from sublight.pyprof.ours import BEHIND, ENTRIES
from sublight.pyprof.record import PythonProcess, PythonProfile
from sublight.pyprof.recorder import NativeLooks, Options, PythonLooks, RawRow, Recorder, without_ours
from sublight.pyprof.tables import Split, tables
from sublight.sampling import Frame, Row, Samples

LONGEST_S = 20.0
MS = 1_000_000


def busy(until: Callable[[], bool]) -> None:
    total = 0
    while not until():
        for number in range(2000):
            total += number


def looked(
    kind: str,
    seconds_of_cpu: float,
    threads: int,
) -> PythonProcess:
    """Threads compute, one sleeps, this one waits: until each has had its CPU time, however busy the machine is."""
    module = native.module() if kind == "c" else None
    if kind == "c" and module is None:
        pytest.skip(f"the C part was not built: {native.Native.reason}")
    one: Recorder = NativeLooks(module, 200.0) if module is not None else PythonLooks(200.0)
    if module is not None:
        module.sample_abandon()  # looks of tests before
    over = threading.Event()
    began_s = time.monotonic()

    def had_enough() -> bool:
        return time.thread_time() > seconds_of_cpu or time.monotonic() - began_s > LONGEST_S

    workers = [
        threading.Thread(target=busy, daemon=True, args=(had_enough,), name=f"busy {at}") for at in range(threads)
    ]
    sleeper = threading.Thread(target=over.wait, daemon=True, name="sleeper")
    one.start()
    for thread in (*workers, sleeper):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    sleeper.join()
    return one.stop()


def by_thread(process: PythonProcess) -> dict[str, Split]:
    profile = PythonProfile(mode="sample", command="x", processes=(process,))
    return dict(tables(profile).threads)


@pytest.mark.parametrize("kind", ["c", "python"])
def test_who_ran_and_who_slept(kind: str) -> None:
    process = looked(kind, 1.0, 1)  # on a busy machine the first look may come when half of it is over
    threads = by_thread(process)
    assert threads["busy 0"].ran_s > 0.1
    assert threads["sleeper"].idle_s > 0.9 * threads["sleeper"].all_s
    assert process.looks >= 5 and process.knows_waits == (kind == "c")
    profile = PythonProfile(mode="sample", command="x", processes=(process,))
    assert "busy" in {one.frame.function for one in tables(profile).functions}


def test_threads_that_compute_wait_for_the_lock() -> None:
    """Each runs for a third of the time at most: what is not waiting for a core is waiting for the lock."""
    threads = by_thread(looked("c", 0.15, 3))
    computing = [part for name, part in threads.items() if name.startswith("busy")]
    waited_s, ran_s = sum(part.gil_s for part in computing), sum(part.ran_s for part in computing)
    assert waited_s > 0.3 * ran_s
    assert threads["sleeper"].gil_s < 0.1 * threads["sleeper"].all_s


@pytest.mark.parametrize(
    ("cpu_ms", "others_cpu_ms", "late_ms", "core_ms", "gil_ms"),
    [
        (1, 0, 0, 0, 0),  # it slept for 9 ms, then computed, and this look stopped it
        (1, 0, 1, 0, 0),  # the sampler waited while it computed
        (1, 9, 0, 0, 9),  # another thread had the lock
        (1, 4, 0, 0, 4),  # for a while
        (1, 9, 0, 6, 3),  # and for a while there was no core
        (0, 0, 7, 0, 7),  # somebody slept with the lock
    ],
)
def test_a_wait_for_the_lock_is_no_longer_than_others_had_it(
    cpu_ms: int, others_cpu_ms: int, late_ms: int, core_ms: int, gil_ms: int
) -> None:
    waits = RawRow(1, 0, 0, 10 * MS, cpu_ms * MS, core_ms * MS, 5, late_ms * MS, recorder.WAITED_FOR_LOCK)
    other = RawRow(1, 1, 0, 10 * MS, others_cpu_ms * MS, 0, 5, late_ms * MS, 2)
    earlier = RawRow(0, 1, 0, 10 * MS, 10 * MS, 0, 4, 0, 2)
    _, row, _ = recorder._rows([earlier, waits, other])
    assert row.gil_ns == gil_ms * MS
    (unknown,) = recorder._rows([waits._replace(state=recorder.NOT_KNOWN)])
    assert unknown.gil_ns == -1


def test_the_main_thread_is_the_first_whoever_began_before() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait, daemon=True, name="began before")
    other.start()
    one = recorder.make(Options(hz=500))
    one.abandon()
    one.start()
    time.sleep(0.05)
    samples = one.stop().samples
    over.set()
    other.join()
    assert samples is not None and samples.threads[0] == "MainThread"


def test_a_recorder_starts_again() -> None:
    one = recorder.make(Options(hz=500))

    def sees_something() -> bool:
        for _ in range(100):  # a busy machine may give the sampler no turn in so short a time
            one.start()
            time.sleep(0.02)
            if one.stop().looks:
                return True
        return False

    assert sees_something() and sees_something()
    one.stop()  # once more does no harm
    assert sees_something()


CROWDED = """
import json, os, subprocess, sys, time
from sublight.pyprof import recorder
from sublight.pyprof.recorder import Options
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
try:
    time.sleep(0.3)
    one = recorder.make(Options(hz=100))
    one.start()
    began_s, end_s = time.monotonic(), time.thread_time() + 0.4
    while time.thread_time() < end_s:
        sum(range(1000))
    waited_s = time.monotonic() - began_s
    seen = one.stop()
finally:
    for other in others:
        other.kill()
        other.wait()
rows = [row for row in seen.samples.rows if row.thread == 0]
seen_s, seen_cpu_s = sum(row.wall_ns for row in rows) * 1e-9, sum(row.cpu_ns for row in rows) * 1e-9
print(json.dumps([waited_s, seen.looks, seen_s, seen_cpu_s]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins processes to a core")
def test_looks_count_time_on_a_core_where_many_wait_for_it() -> None:
    """By the clock there would be five times as many for each second that the program runs, each at the same cost."""
    if native.module() is None:
        pytest.skip(f"the C part was not built: {native.Native.reason}")
    environment = {**os.environ, "PYTHONPATH": str(Path(sublight.__file__).parents[1])}
    command = [sys.executable, "-c", CROWDED]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    wall_s, looks, seen_s, seen_cpu_s = json.loads(ran.stdout)
    assert wall_s > 1.2, "the others were to take most of the core"
    most = 15 + 1.3 * 100 * max(0.4, wall_s / 8)  # at most eight times as long between two
    assert 15 <= looks <= most, f"{looks} looks at 100 Hz for 0.4 s on a core, of {wall_s:.1f} s"
    assert seen_s == pytest.approx(wall_s, rel=0.2, abs=0.2), "no time is lost by it"
    assert seen_cpu_s == pytest.approx(0.4, rel=0.2)


def test_ours_are_cut_off_the_stacks() -> None:
    frames = (
        Frame("/usr/lib/python3.11/cli.py", "main", 1, 1),
        Frame(ENTRIES[0], "run", 1, 1),
        Frame("train.py", "<module>", 1, 1),
        Frame(recorder.__file__, "NativeLooks.stop", 1, 1),
        Frame("<frozen runpy>", "_run_code", 1, 1),
    )
    stacks = ((0, 1, 2), (0, 1), (0, 1, 2, 3), (0, 1, 4, 2), (3,), (0, 3))
    rows = tuple(Row(1, 0, number, 1, 1) for number in range(6))
    found = without_ours(Samples(frames=frames, stacks=stacks, threads=("main",), labels=("",), rows=rows))
    assert [found.stacks[row.stack] for row in found.rows] == [(2,), (2,), (2,)]


def test_what_is_cut_from_a_deep_stack_is_named() -> None:
    frames, stacks = (Frame("x.py", "f", 1), Frame("x.py", "g", 2)), ((0, 1, 0), (0, 1))
    rows = tuple(Row(10, 0, number, 1, 1) for number in range(2))
    samples = Samples(frames=frames, stacks=stacks, threads=("main",), labels=("",), rows=rows)
    found = without_ours(samples, deepest=3)
    assert [frame.function for frame in found.stack(rows[0])] == [recorder.DEEPER.function, "f", "g", "f"]
    assert [frame.function for frame in found.stack(rows[1])] == ["f", "g"]


def test_what_we_do_behind_the_program_is_not_its_time() -> None:
    frames = (Frame(ENTRIES[0], "run", 1), Frame(BEHIND, "Interrupts.hold", 2), Frame("signal.py", "getsignal", 3))
    samples = Samples(frames=frames, stacks=((0, 1, 2),), threads=("main",), labels=("",), rows=(Row(10, 0, 0, 1, 1),))
    assert not without_ours(samples).rows
