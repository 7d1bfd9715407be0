"""Attention's gradients: weights are computed again from the logarithm of their sums, so nothing of S x S is kept.

Two passes, so that no two programs write to the same place and every run gives the same bits: one holds a tile of keys
and values and streams the queries that see it (of all heads that share them), the other holds a tile of queries and
streams keys. What both subtract, the sum of dout * out over a row, is computed first; in fp32 by the pass over queries.
"""

from __future__ import annotations

import torch

from sublight.backend.device import Facts, facts, is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step, View
from sublight.op import Buffer, Plan
from sublight.ops.attention.delta import delta_step, sinks_step
from sublight.ops.attention.extras import NONE, Extras, in_units, kept, sequence_at, span_of
from sublight.ops.attention.masks import Mask, keys_seen, queries_seeing
from sublight.ops.attention.mods import is_shown, modded, slope_at, slope_named
from sublight.ops.attention.parts import (
    Sizes,
    begin_of,
    copies_of,
    exponent_scale,
    flags,
    has_copy_engine,
    head_at,
    load_sums,
    result_like,
    rounding_of,
    scores_of,
    sizes_of,
    store_rows,
    strides_of,
    sums_name,
    tile_at,
    view_of,
    weights_of,
)
from sublight.ops.matmul.order import add_product
from sublight.ops.record.tuning import Tile


