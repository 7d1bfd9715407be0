"""RoPE inside an attention's forward: the function of its module that turns q and k by cos and sin.

Known by what it does to small tensors, beside tables as the model's own rotary embedding makes them: the pairs of a
head are its two halves or neighbours, and the tables hold an angle once, or at both values of its pair.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from sublight.correct import error
from sublight.fix.patch import outside, probe, rewrite
from sublight.fix.patch.proof import DTYPES, quiet
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.tables import TOKENS, WIDTH, Looks, Table, is_handed_on, tables_of
from sublight.fix.patch.trace import trace
from sublight.ops.rotary.rope import reference, rope
from sublight.ops.rotary.rotary import STYLES, Pair, Style, why_not_ours

RULE = "rope"
NAME = "__sublight_rope"
# our kernels read an angle once, where they expect it: other pairs would agree on a CPU, which reads all, and not there
TURNABLE = (
    *(("half", "halves"), ("half", "once")),
    *(("interleaved", "neighbours"), ("interleaved", "halves"), ("interleaved", "once")),
)
LONG = 5000  # tokens of the long probe
MANY = (1 << 18) + 7  # where no values are held
BUDGET = {"mul": 8, "add": 2, "sub": 2, "neg": 2, "cat": 4, "stack": 2}
BATCH, HEADS, KV_HEADS = 2, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """What a function does to q and k."""

    style: Style
    table: Table
    partial: bool  # values beyond the tables' width pass through
    widens: bool  # tables wider than q are taken, and the result is still of q's data type
    packs: bool  # what it gives is contiguous, however q and k lie: callers may have it viewed


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    """A forward that calls a function of its globals with (q, k, cos, sin)."""
    try:
        own = type(module).forward
        function = rewrite.layers(own)[-1]
    except rewrite.NotUnderstood:
        return None
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    turners = {name: value for name, value in named.items() if callable(value) and takes_tables(value)}
    if not turners:
        return None
    if len(turners) > 1:
        return Left(rule=RULE, reason=f"its forward may call any of {', '.join(turners)}")
    (name, turner), *_ = turners.items()
    if len(_parameters(turner)) < 4 or "cos" not in _parameters(turner)[2]:
        return Left(rule=RULE, reason=f"{name} does not take q, k, cos and sin")
    read = outside.of_function(turner)
    if read.oddity:
        return Left(rule=RULE, reason=f"not tried: {name} {read.oddity}")
    tables = {kind for part in model.modules() for kind in tables_of(part)}
    if len(tables) != 1:
        return Left(rule=RULE, reason="no rotary embedding in the model shows how its tables are laid out")
    turning = understood(turner, tables.pop())
    if turning is None:
        return Left(rule=RULE, reason=f"values not proven: {name} is neither of our two ways to turn q and k")
    dtypes, missing = proven(turner, turning, probe.dtype_of(module, model))
    if missing:
        return Left(rule=RULE, reason=missing)
    try:
        home, is_plain = sys.modules.get(function.__module__), is_handed_on(rewrite.parsed(function), name)
        put = {NAME: turned_by(turning, turner, home, name, read, dtypes, is_plain)}
        forward = rewrite.rebuilt(own, lambda tree: _renamed(tree, name), put)
    except rewrite.NotUnderstood as reason:
        return Left(rule=RULE, reason=str(reason))
    what = f"{name}, {turning.style}"
    return Swap(rule=RULE, op="rope", forward=forward, arguments=_arguments, reads_settings=False, what=what)


def takes_tables(function: Any) -> bool:
    names = _parameters(function)
    return any("cos" in name for name in names[1:]) and any("sin" in name for name in names[1:])


def understood(function: Callable[..., Any], table: Table) -> Turning | None:
    """What this function is, given tables of this layout."""
    styles = [style for style in STYLES if (style, table) in TURNABLE]
    style = next((style for style in styles if _agrees(function, style, table, WIDTH)), None)
    if style is None:
        return None
    q, k, cos, sin = _inputs(table, WIDTH)
    narrow = [x.half() for x in (q, k)]
    try:
        kinds = {x.dtype for x in function(*narrow, cos.float(), sin.float())}
    except Exception:  # whatever a stranger's function may raise: it does not widen
        kinds = set()
    projected = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]  # with a token's heads side by side
    return Turning(
        style=style,  # type: ignore[arg-type]
        table=table,
        partial=_agrees(function, style, table, WIDTH - 4),
        widens=kinds == {torch.float16},
        packs=all(x.is_contiguous() for x in function(*projected, cos, sin)),
    )


def proven(function: Callable[..., Any], turning: Turning, runs_in: torch.dtype) -> tuple[frozenset[torch.dtype], str]:
    """The data types in which the function is that turning and nothing else, and why it is not in `runs_in`.

    Structure with gradients and without, and at other lengths; values and gradients at scales and lengths far apart.
    """
    if why := _structure(function, turning, torch.float64) or _by_size(function, turning):
        return frozenset(), f"structure not proven: {why.replace('its forward', function.__name__)}"
    missing = {dtype: _unproven(function, turning, dtype) for dtype in (torch.float64, *DTYPES)}
    dtypes = frozenset(dtype for dtype, why in missing.items() if not why)
    return (frozenset(), missing[torch.float64]) if missing[torch.float64] else (dtypes, missing.get(runs_in, ""))


def _unproven(function: Callable[..., Any], turning: Turning, dtype: torch.dtype) -> str:
    if why := _structure(function, turning, dtype):
        return f"structure not proven: {why.replace('its forward', function.__name__)}"
    large = min(1e4, torch.finfo(dtype).max / 50)  # what is beyond the data type has no right answer
    for size, tokens in ((1e-4, TOKENS), (1.0, LONG), (large, TOKENS)):
        narrow = tuple(x.to(dtype) for x in _inputs(turning.table, WIDTH, tokens, size))
        ways = (lambda *xs: function(*xs), lambda *xs: _by_reference(turning, xs))
        mine, theirs = (_step(way, narrow) for way in ways)
        truth = _step(ways[1], tuple(x.double() for x in narrow))
        with torch.no_grad(), quiet():
            if not all(map(torch.equal, function(*narrow), mine)):
                return f"values not proven: {function.__name__} is another without gradients"
        for one, other, true in zip(mine, theirs, truth, strict=True):
            right = probe.same(one, true) if dtype == torch.float64 else error("", one, other, true).ok
            if one.dtype != dtype or not right:
                return f"values not proven: {function.__name__} is another in {dtype} at {tokens} tokens of {size:g}"
    return ""


def _structure(function: Callable[..., Any], turning: Turning, dtype: torch.dtype) -> str:
    for records in (True, False):
        q, k, cos, sin = (x.to(dtype) for x in _inputs(turning.table, WIDTH))
        leaves = [x.requires_grad_(records) for x in (q, k)]
        try:
            with torch.set_grad_enabled(records), quiet():
                found = trace(function, *leaves, cos, sin)
        except Exception as failure:  # whatever a stranger's function may raise
            return f"its forward fails in {dtype} ({type(failure).__name__})"
        if why := found.why_not(BUDGET, "turning"):
            return why
    return ""


def _by_size(function: Callable[..., Any], turning: Turning) -> str:
    """Whether it computes with lengths: `k * (len // 4096 + 1)` leaves no trace but the number that an op gets."""
    found = []
    for tokens in (TOKENS, MANY):
        inputs = (x.to("meta") for x in _inputs(turning.table, WIDTH, TOKENS))
        there = [x[..., :1, :].expand(*x.shape[:-2], tokens, x.shape[-1]) for x in inputs]
        try:
            with torch.no_grad(), quiet():
                calls = trace(function, *there)
        except Exception as failure:  # whatever a stranger's function may raise
            return f"its forward fails at other sizes ({type(failure).__name__})"
        found.append((calls.ops, calls.numbers))
    return "" if found[0] == found[1] else "its forward computes with sizes, and may do otherwise for others"


def _by_reference(turning: Turning, inputs: tuple[torch.Tensor, ...]) -> Pair:
    q, k, cos, sin = inputs
    return turned(turning, q, k, cos, sin, 1, reference)


def _step(way: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Both results and their gradients."""
    q, k, cos, sin = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    with torch.enable_grad(), quiet():
        results = way(*leaves, cos, sin)
        weights = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).to(x.dtype).view(x.shape) for x in results]
        return (*(x.detach() for x in results), *torch.autograd.grad(results, leaves, weights))


