"""Which line of the user's code, and which module, each op of a step came from.

One step runs with a line tracer on the user's own files. Whenever the line or the module changes, a mark of no length
goes into the profile, so that marks and ops stand on one clock; an op belongs to the last mark before it. The
profiler's own stacks give the line where a function is defined, not the one that runs, and count modules by class.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec

from sublight.backend import private
from sublight.trace.capture.steps import leave_uncompiled

MARK = "sublight@"
MOST_MARKS = 50_000  # a step of pure Python may run a million lines; the profile must stay small
MOST_LINES = 10_000  # of one function: a long loop in Python must not use up the marks of the whole step
ENGINE = "autograd::engine::evaluate_function"  # backward ops have no Python above them
WRAPPERS = ("_orig_mod", "module")  # what torch.compile and DistributedDataParallel put around a model


class SourceTracer:
    """Marks the profile of one thread with the user's lines and modules, from `start` to `stop`."""

    def __init__(self, *, script: str = "") -> None:

        self.places: list[tuple[str, str]] = []  # (source, module) by the number in a mark
        self._marks = 0
        self._marked = -1  # the place of the last mark
        self._outer: dict[int, FrameType] = {}  # frames that were there when the step began, by id
        self._first_line, self._moved = "", False
        self._long: dict[str, None] = {}  # functions that ran too many lines to mark each
        self._lines: dict[CodeType, int] = {}  # how many of a function's lines have run
        self._mark: Any = private.RecordFunctionFast
        self._numbers: dict[tuple[str, str], int] = {}
        self._call_code: CodeType = private.call_module.__code__
        self._user: dict[str, str] = {script: shown_path(script)} if script else {}  # by file; "" is not the user's
        self._line = ""
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        own = SourceTracer
        for function in (own._enter, own._in_user_code, own._in_module, own._note, own._leave, own._shown, own._path):
            leave_uncompiled(function)

    def start(self) -> bool:
        """False where a debugger or a coverage tool already traces this thread."""
        if sys.gettrace() is not None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if shown := self._shown(frame.f_code.co_filename):
                self._line = self._line or f"{shown}:{frame.f_lineno}"
                frame.f_trace = self._in_user_code
                self._outer[id(frame)] = frame
            frame = frame.f_back
        self._first_line = self._line
        self._note()
        sys.settrace(self._enter)
        return True

    def stop(self) -> None:
        sys.settrace(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace is not None and getattr(frame.f_trace, "__self__", None) is self:
                frame.f_trace = None
            frame = frame.f_back
        self._outer = {}
        if not self._moved:  # a library runs the whole step from there, as `trainer.train()`: that line tells nothing
            self.places = [("" if line == self._first_line else line, module) for line, module in self.places]

    def notes(self) -> list[str]:
        """What has no line of its own, and why."""
        found = []
        if self._long:
            names = ", ".join(self._long)
            found.append(f"{names} ran over {MOST_LINES:,} lines in a step: ops there have no line of their own")
        if self._marks > MOST_MARKS:
            found.append(f"a step goes from line to line over {MOST_MARKS:,} times: what follows has no source lines")
        return found

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is self._call_code:
            self._modules.append(self._path(frame.f_locals["self"]))
            self._note()
            frame.f_trace_lines = False
            return self._in_module
        if self._lines.get(frame.f_code, 0) >= MOST_LINES:  # called often: its ops are those of the line that calls it
            return None
        return self._in_user_code if self._shown(frame.f_code.co_filename) else None

    def _in_user_code(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            count = self._lines[frame.f_code] = self._lines.get(frame.f_code, 0) + 1
            self._moved = self._moved or id(frame) in self._outer
            frame.f_trace_lines = count < MOST_LINES  # from then on, all of the function counts as its first line
            shown = self._shown(frame.f_code.co_filename)
            self._line = f"{shown}:{frame.f_lineno}"
            if not frame.f_trace_lines:
                name, first = frame.f_code.co_name, frame.f_code.co_firstlineno
                self._line = f"{shown}:{first}" if name != "<module>" else ""
                self._long[name if name != "<module>" else shown] = None
            self._note()
        elif event == "return":  # what follows belongs to the caller's line
            caller = frame.f_back
            while caller is not None and not self._shown(caller.f_code.co_filename):
                caller = caller.f_back
            if caller is not None:
                self._line = f"{self._shown(caller.f_code.co_filename)}:{caller.f_lineno}"
                self._note()
        return self._in_user_code

    def _in_module(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._leave()
        return self._in_module

    def _leave(self) -> None:
        if self._modules:
            self._modules.pop()
            self._note()

    def _note(self) -> None:
        if self._marks > MOST_MARKS:
            return
        place = (self._line, self._modules[-1] if self._modules else "") if self._marks < MOST_MARKS else ("", "")
        number = self._numbers.setdefault(place, len(self.places))
        if number == self._marked:
            return
        self._marks += 1
        self._marked = number
        if number == len(self.places):
            self.places.append(place)
        with self._mark(f"{MARK}{number}"):
            pass

    def _shown(self, file: str) -> str:
        shown = self._user.get(file)
        if shown is None:
            shown = self._user[file] = shown_path(file) if is_users(file) else ""
        return shown

    def _path(self, module: Any) -> str:
        """The module's name in its model, as the user wrote it; of the model itself, its class."""
        if not self._modules and id(module) not in self._names:
            for name, child in module.named_modules():
                self._names.setdefault(id(child), qualified(name) or type(bare(module)).__name__)
        above = self._modules[-1] if self._modules else ""
        # a module that its parent holds in a plain list has no name: its class stands for it
        return self._names.get(id(module)) or "/".join(filter(None, (above, type(module).__name__)))


def qualified(name: str) -> str:
    """A module's name without what wraps the model.

    >>> qualified("_orig_mod.layers.3.fc1"), qualified("module"), qualified("module.head")
    ('layers.3.fc1', '', 'head')
    """
    parts = name.split(".")
    while parts and parts[0] in WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def bare(module: Any) -> Any:
    """The model inside torch.compile's and DistributedDataParallel's wrappers."""
    while type(module).__name__ in ("OptimizedModule", "DistributedDataParallel", "DataParallel"):
        module = getattr(module, "_orig_mod", None) or module.module
    return module


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


@dataclass(kw_only=True)
class Sources:
    """The place of every top-level op of one step, in order."""

    ops: list[str] = field(default_factory=list)  # each name once
    index: list[int] = field(default_factory=list)  # by op: into ops
    source: list[str] = field(default_factory=list)
    module: list[str] = field(default_factory=list)

    def add(self, name: str, place: tuple[str, str], numbers: dict[str, int]) -> None:
        number = numbers.setdefault(name, len(self.ops))
        if number == len(self.ops):
            self.ops.append(name)
        self.index.append(number)
        self.source.append(place[0])
        self.module.append(place[1])


def attribute(trace_file: Path, places: list[tuple[str, str]]) -> Sources:
    """Read a marked profile: each op that no other op encloses belongs to the last mark before it on its thread."""
    events = msgspec.json.decode(trace_file.read_bytes(), type=_File).events
    ops = sorted((event for event in events if event.cat.lower() == "cpu_op"), key=lambda e: (e.ts, -e.dur))
    marked = next((event.tid for event in ops if event.name.startswith(MARK)), None)
    found, numbers = Sources(), dict[str, int]()
    place, end = ("", ""), float("-inf")
    for op in ops:
        if op.tid != marked:
            continue
        if op.name.startswith(MARK):
            place = places[int(op.name[len(MARK) :])]
        elif op.ts >= end:
            end = op.ts + op.dur
            found.add(op.name, ("", "") if op.name.startswith(ENGINE) else place, numbers)
    return found


def is_users(file: str) -> bool:
    if file.startswith("<") and not file.startswith("<ipython"):  # <frozen runpy>, <string>, <eval_with_key>
        return False
    return not file.startswith(_library_folders()) and f"{os.sep}site-packages{os.sep}" not in file


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*(folder + os.sep for folder in folders), str(Path(__file__).parents[2]) + os.sep)


def shown_path(file: str) -> str:
    """A path that opens, from here or the whole of it, whichever is shorter."""
    if "ipykernel" in file or file.startswith("<ipython"):
        return "notebook"
    try:
        return min(os.path.relpath(os.path.realpath(file)), file, key=len)
    except (ValueError, OSError):
        return file