@triton.jit
def _weights(
    product, top, total, scale, softcap, seen, bias, entry, heads, query, key, kv_len, a_ptr, b_ptr,
    ALIBI: tl.constexpr, SCORE_MOD: tl.constexpr, SLOPE_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """exp(score - lse), and the same times the slope of a soft cap or of the caller's function; of what is not seen,
    zero."""
    scores = scores_of(product, scale, softcap, SOFTCAP, EXACT)
    biased = scores - bias if ALIBI else scores
    if SCORE_MOD is not None:
        changed = modded(biased, entry, heads, query, key, kv_len, a_ptr, b_ptr, SCORE_MOD, MOD_TENSORS, EXACT)
        weights = tl.where(changed == -float("inf"), 0.0, weights_of(changed, top, total, EXACT))
    else:
        weights = weights_of(biased, top, total, EXACT)
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    slope = weights
    if SOFTCAP:
        share = scores / softcap if EXACT else scores * (0.6931471805599453 / softcap)  # the hyperbolic tangent again
        slope = weights * (1.0 - share * share)
    if SCORE_MOD is not None:
        steep = slope_at(biased, entry, heads, query, key, kv_len, a_ptr, b_ptr, SLOPE_MOD, MOD_TENSORS, EXACT)
        slope = tl.where(weights == 0.0, 0.0, slope * steep)  # where nothing is seen the slope may be anything
    return weights, slope


@triton.jit
def _add_queries(
    dk, dv, k, v, q_at, dout_at, sums_ptr, delta_ptr, plane, begin, end, key, batch, head, q_row, dout_row, q_len,
    kv_len, window, scale, softcap, slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PREFIX: tl.constexpr, SCORE_MOD: tl.constexpr,
    SLOPE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr, COPY_ENGINE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What queries from `begin` to `end` add; keys are rows here, so that weights are the products' left side."""
    EXACT: tl.constexpr = k.dtype == tl.float32
    for start in tl.range(begin, end, QUERIES):
        q = tile_at(q_at, batch, head, start, q_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
        row = start + tl.arange(0, QUERIES)
        top, total = load_sums(sums_ptr, row, plane, row < q_len, EXACT)
        product = tl.dot(k, tl.trans(q), input_precision="ieee")
        position = row[None, :] + (kv_len - q_len)
        query = tl.minimum(row, q_len - 1)[None, :]
        seen = is_shown(
            position, query, key[:, None], kv_len, window, prefix, entry, heads, a_ptr, b_ptr, CAUSAL, WINDOW, PREFIX,
            MASK_MOD, MOD_TENSORS,
        )  # fmt: skip
        bias = slope * tl.abs(position - key[:, None]).to(tl.float32)
        weights, steep = _weights(
            product, top[None, :], total[None, :], scale, softcap, seen, bias, entry, heads, query, key[:, None],
            kv_len,
            a_ptr, b_ptr, ALIBI, SCORE_MOD, SLOPE_MOD, MOD_TENSORS, MASKED, SOFTCAP, EXACT,
        )  # fmt: skip
        if DROPOUT:
            weights = kept(weights, seed, entry, row[None, :], key[:, None], least, growth)
        dout = tile_at(dout_at, batch, head, start, dout_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
        dv = add_product(dv, weights.to(k.dtype), dout, "ieee")
        delta = tl.load(delta_ptr + row, mask=row < q_len, other=0.0)
        if EXACT or DROPOUT:  # in fp32 the same bits as those that went into delta
            dweights = tl.dot(v, tl.trans(dout), input_precision="ieee")
            if DROPOUT:
                dweights = kept(dweights, seed, entry, row[None, :], key[:, None], least, growth)
            dscores = steep * (dweights - delta[None, :])
        else:
            less = (
                tl.zeros([k.shape[0], QUERIES], tl.float32) - delta[None, :]
            )  # the sum begins there: no more registers
            dscores = steep * tl.dot(v, tl.trans(dout), less, input_precision="ieee")
        dk = add_product(dk, dscores.to(k.dtype), q, "ieee")
    return dk, dv


@triton.jit
def _keys_backward_kernel(
    q, k, v, dout, sums_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, sinks_ptr, seed_ptr,
    prefix_ptr, a_ptr, b_ptr, plane, q_len, kv_len, kv_heads, share, blocks,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, window, exponent, scale, softcap, sequences, least, growth,
    PACKED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, PREFIX: tl.constexpr,
    SCORE_MOD: tl.constexpr, SLOPE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values."""
    if PACKED:
        kv_head, block, tokens = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads, q_len
        sequence, first, k_start, kv_len = sequence_at(block, cu_k_ptr, sequences, kv_len, KEYS)
        q_start, q_len = span_of(sequence, cu_q_ptr, tokens)
        q_len = tl.where(first < kv_len, q_len, 0)  # a block past its sequence's end has nothing to do
        batch = kv_head * 0
    else:
        entry, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * KEYS  # causal: the first are seen most
        batch, kv_head = entry // kv_heads, entry % kv_heads
    k = begin_of(k, batch, kv_head, k_batch, k_head, COPY_ENGINE)
    v = begin_of(v, batch, kv_head, v_batch, v_head, COPY_ENGINE)
    dk_at = head_at(dk_ptr, batch, kv_head, dk_batch, dk_head)
    dv_at = head_at(dv_ptr, batch, kv_head, dv_batch, dv_head)
    if PACKED:
        start = k_start.to(tl.int64)
        k, v, dk_at, dv_at = k + start * k_row, v + start * v_row, dk_at + start * dk_row, dv_at + start * dv_row
    keys = tile_at(k, batch, kv_head, first, k_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, False)
    values = tile_at(v, batch, kv_head, first, v_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, False)
    key = first + tl.arange(0, KEYS)
    last = tl.minimum(first + KEYS, kv_len) - 1
    begin, inner, outer, end = queries_seeing(first, last, q_len, kv_len, window, CAUSAL, WINDOW, QUERIES)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    slope, seed, prefix, heads = 0.0, 0, 0, share * kv_heads
    if PREFIX:  # keys that all see
        prefix = tl.load(prefix_ptr + (sequence if PACKED else batch)).to(tl.int32)
        begin, inner = tl.where(first < prefix, 0, begin), tl.where(last < prefix, 0, inner)
    if MASK_MOD is not None:  # which block is whole nobody knows
        inner, outer = end, end
    if DROPOUT:
        seed = tl.load(seed_ptr)
    for turn in tl.range(0, share):
        head = kv_head * share + turn
        q_at = begin_of(q, batch, head, q_batch, q_head, COPY_ENGINE)
        dout_at = begin_of(dout, batch, head, dout_batch, dout_head, COPY_ENGINE)
        if PACKED:
            entry, rows = sequence * heads + head, head.to(tl.int64) * tokens + q_start
            q_at, dout_at = q_at + q_start.to(tl.int64) * q_row, dout_at + q_start.to(tl.int64) * dout_row
        else:
            entry = batch * heads + head
            rows = entry.to(tl.int64) * q_len
        if ALIBI:
            slope = in_units(tl.load(slopes_ptr + head), keys.dtype == tl.float32)
        if CAUSAL or WINDOW or MASK_MOD is not None:
            dk, dv = _add_queries(
                dk, dv, keys, values, q_at, dout_at, sums_ptr + rows, delta_ptr + rows, plane, begin,
                tl.minimum(inner, end), key, batch, head, q_row, dout_row, q_len, kv_len, window, exponent, softcap,
                slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI, DROPOUT, PREFIX, SCORE_MOD,
                SLOPE_MOD, MASK_MOD, MOD_TENSORS, COPY_ENGINE, True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, QUERIES, WIDTH,
            )  # fmt: skip
        # a block that the last queries only half fill needs no mask: their weights are zero
        dk, dv = _add_queries(
            dk, dv, keys, values, q_at, dout_at, sums_ptr + rows, delta_ptr + rows, plane, inner,
            outer if WINDOW else end, key, batch, head, q_row, dout_row, q_len, kv_len, window, exponent, softcap,
            slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI, DROPOUT, PREFIX, SCORE_MOD,
            SLOPE_MOD, MASK_MOD, MOD_TENSORS, COPY_ENGINE, False, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, QUERIES, WIDTH,
        )  # fmt: skip
        if WINDOW:
            dk, dv = _add_queries(
                dk, dv, keys, values, q_at, dout_at, sums_ptr + rows, delta_ptr + rows, plane, outer, end, key,
                batch, head, q_row, dout_row, q_len, kv_len, window, exponent, softcap,
                slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI, DROPOUT, PREFIX, SCORE_MOD,
                SLOPE_MOD, MASK_MOD, MOD_TENSORS, COPY_ENGINE, True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, QUERIES, WIDTH,
            )  # fmt: skip
    store_rows(dk_at, dk * scale, first, dk_row, kv_len, HEAD_DIM, KEYS, WIDTH)
    store_rows(dv_at, dv, first, dv_row, kv_len, HEAD_DIM, KEYS, WIDTH)


@triton.jit
def _delta_of(
    q, dout, top, total, k_at, v_at, begin, end, row, position, batch, kv_head, k_row, v_row, kv_len, window, scale,
    softcap, slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, PREFIX: tl.constexpr, SCORE_MOD: tl.constexpr, SLOPE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr, COPY_ENGINE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of dout * out over a row as that of weight * dweight over keys. Where one weight is nearly 1, its
    gradient is a small difference of two large numbers: both must have the same rounding errors, which then cancel."""
    delta = tl.zeros([q.shape[0]], tl.float32)
    for start in tl.range(begin, end, KEYS):
        k = tile_at(k_at, batch, kv_head, start, k_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, False)
        v = tile_at(v_at, batch, kv_head, start, v_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, False)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        key = start + tl.arange(0, KEYS)[None, :]
        query = row[:, None]
        seen = is_shown(
            position[:, None], query, key, kv_len, window, prefix, entry, heads, a_ptr, b_ptr, CAUSAL, WINDOW, PREFIX,
            MASK_MOD, MOD_TENSORS,
        ) & (key < kv_len)  # fmt: skip
        bias = slope * tl.abs(position[:, None] - key).to(tl.float32)
        weights, _ = _weights(
            product, top[:, None], total[:, None], scale, softcap, seen, bias, entry, heads, query, key, kv_len,
            a_ptr, b_ptr, ALIBI, SCORE_MOD, SLOPE_MOD, MOD_TENSORS, True, SOFTCAP, True,
        )  # fmt: skip
        dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
        if DROPOUT:
            dweights = kept(dweights, seed, entry, row[:, None], key, least, growth)
        delta += tl.sum(weights * dweights, 1)
    return delta


@triton.jit
def _add_keys(
    dq, q, dout, top, total, delta, k_at, v_at, begin, end, row, position, batch, kv_head, k_row, v_row, kv_len, window,
    scale, softcap, slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, PREFIX: tl.constexpr, SCORE_MOD: tl.constexpr, SLOPE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr, COPY_ENGINE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, KEYS):
        k = tile_at(k_at, batch, kv_head, start, k_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, not MASKED)
        v = tile_at(v_at, batch, kv_head, start, v_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, not MASKED)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        key = start + tl.arange(0, KEYS)[None, :]
        query = row[:, None]
        seen = is_shown(
            position[:, None], query, key, kv_len, window, prefix, entry, heads, a_ptr, b_ptr, CAUSAL, WINDOW, PREFIX,
            MASK_MOD, MOD_TENSORS,
        ) & (key < kv_len)  # fmt: skip
        bias = slope * tl.abs(position[:, None] - key).to(tl.float32)
        _, steep = _weights(
            product, top[:, None], total[:, None], scale, softcap, seen, bias, entry, heads, query, key, kv_len,
            a_ptr, b_ptr, ALIBI, SCORE_MOD, SLOPE_MOD, MOD_TENSORS, MASKED, SOFTCAP, q.dtype == tl.float32,
        )  # fmt: skip
        dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
        if DROPOUT:
            dweights = kept(dweights, seed, entry, row[:, None], key, least, growth)
        dscores = steep * (dweights - delta[:, None])
        dq = add_product(dq, dscores.to(q.dtype), k, "ieee")
    return dq


@triton.jit
def _queries_backward_kernel(
    q, k, v, dout, sums_ptr, delta_ptr, dlse_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, sinks_ptr, seed_ptr,
    prefix_ptr, a_ptr, b_ptr, plane, q_len, kv_len, heads, share, blocks, together,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dq_batch, dq_head, dq_row, window, exponent, scale, softcap, sequences, least, growth, HAS_DLSE: tl.constexpr,
    PACKED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, PREFIX: tl.constexpr,
    SCORE_MOD: tl.constexpr, SLOPE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, MOD_TENSORS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries; the grid is the forward pass's. In fp32 their deltas as well."""
    if PACKED:
        head, block = tl.program_id(0) % heads, tl.program_id(0) // heads
        sequence, first, q_start, length = sequence_at(block, cu_q_ptr, sequences, q_len, QUERIES)
        k_start, kv_len = span_of(sequence, cu_k_ptr, kv_len)
        kv_len = tl.where(first < length, kv_len, 0)
        entry, place = sequence * heads + head, head.to(tl.int64) * q_len + q_start
        batch, q_len = head * 0, length
    else:
        turn = tl.program_id(0) % (together * blocks)
        entry = tl.program_id(0) // (together * blocks) * together + turn % together
        batch, head = entry // heads, entry % heads
        first = (blocks - 1 - turn // together) * QUERIES
        place = entry.to(tl.int64) * q_len
    kv_head = head // share
    q = begin_of(q, batch, head, q_batch, q_head, COPY_ENGINE)
    k = begin_of(k, batch, kv_head, k_batch, k_head, COPY_ENGINE)
    v = begin_of(v, batch, kv_head, v_batch, v_head, COPY_ENGINE)
    dout = begin_of(dout, batch, head, dout_batch, dout_head, COPY_ENGINE)
    dq_at = head_at(dq_ptr, batch, head, dq_batch, dq_head)
    if PACKED:
        start, k_begin = q_start.to(tl.int64), k_start.to(tl.int64)
        q, dout, dq_at = q + start * q_row, dout + start * dout_row, dq_at + start * dq_row
        k, v = k + k_begin * k_row, v + k_begin * v_row
    queries = tile_at(q, batch, head, first, q_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
    douts = tile_at(dout, batch, head, first, dout_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
    row = first + tl.arange(0, QUERIES)
    place += row
    top, total = load_sums(sums_ptr, place, plane, row < q_len, queries.dtype == tl.float32)
    position = row + (kv_len - q_len)
    last = tl.minimum(first + QUERIES, q_len) - 1 + kv_len - q_len
    begin, inner, outer, end = keys_seen(first + kv_len - q_len, last, kv_len, window, CAUSAL, WINDOW, KEYS)
    slope, seed, prefix = 0.0, 0, 0
    if PREFIX:
        prefix = tl.minimum(tl.load(prefix_ptr + entry // heads).to(tl.int32), kv_len)
        outer, end = tl.maximum(outer, tl.maximum(prefix, 0) // KEYS * KEYS), tl.maximum(end, prefix)
    if MASK_MOD is not None:
        inner, outer = begin, begin
    query = tl.minimum(row, q_len - 1)  # that exists
    if ALIBI:
        slope = in_units(tl.load(slopes_ptr + head), queries.dtype == tl.float32)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    if queries.dtype == tl.float32:
        delta = _delta_of(
            queries, douts, top, total, k, v, begin, end, query, position, batch, kv_head, k_row, v_row, kv_len, window,
            exponent, softcap, slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI, DROPOUT, PREFIX,
            SCORE_MOD, SLOPE_MOD, MASK_MOD, MOD_TENSORS, COPY_ENGINE, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, KEYS, WIDTH,
        )  # fmt: skip
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + place, mask=row < q_len, other=0.0)
        tl.store(delta_ptr + place, delta, mask=row < q_len)
    else:
        delta = tl.load(delta_ptr + place, mask=row < q_len, other=0.0)
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    if WINDOW:
        dq = _add_keys(
            dq, queries, douts, top, total, delta, k, v, begin, tl.minimum(inner, end), query, position, batch, kv_head,
            k_row, v_row, kv_len, window, exponent, softcap, slope, seed, entry, least, growth, heads, prefix, a_ptr,
            b_ptr, ALIBI, DROPOUT, PREFIX, SCORE_MOD, SLOPE_MOD, MASK_MOD, MOD_TENSORS, COPY_ENGINE,
            True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, KEYS, WIDTH,
        )  # fmt: skip
    dq = _add_keys(
        dq, queries, douts, top, total, delta, k, v, inner, outer, query, position, batch, kv_head, k_row, v_row,
        kv_len,
        window, exponent, softcap, slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI, DROPOUT,
        PREFIX, SCORE_MOD, SLOPE_MOD, MASK_MOD, MOD_TENSORS, COPY_ENGINE,
        False, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, KEYS, WIDTH,
    )  # fmt: skip
    dq = _add_keys(
        dq, queries, douts, top, total, delta, k, v, outer, end, query, position, batch, kv_head, k_row, v_row, kv_len,
        window, exponent, softcap, slope, seed, entry, least, growth, heads, prefix, a_ptr, b_ptr, ALIBI, DROPOUT,
        PREFIX, SCORE_MOD, SLOPE_MOD, MASK_MOD, MOD_TENSORS, COPY_ENGINE,
        True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, KEYS, WIDTH,
    )  # fmt: skip
    store_rows(dq_at, dq * scale, first, dq_row, q_len, HEAD_DIM, QUERIES, WIDTH)


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
        _keys_backward_kernel, (programs[0],),
        sizes.rows, sizes.q_len, sizes.kv_len, sizes.kv_heads, sizes.share, cdiv(sizes.kv_len, by_keys.rows),
        *strides, *dk, *dv, *numbers,
        on=f"q k v dout {sums_name(q)} delta dk dv {extras.names()}", tile=by_keys, views=views[0],
        **shape, QUERIES=by_keys.block, KEYS=by_keys.rows, num_warps=by_keys.warps, num_stages=by_keys.stages,
    )  # fmt: skip
    queries = Step(
        _queries_backward_kernel, (programs[1],),
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
