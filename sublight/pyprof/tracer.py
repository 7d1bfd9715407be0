"""Every call, counted and timed: by C functions, or where there is no compiler by Python's own, which costs much more.

From Python 3.12 on the interpreter's `sys.monitoring` calls them, before that its profile hook.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from sublight.pyprof import native
from sublight.pyprof.ours import is_ours
from sublight.pyprof.record import CallEvent, CallNode, Calls, PythonProcess, ThreadCalls
from sublight.sampling import Frame

COST = "each call takes some 15 times as long"
TOOLS = (3, 4, 2, 5)  # free ones of sys.monitoring; 2 is cProfile's
_CLOCKS = Path("/sys/devices/system/clocksource/clocksource0/available_clocksource")
_AT_FORKS = str(Path(__file__).with_name("children.py"))
_Node = tuple[int, int, int, int, int]  # parent, function, calls, resumes, total
_Threads = Sequence[tuple[str | None, int, Sequence[_Node], int]]  # name, number, nodes, lost
_SUSPENDS = 0x20 | 0x80 | 0x200  # a code object's flags: generator, coroutine, asynchronous generator


class Tracer:
    """Counts from `start` to `stop`; with a `program`, the main thread inside the frames of its files alone."""

    def __init__(self, module: Any, *, timed: bool, builtins: bool, events: int, program: tuple[str, ...] = ()) -> None:
        self._module, self._timed, self._builtins, self._events, self._files = module, timed, builtins, events, program
        self._in_python = InPython(timed=timed, builtins=builtins, program=program) if module is None else None
        self._tool = -1
        self._hook: Any = None
        self.taken_away = False  # the program set a profile function of its own

    def start(self) -> None:
        if self._in_python is not None:
            self._in_python.begin(self._at_begin())
        else:
            how = (self._timed, self._builtins, self._events, _has_counter(), _running_threads())
            self._module.trace_start(*how, self._files, self._at_begin())
        if sys.version_info >= (3, 12):
            self._watch()
            return
        if self._in_python is not None:
            self._hook = self._in_python.profile
            threading.setprofile(self._hook)
            sys.setprofile(self._hook)
        else:
            self._hook = self._module.trace_take_thread
            threading.setprofile(self._hook)
            self._module.trace_hook(True)

    def stop(self) -> PythonProcess:
        if sys.version_info >= (3, 12):
            self._unwatch()
        else:
            self.taken_away = threading.getprofile() != self._hook  # equal, not the same: a bound method
            threading.setprofile(None)
            if self._in_python is not None:
                self.taken_away |= _is_main() and sys.getprofile() != self._hook
                sys.setprofile(None)
            else:
                self._module.trace_stop()
                self.taken_away |= self._module.trace_was_taken_away()
                self._module.trace_hook(False)
        source = self._in_python or self._module
        source.trace_stop()
        threads, functions, events, wall_ns = source.trace_seen()
        how = "traced in C" if self._in_python is None else f"traced in Python ({native.Native.reason}): {COST}"
        if self.taken_away:
            how += "; the program set a profile function of its own: calls after that are not counted"
        if any(lost for *_, lost in threads):
            how += "; it switches between stacks (greenlets, gevent): counts hold, times and callers do not"
        return PythonProcess(
            pid=os.getpid(),
            parent=os.getppid(),
            command=" ".join(getattr(sys, "orig_argv", sys.argv)),
            calls=calls_of(threads, functions, events, wall_ns),
            how=how,
        )

    def hold(self) -> None:
        (self._in_python or self._module).trace_stop()

    def pause(self) -> None:
        """A tracer has no thread: a fork does not mind it."""

    def resume(self) -> None:
        pass

    def abandon(self) -> None:
        if sys.version_info >= (3, 12):
            self._unwatch()
        else:
            sys.setprofile(None)
        (self._in_python or self._module).trace_stop()

    def _at_begin(self) -> Any:
        """Where returns are not watched, that of the program's own code is: called with the code when it begins."""
        if self._timed or sys.version_info < (3, 12):
            return None
        return lambda code: sys.monitoring.set_local_events(  # type: ignore[attr-defined]
            self._tool,
            code,
            sys.monitoring.events.PY_RETURN,  # type: ignore[attr-defined]
        )

    def _watch(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        events, source = monitoring.events, self._in_python or self._module
        self._tool = next(tool for tool in TOOLS if monitoring.get_tool(tool) is None)
        monitoring.use_tool_id(self._tool, "sublight")
        callbacks = {
            source.on_start: ("PY_START",),
            source.on_resume: ("PY_RESUME", "PY_THROW"),
            source.on_return: ("PY_RETURN", "PY_YIELD", "PY_UNWIND") if self._timed else ("PY_RETURN", "PY_UNWIND"),
            source.on_call: ("CALL",) if self._builtins else (),
            source.on_builtin_return: ("C_RETURN", "C_RAISE") if self._builtins and self._timed else (),
        }
        wanted = 0
        for callback, names in callbacks.items():
            for name in names:
                monitoring.register_callback(self._tool, getattr(events, name), callback)
                is_local = name == "PY_RETURN" and not self._timed
                if name not in ("C_RETURN", "C_RAISE") and not is_local:  # those two come with CALL
                    wanted |= getattr(events, name)
        monitoring.set_events(self._tool, wanted)

    def _unwatch(self) -> None:
        if self._tool >= 0:
            monitoring = sys.monitoring  # type: ignore[attr-defined]
            monitoring.set_events(self._tool, 0)
            monitoring.free_tool_id(self._tool)
            self._tool = -1


def _is_main() -> bool:
    """A child that is told to end stops its tracer from another thread."""
    return threading.get_ident() == threading.main_thread().ident


def _running_threads() -> dict[int, threading.Thread]:
    return threading._active  # type: ignore[attr-defined, no-any-return]


def _has_counter() -> bool:
    """Whether the processor's own counter is a clock, which costs a third of the system's. A guest's kernel may prefer
    another (kvm-clock), but lists this one only while it finds it steady and the same on all cores."""
    try:
        return "tsc" in _CLOCKS.read_text().split()
    except OSError:
        return False


def calls_of(threads: _Threads, functions: Sequence[Any], events: Sequence[tuple[int, ...]], wall_ns: int) -> Calls:
    """A tracer's raw output as a record."""
    frames = tuple(_frame(function) for function in functions)
    made: list[ThreadCalls] = []
    numbers: dict[int, int] = {}
    kept_of: dict[int, dict[int, int]] = {}
    for name, number, nodes, lost in sorted(threads, key=lambda thread: thread[1]):
        kept = _program(nodes, frames)
        if len(kept) < 2:
            continue
        numbers[number], kept_of[number] = len(made), kept
        tree = [CallNode(-1, -1, 0, 0, 0)]
        tree += [CallNode(kept.get(nodes[at][0], 0), *nodes[at][1:]) for at in [*kept][1:]]
        made.append(ThreadCalls(name=name or f"thread {number}", nodes=tuple(tree), lost=lost))
    made_events = []
    for thread, node, start_ns, end_ns in events:
        if thread in numbers and kept_of[thread].get(node, 0) > 0:
            made_events.append(CallEvent(numbers[thread], kept_of[thread][node], start_ns, end_ns))
    return Calls(functions=frames, threads=tuple(made), events=tuple(made_events), wall_ns=wall_ns)


def _program(nodes: Sequence[_Node], frames: Sequence[Frame]) -> dict[int, int]:
    """The nodes that are the program's, by their new numbers. Ours are the last ones in a forked child, and those that
    stand where the program forks or calls `os._exit`."""
    kept = {0: 0}
    for at, (parent, function, *_) in enumerate(nodes):
        if not at or parent not in kept:  # the first is the root
            continue
        frame = frames[function]
        ours = is_ours(frame.file) and (
            parent == 0 or frame.file == _AT_FORKS or frame.function.endswith("<locals>._exit")
        )
        if not ours and not frame.function.startswith(f"{native.NAME}."):
            kept[at] = len(kept)
    return kept


def _frame(function: Any) -> Frame:
    if isinstance(function, CodeType):
        return Frame(function.co_filename, function.co_qualname, function.co_firstlineno, function.co_firstlineno)
    return Frame("", str(function or "?"), 0, 0)


class InPython:
    """The same as the C part gives, in Python: a call takes some 15 times as long."""

    def __init__(self, *, timed: bool, builtins: bool, program: tuple[str, ...] = ()) -> None:
        self._timed, self._builtins, self._files = timed, builtins, program
        self._program: Any = None
        self._main, self._inside = threading.get_ident(), not program
        self._at_begin: Any = None
        self._local = threading.local()
        self._threads: list[dict[str, Any]] = []
        self._functions: dict[Any, int] = {}
        self._began_ns = self._ended_ns = 0
        self._on = False

    def begin(self, at_begin: Any) -> None:
        self._at_begin = at_begin
        self._began_ns, self._on = time.perf_counter_ns(), True

    def trace_stop(self) -> None:
        if self._on:
            self._on, self._ended_ns = False, time.perf_counter_ns()
            for thread in self._threads:
                for node, start_ns in thread["open"]:
                    node[4] += self._ended_ns - start_ns

    def trace_seen(self) -> tuple[Any, ...]:
        threads = [
            (one["name"], at, [tuple(node[:5]) for node in one["nodes"]], one["lost"])
            for at, one in enumerate(self._threads)
        ]
        return threads, list(self._functions), [], self._ended_ns - self._began_ns

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call":
            self._enter(code, bool(code.co_flags & _SUSPENDS) and _goes_on(frame))
        elif event == "return":
            self._leave(code)
        elif self._builtins and event == "c_call":
            self._enter(builtin_name(argument), False)
        elif self._builtins:
            self._leave()

    def on_start(self, code: CodeType, offset: int) -> None:
        self._enter(code, False)

    def on_resume(self, code: CodeType, offset: int, *more: Any) -> None:
        self._enter(code, True)

    def on_return(self, code: CodeType, offset: int, value: Any) -> None:
        self._leave(code)

    def on_call(self, code: CodeType, offset: int, function: Any, argument: Any) -> None:
        if is_builtin(function):
            self._enter(builtin_name(function), False)

    def on_builtin_return(self, code: CodeType, offset: int, function: Any, argument: Any) -> None:
        if is_builtin(function):
            self._leave()

    def _begins(self, thing: Any) -> bool:
        """Whether a call counts, though the program does not run in the main thread: of another; or it begins now."""
        if threading.get_ident() != self._main:
            return True
        if not isinstance(thing, CodeType) or thing.co_name != "<module>" or thing.co_filename not in self._files:
            return False
        self._program = thing
        if self._at_begin is not None:
            self._at_begin(thing)
        self._inside = True
        return True

    def _enter(self, thing: Any, resumed: bool) -> None:
        if not self._on or (not self._inside and not self._begins(thing)):
            return
        thread = getattr(self._local, "thread", None)
        if thread is None:
            ident = threading.get_ident()
            thread = {"name": None, "ident": ident, "nodes": [[-1, -1, 0, 0, 0, {}, 0]], "open": [], "lost": 0}
            self._local.thread = thread
            self._threads.append(thread)
        parent = thread["open"][-1][0] if thread["open"] else thread["nodes"][0]
        node = parent[5].get(thing)
        if node is None:
            number = self._functions.setdefault(thing, len(self._functions))
            node = parent[5][thing] = [parent[6], number, 0, 0, 0, {}, len(thread["nodes"])]
            thread["nodes"].append(node)
            if thread["name"] is None and (one := _running_threads().get(thread["ident"])) is not None:
                thread["name"] = one._name  # type: ignore[attr-defined]
        node[3 if resumed else 2] += 1
        if self._timed:
            thread["open"].append((node, time.perf_counter_ns()))

    def _leave(self, thing: Any = None) -> None:
        if thing is self._program is not None:
            self._inside = False
        thread = getattr(self._local, "thread", None)
        if self._on and thread is not None and thread["open"]:
            node, start_ns = thread["open"].pop()
            node[4] += time.perf_counter_ns() - start_ns
            if thing is not None and self._functions.get(thing) != node[1]:
                thread["lost"] += 1


_BUILTINS = (type(len), type(list.append))


def is_builtin(function: Any) -> bool:
    return type(function) in _BUILTINS


def builtin_name(function: Any) -> str:
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    if owner is None:
        return str(function.__name__)
    name = owner.__name__ if isinstance(owner, type) or hasattr(owner, "__spec__") else type(owner).__name__
    return f"{name}.{function.__name__}"


def _goes_on(frame: FrameType) -> bool:
    """Whether a generator's frame does not stand at the RESUME 0 that begins its body."""
    import opcode

    at, code = frame.f_lasti, frame.f_code.co_code
    return at < 0 or not (code[at] == opcode.opmap.get("RESUME") and code[at + 1] == 0)
