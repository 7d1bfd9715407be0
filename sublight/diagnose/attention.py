"""The call of scaled_dot_product_attention that gives what a written-out attention gives, as far as its ops tell.

The mask shows in the op between the first product and the softmax: what fills or selects, what is added. It is passed
on as it is; only where the trace shows that it was made by triu or tril, from the diagonal, is it causal. Where an op
stands there that the call cannot do, no call is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sublight.diagnose.case import Case
from sublight.diagnose.fusion import CASTS
from sublight.diagnose.work import Item
from sublight.trace.record import Shape, Trace

How = Literal["fill", "keep", "drop", "add"]
_FILLS = ("aten::masked_fill", "aten::masked_fill_")
_ADDS = ("aten::add", "aten::add_")
_SCALES = ("aten::mul", "aten::mul_", "aten::div", "aten::div_")
_DROPS = ("aten::dropout", "aten::native_dropout", "aten::dropout_")
_MAKES = tuple(
    f"aten::{name}"
    for name in ("bitwise_not", "logical_not", "bitwise_or", "logical_or", "eq", "ne", "lt", "gt", "le", "ge", "full",
                 "ones", "zeros", "fill", "arange", "tril", "triu", "full_like", "ones_like", "zeros_like")
)  # fmt: skip
_MADE = {("aten::tril", "0"), ("aten::triu", "1")}  # what makes a causal mask, and from which diagonal
_WORDS: dict[How, tuple[str, str]] = {
    "fill": ("attn_mask=~mask", "mask is what your masked_fill gets (True: left out), so its opposite is kept"),
    "keep": ("attn_mask=mask", "mask is what your where() keeps"),
    "drop": ("attn_mask=~mask", "mask is what your where() replaces, so its opposite is kept"),
    "add": ("attn_mask=mask", "mask is what you add to the scores, in their dtype"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What to write instead, and what mask it has."""

    code: str
    mask: Literal["none", "causal", "padding", "other", "not known"]


def call_for(case: Case, members: Sequence[int]) -> Call:
    """The call that replaces one written-out attention, from the items of its forward pass."""
    trace, items = case.trace, [case.items[at] for at in members]
    softmax = next((at for at, item in enumerate(items) if item.family == "softmax"), len(items) - 1)
    scores = _shapes(trace, items[softmax])[:1]
    square = scores[0] if scores else ()
    masks: list[tuple[How, Shape]] = []
    scaled = False
    for item in items[:softmax]:
        if mask := _mask(trace, item, square):
            masks.append(mask)
        if item.name == "aten::baddbmm" or _scales(trace, item):
            scaled = True
        elif not mask and item.family != "matmul" and item.name not in CASTS and not _of_the_mask(trace, item, square):
            return _unknown(item)
    behind = [item for item in items[softmax + 1 :] if item.family != "matmul" and item.name not in CASTS]
    if other := next((item for item in behind if item.name not in _DROPS), None):
        return _unknown(other)
    arguments, why, kind = _mask_arguments(trace, masks, square)
    if behind:
        arguments.append("dropout_p=p")
        why.append("p is your dropout's, 0.0 in evaluation")
    arguments.append("scale=scale" if scaled else "scale=1.0")
    why.append(
        "scale is what you multiply the scores by, or 1 / what you divide them by"
        if scaled
        else "the scores are not scaled between product and softmax"
    )
    call = f"out = torch.nn.functional.scaled_dot_product_attention({', '.join(('q', 'k', 'v', *arguments))})"
    lines = ("# q, k, v as they enter your products: (batch, heads, length, dim)", *(f"# {line}" for line in why), call)
    return Call(code="\n".join(lines), mask=kind)


def _of_the_mask(trace: Trace, item: Item, scores: Shape) -> bool:
    """An op that makes the mask, and leaves the scores alone."""
    largest = max((math.prod(shape) for shape in _shapes(trace, item)), default=0)
    return item.name.rstrip("_") in _MAKES or (0 < largest < math.prod(scores))


def _unknown(item: Item) -> Call:
    return Call(
        code=f"# between your products stands {item.name}, which scaled_dot_product_attention does not do:\n"
        "# torch.nn.attention.flex_attention takes it as score_mod, and makes one kernel of all",
        mask="not known",
    )


def _mask_arguments(
    trace: Trace, masks: list[tuple[How, Shape]], scores: Shape
) -> tuple[list[str], list[str], Literal["none", "causal", "padding", "other"]]:
    if not masks:
        return [], ["no mask was seen: every position attends to every other"], "none"
    if len(masks) > 1:
        return ["attn_mask=mask"], ["mask joins yours: kept by all (True), or the sum of what you add"], "other"
    how, shape = masks[0]
    if _is_causal(trace, shape, scores):
        return ["is_causal=True"], ["your mask comes from triu or tril: causal"], "causal"
    argument, why = _WORDS[how]
    if len(shape) > 1 and shape[-2] == 1:
        return [argument], [f"{why}; its shape is that of padding"], "padding"
    return [argument], [why, "if it is causal and no more, is_causal=True in its place is faster still"], "other"


def _mask(trace: Trace, item: Item, scores: Shape) -> tuple[How, Shape] | None:
    """How an op masks the scores, and the mask's shape; empty where shapes were not recorded."""
    shapes = _shapes(trace, item)
    if item.name in _FILLS:
        return "fill", shapes[1] if len(shapes) > 1 else ()
    if item.name == "aten::where":
        return ("drop" if len(shapes) > 2 and shapes[2] == scores else "keep"), shapes[0] if shapes else ()
    if item.name in _ADDS and (len(shapes) < 2 or shapes[1]):
        return "add", () if len(shapes) < 2 else shapes[1] if shapes[0] == scores else shapes[0]
    if item.name == "aten::baddbmm":
        return "add", shapes[0] if shapes else ()
    return None


def _is_causal(trace: Trace, mask: Shape, scores: Shape) -> bool:
    """Whether a square of the mask's size was made by tril from the diagonal down, or by triu from above it, and none
    by another of the kind.
    """
    if len(scores) < 2 or len(mask) < 2 or scores[-1] != scores[-2] or mask[-2:] != scores[-2:]:
        return False
    if math.prod(mask[:-2]) != 1:  # one a batch or a head holds more than that
        return False
    found = set()
    for row in trace.rows_named(lambda name: name.rstrip("_") in ("aten::tril", "aten::triu")).tolist():
        shapes, concrete = [_as_shape(part) for part in trace.detail_of(row).dims], trace.detail_of(row).concrete
        if shapes and shapes[0][-2:] == mask[-2:]:
            found.add((trace.name_of(row).rstrip("_"), concrete[1] if len(concrete) > 1 else "?"))
    return bool(found) and found <= _MADE


def _scales(trace: Trace, item: Item) -> bool:
    """Whether an op scales by a single number: a tensor of the scores' size would be something else."""
    shapes = _shapes(trace, item)
    return item.name in _SCALES and (len(shapes) < 2 or math.prod(shapes[1]) == 1)


def _shapes(trace: Trace, item: Item) -> list[Shape]:
    return [_as_shape(part) for part in trace.detail_of(item.row).dims]


def _as_shape(dims: object) -> Shape:
    return tuple(dims) if isinstance(dims, tuple) and all(isinstance(size, int) for size in dims) else ()
