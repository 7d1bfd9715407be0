"""Attention's backward pass over keys: a program holds a tile of keys and values, and streams queries that see it."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.ops.attention.extras import in_units, kept, sequence_at, span_of
from sublight.ops.attention.masks import queries_seeing
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
        weights, steep = weights_again(
            product, top[None, :], total[None, :], scale, softcap, seen, bias, entry, heads, query, key[:, None],
            kv_len,
            a_ptr, b_ptr, ALIBI, SCORE_MOD, SLOPE_MOD, MOD_TENSORS, MASKED, SOFTCAP, EXACT,
        )  # fmt: skip
        if DROPOUT:
            weights = kept(weights, seed, entry, row[None, :], key[:, None], least, growth)
        dout = tile_at(dout_at, batch, head, start, dout_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
        dv = add_block(dv, weights.to(k.dtype), dout, "ieee")
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
        dk = add_block(dk, dscores.to(k.dtype), q, "ieee")
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
