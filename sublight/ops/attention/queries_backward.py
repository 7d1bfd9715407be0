"""Attention's backward pass over queries: a program holds a tile of queries and streams the keys that they see."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.ops.attention.extras import in_units, kept, sequence_at, span_of
from sublight.ops.attention.masks import keys_seen
from sublight.ops.attention.mods import is_shown
from sublight.ops.attention.parts import (
    begin_of,
    head_at,
    load_sums,
    store_rows,
    tile_at,
)
from sublight.ops.attention.weights_again import weights_again
from sublight.ops.matmul.order import add_block


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
        weights, _ = weights_again(
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
        _, steep = weights_again(
            product, top[:, None], total[:, None], scale, softcap, seen, bias, entry, heads, query, key, kv_len,
            a_ptr, b_ptr, ALIBI, SCORE_MOD, SLOPE_MOD, MOD_TENSORS, MASKED, SOFTCAP, q.dtype == tl.float32,
        )  # fmt: skip
        dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
        if DROPOUT:
            dweights = kept(dweights, seed, entry, row[:, None], key, least, growth)
        dscores = steep * (dweights - delta[:, None])
        dq = add_block(dq, dscores.to(q.dtype), k, "ieee")
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
