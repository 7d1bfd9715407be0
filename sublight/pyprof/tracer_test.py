"""Counts are equal to what the program did, by the C part and by Python, and so is the record of them."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublight.pyprof import native, tracer
from sublight.pyprof.record import PythonProcess, PythonProfile, process_from_json, process_to_json
from sublight.pyprof.tables import tables
from sublight.pyprof.tracer import Tracer, calls_of


def leaf() -> int:
    return 1


def numbers(n: int) -> Iterator[int]:
    for number in range(n):  # noqa: UP028
        yield number


def outer(n: int) -> Iterator[int]:
    yield from numbers(n)


def fails() -> None:
    raise ValueError


def tries() -> int:
    try:
        fails()
    except ValueError:
        return abs(-1)
    return 0


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


async def waits(n: int) -> None:
    if n:
        await asyncio.sleep(0)
        await waits(n - 1)


async def counts_up() -> Any:
    for number in range(3):
        yield number
        await asyncio.sleep(0)


async def gathers() -> None:
    await asyncio.gather(*(waits(4) for _ in range(3)))
    async for _ in counts_up():
        pass


class Thing:
    def __init__(self) -> None:
        leaf()

    def method(self) -> Thing:
        return self


def job() -> None:
    for _ in range(100):
        leaf()
    found: list[int] = []
    for number in range(50):
        found.append(number)


def program() -> None:
    threads = [threading.Thread(target=job, name=f"job {number}") for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    list(outer(5))
    begun = numbers(3)
    next(begun)
    begun.close()
    numbers(9)  # never begins: its body is not called
    for _ in range(7):
        tries()
    factorial(30)
    asyncio.run(gathers())
    Thing().method().method()
    functools.partial(leaf)()
    abs(*[-2])
    with pytest.raises(ValueError):
        int("x")


KNOWN = {
    "leaf": 302,
    "numbers": 2,
    "outer": 1,
    "fails": 7,
    "tries": 7,
    "factorial": 30,
    "waits": 15,
    "counts_up": 1,
    "gathers": 1,
    "Thing.__init__": 1,
    "Thing.method": 2,
    "job": 3,
    "builtins.abs": 8,
}


def module(kind: str) -> Any:
    if kind == "python":
        return None
    found = native.module()
    if found is None:
        pytest.skip(f"the C part was not built: {native.Native.reason}")
    return found


def traced(kind: str, *, timed: bool = True, builtins: bool = True) -> PythonProcess:
    tracer = Tracer(module(kind), timed=timed, builtins=builtins, events=1000)
    before = sys.getprofile()
    tracer.start()
    try:
        program()
    finally:
        found = tracer.stop()
        sys.setprofile(before)
    return found


def counted(process: PythonProcess) -> Counter[str]:
    found: Counter[str] = Counter()
    assert process.calls is not None
    for thread in process.calls.threads:
        for node in thread.nodes[1:]:
            found[process.calls.functions[node.function].function] += node.calls
    return found


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("kind", ["c", "python"])
def test_counts_are_what_was_called(kind: str, timed: bool) -> None:
    process = traced(kind, timed=timed)
    found = counted(process)
    assert {name: found[name] for name in KNOWN} == KNOWN
    assert found["list.append"] >= 150
    assert process.calls is not None
    assert {"job 0", "job 1", "job 2"} <= {thread.name for thread in process.calls.threads}
    assert all(thread.lost == 0 for thread in process.calls.threads)


@pytest.mark.parametrize("kind", ["c", "python"])
def test_without_builtins_there_are_none(kind: str) -> None:
    found = counted(traced(kind, builtins=False))
    assert found["leaf"] == KNOWN["leaf"]
    assert not any(name.startswith("builtins.") or name == "list.append" for name in found)


def test_times_add_up() -> None:
    """Own times of all nodes are the time in the outermost calls; a function is counted once where it nests."""
    process = traced("c")
    assert process.calls is not None
    profile = PythonProfile(mode="trace", command="x", processes=(process,))
    found = tables(profile)
    tops_s = sum(
        node.total_ns * 1e-9 for thread in process.calls.threads for node in thread.nodes[1:] if node.parent == 0
    )
    assert sum(one.own_s for one in found.functions) == pytest.approx(tops_s, rel=1e-6)
    recursive = next(one for one in found.functions if one.frame.function == "factorial")
    assert recursive.total_s < sum(
        node.total_ns * 1e-9
        for thread in process.calls.threads
        for node in thread.nodes[1:]
        if process.calls.functions[node.function].function == "factorial"
    )
    assert all(0 <= event.start_ns <= event.end_ns <= process.calls.wall_ns for event in process.calls.events)


def test_the_record_survives_json() -> None:
    process = traced("c")
    assert process_from_json(process_to_json(process)) == process


def test_a_damaged_record_is_refused() -> None:
    data = process_to_json(traced("c"))
    data["calls"]["threads"][0]["nodes"][1][0] = 10**6
    with pytest.raises(ValueError, match="damaged"):
        process_from_json(data)


def test_calls_of_ours_at_the_root_are_left_out() -> None:
    ours = compile("def f(): pass", native.__file__, "exec")
    theirs = compile("def f(): pass", "program.py", "exec")
    nodes = [(-1, -1, 0, 0, 0), (0, 0, 1, 0, 10), (1, 1, 1, 0, 5), (0, 1, 4, 0, 50)]
    found = calls_of([("main", 0, nodes, 0)], [ours, theirs], [(0, 3, 1, 2), (0, 2, 1, 2)], 100)
    assert [(node.parent, node.function, node.calls) for node in found.threads[0].nodes] == [(-1, -1, 0), (0, 1, 4)]
    assert [(event.node, event.start_ns) for event in found.events] == [(1, 1)]


def test_the_main_thread_counts_from_the_program_to_its_end(tmp_path: Any) -> None:
    file = tmp_path / "program.py"
    file.write_text("len('x')\nabs(-1)\n")
    for kind in ("c", "python"):
        for timed in (True, False):
            tracer = Tracer(module(kind), timed=timed, builtins=True, events=0, program=(str(file),))
            code = compile(file.read_text(), str(file), "exec")
            tracer.start()
            len("before")
            exec(code, {})
            len("after")
            found = counted(tracer.stop())
            assert dict(found) == {"<module>": 1, "builtins.len": 1, "builtins.abs": 1}, (kind, timed)


def test_the_processors_counter_is_read_where_the_system_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "available_clocksource"
    monkeypatch.setattr(tracer, "_CLOCKS", listed)
    assert not tracer._has_counter(), "no such file"
    for words, is_listed in (("tsc \n", True), ("kvm-clock tsc acpi_pm \n", True), ("kvm-clock tsc-early \n", False)):
        listed.write_text(words)
        assert tracer._has_counter() == is_listed, words


def test_what_we_do_at_os_exit_is_not_the_programs() -> None:
    def f() -> None: ...

    ours = f.__code__.replace(co_filename=tracer.__file__, co_qualname="watching_exit.<locals>._exit")
    functions = [f.__code__, ours, "posix.getpid", f"{native.NAME}.trace_stop"]
    nodes = [(0, -1, 0, 0, 0), (0, 0, 1, 0, 9), (1, 2, 1, 0, 1), (1, 1, 1, 0, 5), (3, 2, 1, 0, 1), (0, 3, 1, 0, 0)]
    (thread,) = calls_of([("main", 0, nodes, 0)], functions, [], 9).threads
    assert [(node.function, node.calls) for node in thread.nodes[1:]] == [(0, 1), (2, 1)], (
        "the program's own getpid stays"
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring is nobody's to take away")
def test_a_profile_function_of_the_programs_is_noticed() -> None:
    def in_a_thread(job: Any) -> None:
        thread = threading.Thread(target=job)
        thread.start()
        thread.join()

    takers: dict[str, Any] = {
        "nobody": lambda: in_a_thread(leaf),
        "a thread": lambda: in_a_thread(lambda: sys.setprofile(None)),
        "all threads to come": lambda: threading.setprofile(None),
        "the main thread": lambda: sys.setprofile(None),
    }
    for kind in ("c", "python"):
        for name, taker in takers.items():
            if (kind, name) == ("python", "a thread"):
                continue  # only the C part sees that
            tracer = Tracer(module(kind), timed=True, builtins=True, events=0)
            tracer.start()
            taker()
            tracer.stop()
            assert tracer.taken_away == (name != "nobody"), (kind, name)


def test_the_c_part_lies_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def no_home() -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path))
    assert native.file_of.__wrapped__().parent == tmp_path / "native"
    monkeypatch.delenv("SUBLIGHT_CACHE")
    monkeypatch.setattr(native.Path, "home", no_home)
    assert native.file_of.__wrapped__().parent.name == "native"


def test_calls_that_end_out_of_order_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def first() -> None: ...
    def second() -> None: ...

    for ends, in_order in (((second, first), True), ((first, second), False)):
        tracer = Tracer(None, timed=True, builtins=False, events=0)
        monkeypatch.setattr(tracer, "_watch", lambda: None)  # no calls but those below
        monkeypatch.setattr(sys, "setprofile", lambda hook: None)
        tracer.start()
        calls = tracer._in_python
        assert calls is not None
        calls.on_start(first.__code__, 0)
        calls.on_start(second.__code__, 0)  # as a greenlet does to which `first` switches
        for function in ends:
            calls.on_return(function.__code__, 0, None)
        assert ("greenlets" in tracer.stop().how) != in_order


def test_calls_that_hold_those_that_are_kept_are_kept() -> None:
    tracer = Tracer(module("c"), timed=True, builtins=False, events=10)
    tracer.start()
    job()
    calls = tracer.stop().calls
    assert calls is not None
    (thread,) = calls.threads
    names = Counter(calls.functions[thread.nodes[event.node].function].function for event in calls.events)
    assert names == {"leaf": 10, "job": 1}, "the tenth leaf ends before job does"
