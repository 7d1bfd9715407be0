"""Profiles that are made up, for the tests of what reads them."""

from __future__ import annotations

from sublight.pyprof.record import CallEvent, CallNode, Calls, PythonProcess, PythonProfile, ThreadCalls
from sublight.sampling import Frame, Row, Samples

MS = 1_000_000
MAIN, HOT, COLD, WAITS = (
    Frame("train.py", "<module>", 30, 1),
    Frame("train.py", "hot", 12, 10),
    Frame("train.py", "cold", 22, 20),
    Frame("/usr/lib/python3.11/threading.py", "Condition.wait", 327, 288),
)


def sampled(*, slower: float = 1.0, name: str = "hot") -> PythonProfile:
    """Ten looks, 10 ms each: the main thread in `hot` (6), `cold` (2, half of it for the lock), asleep (2); a worker
    that sleeps all along."""
    hot = Frame("train.py", name, 12, 10)
    stacks = ((0, 1), (0, 2), (0, 3), (3,))
    rows = []
    for look in range(10):
        stack, cpu, gil = ((0, 10, 0) if look < 6 else (1, 5, 5)) if look < 8 else (2, 0, 0)
        wall = round((10 * slower if stack == 0 else 10) * MS)
        cpu_ns = wall if stack == 0 else cpu * MS
        rows.append(Row((look + 1) * 10 * MS, 0, stack, wall, cpu_ns, 0, gil * MS, 0))
        rows.append(Row((look + 1) * 10 * MS, 1, 3, 10 * MS, 0, 0, 0, 0))
    samples = Samples(
        frames=(MAIN, hot, COLD, WAITS),
        stacks=stacks,
        threads=("MainThread", "worker"),
        labels=("",),
        rows=tuple(rows),
    )
    process = PythonProcess(pid=7, command="python train.py", samples=samples, looks=10, knows_waits=True)
    return PythonProfile(
        mode="sample", command="python train.py", python="3.11", hz=100, wall_s=0.1, cpu_s=0.07, processes=(process,)
    )


def traced() -> PythonProfile:
    """main -> fib -> fib -> fib, and a builtin."""
    functions = (Frame("train.py", "<module>", 1, 1), Frame("train.py", "fib", 3, 3), Frame("", "builtins.len", 0, 0))
    nodes = (
        CallNode(-1, -1, 0, 0, 0),
        CallNode(0, 0, 1, 0, 100 * MS),
        CallNode(1, 1, 1, 0, 80 * MS),
        CallNode(2, 1, 2, 0, 50 * MS),
        CallNode(3, 2, 4, 0, 10 * MS),
    )
    events = (CallEvent(0, 4, 40 * MS, 50 * MS), CallEvent(0, 3, 30 * MS, 80 * MS), CallEvent(0, 2, 10 * MS, 90 * MS))
    calls = Calls(
        functions=functions, threads=(ThreadCalls(name="MainThread", nodes=nodes),), events=events, wall_ns=100 * MS
    )
    process = PythonProcess(pid=7, command="python train.py", calls=calls)
    return PythonProfile(mode="trace", command="python train.py", wall_s=0.1, cpu_s=0.1, processes=(process,))


def hostile() -> PythonProfile:
    """Names that would end a script, a tag, a line or rich's markup."""
    bad = Frame('</script><img src=x onerror="alert(1)">.py', "[red]<b>;\n\x1b[31m", 1, 1)
    samples = Samples(
        frames=(bad,), stacks=((0,),), threads=("[bold]<i>",), labels=("",), rows=(Row(MS, 0, 0, MS, MS, 0, 0, 0),)
    )
    process = PythonProcess(pid=7, command="</title>", samples=samples, looks=1, knows_waits=True)
    return PythonProfile(mode="sample", command="</title>[/red]", hz=100, wall_s=1, cpu_s=1, processes=(process,))
