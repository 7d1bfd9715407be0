"""Rotary position embedding of q and k in one launch: every pair of a head's values is turned by its token's angle.

The idea: a thread holds both halves of its pairs, so that q and k are read once and written once; the tables stay in
the cache. Rows may lie anywhere, (batch, q_len, heads, head_dim) or its transpose, as long as a row's values follow one
another; the backward pass is the same kernel turning the other way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.backend.jit import tl, triton
from sublight.correct import Inputs
from sublight.cost.rotary import rope as cost
from sublight.errors import BadInput
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels.rows import facts
from sublight.ops.record.library import LIBRARY, peer
from sublight.ops.record.tuning import tile_for
from sublight.ops.rotary import rotary
from sublight.ops.rotary.rotary import Pair, Style, load_angles, load_pairs, row_places, store_pairs, tile_here
from sublight.timing import Thunk


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> Pair:
    """The usual composition, in q's data type: x * cos + rotated(x) * sin."""
    width = rotary_dim or q.shape[-1]
    cos, sin = (_whole(table, positions, q, style, width) for table in (cos, sin))
    return _turned(q, cos, sin, style, width), _turned(k, cos, sin, style, width)


def _whole(table: torch.Tensor, positions: torch.Tensor | None, q: torch.Tensor, style: Style, width: int) -> Any:
    """The table's rows for these tokens, as wide as what is turned: (batch or 1, q_len, 1, rotary_dim)."""
    rows = table[: q.shape[1]][None] if positions is None else table[positions.expand(q.shape[:2])]
    if rows.shape[-1] != width:
        rows = torch.cat((rows, rows), -1) if style == "half" else rows.repeat_interleave(2, -1)
    return rows.to(q.dtype)[:, :, None]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: Style, width: int) -> torch.Tensor:
    turning, rest = x[..., :width], x[..., width:]
    if style == "half":
        first, second = turning.chunk(2, -1)
        across = torch.cat((-second, first), -1)
    else:
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    turned = turning * cos + across * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


