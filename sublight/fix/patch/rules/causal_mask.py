"""Under torch.compile, the causal mask that eager skips: SDPA gets `is_causal` and no mask, and takes its flash kernel.

Hugging Face's `create_causal_mask` gives None where nothing is masked but the future. To know that there is no padding
and that no sequences are packed it reads values, which nothing can while a graph is traced: there it always makes the
mask. What a forward was called with often proves it without values: no mask, no positions, no cache. The positions that
it then counts up itself are one sequence. In every other call, in eager mode and in torch.export, their own code runs.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from sublight.fix.patch import rewrite
from sublight.fix.patch.record import Left, Rule, Swap

RULE = "causal_mask"
WHY = "under torch.compile, the mask that eager skips"
MAKER, BARE = "__sublight_causal_mask", "__sublight_bare"
POSITIONS = ("position_ids", "cache_position")  # of which one that is no plain count may tell of packed sequences
CACHE = "past_key_values"
HARMLESS = {"config", "inputs_embeds", "input_embeds", "attention_mask", "allow_is_causal_skip", CACHE, *POSITIONS}


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    """A forward that reads a global which is `create_causal_mask`, whatever it is called there."""
    masking = sys.modules.get("transformers.masking_utils")  # a model of theirs has loaded it
    theirs = getattr(masking, "create_causal_mask", None)
    try:
        own = type(module).forward
        function = rewrite.layers(own)[-1]
    except rewrite.NotUnderstood:
        return None
    name = next((each for each in _read_by(function.__code__) if function.__globals__.get(each) is theirs), None)
    if theirs is None or name is None:
        return None
    if reason := _needed(getattr(module, "config", None)):
        return Left(rule=RULE, reason=reason)
    over = partial(rewritten, name=name, theirs=theirs)
    try:
        forward = over(own)
    except rewrite.NotUnderstood as reason:
        return Left(rule=RULE, reason=str(reason))
    return Swap(rule=RULE, forward=forward, over=over, reads_settings=False, why=WHY)


def _read_by(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function reads, and those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _read_by(constant)


def _needed(config: Any) -> str:
    """Why its layers need the mask in eager mode, too; empty where one of them may do without."""
    kind = getattr(config, "_attn_implementation", None)
    if kind != "sdpa":
        return f"its attention is {kind}, not sdpa"
    layers = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) is not None and "full_attention" not in (layers or ()):
        return "all its layers look through a sliding window, which is in the mask"
    return ""


def rewritten(own: Any, name: str, theirs: Callable[..., Any]) -> Any:
    """The forward with each `create_causal_mask` in it chosen by what the forward was called with."""

    def change(tree: ast.FunctionDef) -> None:
        taken = [argument.arg for argument in ast.walk(tree.args) if isinstance(argument, ast.arg)]
        optional = [each for each in (*POSITIONS, CACHE) if each in taken]
        counted = [each for each in optional if each in POSITIONS and is_counted(each, tree)]
        _Chosen(name, counted).visit(tree)
        bare = ast.parse(f"{BARE} = {' and '.join(f'{each} is None' for each in optional) or True}").body[0]
        for node in ast.walk(bare):
            ast.copy_location(node, tree.body[0])
        tree.body.insert(0, bare)  # the forward gives these names other values later

    return rewrite.rebuilt(own, change, {MAKER: chosen_for(theirs)})


class _Chosen(ast.NodeTransformer):
    """`create_causal_mask` becomes `maker(create_causal_mask, bare, the counted positions…)`."""

    def __init__(self, name: str, counted: list[str]) -> None:
        self.name, self.counted = name, counted

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != self.name:
            return node
        others = [ast.Name(each, ast.Load()) for each in (BARE, *self.counted)]
        return ast.copy_location(ast.Call(ast.Name(MAKER, ast.Load()), [node, *others], []), node)


def chosen_for(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What to call where a forward calls `create_causal_mask`."""
    masking: Any = sys.modules["transformers.masking_utils"]
    caches: Any = sys.modules["transformers.cache_utils"]
    order = tuple(inspect.signature(theirs).parameters)

    def skipped(*args: Any, counted: tuple[Any, ...], **named: Any) -> Any:
        given = dict(zip(order, args, strict=False)) | named
        return None if is_skipped(given, counted) else theirs(*args, **named)

    def is_skipped(given: dict[str, Any], counted: tuple[Any, ...]) -> bool:
        """Whether nothing is masked but the future, as eager would find."""
        config = given["config"]
        return (
            config._attn_implementation == "sdpa"
            and masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking.sdpa_mask
            and getattr(config, "is_causal", True)
            and given.get("attention_mask") is None
            and given.get("allow_is_causal_skip", True)
            and is_empty(given.get(CACHE))
            and all(_is_among(given.get(each), counted) for each in POSITIONS)
            and all(given[each] is None for each in given if each not in HARMLESS)
        )

    def is_empty(cache: Any) -> bool:
        """A cache that grows, and holds nothing yet: there are as many keys as queries."""
        if type(cache) is caches.EncoderDecoderCache:
            cache = cache.self_attention_cache
        return cache is None or (type(cache) is caches.DynamicCache and cache.get_seq_length() == 0)

    def chosen(found: Callable[..., Any], bare: bool, *counted: Any) -> Callable[..., Any]:
        if bare and torch.compiler.is_dynamo_compiling() and found is theirs and not is_exporting():
            return partial(skipped, counted=counted)
        return found

    return chosen


