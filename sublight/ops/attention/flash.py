"""Attention forward on any GPU: a tile of queries stays on chip while keys and values stream past once.

What makes it quick over `online`: blocks that no query of the tile sees are never loaded; blocks that all of them see
whole need no mask; the exponent's factor is folded into the scale; tiles fill the tensor cores; heads that share keys
run side by side, so that the L2 answers; on Hopper and later the copy engine brings the blocks in.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sublight.backend.device import Facts, facts, is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step, View
from sublight.op import Plan
from sublight.ops.attention.extras import NONE, Extras, in_units, kept, sequence_at, span_of
from sublight.ops.attention.masks import Mask, keys_seen
from sublight.ops.attention.mods import is_shown, modded
from sublight.ops.attention.parts import (
    Sizes,
    begin_of,
    copies_of,
    exponent_scale,
    flags,
    has_copy_engine,
    head_at,
    power,
    result_like,
    rounding_of,
    scores_of,
    sizes_of,
    store_rows,
    store_sums,
    strides_of,
    sums_buffers,
    tile_at,
    view_of,
)
from sublight.ops.matmul.order import add_block
from sublight.ops.record.tuning import Tile


@triton.jit
def _attend_blocks(
    out, top, total, q, k, v, begin, end, position, batch, kv_head, k_stride, v_stride, kv_len, window, scale, softcap,
    slope, seed, entry, row, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    PREFIX: tl.constexpr, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FOLDED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The running result, maximum and sum after the blocks of keys from `begin` to `end`."""
    EXACT: tl.constexpr = q.dtype == tl.float32
    for start in tl.range(begin, end, KEYS):
        block = tile_at(k, batch, kv_head, start, k_stride, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, not MASKED)
        product = tl.dot(q, tl.trans(block), input_precision="ieee")
        key = start + tl.arange(0, KEYS)[None, :]
        if FOLDED:  # scaled in the same instruction that takes the maximum off
            scores, factor = product, scale
        else:
            scores, factor = scores_of(product, scale, softcap, SOFTCAP, EXACT), 1.0
        if ALIBI:
            scores -= slope * tl.abs(position[:, None] - key).to(tl.float32)
        if SCORE_MOD is not None:
            scores = modded(
                scores, entry, heads, row[:, None], key, kv_len, a_ptr, b_ptr, SCORE_MOD, MOD_TENSORS, EXACT
            )
        if MASKED:
            seen = is_shown(
                position[:, None], row[:, None], key, kv_len, window, prefix, entry, heads, a_ptr, b_ptr, CAUSAL,
                WINDOW, PREFIX, MASK_MOD, MOD_TENSORS,
            ) & (key < kv_len)  # fmt: skip
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = new_top
        if MASKED or SCORE_MOD is not None:
            base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query that saw nothing yet
        weights = power(scores * factor - base[:, None], EXACT)
        shrink = power(top - base, EXACT)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None]
        if DROPOUT:
            weights = kept(weights, seed, entry, row[:, None], key, least, growth)
        block = tile_at(v, batch, kv_head, start, v_stride, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, not MASKED)
        out = add_block(out, weights.to(q.dtype), block, "ieee")
        top = new_top
    return out, top, total