@triton.jit
def _turn(
    x_ptr, y_ptr, cos_ptr, sin_ptr, positions_ptr, batch, token, head,
    q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
    x_batch, x_token, x_head, y_batch, y_token, y_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, TABLE_UNIT: tl.constexpr,
    POSITIONS: tl.constexpr, SAME: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    place = row_places(batch, token, head, x_batch, x_token, x_head, UNIT)
    inside = token < q_len
    first, second = load_pairs(x_ptr + place, inside, HALF, BLOCK, PAIRS)
    if REST:
        col = 2 * HALF + tl.arange(0, REST_BLOCK)[None, None, :]
        rest = tl.load(x_ptr + place + col, mask=inside & (col < 2 * HALF + REST))
    cos, sin = load_angles(
        cos_ptr, sin_ptr, positions_ptr, batch, token, q_len, max_len,
        cos_stride, sin_stride, positions_batch, positions_token,
        HEADS, HALF, BLOCK, STEP, RUN, TABLE_UNIT, POSITIONS, INVERSE,
    )  # fmt: skip
    if not SAME:
        place = row_places(batch, token, head, y_batch, y_token, y_head, UNIT)
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    store_pairs(y_ptr + place, turned_first, turned_second, inside, HALF, BLOCK, PAIRS)
    if REST:
        tl.store(y_ptr + place + col, rest, mask=inside & (col < 2 * HALF + REST))


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr,
    q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    q_out_batch, q_out_token, q_out_head, k_out_batch, k_out_token, k_out_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, TABLE_UNIT: tl.constexpr,
    POSITIONS: tl.constexpr, SAME: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    batch, token_tile, head_tile = tile_here(Q_TILES + K_TILES, HEADS_FIRST)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.arange(0, HEADS)[None, :, None]
    if head_tile < Q_TILES:  # two calls, not a choice of pointers: the compiler would lose sight of their alignment
        _turn(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, positions_ptr, batch, token, head + head_tile * HEADS,
            q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
            q_batch, q_token, q_head, q_out_batch, q_out_token, q_out_head,
            HEADS, HALF, BLOCK, REST, REST_BLOCK, PAIRS, UNIT, STEP, RUN, TABLE_UNIT, POSITIONS, SAME, INVERSE,
        )  # fmt: skip
    else:
        _turn(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, batch, token, head + (head_tile - Q_TILES) * HEADS,
            q_len, max_len, cos_stride, sin_stride, positions_batch, positions_token,
            k_batch, k_token, k_head, k_out_batch, k_out_token, k_out_head,
            HEADS, HALF, BLOCK, REST, REST_BLOCK, PAIRS, UNIT, STEP, RUN, TABLE_UNIT, POSITIONS, SAME, INVERSE,
        )  # fmt: skip


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool = False,
) -> None:
    """Our kernel, from q and k (rows of unit stride) into the outputs, which may be q and k themselves."""
    rule, item = rotary.rule(rotary_dim, q.element_size()), q.element_size()
    tile = tile_for("rope", rotary_dim, item, packable=True, capability=facts(q).capability, rule=rule)
    where = rotary.layout((q, k, q_out, k_out), cos, sin, positions, rotary_dim, interleaved, tile)
    constants = where.constants | ({"REST": 0, "REST_BLOCK": 1} if q_out is q else {})  # what stays is there already
    _rope_kernel[where.grid](
        q, k, q_out, k_out, *where.tables, *where.numbers, *where.strides,
        **constants, SAME=where.strides[:6] == where.strides[6:], INVERSE=inverse, **tile.options(),
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    style: Style = "half",
    rotary_dim: int | None = None,
    in_place: bool = False,
) -> Pair:
    """Our kernel, whatever `choose` would say."""
    how = rotary.check(q, k, cos, sin, positions, style, rotary_dim), style == "interleaved"
    if not in_place:
        return _cuda(q, k, cos, sin, positions, *how, False)
    _cuda_(q, k, cos, sin, positions, *how)
    return q, k


def launch_backward(
    dq: torch.Tensor, dk: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Inputs:
    return _cuda(dq, dk, cos, sin, None, q.shape[-1], False, True)


def choose(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **_options: Any) -> Choice:
    """What `rope(q, k, cos, sin)` runs, and why."""
    if reason := rotary.why_not_ours(q, k, cos, sin):
        return Choice(provider="torch", kernel="x * cos + rotated(x) * sin", reason=reason)
    return Choice(provider="sublight", kernel="_rope_kernel", reason="q and k read once and written once")


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> Pair:
    """q (batch, q_len, heads, head_dim) and k (batch, q_len, kv_heads, head_dim), turned; transposed views are welcome.

    `cos` and `sin` are (max_len, rotary_dim / 2), or (max_len, rotary_dim) with the angle at both values of a pair.
    Without `positions`, tokens count from 0; with them, (batch, q_len) of whole numbers from 0 to max_len - 1. Looking
    for others would wait for the GPU, so there they give NaN. What lies beyond `rotary_dim` passes through.
    """
    width = rotary.check(q, k, cos, sin, positions, style, rotary_dim)
    if rotary.why_not_ours(q, k, cos, sin):
        return reference(q, k, cos, sin, positions, style=style, rotary_dim=width)
    return _rope(q, k, cos, sin, positions, width, style == "interleaved", False)  # type: ignore[no-any-return]


def rope_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> Pair:
    """`rope`, written into q and k, which are returned; for inference: it keeps nothing for a gradient."""
    width = rotary.check(q, k, cos, sin, positions, style, rotary_dim)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, cos, sin)):
        raise BadInput("rope_ has no gradient: use rope, or call it under torch.no_grad()")
    for x in (q, k):
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise BadInput("rope_ cannot write into an expanded tensor, whose elements share memory: use rope")
    if rotary.why_not_ours(q, k, cos, sin):
        _cpu_(q, k, cos, sin, positions, width, style == "interleaved")
    else:
        _rope_(q, k, cos, sin, positions, width, style == "interleaved")
    return q, k


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    _, _, cos, sin, positions, *ctx.how = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rotary_dim, interleaved, inverse = ctx.how
    return *_rope(dq, dk, *ctx.saved_tensors, rotary_dim, interleaved, not inverse), *[None] * 6