def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which PyTorch 2.11 always answers with True while a graph is traced."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", True))


def _is_among(value: Any, tensors: tuple[Any, ...]) -> bool:
    return value is None or any(value is each for each in tensors)


def is_counted(name: str, tree: ast.FunctionDef) -> bool:
    """Whether all that the forward ever puts into this variable are positions of one sequence, one after the other."""
    values = list(_values(name, tree))
    return not _is_changed(name, tree) and all(value is not None and _is_count(value, name, tree) for value in values)


def _values(name: str, tree: ast.FunctionDef) -> Iterator[ast.expr | None]:
    """What is assigned to a variable; None: it cannot be told."""
    plain: dict[ast.AST, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            plain |= dict.fromkeys(node.targets, node.value)
        elif isinstance(node, ast.AnnAssign):
            plain[node.target] = node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            yield plain.get(node)


def _is_changed(name: str, tree: ast.FunctionDef) -> bool:
    """Whether something may be written into it in place: x[…] = …, x.add_(…)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and rewrite.is_name(node.value, name):
            return True
        if isinstance(node, ast.Attribute) and node.attr.endswith("_") and rewrite.is_name(node.value, name):
            return True
    return False


def _is_count(value: ast.expr, name: str, tree: ast.FunctionDef) -> bool:
    """torch.arange(…), moved by a number, given a dimension in front; or what `name` or the other positions have."""
    if isinstance(value, ast.Name):
        return value.id == name or (value.id in POSITIONS[POSITIONS.index(name) + 1 :] and is_counted(value.id, tree))
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _is_count(value.left, name, tree) and _is_number(value.right, tree)
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.slice) in ("None", "(None, :)") and _is_count(value.value, name, tree)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if ast.unparse(value.func) == "torch.arange":
        return len(value.args) <= 2 and {keyword.arg for keyword in value.keywords} <= {"device", "dtype"}
    shown = [ast.unparse(argument) for argument in value.args]
    in_front = value.func.attr == "unsqueeze" and shown == ["0"]
    repeated = value.func.attr == "expand" and len(shown) == 2 and shown[1] == "-1"
    return (in_front or repeated) and not value.keywords and _is_count(value.func.value, name, tree)


def _is_number(value: ast.expr, tree: ast.FunctionDef) -> bool:
    """A whole number, or how much a cache holds; or a variable that has nothing else."""
    values = list(_values(value.id, tree)) if isinstance(value, ast.Name) else [value]
    for each in values:
        sides = [each.body, each.orelse] if isinstance(each, ast.IfExp) else [each]
        if not all(_is_size(side) for side in sides):
            return False
    return bool(values)


def _is_size(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr == "get_seq_length"
    return isinstance(value, ast.Constant) and type(value.value) is int


CAUSAL_MASK = Rule(name=RULE, find=find, reads="source", joins=True)
