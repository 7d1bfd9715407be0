"""Where the user's code made a thing, or calls us: for the diff that it is shown."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")})


def users_frames() -> Iterator[FrameType]:
    """The frames of code that belongs to the user, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", _OURS, *_LIBRARIES)) and "site-packages" not in file:
            yield frame
        frame = frame.f_back


def calling() -> tuple[str, int] | None:
    """File and line of the user's call that led here."""
    frame = next(users_frames(), None)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def before_use(thing: Any) -> tuple[str, int, str] | None:
    """File, line and name for a line that changes the thing before it is used, as a cure does at its first use.

    It goes before the outermost loop around the call that led here, in the outermost function that has a name for the
    thing by then: there it runs once, and all that the script does to the thing before is done.
    """
    place = None
    for frame in users_frames():
        code, source = frame.f_code, "".join(linecache.getlines(frame.f_code.co_filename))
        low = 1 if code.co_name == "<module>" else code.co_firstlineno
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if line := loop_around(source, frame.f_lineno, low):
            names = _names(frame, thing)
            known = (n for n in names if "." in n or n in parameters or assigned(source, n, low, line))
            if name := next(known, ""):
                place = code.co_filename, line, name
    return place


def loop_around(source: str, line: int, low: int) -> int:
    """The first line of the outermost loop around a line, else of its own statement; of those from `low` on. 0: none.

    >>> loop_around("a = 1\\nfor b in c:\\n    while a:\\n        f(a)", 4, 1), loop_around("f()\\ng(\\n2)", 3, 1)
    (2, 2)
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return 0
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and low <= node.lineno <= line <= (node.end_lineno or 0)
    ]
    scope = max((node.lineno for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)), default=0)
    inside = [node for node in around if node.lineno > scope]
    loops = [node.lineno for node in inside if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
    return min(loops, default=max((node.lineno for node in inside), default=0))


def made(thing: Any) -> tuple[str, int, str] | None:
    """File, last line and name of the assignment that the thing came from."""
    for frame in users_frames():
        file = frame.f_code.co_filename
        for name in _names(frame, thing):
            low = 1 if "." in name or frame.f_code.co_name == "<module>" else frame.f_code.co_firstlineno
            high = sys.maxsize if "." in name else frame.f_lineno
            if line := assigned("".join(linecache.getlines(file)), name, low, high):
                return file, line, name
    return None


def _names(frame: FrameType, thing: Any) -> Iterator[str]:
    variables = frame.f_locals
    yield from [name for name, value in variables.items() if value is thing]
    if (owner := variables.get("self")) is not None:
        yield from [f"self.{name}" for name, value in getattr(owner, "__dict__", {}).items() if value is thing]


def assigned(source: str, name: str, low: int, high: int) -> int:
    """The last line of the last assignment to a name between two lines; 0: there is none.

    >>> assigned("a = 1\\nb = f(\\n    a\\n)\\nb.step()", "b", 1, 5)
    4
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return 0
    found = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        end = node.end_lineno or node.lineno
        if low <= node.lineno and end < high and any(ast.unparse(part) == name for part in parts):
            found = max(found, end)
    return found
