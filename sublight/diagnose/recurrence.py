"""Loops whose rounds need each other, by the text: then no batch of all rounds says the same."""

from __future__ import annotations

import ast
from pathlib import Path

JOINS = ("append", "extend", "cat", "concat", "stack", "add")  # a result put together piece by piece is no need


def recurs(file: str, line: int) -> bool:
    """Whether the innermost loop around a line hands a value from round to round through a call; no where it cannot
    be read.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and node.body[0].lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return bool(loops) and _hands_on(max(loops, key=lambda loop: loop.lineno))


def _hands_on(loop: ast.For | ast.While) -> bool:
    """Whether a name is read, inside a call, before the round has set it, and set later in the round.

    >>> _hands_on(ast.parse("for x in xs: h, c = cell(x, (h, c))").body[0])
    True
    >>> _hands_on(ast.parse("for x in xs: y = f(x); total = total + y; out = cat([out, g(y)])").body[0])
    False
    """
    own = (
        {name.id for name in ast.walk(loop.target) if isinstance(name, ast.Name)} if hasattr(loop, "target") else set()
    )
    early: set[str] = set()
    for statement in loop.body:
        early |= _read_in_calls(statement) - own
        set_here = {
            name.id for name in ast.walk(statement) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        if early & set_here:
            return True
        own |= set_here
    return False


def _read_in_calls(statement: ast.stmt) -> set[str]:
    read: set[str] = set()
    for call in ast.walk(statement):
        if isinstance(call, ast.Call) and _name(call.func) not in JOINS:
            for part in (*call.args, *(keyword.value for keyword in call.keywords)):
                read |= {name.id for name in ast.walk(part) if isinstance(name, ast.Name)}
    return read


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
