"""What the text of a submission that is wrong tells of the mistake: nothing here refuses, a check says it beside."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeGuard

BLOCK_MAKERS = ("arange", "zeros", "full")  # of tl
REDUCTIONS = ("sum", "max", "min", "argmax", "argmin", "xor_sum", "reduce")


def branches(source: str) -> bool:
    """Whether a kernel has a branch of Python's: the interpreter takes one on a whole block, the compiler does not."""
    return any(
        _joins(node) or isinstance(node, ast.If | ast.IfExp | ast.While | ast.Not) for node in _in_kernels(source)
    )


def words_between_blocks(source: str) -> list[int]:
    """Lines of kernels with `and`, `or`, `a < b < c`: between blocks a GPU takes them in another way."""
    return sorted({node.lineno for node in _in_kernels(source) if _joins(node)})


def joins_blocks(source: str) -> set[int]:
    """Of these lines, those where one side is a block for certain: numbers may be joined so.

    >>> code = "@triton.jit\\ndef k(n, B):\\n    at = tl.arange(0, B)\\n    a = n > 0 and B > 8\\n    b = 0 <= at < n"
    >>> words_between_blocks(code), joins_blocks(code)
    ([4, 5], {5})
    """
    return {
        node.lineno
        for kernel in _kernels(source)
        for names in (_blocks_of(kernel),)
        for node in ast.walk(kernel)
        if _joins(node) and _has_block(node, names)
    }


def _blocks_of(kernel: ast.FunctionDef) -> set[str]:
    """Names that stand for blocks: made by BLOCK_MAKERS, or of what was."""
    names: set[str] = set()
    while True:
        more = {
            name.id
            for node in ast.walk(kernel)
            if isinstance(node, ast.Assign | ast.AugAssign) and _has_block(node.value, names)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        if more <= names:
            return names
        names |= more


def _has_block(node: ast.AST, names: set[str]) -> bool:
    """What is reduced may be a number, so it does not count."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in REDUCTIONS:
            return False
        if node.func.attr in BLOCK_MAKERS:
            return True
    if isinstance(node, ast.Name):
        return node.id in names
    return any(_has_block(each, names) for each in ast.iter_child_nodes(node))


def _joins(node: ast.AST) -> TypeGuard[ast.expr]:
    return isinstance(node, ast.BoolOp) or (isinstance(node, ast.Compare) and len(node.ops) > 1)


def stores_nothing(source: str) -> bool:
    """Whether no line could write to memory: no tl.store, no atomic operation, no descriptor's store.

    >>> stores_nothing("out_ptr = x + y"), stores_nothing("tl.store(out_ptr, x)")
    (True, False)
    """
    named = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return not any(name == "store" or name.startswith("atomic_") for name in named)


def counted_beside(source: str) -> list[tuple[int, int]]:
    """Lines of kernels that ask for the grid's second or third number and never for its first.

    >>> counted_beside("@triton.jit\\ndef k(p):\\n    place = tl.program_id(1)")
    [(3, 1)]
    >>> counted_beside("@triton.jit\\ndef k(p):\\n    place = tl.program_id(1) + tl.program_id(axis=0)")
    []
    """
    asked = [
        (node.lineno, number.value)
        for node in _in_kernels(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "program_id"
        for number in (*node.args, *(each.value for each in node.keywords))
        if isinstance(number, ast.Constant) and isinstance(number.value, int)
    ]
    return [] if any(axis == 0 for _, axis in asked) else sorted(set(asked))


def unread(source: str) -> list[tuple[int, str, str]]:
    """Addresses that a kernel gets and never uses, with its line and name.

    >>> unread("@triton.jit\\ndef add_kernel(x_ptr, y_ptr, n):\\n    x = tl.load(x_ptr)")
    [(2, 'add_kernel', 'y_ptr')]
    """
    return [
        (kernel.lineno, kernel.name, argument.arg)
        for kernel in _kernels(source)
        for argument in kernel.args.args
        if argument.arg.endswith("_ptr")
        and argument.arg not in {name.id for name in ast.walk(kernel) if isinstance(name, ast.Name)}
    ]


def rebound(source: str, function: str, outputs: Sequence[str]) -> list[tuple[int, str]]:
    """Outputs whose names are given to other tensors, with the line: what is written there nobody sees.

    >>> rebound("def copy(x, out):\\n    n, out = x.numel(), x.clone()", "copy", ["out"])
    [(2, 'out')]
    """
    return sorted(
        (name.lineno, name.id)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in outputs
    )


def _in_kernels(source: str) -> Iterator[ast.AST]:
    """Everything inside of decorated functions."""
    return (inner for kernel in _kernels(source) for statement in kernel.body for inner in ast.walk(statement))


def _kernels(source: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            yield node
