"""Residual and norm in one pass: `x = residual + x` and the `self.norm(x)` after it, or `self.norm(residual + x)`.

The forward is rebuilt from its source with the two fused and all else as it was. The last sum of one layer and the
first norm of the next lie in different forwards: those stay two passes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from sublight.fix.patch import probe, rewrite
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.rules import norm
from sublight.fix.patch.swap import is_called_plainly
from sublight.fix.patch.twin import is_cast, is_hooked
from sublight.ops.norm.add_layer_norm import add_layer_norm
from sublight.ops.norm.add_rms_norm import add_rms_norm

RULE = "residual_norm"
PREFIX = "__sublight_add_"
NORMED = "__sublight_normed"


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    """A forward in which a sum meets a norm that we understand."""
    if not any(_may_be_norm(child) for child in module.children()):
        return None
    try:
        own = type(module).forward
        tree = rewrite.parsed(rewrite.layers(own)[-1])
        names = fused(tree, lambda name: _may_be_norm(getattr(module, name, None)))
        if not names:
            return None
        norms = {name: _known(getattr(module, name), model) for name in names}
        kinds = {name: kind for name, kind in norms.items() if isinstance(kind, norm.Norm)}
        if not kinds:
            reasons = {f"{name}: {left.reason}" for name, left in norms.items() if isinstance(left, Left)}
            return Left(rule=RULE, reason="; ".join(sorted(reasons)) or f"{names[0]} is no norm that we know")
        put = {PREFIX + name: adding(kind) for name, kind in kinds.items()}
        forward = rewrite.rebuilt(own, lambda fresh: _fuse(fresh, kinds), put)
    except rewrite.NotUnderstood as reason:
        return Left(rule=RULE, reason=str(reason))
    first, kind = next(iter(kinds.items()))
    op = "add_layer_norm" if kind.kind == "LayerNorm" else "add_rms_norm"
    arguments = partial(_arguments, first, kind)
    return Swap(
        rule=RULE,
        op=op,
        forward=forward,
        arguments=arguments,
        hides=tuple(kinds),
        reads_settings=False,
        what=f"x + y, {kind.kind}",
    )


def _known(child: torch.nn.Module, model: torch.nn.Module) -> norm.Norm | Left | None:
    return norm.known(child, probe.dtype_of(child, model))


def adding(kind: norm.Norm) -> Callable[..., Any]:
    """(norm of a + b, a + b), by one kernel where everything is as the norm was understood."""

    def add_norm(module: Any, a: torch.Tensor, b: torch.Tensor, with_sum: bool = True) -> Any:
        weight, bias = _columns(kind, module)
        if not is_plain(a, b, weight) or not kind.takes(a, weight) or is_hooked(module):
            total = a + b
            both = module(total), total
        elif kind.kind == "LayerNorm":
            both = add_layer_norm(a, b, weight, torch.zeros_like(weight) if bias is None else bias, eps_for(kind, a))
        else:
            both = add_rms_norm(a, b, weight, eps_for(kind, a))
        return both if with_sum else both[0]

    return add_norm


def eps_for(kind: norm.Norm, x: torch.Tensor) -> float:
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if kind.eps is None else kind.eps


def _columns(kind: norm.Norm, module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = getattr(module, kind.weight)
    bias = getattr(module, kind.bias) if kind.bias else None
    return 1 + weight if kind.kind == "RMSNorm with 1 + weight" else weight, bias


def is_plain(a: Any, b: Any, weight: torch.Tensor) -> bool:
    """Whether nothing is promoted, broadcast or cast in a + b and its norm, and the sum lies as ours does."""
    if not all(map(probe.is_plain_tensor, (a, b, weight))) or a.shape != b.shape or a.dim() == 0:
        return False
    alike = a.dtype == b.dtype == weight.dtype and a.device == b.device == weight.device
    return alike and not is_cast(a) and probe.lies_in_order(a) and probe.lies_in_order(b)


def fused(tree: ast.FunctionDef, is_norm: Callable[[str], bool]) -> list[str]:
    """Change the tree; the names of the norms whose sums were taken in."""
    done: list[str] = []
    for block in list(rewrite.blocks(tree)):
        _sink(block, rewrite.self_name(tree), is_norm)
    for block in list(rewrite.blocks(tree)):
        for i in range(len(block) - 1, -1, -1):
            if taken := _fuse_at(block, i, rewrite.self_name(tree), is_norm):
                done.append(taken)
    for node in ast.walk(tree):
        if _is_norm_call(node, rewrite.self_name(tree), is_norm) and (sides := _sides(node.args[0])):  # type: ignore[attr-defined]
            done.append(_fuse_call(node, sides))
    return done


def _fuse(tree: ast.FunctionDef, kinds: dict[str, Any]) -> None:
    fused(tree, kinds.__contains__)


def _sink(block: list[ast.stmt], me: str, is_norm: Callable[[str], bool]) -> None:
    """`x = a + b; if never: …; y = norm(x)`: the sum and what follows go into both branches, so that in one they meet.

    GPT-2 has its cross-attention there. The test may read local names only: the sum cannot change its answer.
    """
    for i in range(len(block) - 2):
        total, test = _sum_at(block[i]), block[i + 1]
        if total is None or not isinstance(test, ast.If) or test.orelse or not _reads_names(test.test, total[0]):
            continue
        end = _norm_after(block, i + 1, total[0], me, is_norm)
        if end is None:
            continue
        first, tail = block[i], block[i + 2 : end + 1]
        test.orelse = [first, *tail]
        test.body = [copy.deepcopy(first), *test.body, *copy.deepcopy(tail)]
        block[i : end + 1] = [test]
        return


def _fuse_at(block: list[ast.stmt], i: int, me: str, is_norm: Callable[[str], bool]) -> str | None:
    total = _sum_at(block[i])
    if total is None or (end := _norm_after(block, i, total[0], me, is_norm)) is None:
        return None
    x, a, b = total
    call = next(_norm_calls(block[end], x, me, is_norm))
    name = call.func.attr
    both = ast.Tuple([ast.Name(NORMED, ast.Store()), ast.Name(x, ast.Store())], ast.Store())
    sum_and_norm = ast.Call(ast.Name(PREFIX + name, ast.Load()), [call.func, a, b], [])
    block[end] = _Replace(call, ast.copy_location(ast.Name(NORMED, ast.Load()), call)).visit(block[end])
    if not isinstance(block[end], ast.Return):  # not held longer than the norm's own result would be
        block.insert(end + 1, ast.copy_location(ast.Delete([ast.Name(NORMED, ast.Del())]), block[end]))
    block[i] = ast.copy_location(ast.Assign([both], ast.copy_location(sum_and_norm, block[i])), block[i])
    return str(name)


def _fuse_call(call: Any, sides: tuple[ast.expr, ast.expr]) -> str:
    """`self.norm(a + b)`, whose sum nobody else sees."""
    name = str(call.func.attr)
    call.func, call.args = ast.Name(PREFIX + name, ast.Load()), [call.func, *sides, ast.Constant(False)]
    return name


def _sum_at(statement: ast.stmt) -> tuple[str, ast.expr, ast.expr] | None:
    """(x, a, b) of `x = a + b` or `x = torch.add(a, b)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, sides = statement.targets[0], _sides(statement.value)
    return (target.id, *sides) if isinstance(target, ast.Name) and sides else None


def _sides(value: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """a and b of `a + b` or `torch.add(a, b)`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return value.left, value.right
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "torch.add" and len(value.args) == 2:
        return None if value.keywords else (value.args[0], value.args[1])
    return None


def _norm_after(block: list[ast.stmt], i: int, x: str, me: str, is_norm: Callable[[str], bool]) -> int | None:
    """Where the sum in x is normed, with nothing between but names given to names."""
    for j in range(i + 1, len(block)):
        statement = block[j]
        if len(list(_norm_calls(statement, x, me, is_norm))) == 1:
            return j
        if not isinstance(statement, ast.Assign) or not rewrite.is_name(statement.value):
            return None
        if not all(rewrite.is_name(target) and not rewrite.is_name(target, x) for target in statement.targets):
            return None
    return None


def _norm_calls(statement: ast.stmt, x: str, me: str, is_norm: Callable[[str], bool]) -> Iterator[Any]:
    """Each self.norm(x) that this statement surely evaluates, once, before it stores anything or calls another."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
        return
    calls: list[Any] = []  # in the order in which they end, as they are evaluated
    todo: list[tuple[ast.AST, bool]] = [(statement, False)]
    while todo:
        node, is_done = todo.pop()
        if isinstance(node, ast.Lambda | ast.IfExp | ast.BoolOp | ast.ListComp | ast.GeneratorExp | ast.NamedExpr):
            calls.append(None)  # whatever it may call
        elif is_done:
            calls.append(node)
        else:
            todo += [(node, True)] * isinstance(node, ast.Call | ast.Await | ast.Yield)
            todo += [(child, False) for child in reversed(_evaluated(node))]
    found = [node for node in calls if _is_norm_call(node, me, is_norm) and rewrite.is_name(node.args[0], x)]
    yield from found if found and calls[0] is found[0] else ()


def _evaluated(node: ast.AST) -> list[ast.AST]:
    """What a node evaluates, in order; an assignment its value before its targets."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [each for each in (node.value, *getattr(node, "targets", ())) if each is not None]
    if isinstance(node, ast.Call):
        return [node.func, *node.args, *node.keywords]
    return list(ast.iter_child_nodes(node))


def _is_norm_call(node: ast.AST | None, me: str, is_norm: Callable[[str], bool]) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        return False
    return rewrite.is_name(node.func.value, me) and is_norm(node.func.attr) and len(node.args) == 1


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _reads_names(test: ast.expr, x: str) -> bool:
    allowed = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Name, ast.Constant, ast.boolop, ast.unaryop, ast.cmpop)
    nodes = [node for node in ast.walk(test) if not isinstance(node, ast.expr_context)]
    return all(isinstance(node, allowed) and not rewrite.is_name(node, x) for node in nodes)


def _may_be_norm(child: Any) -> bool:
    """A module with nothing but one or two vectors."""
    if not isinstance(child, torch.nn.Module) or child._modules or not is_called_plainly(child):
        return False
    own = [p for p in child._parameters.values() if p is not None]
    return 0 < len(own) <= 2 and all(p.dim() == 1 for p in own)


def _arguments(name: str, kind: norm.Norm, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """As the first fused norm of the module will be called."""
    weight = getattr(getattr(module, name), kind.weight)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    hidden = (x for x in tensors if x.is_floating_point() and x.dim() > 1 and x.shape[-1:] == weight.shape)
    rows = tensors[0].shape if tensors else (1,)  # as of token ids, which are embedded first
    x = next(hidden, None)
    x = weight.new_empty((*rows, weight.shape[0])) if x is None else x
    return (x, x, weight, weight) if kind.kind == "LayerNorm" else (x, x, weight)


RESIDUAL_NORM = Rule(name=RULE, find=find, reads="source")
