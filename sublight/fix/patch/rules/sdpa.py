"""Hugging Face's `sdpa` attention in a module's forward, where our attention wins.

A forward asks transformers for the function that its config names and calls it with q, k and v; all before and after is
the module's own. Where that function is the library's own `sdpa`, which is tried against the formula first, ours takes
its place call by call: without a mask, or with one whose values are looked at and are a causal window's. What else a
call may bring (a bias, a paged cache, dropout, whose draws would be others, a size where ours is not faster) stays
theirs, and so does every call under torch.compile or in a graph's capture that has a mask.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sublight.fix.patch import probe, rewrite
from sublight.fix.patch.proof import quiet
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.twin import own_copy, random
from sublight.ops.attention.attention import attention, plan

RULE = "sdpa"
NAME = "__sublight_interface"
LIBRARY = "transformers.integrations.sdpa_attention"
BY_CALL = "decided call by call"
SHORTEST = 2048  # tokens: in a shorter window nothing was timed, and without one ours is faster from 4096 on
UNSET = ("position_bias", "cache", "softcap", "s_aux", "head_mask")  # a swap does not cover these
ASKS = "output_attentions"
NUMBERS = ("dropout", "scaling", "is_causal")
Attention = Callable[..., tuple[torch.Tensor, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What our attention takes for one call."""

    causal: bool
    window: int | None
    scale: float | None


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    """A forward that takes a function from transformers' table of attentions, and calls it."""
    theirs = getattr(sys.modules.get(LIBRARY), "sdpa_attention_forward", None)
    table = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    try:
        own = type(module).forward
        function = rewrite.layers(own)[-1]
    except rewrite.NotUnderstood:
        return None
    names = [each for each in function.__code__.co_names if _is_table(function.__globals__.get(each), table)]
    if theirs is None or not names:
        return None
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if kind != "sdpa":
        also = "; eager gives its weights, too" if kind == "eager" else ""
        return Left(
            rule=RULE, reason=f"its attention is {kind}, not sdpa{also}: attn_implementation='sublight' is ours"
        )
    if missing := unproven(theirs):
        return Left(rule=RULE, reason=missing)
    over = functools.partial(rewritten, names=names, chosen=chosen_for(theirs))
    try:
        forward = over(own)
        asking = rewritten(own, names, lambda found: _raising if found is theirs else found)
    except rewrite.NotUnderstood as reason:
        return Left(rule=RULE, reason=str(reason))
    wins = functools.partial(_wins, asking)
    more: dict[str, Any] = {"reads_settings": False, "what": RULE, "why": BY_CALL}
    return Swap(rule=RULE, forward=forward, over=over, op="attention", wins=wins, **more)


def _is_table(value: Any, table: Any) -> bool:
    return isinstance(table, type) and isinstance(value, table)


def rewritten(own: Any, names: list[str], chosen: Callable[[Any], Any]) -> Any:
    """The forward with each attention that it takes from the table chosen by us."""

    def change(tree: ast.FunctionDef) -> None:
        lookups = [node for node in ast.walk(tree) if _is_lookup(node, names)]
        if sum(rewrite.is_name(node) and node.id in names for node in ast.walk(tree)) != len(lookups):  # type: ignore[attr-defined]
            raise rewrite.NotUnderstood("it does something else with the table of attentions than to take one from it")
        for name in {_kept_in(lookup, tree) for lookup in lookups}:
            for call in _calls(name, tree):
                if odd := [each.arg for each in call.keywords if each.arg in UNSET]:
                    raise rewrite.NotUnderstood(f"it hands {odd[0]} to its attention, which our swap does not cover")
        _Chosen(names).visit(tree)

    return rewrite.rebuilt(own, change, {NAME: chosen})


def _is_lookup(node: ast.AST, names: list[str]) -> bool:
    """TABLE.get_interface(…) or TABLE[…]"""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_interface":
        return isinstance(node.func.value, ast.Name) and node.func.value.id in names
    is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    return is_read and isinstance(node.value, ast.Name) and node.value.id in names  # type: ignore[attr-defined]


def _kept_in(lookup: ast.AST, tree: ast.FunctionDef) -> str:
    """The variable that a lookup is assigned to, by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is lookup:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(targets) == 1 and isinstance(targets[0], ast.Name):
                return targets[0].id
    raise rewrite.NotUnderstood("the attention that it takes from the table is not kept in a variable of its own")


def _calls(name: str, tree: ast.FunctionDef) -> Iterator[ast.Call]:
    """All uses of a variable, which must be calls: whoever compares it, or hands it on, would see another function."""
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            if node not in calls:
                raise rewrite.NotUnderstood("it does something else with its attention function than to call it")
            yield calls[node]


class _Chosen(ast.NodeTransformer):
    """A lookup becomes `ours(lookup)`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> Any:
        if _is_lookup(node, self.names):
            return ast.copy_location(ast.Call(ast.Name(NAME, ast.Load()), [node], []), node)  # type: ignore[list-item]
        return self.generic_visit(node)


