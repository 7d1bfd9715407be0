"""The derivative of a caller's score function by its score: written out from its source, so that it is exact.

A score function is a few lines of arithmetic. Each assignment gets a second one before it, for the derivative, by the
rules of calculus; what does not depend on the score has none. What is beyond these rules (a loop, a function that we do
not know) is refused, and the caller gives the derivative as a function of their own.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
import zlib
from collections.abc import Callable
from typing import Any

from sublight.backend.jit import triton
from sublight.errors import BadInput

# of f(x): what its derivative by x is
CHAIN = {
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0}) * 0.6931471805599453",
    "log": "1.0 / ({0})",
    "log2": "1.4426950408889634 / ({0})",
    "sqrt": "0.5 / tl.sqrt({0})",
    "rsqrt": "-0.5 * tl.rsqrt({0}) / ({0})",
    "sin": "tl.cos({0})",
    "cos": "-tl.sin({0})",
    "abs": "tl.where(({0}) < 0, -1.0, 1.0)",
    "sigmoid": "tl.sigmoid({0}) * (1.0 - tl.sigmoid({0}))",
}
PICKS = {"maximum": "({0}) > ({1})", "minimum": "({0}) < ({1})"}


class _Beyond(Exception):
    """The rules here do not reach so far."""


def slope_function(function: Any) -> Any:
    """A Triton function of the same arguments as a score function, which gives its derivative by the first."""
    plain = function.fn
    definition = definition_of(plain)
    try:
        lines = _derived(definition)
    except _Beyond as beyond:
        raise _refusal(plain.__name__, str(beyond)) from None
    arguments = ast.unparse(definition.args)
    text = f"def slope_of_{plain.__name__}({arguments}):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"
    return _compiled(text, f"slope_of_{plain.__name__}", plain)


def definition_of(plain: Callable[..., Any]) -> ast.FunctionDef:
    """A function's source, parsed, without its decorators."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
    except OSError:
        raise BadInput(f"the source of {plain.__name__} is not to be had: define it in a file") from None
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    return definition


def names_of(plain: Callable[..., Any]) -> dict[str, Any]:
    """What a function's names stand for, outside of it."""
    cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    return plain.__globals__ | {name: cell.cell_contents for name, cell in cells}


def _refusal(name: str, reason: str) -> BadInput:
    return BadInput(f"score_mod {name} cannot be differentiated here ({reason}): give score_mod_grad=")


def _compiled(text: str, name: str, plain: Callable[..., Any]) -> Any:
    """The text as a Triton function in the caller's names; Triton reads a function's source by its file's name."""
    place = f"<{plain.__module__}.{name} {zlib.crc32(text.encode()):x}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    names = names_of(plain) | {"tl": triton.language}
    exec(compile(text, place, "exec"), names)
    return triton.jit(names[name])


def _derived(definition: ast.FunctionDef) -> list[str]:
    """The body, with a derivative before each assignment, and the result's in its place."""
    score = definition.args.args[0].arg
    known = {score: "1.0"}  # a name that depends on the score: the name of its derivative
    lines: list[str] = []
    for statement in definition.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if isinstance(statement, ast.Return) and statement.value is not None:
            slope = _slope(statement.value, known)
            return [*lines, f"return {slope or '0.0'}"]
        target, value = _assignment(statement)
        slope = _slope(value, known)
        if slope is not None:
            lines.append(f"_slope_{target} = {slope}")
        lines.append(ast.unparse(statement))
        known.pop(target, None)
        if slope is not None:
            known[target] = f"_slope_{target}"
    raise _Beyond("it returns nothing")


def _assignment(statement: ast.stmt) -> tuple[str, ast.expr]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        left = ast.Name(id=statement.target.id, ctx=ast.Load())
        return statement.target.id, ast.BinOp(left=left, op=statement.op, right=statement.value)
    raise _Beyond(f"line {statement.lineno} is more than an assignment")


def _slope(x: ast.expr, known: dict[str, str]) -> str | None:
    """The derivative of an expression by the score; None where it does not depend on it."""
    if not any(isinstance(part, ast.Name) and part.id in known for part in ast.walk(x)):
        return None
    match x:
        case ast.Name():
            return known[x.id]
        case ast.Compare() | ast.BoolOp():
            return None  # a step: flat wherever it has a derivative
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return f"{'-' if isinstance(x.op, ast.USub) else ''}({_slope(x.operand, known)})"
        case ast.BinOp():
            return _of_two(x, known)
        case ast.IfExp():
            return f"({_or_zero(x.body, known)}) if {ast.unparse(x.test)} else ({_or_zero(x.orelse, known)})"
        case ast.Call(func=ast.Attribute(value=value, attr="to")) if not x.keywords:
            return _slope(value, known)
        case ast.Call(func=ast.Attribute(attr=name)) if not x.keywords:
            return _of_call(x, name, known)
    raise _Beyond(f"no rule for {ast.unparse(x)}")


def _or_zero(x: ast.expr, known: dict[str, str]) -> str:
    return _slope(x, known) or "0.0"


def _of_two(x: ast.BinOp, known: dict[str, str]) -> str | None:
    left, right = _slope(x.left, known), _slope(x.right, known)
    a, b = f"({ast.unparse(x.left)})", f"({ast.unparse(x.right)})"
    match x.op:
        case ast.Add():
            return " + ".join(f"({part})" for part in (left, right) if part)
        case ast.Sub():
            return f"({left or 0.0}) - ({right})" if right else left
        case ast.Mult():
            parts = [f"({left}) * {b}" if left else "", f"{a} * ({right})" if right else ""]
            return " + ".join(part for part in parts if part)
        case ast.Div():
            parts = [f"({left}) / {b}" if left else "", f"- {a} / {b} * (({right}) / {b})" if right else ""]
            return " ".join(part for part in parts if part)
        case ast.BitAnd() | ast.BitOr() | ast.BitXor():
            return None  # of comparisons
    raise _Beyond(f"no rule for {ast.unparse(x)}")


def _of_call(x: ast.Call, name: str, known: dict[str, str]) -> str | None:
    args = [ast.unparse(each) for each in x.args]
    if name in CHAIN and len(args) == 1:
        return f"({CHAIN[name].format(args[0])}) * ({_slope(x.args[0], known)})"
    if name == "where" and len(args) == 3:
        one, other = (_slope(each, known) for each in x.args[1:])
        return f"tl.where({args[0]}, {one or 0.0}, {other or 0.0})" if one or other else None
    if name in PICKS and len(args) == 2:
        one, other = (_slope(each, known) or "0.0" for each in x.args)
        return f"tl.where({PICKS[name].format(*args)}, {one}, {other})"
    raise _Beyond(f"no rule for {name}()")
