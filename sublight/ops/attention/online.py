"""Attention in one pass: a running maximum and sum take the place of the matrix of scores, which is never in memory.

When a block of keys brings a larger score, what was summed so far shrinks by exp(old - new). This is the whole idea;
`flash` adds the engineering.
"""

from __future__ import annotations

import torch

from sublight.backend.device import is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.op import Plan
from sublight.ops.attention.masks import Mask, is_seen
from sublight.ops.attention.parts import (
    copies_of,
    exponent_scale,
    flags,
    head_at,
    power,
    result_like,
    rounding_of,
    rows_at,
    scores_of,
    sizes_of,
    store_rows,
    store_sums,
    strides_of,
    sums_buffers,
)
from sublight.ops.matmul.order import add_block
from sublight.ops.record.tuning import Tile


@triton.jit
def _online_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sums_ptr, plane, q_len, kv_len, heads, share, blocks,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    window, scale, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    entry, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * QUERIES
    batch, head = entry // heads, entry % heads
    k_ptr = head_at(k_ptr, batch, head // share, k_batch, k_head)
    v_ptr = head_at(v_ptr, batch, head // share, v_batch, v_head)
    q = rows_at(head_at(q_ptr, batch, head, q_batch, q_head), first, q_row, q_len, HEAD_DIM, QUERIES, WIDTH, False)
    row = first + tl.arange(0, QUERIES)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    EXACT: tl.constexpr = q.dtype == tl.float32
    for start in tl.range(0, kv_len, KEYS):
        k = rows_at(k_ptr, start, k_row, kv_len, HEAD_DIM, KEYS, WIDTH, False)
        v = rows_at(v_ptr, start, v_row, kv_len, HEAD_DIM, KEYS, WIDTH, False)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = scores_of(product, scale, softcap, SOFTCAP, EXACT)
        key = start + tl.arange(0, KEYS)[None, :]
        seen = is_seen(row[:, None] + (kv_len - q_len), key, window, CAUSAL, WINDOW) & (key < kv_len)
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query that saw nothing yet
        weights = power(scores - base[:, None], EXACT)
        shrink = power(top - base, EXACT)
        total = total * shrink + tl.sum(weights, 1)
        out = add_block(out * shrink[:, None], weights.to(q.dtype), v, "ieee")
        top = new_top
    some = tl.where(total == 0.0, 1.0, total)
    out_at = head_at(out_ptr, batch, head, out_batch, out_head)
    store_rows(out_at, out / some[:, None], first, out_row, q_len, HEAD_DIM, QUERIES, WIDTH)
    store_sums(lse_ptr, sums_ptr, entry.to(tl.int64) * q_len + row, plane, row < q_len, top, some, EXACT)


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float) -> Plan:
    sizes, out = sizes_of(q, k), result_like(q)
    mask = mask.needed(sizes.q_len, sizes.kv_len)
    tile = Tile(rows=16, block=32, warps=4)
    if not is_interpreted():
        row_bytes = sizes.width * q.element_size()
        rows = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        tile = Tile(rows=rows, block=min(rows, 32), warps=4)
    blocks = cdiv(sizes.q_len, tile.rows)
    step = Step(
        _online_kernel, (blocks * sizes.batch * sizes.heads,),
        sizes.rows, sizes.q_len, sizes.kv_len, sizes.heads, sizes.share, blocks,
        *strides_of(q), *strides_of(k), *strides_of(v), *out.strides[:3],
        mask.window, exponent_scale(q, scale, softcap), float(softcap),
        on="q k v out lse sums", tile=tile, **flags(mask, softcap),
        HEAD_DIM=sizes.head_dim, QUERIES=tile.rows, KEYS=tile.block, WIDTH=sizes.width,
        num_warps=4, num_stages=1, **rounding_of(q),
    )  # fmt: skip
    return Plan(
        provider="online",
        reason="one pass over the keys, a running maximum and sum",
        copies=copies_of(q=q, k=k, v=v),
        buffers={"out": out, **sums_buffers(q)},
        steps=(step,),
        outputs=("out", "lse", "sums"),
    )
