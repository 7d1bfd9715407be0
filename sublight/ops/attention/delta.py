"""What the backward passes take from whole rows: the sum of dout * out of each query, and the gradient of the sinks."""

from __future__ import annotations

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.ops.attention.extras import in_units
from sublight.ops.attention.parts import Sizes, head_at, load_sums, power, rows_at, sums_name


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
def _sinks_backward_kernel(
    sums_ptr, delta_ptr, sinks_ptr, dsinks_ptr, plane, q_len, heads, entries, EXACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one head: a sink takes its weight from every query's result, and gives no value."""
    head = tl.program_id(0)
    sink = in_units(tl.load(sinks_ptr + head), EXACT)
    sums = tl.zeros([BLOCK], tl.float32)
    for entry in tl.range(head, entries, heads):
        at = (tl.full([], 0, tl.int64) + entry) * q_len
        for start in tl.range(0, q_len, BLOCK):
            row = start + tl.arange(0, BLOCK)
            top, total = load_sums(sums_ptr, at + row, plane, row < q_len, EXACT)
            weight = power(sink - top, EXACT) / total if EXACT else power(sink - top, EXACT)
            sums -= weight * tl.load(delta_ptr + at + row, mask=row < q_len, other=0.0)
    tl.store(dsinks_ptr + head, tl.sum(sums, 0))


def delta_step(sizes: Sizes, dout: tuple[int, ...], out: tuple[int, ...], has_dlse: bool) -> Step:
    """dout and out by their strides: from one batch entry, head and row to the next."""
    blocks = cdiv(sizes.q_len, 32)
    return Step(
        _delta_kernel, (blocks * sizes.batch * sizes.heads,), sizes.q_len, sizes.heads, blocks, *dout, *out,
        on=f"dout out {'dlse' if has_dlse else 'lse'} delta",
        HAS_DLSE=has_dlse, HEAD_DIM=sizes.head_dim, QUERIES=32, WIDTH=sizes.width, num_warps=4,
    )  # fmt: skip


def sinks_step(q: torch.Tensor, sizes: Sizes) -> Step:
    return Step(
        _sinks_backward_kernel, (sizes.heads,), sizes.rows, sizes.q_len, sizes.heads, sizes.batch * sizes.heads,
        on=f"{sums_name(q)} delta sinks dsinks", EXACT=q.dtype == torch.float32, BLOCK=256, num_warps=4,
    )  # fmt: skip
