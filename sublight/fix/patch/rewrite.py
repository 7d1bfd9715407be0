"""A module's forward rebuilt from its source with a few expressions changed, its decorators kept.

What we put in is reached as a closure variable, so the globals stay the module's own, live ones, and nothing is added
to anybody's module. The code keeps its file name and line numbers: a traceback shows the lines that the user knows.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

FUTURE_ANNOTATIONS = 0x1000000  # the compiler's flag, as code objects keep it
TREE = "__sublight_tree__"  # on a rebuilt function: what it was built from, for whoever changes more
LOOKS_AT_ITSELF = ("locals", "eval", "exec", "_getframe", "currentframe")
Change = Callable[[ast.FunctionDef], None]


class NotUnderstood(Exception):
    """Why a forward cannot be rebuilt."""


def layers(function: Any) -> tuple[types.FunctionType, ...]:
    """A function and what it wraps, outermost first."""
    found = []
    while True:
        if not isinstance(function, types.FunctionType):
            raise NotUnderstood(f"its forward is a {type(function).__name__}, not a function")
        found.append(function)
        if (function := getattr(function, "__wrapped__", None)) is None:
            return tuple(found)


def parsed(function: types.FunctionType) -> ast.FunctionDef:
    """The tree of a function's own source, without what only its definition needs; of a rebuilt one, the new tree."""
    if TREE in function.__dict__:
        return copy.deepcopy(function.__dict__[TREE])  # type: ignore[no-any-return]
    try:
        lines, first = inspect.getsourcelines(function)
        around: Any = ast.parse("if True:\n" + _indented("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise NotUnderstood("the source of its forward is not to be had") from error
    made = around.body[0]
    if len(around.body) != 1 or not isinstance(made, ast.FunctionDef):
        raise NotUnderstood("its forward is not a plain function")
    ast.increment_lineno(made, first - 2)  # one for the line in front of it
    made.decorator_list, made.returns = [], None
    for argument in ast.walk(made.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if any(_is_private(name) for name in _names(made)):
        raise NotUnderstood("its forward uses private names (__x), which only its class can read")
    return made


def _indented(source: str) -> str:
    """As it stands in a class, untouched: to take indentation away would change strings of several lines."""
    return source if source[0].isspace() else textwrap.indent(source, " ")


def rebuilt(function: Any, change: Change, put: Mapping[str, Any]) -> types.FunctionType:
    """The function with its tree changed; `put` are the values of the new names in it."""
    chain = layers(function)
    own, tree = chain[-1], parsed(chain[-1])
    if _facts(_compiled(own, tree, ())) != _facts(own.__code__):
        raise NotUnderstood("the source of its forward is not what runs: changed since, or rewritten by a tool")
    if asked := next((name for name in _names(tree) if name in LOOKS_AT_ITSELF), None):
        raise NotUnderstood(f"its forward calls {asked}, which would show what we put in")
    change(tree)
    code = _compiled(own, ast.fix_missing_locations(tree), tuple(put))
    cells = dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in put.items()}
    made = _like(own, code, tuple(cells[name] for name in code.co_freevars))
    made.__dict__[TREE] = tree
    for inner, wrapper in zip(reversed(chain[1:]), reversed(chain[:-1]), strict=True):
        made = _rewrapped(wrapper, inner, made)
    return made


def signed(function: Callable[..., Any], own: Any) -> types.FunctionType:
    """function(self, **given) under the very signature of `own`: tools read what a forward takes from it."""
    like = layers(own)[-1]
    parameters = list(inspect.signature(like).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        raise NotUnderstood("its forward takes unnamed arguments")
    tree = parsed(like)
    own_self, *others = parameters
    handed = [
        ast.keyword(arg=None if p.kind is p.VAR_KEYWORD else p.name, value=ast.Name(p.name, ast.Load())) for p in others
    ]
    call = ast.Call(ast.Name("__ours", ast.Load()), [ast.Name(own_self.name, ast.Load())], handed)
    tree.body = [ast.copy_location(ast.Return(call), tree)]
    code = _compiled(like, ast.fix_missing_locations(tree), ("__ours",))
    return _like(like, code, (types.CellType(function),))


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements inside."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list):
                yield block


def self_name(tree: ast.FunctionDef) -> str:
    return (tree.args.posonlyargs + tree.args.args)[0].arg


def is_name(node: ast.AST | None, name: str | None = None) -> bool:
    return isinstance(node, ast.Name) and name in (None, node.id)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _compiled(own: types.FunctionType, tree: ast.FunctionDef, put: tuple[str, ...]) -> types.CodeType:
    """The code of `tree` inside a function whose arguments are its free variables; only the inner one is kept."""
    free = [*own.__code__.co_freevars, *put]
    outer = ast.parse(f"def outer({', '.join(free)}): pass")
    made: Any = outer.body[0]
    made.body = [tree]
    flags = own.__code__.co_flags & FUTURE_ANNOTATIONS
    whole = compile(outer, own.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    around = next(code for code in whole.co_consts if isinstance(code, types.CodeType))
    return next(code for code in around.co_consts if isinstance(code, types.CodeType) and code.co_name == tree.name)


def _facts(code: types.CodeType) -> tuple[Any, ...]:
    """What two codes of one source share; not the bytes, in which a method of an imported name is called otherwise."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, types.CodeType)]
    lines = {line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno}
    return code.co_names, code.co_varnames, code.co_freevars, constants, lines


def _like(own: types.FunctionType, code: types.CodeType, cells: tuple[types.CellType, ...]) -> types.FunctionType:
    """Another code under this function's name, defaults and globals."""
    named = code.replace(co_qualname=own.__code__.co_qualname)
    made = types.FunctionType(named, own.__globals__, own.__name__, own.__defaults__, cells)
    made.__kwdefaults__, made.__annotations__ = own.__kwdefaults__, own.__annotations__
    made.__qualname__, made.__doc__ = own.__qualname__, own.__doc__
    made.__dict__.update(own.__dict__)
    return made


def _rewrapped(wrapper: types.FunctionType, inner: Any, made: types.FunctionType) -> types.FunctionType:
    """The same wrapper around another function, which it must hold in exactly one closure variable."""
    cells = wrapper.__closure__ or ()
    if sum(_content(cell) is inner for cell in cells) != 1:
        raise NotUnderstood("its forward is wrapped by a decorator that does not show what it calls")
    swapped = tuple(types.CellType(made) if _content(cell) is inner else cell for cell in cells)
    around = _like(wrapper, wrapper.__code__, swapped)
    around.__dict__["__wrapped__"] = made
    return around


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty one
        return None
