"""How a function is written: its name, and where it stands."""

from __future__ import annotations

from sublight.pyprof.tree import Function
from sublight.trace.capture.python import library_path
from sublight.trace.capture.source import is_users, shown_path


def file_text(file: str) -> str:
    """A file's path as the user would write it."""
    return shown_path(file) if is_users(file) else library_path(file)


def where(function: Function, line: int = 0) -> str:
    file, _, first_line = function
    return f"{file_text(file)}:{line or first_line}" if file else "builtin"


def label(function: Function) -> str:
    """
    >>> label(("", "builtins.len", 0))
    'builtins.len'
    """
    return f"{function[1]} ({where(function)})" if function[0] else function[1]
