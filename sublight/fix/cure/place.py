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
