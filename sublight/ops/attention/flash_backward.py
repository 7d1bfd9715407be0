"""Attention's gradients: weights are computed again from the logarithm of their sums, so nothing of S x S is kept.

Two passes, so that no two programs write to the same place and every run gives the same bits: one holds a tile of keys
and values and streams the queries that see it (of all heads that share them), the other holds a tile of queries and
streams keys. What both subtract, the sum of dout * out over a row, is computed first.
"""

from __future__ import annotations

import torch

from sublight.backend.device import Facts, facts, is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step, View
from sublight.op import Buffer, Plan
from sublight.ops.attention.masks import Mask, is_seen, keys_seen, queries_seeing
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
    rows_at,
    scores_of,
    sizes_of,
    store_rows,
    strides_of,
    sums_name,
    tile_at,
    view_of,
    weights_of,
)
from sublight.ops.record.tuning import Tile


@triton.jit
def _delta_kernel(
    dout_ptr, out_ptr, dlse_ptr, delta_ptr, q_len, heads, blocks,
    dout_batch, dout_head, dout_row, out_batch, out_head, out_row,
    HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of dout * out over a row: what the softmax's gradient subtracts from every key's."""
    entry, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * QUERIES
    batch, head = entry // heads, entry % heads
    dout_ptr = head_at(dout_ptr, batch, head, dout_batch, dout_head)
    out_ptr = head_at(out_ptr, batch, head, out_batch, out_head)
    dout = rows_at(dout_ptr, first, dout_row, q_len, HEAD_DIM, QUERIES, WIDTH, False).to(tl.float32)
    out = rows_at(out_ptr, first, out_row, q_len, HEAD_DIM, QUERIES, WIDTH, False).to(tl.float32)
    row = first + tl.arange(0, QUERIES)
    delta = tl.sum(dout * out, 1)
    place = entry.to(tl.int64) * q_len + row
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + place, mask=row < q_len, other=0.0)
    tl.store(delta_ptr + place, delta, mask=row < q_len)


@triton.jit
def _weights(
    product, top, total, scale, softcap, seen, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr
):
    """exp(score - lse), and with a soft cap its slope; of what is not seen, zero."""
    scores = scores_of(product, scale, softcap, SOFTCAP, EXACT)
    weights = weights_of(scores, top, total, EXACT)
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    slope = weights
    if SOFTCAP:
        share = scores / softcap if EXACT else scores * (0.6931471805599453 / softcap)  # the hyperbolic tangent again
        slope = weights * (1.0 - share * share)
    return weights, slope


@triton.jit
def _add_queries(
    dk, dv, k, v, q_at, dout_at, sums_ptr, delta_ptr, plane, begin, end, key, batch, head, q_row, dout_row, q_len,
    kv_len, window, scale, softcap, COPY_ENGINE: tl.constexpr,
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
        seen = is_seen(row[None, :] + (kv_len - q_len), key[:, None], window, CAUSAL, WINDOW)
        weights, slope = _weights(product, top[None, :], total[None, :], scale, softcap, seen, MASKED, SOFTCAP, EXACT)
        dout = tile_at(dout_at, batch, head, start, dout_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
        dv = tl.dot(weights.to(k.dtype), dout, dv, input_precision="ieee")
        delta = tl.load(delta_ptr + row, mask=row < q_len, other=0.0)
        less = tl.zeros([k.shape[0], QUERIES], tl.float32) - delta[None, :]  # where the sum begins: no register more
        dscores = slope * tl.dot(v, tl.trans(dout), less, input_precision="ieee")
        dk = tl.dot(dscores.to(k.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _keys_backward_kernel(
    q, k, v, dout, sums_ptr, delta_ptr, dk_ptr, dv_ptr, plane, q_len, kv_len, kv_heads, share, blocks,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, window, exponent, scale, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values."""
    entry, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * KEYS  # causal: the first are seen most
    batch, kv_head = entry // kv_heads, entry % kv_heads
    k = begin_of(k, batch, kv_head, k_batch, k_head, COPY_ENGINE)
    v = begin_of(v, batch, kv_head, v_batch, v_head, COPY_ENGINE)
    keys = tile_at(k, batch, kv_head, first, k_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, False)
    values = tile_at(v, batch, kv_head, first, v_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, False)
    key = first + tl.arange(0, KEYS)
    last = tl.minimum(first + KEYS, kv_len) - 1
    begin, inner, outer, end = queries_seeing(first, last, q_len, kv_len, window, CAUSAL, WINDOW, QUERIES)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    for turn in tl.range(0, share):
        head = kv_head * share + turn
        q_at = begin_of(q, batch, head, q_batch, q_head, COPY_ENGINE)
        dout_at = begin_of(dout, batch, head, dout_batch, dout_head, COPY_ENGINE)
        rows = (batch * share * kv_heads + head).to(tl.int64) * q_len
        if CAUSAL or WINDOW:
            dk, dv = _add_queries(
                dk, dv, keys, values, q_at, dout_at, sums_ptr + rows, delta_ptr + rows, plane, begin,
                tl.minimum(inner, end), key, batch, head, q_row, dout_row, q_len, kv_len, window, exponent, softcap,
                COPY_ENGINE,
                True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, QUERIES, WIDTH,
            )  # fmt: skip
        # a block that the last queries only half fill needs no mask: their weights are zero
        dk, dv = _add_queries(
            dk, dv, keys, values, q_at, dout_at, sums_ptr + rows, delta_ptr + rows, plane, inner,
            outer if WINDOW else end, key, batch, head, q_row, dout_row, q_len, kv_len, window, exponent, softcap,
            COPY_ENGINE,
            False, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, QUERIES, WIDTH,
        )  # fmt: skip
        if WINDOW:
            dk, dv = _add_queries(
                dk, dv, keys, values, q_at, dout_at, sums_ptr + rows, delta_ptr + rows, plane, outer, end, key,
                batch, head, q_row, dout_row, q_len, kv_len, window, exponent, softcap, COPY_ENGINE,
                True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, QUERIES, WIDTH,
            )  # fmt: skip
    dk_at = head_at(dk_ptr, batch, kv_head, dk_batch, dk_head)
    dv_at = head_at(dv_ptr, batch, kv_head, dv_batch, dv_head)
    store_rows(dk_at, dk * scale, first, dk_row, kv_len, HEAD_DIM, KEYS, WIDTH)
    store_rows(dv_at, dv, first, dv_row, kv_len, HEAD_DIM, KEYS, WIDTH)


@triton.jit
def _add_keys(
    dq, q, dout, top, total, delta, k_at, v_at, begin, end, position, batch, kv_head, k_row, v_row, kv_len, window,
    scale, softcap, COPY_ENGINE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, KEYS):
        k = tile_at(k_at, batch, kv_head, start, k_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, not MASKED)
        v = tile_at(v_at, batch, kv_head, start, v_row, kv_len, COPY_ENGINE, HEAD_DIM, KEYS, WIDTH, not MASKED)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        key = start + tl.arange(0, KEYS)[None, :]
        seen = is_seen(position[:, None], key, window, CAUSAL, WINDOW) & (key < kv_len)
        _, slope = _weights(
            product, top[:, None], total[:, None], scale, softcap, seen, MASKED, SOFTCAP, q.dtype == tl.float32
        )
        dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
        dscores = slope * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(q.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _queries_backward_kernel(
    q, k, v, dout, sums_ptr, delta_ptr, dq_ptr, plane, q_len, kv_len, heads, share, blocks, together,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, dout_batch, dout_head, dout_row,
    dq_batch, dq_head, dq_row, window, exponent, scale, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries; the grid is the forward pass's."""
    turn = tl.program_id(0) % (together * blocks)
    entry = tl.program_id(0) // (together * blocks) * together + turn % together
    batch, head = entry // heads, entry % heads
    kv_head = head // share
    first = (blocks - 1 - turn // together) * QUERIES
    q = begin_of(q, batch, head, q_batch, q_head, COPY_ENGINE)
    k = begin_of(k, batch, kv_head, k_batch, k_head, COPY_ENGINE)
    v = begin_of(v, batch, kv_head, v_batch, v_head, COPY_ENGINE)
    dout = begin_of(dout, batch, head, dout_batch, dout_head, COPY_ENGINE)
    queries = tile_at(q, batch, head, first, q_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
    douts = tile_at(dout, batch, head, first, dout_row, q_len, COPY_ENGINE, HEAD_DIM, QUERIES, WIDTH, False)
    row = first + tl.arange(0, QUERIES)
    place = entry.to(tl.int64) * q_len + row
    top, total = load_sums(sums_ptr, place, plane, row < q_len, queries.dtype == tl.float32)
    delta = tl.load(delta_ptr + place, mask=row < q_len, other=0.0)
    position = row + (kv_len - q_len)
    last = tl.minimum(first + QUERIES, q_len) - 1 + kv_len - q_len
    begin, inner, outer, end = keys_seen(first + kv_len - q_len, last, kv_len, window, CAUSAL, WINDOW, KEYS)
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    if WINDOW:
        dq = _add_keys(
            dq, queries, douts, top, total, delta, k, v, begin, tl.minimum(inner, end), position, batch, kv_head,
            k_row, v_row, kv_len,
            window, exponent, softcap, COPY_ENGINE, True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, KEYS, WIDTH,
        )  # fmt: skip
    dq = _add_keys(
        dq, queries, douts, top, total, delta, k, v, inner, outer, position, batch, kv_head, k_row, v_row, kv_len,
        window, exponent, softcap, COPY_ENGINE, False, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, KEYS, WIDTH,
    )  # fmt: skip
    dq = _add_keys(
        dq, queries, douts, top, total, delta, k, v, outer, end, position, batch, kv_head, k_row, v_row, kv_len,
        window, exponent, softcap, COPY_ENGINE, True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, KEYS, WIDTH,
    )  # fmt: skip
    store_rows(
        head_at(dq_ptr, batch, head, dq_batch, dq_head), dq * scale, first, dq_row, q_len, HEAD_DIM, QUERIES, WIDTH
    )


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


def delta_step(dout: torch.Tensor, out: torch.Tensor, has_dlse: bool) -> Step:
    batch, heads, q_len, head_dim = out.shape
    blocks, width = cdiv(q_len, 32), sizes_of(out, out).width
    return Step(
        _delta_kernel, (blocks * batch * heads,), q_len, heads, blocks, *strides_of(dout), *strides_of(out),
        on=f"dout out {'dlse' if has_dlse else 'lse'} delta",
        HAS_DLSE=has_dlse, HEAD_DIM=head_dim, QUERIES=32, WIDTH=width, num_warps=4,
    )  # fmt: skip


def gradient_buffers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Buffer]:
    delta = Buffer(shape=tuple(q.shape[:3]), dtype=torch.float32)
    return {"dq": result_like(q), "dk": result_like(k), "dv": result_like(v), "delta": delta}


def plan_backward(
    dout: torch.Tensor, has_dlse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    mask: Mask, softcap: float, scale: float,
) -> Plan:  # fmt: skip
    sizes = sizes_of(q, k)
    mask = mask.needed(sizes.q_len, sizes.kv_len)
    by_keys, by_queries = tiles_for(sizes, q.element_size(), facts(q))
    buffers = gradient_buffers(q, k, v)
    operands = (*strides_of(q), *strides_of(k), *strides_of(v), *strides_of(dout))
    numbers = (mask.window, exponent_scale(q, scale, softcap), scale, float(softcap))
    by_engine = has_copy_engine(facts(q), q, k, v, dout)
    shape = {
        **flags(mask, softcap),
        "COPY_ENGINE": by_engine,
        "HEAD_DIM": sizes.head_dim,
        "WIDTH": sizes.width,
    }

    def views(queries: int, keys: int) -> dict[int, View]:
        held = enumerate(((q, queries), (k, keys), (v, keys), (dout, queries)))
        return {at: view_of(x.shape, strides_of(x), rows, sizes.width) for at, (x, rows) in held} if by_engine else {}

    key_blocks, query_blocks = cdiv(sizes.kv_len, by_keys.rows), cdiv(sizes.q_len, by_queries.rows)
    keys = Step(
        _keys_backward_kernel, (key_blocks * sizes.batch * sizes.kv_heads,),
        sizes.rows, sizes.q_len, sizes.kv_len, sizes.kv_heads, sizes.share, key_blocks,
        *operands, *buffers["dk"].strides[:3], *buffers["dv"].strides[:3], *numbers,
        on=f"q k v dout {sums_name(q)} delta dk dv", tile=by_keys,
        views=views(by_keys.block, by_keys.rows), **shape, QUERIES=by_keys.block, KEYS=by_keys.rows,
        num_warps=by_keys.warps, num_stages=by_keys.stages,
    )  # fmt: skip
    queries = Step(
        _queries_backward_kernel, (query_blocks * sizes.batch * sizes.heads,),
        sizes.rows, sizes.q_len, sizes.kv_len, sizes.heads, sizes.share, query_blocks, sizes.together(),
        *operands, *buffers["dq"].strides[:3], *numbers,
        on=f"q k v dout {sums_name(q)} delta dq", tile=by_queries,
        views=views(by_queries.rows, by_queries.block), **shape, QUERIES=by_queries.rows, KEYS=by_queries.block,
        num_warps=by_queries.warps, num_stages=by_queries.stages,
    )  # fmt: skip
    return Plan(
        provider="flash",
        reason="weights again from their logarithms; keys and queries in turn, each written once",
        copies=copies_of(dout=dout, q=q, k=k, v=v, out=out),
        buffers=buffers,
        steps=(delta_step(dout, out, has_dlse), keys, queries),
        outputs=("dq", "dk", "dv"),
    )