@triton.jit
def _flash_kernel(
    q, k, v, out_ptr, lse_ptr, sums_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, sinks_ptr, seed_ptr,
    prefix_ptr, a_ptr, b_ptr,
    plane, q_len, kv_len, heads, share, blocks, together,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    window, scale, softcap, sequences, least, growth,
    PACKED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, PREFIX: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FOLDED: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """q, k and v are descriptors for the copy engine, or pointers."""
    if PACKED:
        head, block = tl.program_id(0) % heads, tl.program_id(0) // heads
        sequence, first, q_start, length = sequence_at(block, cu_q_ptr, sequences, q_len, QUERIES)
        k_start, kv_len = span_of(sequence, cu_k_ptr, kv_len)
        kv_len = tl.where(first < length, kv_len, 0)  # a block past its sequence's end has nothing to do
        entry, place = sequence * heads + head, head.to(tl.int64) * q_len + q_start
        batch, q_len = head * 0, length
    else:
        turn = tl.program_id(0) % (together * blocks)
        entry = tl.program_id(0) // (together * blocks) * together + turn % together
        batch, head = entry // heads, entry % heads
        first = (blocks - 1 - turn // together) * QUERIES  # with a causal mask the last queries have most to do
        place = entry.to(tl.int64) * q_len
    kv_head = head // share
    q = begin_of(q, batch, head, q_batch, q_head, COPY_ENGINE)
    k = begin_of(k, batch, kv_head, k_batch, k_head, COPY_ENGINE)
    v = begin_of(v, batch, kv_head, v_batch, v_head, COPY_ENGINE)
    out_at = head_at(out_ptr, batch, head, out_batch, out_head)
    if PACKED:
        q, out_at = q + q_start.to(tl.int64) * q_row, out_at + q_start.to(tl.int64) * out_row
        k, v = k + k_start.to(tl.int64) * k_row, v + k_start.to(tl.int64) * v_row
    queries = tile_at(q, batch, head, first, q_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
    row = first + tl.arange(0, QUERIES)
    position = row + (kv_len - q_len)
    last = tl.minimum(first + QUERIES, q_len) - 1 + kv_len - q_len
    begin, inner, outer, end = keys_seen(first + kv_len - q_len, last, kv_len, window, CAUSAL, WINDOW, KEYS)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    EXACT: tl.constexpr = queries.dtype == tl.float32
    slope, seed, prefix = 0.0, 0, 0
    if PREFIX:  # keys that all see
        prefix = tl.minimum(tl.load(prefix_ptr + entry // heads).to(tl.int32), kv_len)
        outer, end = tl.maximum(outer, tl.maximum(prefix, 0) // KEYS * KEYS), tl.maximum(end, prefix)
    if MASK_MOD is not None:  # which block is whole nobody knows
        inner, outer = begin, begin
    query = tl.minimum(row, q_len - 1)  # that exists
    if ALIBI:
        slope = in_units(tl.load(slopes_ptr + head), EXACT)
    if SINKS:  # a key that every query sees, without a value
        top, total = tl.zeros([QUERIES], tl.float32) + in_units(tl.load(sinks_ptr + head), EXACT), total + 1.0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    if WINDOW:
        out, top, total = _attend_blocks(
            out, top, total, queries, k, v, begin, tl.minimum(inner, end), position, batch, kv_head, k_row, v_row,
            kv_len, window, scale, softcap, slope, seed, entry, query, least, growth, heads, prefix, a_ptr,
        b_ptr, ALIBI, DROPOUT, PREFIX, SCORE_MOD, MASK_MOD, MOD_TENSORS,
            True, CAUSAL, WINDOW, SOFTCAP, FOLDED, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH,
        )  # fmt: skip
    out, top, total = _attend_blocks(
        out, top, total, queries, k, v, inner, outer, position, batch, kv_head, k_row, v_row,
        kv_len, window, scale, softcap, slope, seed, entry, query, least, growth, heads, prefix, a_ptr,
        b_ptr, ALIBI, DROPOUT, PREFIX, SCORE_MOD, MASK_MOD, MOD_TENSORS,
        False, CAUSAL, WINDOW, SOFTCAP, FOLDED, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH,
    )  # fmt: skip
    out, top, total = _attend_blocks(
        out, top, total, queries, k, v, outer, end, position, batch, kv_head, k_row, v_row,
        kv_len, window, scale, softcap, slope, seed, entry, query, least, growth, heads, prefix, a_ptr,
        b_ptr, ALIBI, DROPOUT, PREFIX, SCORE_MOD, MASK_MOD, MOD_TENSORS,
        True, CAUSAL, WINDOW, SOFTCAP, FOLDED, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH,
    )  # fmt: skip
    some = tl.where(total == 0.0, 1.0, total)  # a query that sees nothing gets zeros
    store_rows(out_at, out / some[:, None], first, out_row, q_len, HEAD_DIM, QUERIES, WIDTH)
    store_sums(lse_ptr, sums_ptr, place + row, plane, row < q_len, top, some, EXACT)


def tile_for(sizes: Sizes, itemsize: int, gpu: Facts) -> Tile:
    """Rows are queries, the block is keys. Tried on an H200; elsewhere what compiles without a spill and fits."""
    if is_interpreted():
        return Tile(rows=16, block=32, warps=4)
    if itemsize == 4:  # products in fp32 take no tensor core
        side = 32 if sizes.width <= 64 else 16
        return Tile(rows=side, block=side, warps=4)
    if gpu.capability in (90, 100) and sizes.width <= 64:
        return Tile(rows=64, block=128, warps=4, stages=3)
    if gpu.capability in (90, 100):
        keys = 64 if sizes.width > 128 else 128
        return Tile(rows=128, block=keys, warps=8, stages=2 if sizes.width > 128 else 3)
    keys, queries = 64 if sizes.width <= 64 else 32, 128 if sizes.width <= 128 else 64
    return Tile(rows=queries, block=keys, warps=4 if sizes.width <= 64 else 8, stages=2)


def tile_with(extras: Extras, sizes: Sizes, itemsize: int, gpu: Facts) -> Tile:
    """A caller's functions need registers of their own: fewer keys at once, or some words spill. The batch-invariant
    mode has the blocks of `paged_prefill`."""
    tile = tile_for(sizes, itemsize, gpu)
    return replace(tile, block=min(64, tile.block)) if extras.mods or extras.is_invariant else tile


def forward_step(
    q: torch.Tensor, sizes: Sizes, tile: Tile, programs: int, strides: tuple[int, ...], mask: Mask, scale: float,
    softcap: float, extras: Extras, views: dict[int, View],
) -> Step:  # fmt: skip
    """`strides` are those of q, k, v and the result: from one batch entry, head and row to the next."""
    blocks, exponent = cdiv(sizes.q_len, tile.rows), exponent_scale(q, scale, softcap)
    is_plain = not softcap and not extras.has_slopes and not extras.mods and not extras.is_invariant
    is_folded = scale > 0 and is_plain and q.dtype != torch.float32
    return Step(
        _flash_kernel, (programs,),
        sizes.rows, sizes.q_len, sizes.kv_len, sizes.heads, sizes.share, blocks, sizes.together(),
        *strides, mask.window, exponent, float(softcap), *extras.numbers(),
        on=f"q k v out lse sums {extras.names()}", views=views, tile=tile,
        **extras.flags(), **flags(mask, softcap), FOLDED=is_folded, COPY_ENGINE=bool(views), HEAD_DIM=sizes.head_dim,
        QUERIES=tile.rows, KEYS=tile.block, WIDTH=sizes.width, num_warps=tile.warps, num_stages=tile.stages,
        **rounding_of(q, extras.is_invariant),
    )  # fmt: skip


def plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float, extras: Extras = NONE
) -> Plan:
    sizes, gpu = sizes_of(q, k), facts(q)
    mask = mask.needed(sizes.q_len, sizes.kv_len)
    tile = tile_with(extras, sizes, q.element_size(), gpu)
    blocks, out = cdiv(sizes.q_len, tile.rows), result_like(q)
    held = enumerate(((q, tile.rows), (k, tile.block), (v, tile.block)))
    by_engine = has_copy_engine(gpu, q, k, v)
    views = {at: view_of(x.shape, strides_of(x), rows, sizes.width) for at, (x, rows) in held} if by_engine else {}
    strides = (*strides_of(q), *strides_of(k), *strides_of(v), *out.strides[:3])
    programs = blocks * sizes.batch * sizes.heads
    return Plan(
        provider="flash",
        reason="a tile of queries on chip, keys and values once past it",
        copies=copies_of(q=q, k=k, v=v),
        buffers={"out": out, **sums_buffers(q)},
        steps=(forward_step(q, sizes, tile, programs, strides, mask, scale, softcap, extras, views),),
        outputs=("out", "lse", "sums"),
    )