def turned_by(
    turning: Turning,
    own: Callable[..., Any],
    home: types.ModuleType | None = None,
    name: str = "",
    read: outside.Outside | None = None,
    dtypes: Collection[torch.dtype] = (torch.float64, *DTYPES),
    has_plain_tables: bool = True,
) -> Callable[..., Any]:
    """The function to call in place of `own`, which it calls itself where ours does not win or is not proven.

    Where somebody has put another function in its place, in the module that is its home, that one is called; where
    something that its code read is another thing now, `own`. Tables are looked at (`Looks`): a forward may have made
    others of the rotary embedding's. A compiler cannot look; there they must come as the forward got them.
    """
    looks = Looks(turning.table)
    noted: tuple[outside.Globals, outside.Globals, outside.Functions] = ((), (), ())
    if read is not None:
        noted = tuple(read.globals.values()), tuple(read.bound.values()), tuple(read.functions.items())

    def turn(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        if home is not None and getattr(home, name, own) is not own:
            return getattr(home, name)(q, k, cos, sin, *rest, **named)
        dim = named.get("unsqueeze_dim", 1)
        if outside.changed(*noted):
            return own(q, k, cos, sin, *rest, **named)
        is_plain = not rest and not set(named) - {"unsqueeze_dim"} and dim in (1, 2)
        if not is_plain or not _fits(turning, q, k, cos, sin, dim) or q.dtype not in dtypes:
            return own(q, k, cos, sin, *rest, **named)
        if why_not_ours(q, k, cos, sin):
            return own(q, k, cos, sin, **named)
        is_blind = torch.compiler.is_compiling() or type(cos).__module__.startswith("torch._subclasses.")
        if not (has_plain_tables if is_blind else looks.are_as_expected(cos, sin)):
            return own(q, k, cos, sin, **named)
        return turned(turning, q, k, cos, sin, dim)

    return turn


def turned(
    turning: Turning,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dim: int,
    op: Callable[..., Pair] = rope,
) -> Pair:
    """q and k by our op; heads lie in dimension `dim`, tables are (batch or 1, tokens, width)."""
    if dim == 1:  # (b, h, t, d) -> (b, t, h, d)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    width = cos.shape[-1] * (2 if turning.table == "once" else 1)
    if turning.style == "interleaved" and turning.table == "halves":
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    cos, sin, (batch, tokens) = cos.flatten(0, 1), sin.flatten(0, 1), q.shape[:2]
    by: dict[str, Any] = {"style": turning.style, "rotary_dim": width}
    if cos.shape[0] == tokens:
        q, k = op(q, k, cos, sin, **by)
    elif all(x.stride(0) == tokens * x.stride(1) for x in (q, k)):  # one long sequence, each token with its own angles
        pair = op(q.flatten(0, 1)[None], k.flatten(0, 1)[None], cos, sin, **by)
        q, k = (x[0].unflatten(0, (batch, tokens)) for x in pair)
    else:
        q, k = op(q, k, cos, sin, torch.arange(batch * tokens, device=q.device).view(batch, tokens), **by)
    if dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q.contiguous(), k.contiguous()) if turning.packs else (q, k)


