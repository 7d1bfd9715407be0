"""What a submission's names are bound to: the scan judges `tl.load` and `self.block` by the name before the dot.

So a module's or a class's name must stand for nothing else anywhere in the file, and `self` for an object of one of the
submission's own classes. Else `def look(self): return self.numpy()` would reach what no tensor may give.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator


def bound_names(tree: ast.AST) -> set[str]:
    """Every name that the submission, or one function of it, binds itself."""
    return {name for _, name, _ in _bindings(tree)}


def imported(alias: ast.alias) -> tuple[str, str]:
    """The name that `import …` binds, and the module that it stands for.

    >>> imported(ast.alias("triton.language", "tl")), imported(ast.alias("triton.language"))
    (('tl', 'triton.language'), ('triton', 'triton'))
    """
    first = alias.name.split(".")[0]
    return (alias.asname, alias.name) if alias.asname else (first, first)


def methods_of(tree: ast.AST) -> set[str]:
    """Names of all functions of classes that take an object of theirs."""
    return {node.name for each in _classes(tree) for node in _methods(each)}


def changed_meanings(tree: ast.AST, bases: Collection[str]) -> Iterator[tuple[ast.AST, str]]:
    """What may not be, and why: names that stand for a module or a class and for something else as well; a `self` that
    may be anything. `bases` of classes may be these, and classes of the submission."""
    meanings: dict[str, str] = {}
    classes = {each.name for each in _classes(tree)}
    bound = bound_names(tree)
    own = {id(node.args.args[0]) for each in _classes(tree) for node in _methods(each) if _is_left_alone(node, bound)}
    for node, name, meaning in _bindings(tree):
        if meanings.setdefault(name, meaning) != meaning:
            yield node, f"`{name}` must keep its meaning"
        if name == "self" and id(node) not in own:
            yield node, "`self` is the first argument of a class's methods, and nothing else"
    for each in _classes(tree):
        for base in each.bases:
            if not (isinstance(base, ast.Name) and base.id in (classes | (set(bases) - bound))):
                yield base, f"`class {each.name}({ast.unparse(base)})`: a class builds on the submission's own alone"
        for keyword in each.keywords:
            yield keyword.value, f"`class {each.name}({ast.unparse(keyword)})` is not for a submission"
        names = {node.name for node in _methods(each)}
        for node in _outside_of_methods(each):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
                yield node, f"`{node.id}`: a method is called on an object, `{each.name}().{node.id}`"


def _bindings(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Where a name is bound, the name, and what the scan takes it for: a module or a class. Empty: a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node, node.id, ""
        elif isinstance(node, ast.FunctionDef):
            yield node, node.name, ""
        elif isinstance(node, ast.ClassDef):
            yield node, node.name, f"class of line {node.lineno}"
        elif isinstance(node, ast.arg):
            yield node, node.arg, ""
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node, node.name, ""
        elif isinstance(node, ast.Import):
            yield from ((node, *imported(alias)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _methods(each: ast.ClassDef) -> list[ast.FunctionDef]:
    return [
        node
        for node in each.body
        if isinstance(node, ast.FunctionDef) and [arg.arg for arg in node.args.args[:1]] == ["self"]
    ]


def _is_left_alone(method: ast.FunctionDef, bound: set[str]) -> bool:
    """Whether nothing gets the bare function, which would take anything for `self`: no decorator but Python's own
    property, and no argument before."""
    if method.args.posonlyargs:
        return False
    return not method.decorator_list or ([ast.unparse(each) for each in method.decorator_list] == ["property"]
                                         and "property" not in bound)  # fmt: skip


def _outside_of_methods(each: ast.ClassDef) -> Iterator[ast.AST]:
    """What runs while the class is made, and knows its functions by their bare names."""
    for statement in each.body:
        if isinstance(statement, ast.FunctionDef):
            for part in (*statement.decorator_list, statement.args, *filter(None, (statement.returns,))):
                yield from ast.walk(part)
        else:
            yield from ast.walk(statement)
