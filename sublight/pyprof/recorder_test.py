"""Real looks: who ran, who slept, who waited for the interpreter's lock; ours are left out of the stacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sublight.pyprof import native, recorder
from sublight.pyprof.ours import ENTRIES
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
    process = looked(kind, 0.2, 1)
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
    for _ in range(2):
        one.start()
        time.sleep(0.02)
        one.stop()
    one.stop()


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
