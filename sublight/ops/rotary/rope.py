"""Rotary position embedding of q and k in one launch: every pair of a head's values is turned by its token's angle.

The idea: a thread holds both halves of its pairs, so that q and k are read once and written once; the tables stay in
the cache. Rows may lie anywhere, (batch, q_len, heads, head_dim) or its transpose, as long as a row's values follow one
another; the backward pass is the same kernel turning the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost.rotary import rope as cost
from sublight.errors import BadInput
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import copies_of
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered, peer
from sublight.ops.record.tuning import tile_for
from sublight.ops.rotary import rotary
from sublight.ops.rotary.parts import load_angles, load_pairs, row_places, store_pairs, tile_here
from sublight.ops.rotary.rotary import Pair, Style
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


def plan_turn(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    *,
    names: tuple[str, str] = ("q", "k"),
    inverse: bool = False,
    in_place: bool = False,
) -> Plan:
    """The launch that turns two tensors, which go by `names`, forwards or (`inverse`) back."""
    rotary.check(q, k, cos, sin, positions, rotary_dim)
    if in_place:
        rotary.check_memory(q, k)
    rule, item = rotary.rule(rotary_dim, q.element_size()), q.element_size()
    tile = tile_for("rope", rotary_dim, item, packable=True, capability=facts(q).capability, rule=rule)
    reads = [rotary.heads_of(x) for x in (q, k)]
    rooms = {} if in_place else {f"{name}_turned": rotary.room_like(x) for name, x in zip(names, (q, k), strict=True)}
    writes = [rotary.heads_of_room(room) for room in rooms.values()] or reads
    where = rotary.layout(q, k, cos, sin, positions, rotary_dim, interleaved, tile, (*reads, *writes))
    constants = where.constants | ({"REST": 0, "REST_BLOCK": 1} if in_place else {})  # what stays is there already
    is_same = [each.strides for each in reads] == [each.strides for each in writes]
    on = f"{' '.join((*names, *(rooms or names)))} {where.tables}"
    step = Step(
        _rope_kernel, where.grid, *where.numbers, on=on, tile=tile,
        **constants, SAME=is_same, INVERSE=inverse, **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="q and k read once and written once",
        copies=copies_of(**{name: each.is_copy for name, each in zip(names, reads, strict=True)}) + where.copies,
        buffers=rooms,
        steps=(step,),
        outputs=tuple(rooms),
    )


def _turn_in_place(plan: Plan, q: torch.Tensor, k: torch.Tensor, *how: Any) -> None:
    """What was copied is copied back; whoever kept q or k for a gradient is told that they have changed."""
    rows = [x.contiguous() if name in plan.copies else x for name, x in (("q", q), ("k", k))]
    given = dict(zip(("q", "k", "cos", "sin", "positions"), (*rows, *how), strict=False))
    given |= {name: given[name].contiguous() for name in plan.copies}
    plan.steps[0](*[given[name] for name in plan.steps[0].on])
    for x, turned in zip((q, k), rows, strict=True):
        if turned is not x:
            x.copy_(turned)
        elif not x.is_inference():
            torch.autograd.graph.increment_version(x)


def by_style(*args: Any) -> Pair:
    """`reference` with the arguments of the registered op."""
    q, k, cos, sin, positions, rotary_dim, interleaved = args
    rotary.check(q, k, cos, sin, positions, rotary_dim)
    return reference(q, k, cos, sin, positions, style=rotary.style_of(interleaved), rotary_dim=rotary_dim)


def _reference_in_place(q: torch.Tensor, k: torch.Tensor, *how: Any) -> None:
    rotary.check_memory(q, k)
    for x, turned in zip((q, k), by_style(q, k, *how), strict=True):
        x.copy_(turned)


def of_given(call: Callable[..., Pair], dq: Any, dk: Any, *how: Any) -> tuple[Any, Any]:
    """The gradients of q and k by a `call` that takes both, where one may be None, since nobody used that result."""
    turned = call(dk if dq is None else dq, dq if dk is None else dk, *how)
    return None if dq is None else turned[0], None if dk is None else turned[1]


def _back_by_torch(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[Any, Any]:
    how = saved["cos"], -saved["sin"], saved["positions"], saved["rotary_dim"], saved["interleaved"]
    return of_given(by_style, *grads, *how)


_ARGUMENTS = "Tensor cos, Tensor sin, Tensor? positions, int rotary_dim, bool interleaved"
_rope_backward = Registered(
    schema=f"rope_backward(Tensor dq, Tensor dk, {_ARGUMENTS}) -> (Tensor dq_turned, Tensor dk_turned)",
    plan=partial(plan_turn, names=("dq", "dk"), inverse=True),
    fake=lambda dq, dk, *_: (rotary.like(dq), rotary.like(dk)),
)
_rope = Registered(
    schema=f"rope(Tensor q, Tensor k, {_ARGUMENTS}) -> (Tensor q_turned, Tensor k_turned)",
    reference=by_style,
    theirs="x * cos + rotated(x) * sin",
    why_torch=lambda q, k, cos, sin, *_: rotary.why_not_ours(q, k, cos, sin),
    plan=plan_turn,
    fake=lambda q, k, *_: (rotary.like(q), rotary.like(k)),
    gradient=Gradient(
        by=_rope_backward,
        partly=of_given,
        saves=("cos", "sin", "positions"),
        gives=("q", "k"),
        options=("rotary_dim", "interleaved"),
        by_torch=_back_by_torch,
    ),
)
_rope_ = Registered(
    schema=f"rope_(Tensor(a!) q, Tensor(b!) k, {_ARGUMENTS}) -> ()",
    reference=_reference_in_place,
    theirs="x * cos + rotated(x) * sin",
    why_torch=lambda q, k, cos, sin, *_: rotary.why_not_ours(q, k, cos, sin),
    plan=partial(plan_turn, in_place=True),
    launch=_turn_in_place,
    fake=lambda *_: None,
)


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
    how = _arguments(q, k, cos, sin, positions, style=style, rotary_dim=rotary_dim)
    return _rope.call(*how)  # type: ignore[no-any-return]


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
    how = _arguments(q, k, cos, sin, positions, style=style, rotary_dim=rotary_dim)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, cos, sin)):
        raise BadInput("rope_ has no gradient: use rope, or call it under torch.no_grad()")
    _rope_.call(*how)
    return q, k


def plan(*args: Any, in_place: bool = False, **how: Any) -> Plan:
    """What `rope` or (`in_place`) `rope_` runs with these arguments, and why."""
    return (_rope_ if in_place else _rope).decide(*_arguments(*args, **how))


def launch(*args: Any, in_place: bool = False, **how: Any) -> Pair:
    """Our kernel with the arguments of `rope`, whether or not it wins."""
    given = _arguments(*args, **how)
    if not in_place:
        return _rope.by_kernels(*given)  # type: ignore[no-any-return]
    _rope_.by_kernels(*given)
    return given[:2]  # type: ignore[no-any-return]


def launch_backward(dq: torch.Tensor, dk: torch.Tensor, *args: Any, **how: Any) -> Inputs:
    """The gradients of q and k, for the same arguments: what comes is turned back."""
    _, _, *rest = _arguments(*args, **how)
    return _rope_backward.by_kernels(dq, dk, *rest)  # type: ignore[no-any-return]


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> tuple[Any, ...]:
    """The arguments of the registered op."""
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    return q, k, cos, sin, positions, width, rotary.is_interleaved(style)


def _liger_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Thunk:
    """Liger's function, which works in place, with heads before tokens."""
    apply = peer("liger_kernel.ops.rope", "LigerRopeFunction").apply
    call = partial(apply, q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 1, q.shape[-1])
    return lambda: tuple(x.transpose(1, 2) for x in call())


def _liger(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Thunk:
    return _liger_(q.clone(), k.clone(), cos, sin)  # once: what is timed turns its own copies on and on


_SHARED: dict[str, Any] = {
    "reference": reference,
    "inputs": rotary.random_inputs,
    "cost": cost,
    "shapes": rotary.SHAPES,
    "test_shapes": rotary.TEST_SHAPES,
    "batch": "batch",
}
KERNELS = (Kernel(jit=_rope_kernel),)
ROPE = Op(
    name="rope",
    summary="rotary position embedding of q and k",
    call=rope,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=KERNELS)},
    **_SHARED,
    peers={"liger": _liger},
    wrt=(0, 1),
    library_args=lambda *inputs: (*inputs, None, inputs[0].shape[-1], False),
)
ROPE_IN_PLACE = Op(
    name="rope_",
    summary="rotary position embedding, written into q and k",
    call=rope_,
    plan=partial(plan, in_place=True),
    providers={"sublight": Provider(launch=partial(launch, in_place=True), kernels=KERNELS)},
    **_SHARED,
    peers={"liger": _liger_},
    wrt=(),
    directions=("fwd",),
    writes=(0, 1),
    library_args=lambda *inputs: (*inputs, None, inputs[0].shape[-1], False),
)