def _inputs(
    table: Table, width: int, tokens: int = TOKENS, size: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = (size * probe.sample(BATCH, n, tokens, WIDTH, seed=n) for n in (HEADS, KV_HEADS))
    angles = torch.rand(BATCH, tokens, width // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 6
    if table == "halves":
        angles = torch.cat((angles, angles), -1)
    elif table == "neighbours":
        angles = angles.repeat_interleave(2, -1)
    return q, k, angles.cos(), 1.5 * angles.sin()  # no true angles, so that nobody can take a table for the other's


def _agrees(function: Callable[..., Any], style: Any, table: Table, width: int) -> bool:
    """Whether the function turns as our op would, with heads before tokens and after."""
    inputs = _inputs(table, width)
    turning = Turning(style=style, table=table, partial=True, widens=False, packs=False)
    q, k, cos, sin = inputs
    swapped = (q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    try:
        results = [(function(*inputs), turned(turning, *inputs, 1, reference))]
        if "unsqueeze_dim" in _parameters(function):
            results.append((function(*swapped, unsqueeze_dim=2), turned(turning, *swapped, 2, reference)))
        return all(len(theirs) == 2 and all(map(probe.same, theirs, ours)) for theirs, ours in results)
    except Exception:  # whatever a stranger's function may raise
        return False


def _fits(turning: Turning, q: Any, k: Any, cos: Any, sin: Any, dim: int) -> bool:
    if not all(map(probe.is_plain_tensor, (q, k, cos, sin))) or q.dim() != 4 or k.dim() != 4:
        return False
    if cos.dim() != 3 or sin.shape != cos.shape or cos.shape[0] not in (1, q.shape[0]):
        return False
    tokens, width = 3 - dim, cos.shape[-1] * (2 if turning.table == "once" else 1)
    if q.shape[0] != k.shape[0] or not q.shape[tokens] == k.shape[tokens] == cos.shape[1]:
        return False
    if q.shape[-1] != k.shape[-1] or not (width == q.shape[-1] or (turning.partial and width < q.shape[-1])):
        return False
    return q.dtype == k.dtype and cos.dtype == sin.dtype and (cos.dtype == q.dtype or turning.widens)


def _renamed(tree: ast.FunctionDef, name: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = NAME


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Of the shape that matters to the choice: one head, as wide as the tables that the attention is given."""
    given = (*args, *kwargs.values())
    x = next((x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() == 3), None)
    x = next(module.parameters()).new_empty(1, 1, 2) if x is None else x
    pairs = (x for x in given if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], torch.Tensor))
    cos, sin = next(pairs, (x[..., :2], x[..., :2]))
    head = x.new_empty(*x.shape[:2], 1, max(2, cos.shape[-1]))
    return head, head, cos[0], sin[0]


ROPE = Rule(name=RULE, find=find, reads="source")