def _cuda(q: torch.Tensor, k: torch.Tensor, *how: Any) -> Pair:
    q, k = rotary.unit(q), rotary.unit(k)
    q_out, k_out = rotary.like(q), rotary.like(k)
    rotate(q, k, q_out, k_out, *how)
    return q_out, k_out


def _cpu(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None,
    rotary_dim: int, interleaved: bool, inverse: bool = False,
) -> Pair:  # fmt: skip
    style: Style = "interleaved" if interleaved else "half"
    turned = reference(q, k, cos, -sin if inverse else sin, positions, style=style, rotary_dim=rotary_dim)
    return rotary.like(q).copy_(turned[0]), rotary.like(k).copy_(turned[1])


def _cuda_(q: torch.Tensor, k: torch.Tensor, *how: Any) -> None:
    q_rows, k_rows = rotary.unit(q), rotary.unit(k)
    rotate(q_rows, k_rows, q_rows, k_rows, *how)
    for x, rows in ((q, q_rows), (k, k_rows)):
        if rows is not x:
            x.copy_(rows)


def _cpu_(q: torch.Tensor, k: torch.Tensor, *how: Any) -> None:
    for x, turned in zip((q, k), _cpu(q, k, *how), strict=True):
        x.copy_(turned)


_ARGUMENTS = "Tensor cos, Tensor sin, Tensor? positions, int rotary_dim, bool interleaved"
_rope = LIBRARY.op(
    f"rope(Tensor q, Tensor k, {_ARGUMENTS}, bool inverse) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=lambda q, k, *_: (rotary.like(q), rotary.like(k)),
    backward=_backward,
    setup_context=_setup_context,
)
_rope_ = LIBRARY.op(
    f"rope_(Tensor(a!) q, Tensor(b!) k, {_ARGUMENTS}) -> ()", cpu=_cpu_, cuda=_cuda_, fake=lambda *_: None
)


def _liger_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Thunk:
    """In place, and heads before tokens."""
    apply = peer("liger_kernel.ops.rope", "LigerRopeFunction").apply
    call = partial(apply, q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 1, q.shape[-1])
    return lambda: tuple(x.transpose(1, 2) for x in call())


def _liger(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Thunk:
    return _liger_(q.clone(), k.clone(), cos, sin)  # once: what is timed turns its own copies on and on


_SHARED: dict[str, Any] = {
    "reference": reference,
    "choose": choose,
    "inputs": rotary.random_inputs,
    "cost": cost,
    "kernels": (Kernel(jit=_rope_kernel),),
    "shapes": rotary.SHAPES,
    "test_shapes": rotary.TEST_SHAPES,
}
ROPE = Op(
    name="rope",
    summary="rotary position embedding of q and k",
    call=rope,
    launch=launch,
    launch_backward=launch_backward,
    **_SHARED,
    peers={"liger": _liger},
    wrt=(0, 1),
    library_args=lambda *inputs: (*inputs, None, inputs[0].shape[-1], False, False),
)
ROPE_IN_PLACE = Op(
    name="rope_",
    summary="rotary position embedding, written into q and k",
    call=rope_,
    launch=partial(launch, in_place=True),
    launch_backward=None,
    **_SHARED,
    peers={"liger": _liger_},
    wrt=(),
    directions=("fwd",),
    writes=(0, 1),
    library_args=lambda *inputs: (*inputs, None, inputs[0].shape[-1], False),
)