def chosen_for(theirs: Any) -> Callable[[Any], Any]:
    """What to call where a forward calls the function that it found in the table."""
    known = _parts(theirs)

    @functools.wraps(theirs)
    def ours(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        if query.shape[2] < SHORTEST:  # a new token's step, above all: no more of the host's time than this
            return theirs(module, query, key, value, attention_mask, *args, **named)  # type: ignore[no-any-return]
        options = "" if args else options_of(module, query, key, value, attention_mask, named)
        if isinstance(options, Options) and _parts(theirs) == known and is_won(query, key, value, options):
            return attention(query, key, value, **asdict(options)).transpose(1, 2).contiguous(), None
        return theirs(module, query, key, value, attention_mask, *args, **named)  # type: ignore[no-any-return]

    def chosen(found: Any) -> Any:
        return ours if found is theirs and not torch.compiler.is_compiling() else found

    return chosen


def _parts(function: types.FunctionType) -> tuple[Any, ...]:
    """What a function is made of: its code, its defaults, and the globals that it reads; PyTorch's attention, too."""
    read = tuple(function.__globals__.get(name) for name in function.__code__.co_names)
    return (function.__code__, function.__defaults__, read, torch.nn.functional.scaled_dot_product_attention)


def options_of(
    module: Any, query: Any, key: Any, value: Any, mask: Any, named: Mapping[str, Any]
) -> Options | str:  # fmt: skip
    """How our attention computes what `sdpa` does with these arguments; or why it does not."""
    if any(type(x) is not torch.Tensor or x.dim() != 4 for x in (query, key, value)):
        return "q, k and v are not plain tensors of (batch, heads, tokens, head_dim)"
    if query.shape[2] != key.shape[2] or query.shape[2] < SHORTEST:
        sizes = f"{query.shape[2]} queries over {key.shape[2]} keys"
        return f"{sizes}: ours was timed for as many of both, {SHORTEST} or more"
    if any(named.get(name) is not None for name in UNSET) or named.get(ASKS):
        return f"{', '.join(UNSET)} or {ASKS}, of which one is given"
    dropout, scale, is_causal = (named.get(name) for name in NUMBERS)
    if dropout:
        return "dropout, whose draws would be others"
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not isinstance(scale, float | int | None) or not isinstance(is_causal, bool):
        return "its scale is no number, or is_causal no yes or no"
    heads = key.shape[1] * getattr(module, "num_key_value_groups", 1)
    if query.shape != (key.shape[0], heads, *key.shape[2:]) or key.shape != value.shape:
        return "q, k and v of sizes that do not fit each other, or values of another size"
    if not query.dtype == key.dtype == value.dtype:
        return "q, k and v of several data types"
    if query.device.type not in ("cuda", "cpu") or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return f"its tensors are on {query.device.type}, or a call is traced"
    if reason := _chosen_by_the_user(query):
        return reason
    if mask is None:
        return Options(causal=is_causal, window=None, scale=scale)
    window = named.get("sliding_window")
    if type(window) is not int or not 0 < window < key.shape[2] or key.shape[3] not in (64, 128):
        return "a mask that is no sliding window of heads of 64 or 128, which alone was timed"
    if not shows(mask, query, key, window):
        return "a mask whose values are not the sliding window's, or cannot be looked at now"
    return Options(causal=True, window=window, scale=scale)


def _chosen_by_the_user(query: torch.Tensor) -> str:
    """What somebody has set for PyTorch's attention, which would not hold for ours."""
    cuda, kind = torch.backends.cuda, query.device.type
    kernels = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    if not all(is_enabled() for is_enabled in kernels):
        return "some of PyTorch's attention kernels are turned off: the caller chooses"
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != query.dtype:
        return "autocast makes another data type of q"
    return ""


def shows(mask: Any, query: torch.Tensor, key: torch.Tensor, window: int) -> bool:
    """Whether a mask's values are those of a causal window; the host waits for the answer."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if type(mask) is not torch.Tensor or mask.dtype != torch.bool or mask.dim() != 4:
        return False
    fits = mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
    if not fits or mask.shape[2:] != (q_len, kv_len) or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    alike = mask[: 1 if mask.stride(0) == 0 else None, : 1 if mask.stride(1) == 0 else None]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=mask.device).tril_().triu_(1 - window)
    return torch.equal(alike, seen.expand(alike.shape))


def is_won(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> bool:
    """Whether our attention is faster than PyTorch's for this call."""
    return plan(query, key, value, **asdict(options)).provider != "torch"


class _Called(Exception):
    """Carries what an attention function was called with out of a forward."""


def _raising(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **named: Any) -> Any:
    raise _Called(query, key, value, attention_mask, named | ({"an unnamed argument": args} if args else {}))


def _wins(asking: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Whether ours wins for a call of the module: its forward up to its attention, which tells q, k and v."""
    caches = getattr(sys.modules.get("transformers.cache_utils"), "DynamicCache", ())
    values = [*args, *kwargs.values()]
    if not all(type(x) is caches or _is_plain(x) for x in values):
        return True, BY_CALL  # a second call might leave traces
    own = [own_copy(x) if type(x) is caches else x for x in args]
    named = {name: own_copy(x) if type(x) is caches else x for name, x in kwargs.items()}
    try:
        asking(module, *own, **named)
    except _Called as call:
        query, key, value, mask, given = call.args
        options = options_of(module, query, key, value, mask, given)
        if not isinstance(options, Options):
            return False, options
        with torch.set_grad_enabled(module.training):
            choice = plan(query.detach().requires_grad_(module.training), key, value, **asdict(options))
        return choice.provider != "torch", choice.reason
    return False, "its forward calls another attention for this batch"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(each) for each in value)
    return isinstance(value, torch.Tensor | bool | int | float | str | None)


@functools.cache
def unproven(theirs: Attention) -> str:
    """What `sdpa` of this transformers does that we do not know; empty where it is the formula."""
    try:
        if odd := set(_read_of_named(theirs)) - {*UNSET, ASKS}:
            return f"values not proven: transformers' sdpa reads {min(odd)}"
        with quiet():
            return next((what for what, is_right in _trials(theirs) if not is_right), "")
    except rewrite.NotUnderstood as reason:
        return f"values not proven: transformers' sdpa: {reason}"
    except Exception as error:  # whatever another version may raise
        return f"values not proven: transformers' sdpa raises {type(error).__name__} on small tensors"


def _read_of_named(theirs: Any) -> Iterator[str]:
    """Which arguments it reads beyond those of its signature: kwargs.get("softcap"). What it hands to a paged cache, of
    which a call of ours has none, is not among them."""
    tree = rewrite.parsed(rewrite.layers(theirs)[-1])
    if tree.args.kwarg is None or tree.args.vararg is not None:
        raise rewrite.NotUnderstood("it takes other arguments than those we know")
    name = tree.args.kwarg.arg
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = {_holder(call): _text_in(call) for call in calls if _called(call).endswith(".get")}
    handed = {each.value for call in calls if _called(call) == "cache.update" for each in call.keywords}
    for node in ast.walk(tree):
        if rewrite.is_name(node, name) and node not in handed:
            yield texts.get(node, "any argument")


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _holder(call: ast.Call) -> ast.AST:
    return call.func.value if isinstance(call.func, ast.Attribute) else call.func


def _text_in(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "any argument"


def _trials(theirs: Attention) -> Iterator[tuple[str, bool]]:
    """Each case of a call that ours takes over, beside softmax(q kᵀ · scale) v."""
    for groups in (1, 2):
        q, k, v = (random(2, heads, 5, 8, seed=i) for i, heads in enumerate((4, 4 // groups, 4 // groups)))
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        window = seen.triu(-1).expand(2, 1, 5, 5)
        for is_causal in (True, False):
            module: Any = torch.nn.Module()
            module.is_causal, module.num_key_value_groups = is_causal, groups
            for scale in (None, 0.7):
                what = f"values not proven: transformers' sdpa with is_causal={is_causal}, scaling={scale}"
                wanted = _formula(q, k, v, seen if is_causal else None, scale)
                yield what, _is(theirs(module, q, k, v, None, dropout=0.0, scaling=scale), wanted)
                other: Any = torch.nn.Module()
                other.num_key_value_groups = groups
                named = theirs(other, q, k, v, attention_mask=None, scaling=scale, is_causal=is_causal)
                yield f"{what} by name", _is(named, wanted)
                hidden = theirs(module, q, k, v, window, dropout=0.0, scaling=scale, is_causal=is_causal)
                yield f"{what} and a mask", _is(hidden, _formula(q, k, v, window, scale))
                unset = dict.fromkeys(UNSET) | {"sliding_window": 2, ASKS: False}
                ignored = theirs(module, q, k, v, None, scaling=scale, **unset)
                yield f"{what}, arguments it ignores", _is(ignored, wanted)


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).contiguous()


def _is(result: Any, wanted: torch.Tensor) -> bool:
    out, weights = result
    return weights is None and out.is_contiguous() and probe.same(out, wanted)


HF_SDPA = Rule(name=RULE, find=find, reads="source", joins=True)
