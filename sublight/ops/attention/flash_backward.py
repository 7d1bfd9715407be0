"""Attention's gradients: weights are computed again from the logarithm of their sums, so nothing of S x S is kept.

Two passes, so that no two programs write to the same place and every run gives the same bits: one holds a tile of keys
and values and streams the queries that see it (of all heads that share them), the other holds a tile of queries and
streams keys. What both subtract, the sum of dout * out over a row, is computed first; in fp32 by the pass over queries.
"""

from __future__ import annotations

import torch

from sublight.backend.device import Facts, facts, is_interpreted
from sublight.backend.jit import cdiv
from sublight.backend.launch import Step, View
from sublight.op import Buffer, Plan
from sublight.ops.attention import keys_backward, queries_backward
from sublight.ops.attention.delta import delta_step, sinks_step
from sublight.ops.attention.extras import NONE, Extras
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.mods import slope_named
from sublight.ops.attention.parts import (
    Sizes,
    copies_of,
    exponent_scale,
    flags,
    has_copy_engine,
    result_like,
    rounding_of,
    sizes_of,
    strides_of,
    sums_name,
    view_of,
)
from sublight.ops.record.tuning import Tile


def tiles_for(sizes: Sizes, itemsize: int, gpu: Facts) -> tuple[Tile, Tile]:
    """Of the pass over keys and of the pass over queries: rows are held, the block streams."""
    if is_interpreted():
        return Tile(rows=32, block=16, warps=4), Tile(rows=16, block=32, warps=4)
    if itemsize == 4:
        small = Tile(rows=32, block=16, warps=4) if sizes.width <= 128 else Tile(rows=16, block=16, warps=8)
        return small, small
    if gpu.capability in (90, 100):
        is_large, is_blackwell = sizes.width > 128, gpu.capability == 100
        stages = 1 if is_large or (is_blackwell and sizes.width > 64) else 2
        both = Tile(rows=64, block=32 if is_large else 64, warps=8 if is_large else 4, stages=stages)
    elif sizes.width <= 64:
        both = Tile(rows=128, block=32, warps=8, stages=2)
    elif sizes.width <= 128:
        both = Tile(rows=64, block=32, warps=8, stages=2)
    else:
        both = Tile(rows=32, block=32, warps=8)
    return both, both


def gradient_buffers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Buffer]:
    delta = Buffer(shape=tuple(q.shape[:3]), dtype=torch.float32)
    return {"dq": result_like(q), "dk": result_like(k), "dv": result_like(v), "delta": delta}


def backward_steps(
    sizes: Sizes, q: torch.Tensor, tiles: tuple[Tile, Tile], programs: tuple[int, int], strides: tuple[int, ...],
    gradients: tuple[tuple[int, ...], ...], mask: Mask, scale: float, softcap: float, has_dlse: bool, extras: Extras,
    views: tuple[dict[int, View], dict[int, View]],
) -> tuple[Step, Step]:  # fmt: skip
    """The pass over keys, then the pass over queries; `strides` are those of q, k, v, dout, `gradients` of theirs."""
    by_keys, by_queries = tiles
    dq, dk, dv = gradients
    numbers = (mask.window, exponent_scale(q, scale, softcap), scale, float(softcap), *extras.numbers())
    shape = {
        **extras.flags(), "SLOPE_MOD": slope_named(extras.mods),
        **flags(mask, softcap), "COPY_ENGINE": bool(views[0]), "HEAD_DIM": sizes.head_dim,
        "WIDTH": sizes.width, **rounding_of(q),
    }  # fmt: skip
    keys = Step(
        keys_backward._keys_backward_kernel, (programs[0],),
        sizes.rows, sizes.q_len, sizes.kv_len, sizes.kv_heads, sizes.share, cdiv(sizes.kv_len, by_keys.rows),
        *strides, *dk, *dv, *numbers,
        on=f"q k v dout {sums_name(q)} delta dk dv {extras.names()}", tile=by_keys, views=views[0],
        **shape, QUERIES=by_keys.block, KEYS=by_keys.rows, num_warps=by_keys.warps, num_stages=by_keys.stages,
    )  # fmt: skip
    queries = Step(
        queries_backward._queries_backward_kernel, (programs[1],),
        sizes.rows, sizes.q_len, sizes.kv_len, sizes.heads, sizes.share, cdiv(sizes.q_len, by_queries.rows),
        sizes.together(), *strides, *dq, *numbers,
        on=f"q k v dout {sums_name(q)} delta {'dlse' if has_dlse else 'lse'} dq {extras.names()}", tile=by_queries,
        views=views[1], **shape, HAS_DLSE=has_dlse, QUERIES=by_queries.rows, KEYS=by_queries.block,
        num_warps=by_queries.warps, num_stages=by_queries.stages,
    )  # fmt: skip
    return keys, queries


def in_order(q: torch.Tensor, delta: Step, keys: Step, queries: Step) -> tuple[Step, ...]:
    """In fp32 the pass over queries computes what the other subtracts."""
    return (queries, keys) if q.dtype == torch.float32 else (delta, keys, queries)


def plan_backward(
    dout: torch.Tensor, has_dlse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    mask: Mask, softcap: float, scale: float, extras: Extras = NONE,
) -> Plan:  # fmt: skip
    sizes = sizes_of(q, k)
    mask = mask.needed(sizes.q_len, sizes.kv_len)
    tiles = tiles_for(sizes, q.element_size(), facts(q))
    buffers = gradient_buffers(q, k, v)
    by_engine = has_copy_engine(facts(q), q, k, v, dout)

    def views(queries: int, keys: int) -> dict[int, View]:
        held = enumerate(((q, queries), (k, keys), (v, keys), (dout, queries)))
        return {at: view_of(x.shape, strides_of(x), rows, sizes.width) for at, (x, rows) in held} if by_engine else {}

    by_keys, by_queries = tiles
    programs = (
        cdiv(sizes.kv_len, by_keys.rows) * sizes.batch * sizes.kv_heads,
        cdiv(sizes.q_len, by_queries.rows) * sizes.batch * sizes.heads,
    )
    keys, queries = backward_steps(
        sizes, q, tiles, programs, (*strides_of(q), *strides_of(k), *strides_of(v), *strides_of(dout)),
        tuple(buffers[name].strides[:3] for name in ("dq", "dk", "dv")), mask, scale, softcap, has_dlse, extras,
        (views(by_keys.block, by_keys.rows), views(by_queries.rows, by_queries.block)),
    )  # fmt: skip
    if extras != NONE:
        buffers["dsinks"] = Buffer(shape=(sizes.heads if extras.has_sinks else 0,), dtype=torch.float32)
    return Plan(
        provider="flash",
        reason="weights again from their logarithms; keys and queries in turn, each written once",
        copies=copies_of(dout=dout, q=q, k=k, v=v, out=out),
        buffers=buffers,
        steps=(
            *in_order(q, delta_step(sizes, strides_of(dout), strides_of(out), has_dlse), keys, queries),
            *((sinks_step(q, sizes),) if extras.has_sinks else ()),
        ),
        outputs=("dq", "dk", "dv") if extras == NONE else ("dq", "dk", "dv", "dsinks"),
    )
