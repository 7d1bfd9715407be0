"""Attention's gradients for Hopper, in Gluon: one pass over the scores, five products, the queries' gradient added up.

A program holds 128 keys and values, half of them in each of two warpgroups, and streams the queries that see them (of
all heads that share them); one warp copies. Scores are computed transposed, keys as rows: weights and their gradients
are then the left side of the products that give dv and dk, and stay in registers. The gradient of the queries needs
those of all keys: both warpgroups put their part into shared memory, and each multiplies all of it by half of the
columns of the keys. The copy engine adds the result to a sum in fp32 in memory, in whatever order programs come by: two
runs may differ in the last bits. Where PyTorch is told to be deterministic, the two passes of `flash_backward` run.

Before it, a small kernel computes of each query what weights and their gradients need, and empties the sum; after it,
another scales the sum and rounds it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, gl, gluon, hopper, meet, tile_add, tile_in, tile_out, tl, triton
from sublight.backend.launch import Step, View
from sublight.op import Buffer, Plan
from sublight.ops.attention import flash_backward
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.parts import (
    LOG2_E,
    copies_of,
    has_copy_engine,
    head_at,
    result_like,
    rows_at,
    sizes_of,
    store_rows,
    strides_of,
    view_of,
)
from sublight.ops.attention.slots import slot_of

KEYS = 128
STAGES = {64: 2, 128: 3}  # blocks of queries on their way, by the size of a head
QUERIES = {64: 128, 128: 64}  # by the size of a head; a warpgroup's part of their gradient is 64 x 64 either way


@triton.jit
def _begin_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, rows_ptr, sum_ptr, q_len, padded, plane, heads, blocks,
    dout_batch, dout_head, dout_row, out_batch, out_head, out_row,
    HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Of each query the logarithm of its sum, in units of log(2), and the sum of dout * out; zeros for its gradient."""
    entry, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * QUERIES
    batch, head = entry // heads, entry % heads
    dout_ptr = head_at(dout_ptr, batch, head, dout_batch, dout_head)
    out_ptr = head_at(out_ptr, batch, head, out_batch, out_head)
    dout = rows_at(dout_ptr, first, dout_row, q_len, HEAD_DIM, QUERIES, HEAD_DIM, False).to(tl.float32)
    out = rows_at(out_ptr, first, out_row, q_len, HEAD_DIM, QUERIES, HEAD_DIM, False).to(tl.float32)
    row = first + tl.arange(0, QUERIES)
    delta = tl.sum(dout * out, 1)
    place = entry.to(tl.int64) * q_len + row
    lse = tl.load(lse_ptr + place, mask=row < q_len, other=-float("inf"))
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + place, mask=row < q_len, other=0.0)
    room = rows_ptr + entry.to(tl.int64) * padded + row
    # a query that is not there, or sees nothing, has no weights: they are exp2(score - inf)
    tl.store(room, tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634))
    tl.store(room + plane, -delta)
    sums = sum_ptr + entry.to(tl.int64) * q_len * HEAD_DIM
    store_rows(sums, tl.zeros([QUERIES, HEAD_DIM], tl.float32), first, HEAD_DIM, q_len, HEAD_DIM, QUERIES, HEAD_DIM)


@triton.jit
def _end_kernel(
    sum_ptr, dq_ptr, q_len, heads, blocks, dq_batch, dq_head, dq_row, scale,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries from its sum."""
    entry, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * QUERIES
    sums = sum_ptr + entry.to(tl.int64) * q_len * HEAD_DIM
    rows = rows_at(sums, first, HEAD_DIM, q_len, HEAD_DIM, QUERIES, HEAD_DIM, False)
    dq_ptr = head_at(dq_ptr, entry // heads, entry % heads, dq_batch, dq_head)
    store_rows(dq_ptr, rows * scale, first, dq_row, q_len, HEAD_DIM, QUERIES, HEAD_DIM)


@gluon.jit
def _span(first, q_len, kv_len, CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """The blocks of queries that see some of a program's keys, and up to where they need a mask."""
    begin = 0
    end = (q_len + QUERIES - 1) // QUERIES
    masked = 0
    if CAUSAL:  # query i sees key i + kv_len - q_len and those before it
        begin = gl.minimum(gl.maximum(first - (kv_len - q_len), 0) // QUERIES, end)
        last = gl.maximum(first + KEYS - 1 - (kv_len - q_len), 0)
        masked = (last + QUERIES - 1) // QUERIES
    if first + KEYS > kv_len:  # keys past the end have weights of their own unless they are hidden
        masked = end
    return begin, gl.minimum(gl.maximum(masked, begin), end), end


@gluon.jit
def _turned(block, begin, end, blocks, CAUSAL: gl.constexpr):
    """Programs of one head begin at different queries, so that they do not add to the same sums at the same time; with
    a causal mask they do anyway."""
    if CAUSAL:
        return block
    else:
        turned = block + gl.program_id(0) % blocks * (end - begin) // blocks
        return gl.where(turned < end, turned, turned - (end - begin))


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, dout_desc, rows_ptr, qs, ks, vs, douts, lses, deltas,
    kv_full, q_full, q_empty, dout_full, dout_empty,
    q_len, kv_len, kv_heads, share, blocks, padded, plane,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    entry, first = gl.program_id(0) // blocks, gl.program_id(0) % blocks * KEYS
    batch, kv_head = entry // kv_heads, entry % kv_heads
    begin, _, end = _span(first, q_len, kv_len, CAUSAL, QUERIES, KEYS)
    hopper.mbarrier.expect(kv_full, 2 * KEYS * HEAD_DIM * 2)
    for part in gl.static_range(2):
        tile_in(k_desc, [batch, kv_head, first + part * (KEYS // 2), 0], kv_full, ks.index(part))
        tile_in(v_desc, [batch, kv_head, first + part * (KEYS // 2), 0], kv_full, vs.index(part))
    line: gl.constexpr = gl.BlockedLayout([QUERIES // 32], [32], [1], [0])
    turn = 0
    for number in range(0, share):
        head = kv_head * share + number
        rows = rows_ptr + (batch * kv_heads * share + head).to(gl.int64) * padded + gl.arange(0, QUERIES, line)
        for each in range(begin, end):
            block = _turned(each, begin, end, blocks, CAUSAL)
            slot, phase = slot_of(turn, STAGES)
            lse = gl.load(rows + block * QUERIES)
            delta = gl.load(rows + plane + block * QUERIES)
            hopper.mbarrier.wait(q_empty.index(slot), phase ^ 1)
            lses.index(slot).store(lse)
            meet()  # the other lanes' stores come before this warp's arrival
            hopper.mbarrier.expect(q_full.index(slot), QUERIES * HEAD_DIM * 2)
            tile_in(q_desc, [batch, head, block * QUERIES, 0], q_full.index(slot), qs.index(slot))
            hopper.mbarrier.wait(dout_empty.index(slot), phase ^ 1)
            deltas.index(slot).store(delta)
            meet()
            hopper.mbarrier.expect(dout_full.index(slot), QUERIES * HEAD_DIM * 2)
            tile_in(dout_desc, [batch, head, block * QUERIES, 0], dout_full.index(slot), douts.index(slot))
            turn += 1


@gluon.jit
def _turn(
    dk, dv, sum_desc, batch, head, block, turn, key, offset, kv_len, scale,
    qs, ks, vs, douts, lses, deltas, dscores, sums, q_full, q_empty, dout_full, dout_empty, exchanged,
    PART: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr, left: gl.constexpr,
    dq_layout: gl.constexpr,
):  # fmt: skip
    """What a block of queries adds to this half of the keys and values, and all keys to half of its columns."""
    HALF: gl.constexpr = KEYS // 2
    WIDTH: gl.constexpr = HEAD_DIM // 2 if QUERIES == 64 else HEAD_DIM  # of a warpgroup's 64 rows of dq
    slot, phase = slot_of(turn, STAGES)
    room, room_phase = slot_of(turn, 2)
    none = gl.zeros([HALF, QUERIES], gl.float32, layout)
    k = ks.index(PART).reshape([HALF, HEAD_DIM])
    q = qs.index(slot).reshape([QUERIES, HEAD_DIM])
    hopper.mbarrier.wait(q_full.index(slot), phase)
    product = hopper.warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
    dout = douts.index(slot).reshape([QUERIES, HEAD_DIM])
    v = vs.index(PART).reshape([HALF, HEAD_DIM])
    hopper.mbarrier.wait(dout_full.index(slot), phase)
    less = deltas.index(slot).load(gl.SliceLayout(0, layout))  # where the sum begins: nothing is subtracted later
    dweights = hopper.warpgroup_mma(v, dout.permute((1, 0)), less[None, :] + none, is_async=True)
    lse = lses.index(slot).load(gl.SliceLayout(0, layout))
    product = hopper.warpgroup_mma_wait(1, deps=(product,))
    weights = gl.exp2(product * scale - lse[None, :])
    if MASKED:
        seen = key[:, None] < kv_len
        if CAUSAL:
            position = block * QUERIES + offset + gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
            seen = seen & (key[:, None] <= position[None, :])
        weights = gl.where(seen, weights, 0.0)
    packed = gl.convert_layout(weights.to(qs.dtype), left)
    dv = hopper.warpgroup_mma(packed, dout, dv, is_async=True)
    dweights = hopper.warpgroup_mma_wait(1, deps=(dweights,))
    dscore = (weights * dweights).to(qs.dtype)
    dscores.index(room * 2 + PART).store(dscore)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(exchanged.index(room), count=1)
    packed_dscore = gl.convert_layout(dscore, left)
    dk = hopper.warpgroup_mma(packed_dscore, q, dk, is_async=True)
    hopper.mbarrier.wait(exchanged.index(room), room_phase)
    dq = gl.zeros([64, WIDTH], gl.float32, dq_layout)
    for half in gl.static_range(2):
        dscore_half = dscores.index(room * 2 + half)
        k_half = ks.index(half).reshape([HALF, HEAD_DIM])
        if QUERIES == 64:
            k_half = k_half.slice(PART * WIDTH, WIDTH, dim=1)
        else:
            dscore_half = dscore_half.slice(PART * 64, 64, dim=1)
        dq = hopper.warpgroup_mma(dscore_half.permute((1, 0)), k_half, dq, use_acc=half > 0, is_async=True)
    dv, packed = hopper.warpgroup_mma_wait(3, deps=(dv, packed))
    hopper.mbarrier.arrive(dout_empty.index(slot), count=1)
    dk, packed_dscore = hopper.warpgroup_mma_wait(2, deps=(dk, packed_dscore))
    hopper.tma.store_wait(0)  # the sum of the turn before has left its place, which all see after the next barrier
    hopper.mbarrier.arrive(q_empty.index(slot), count=1)
    dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
    sums.index(PART).reshape([64, WIDTH]).store(dq)
    hopper.fence_async_shared()
    if QUERIES == 64:
        tile_add(sum_desc, [batch, head, block * QUERIES, PART * WIDTH], sums.index(PART))
    else:
        tile_add(sum_desc, [batch, head, block * QUERIES + PART * 64, 0], sums.index(PART))
    return dk, dv


@gluon.jit
def _multiply(
    sum_desc, dk_desc, dv_desc, qs, ks, vs, douts, lses, deltas, dscores, sums,
    kv_full, q_full, q_empty, dout_full, dout_empty, exchanged,
    q_len, kv_len, kv_heads, share, blocks, exponent, scale, PART: gl.constexpr,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup with its half of the keys."""
    HALF: gl.constexpr = KEYS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, QUERIES, 16]
    )
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    entry, tile = gl.program_id(0) // blocks, gl.program_id(0) % blocks * KEYS
    batch, kv_head = entry // kv_heads, entry % kv_heads
    begin, masked, end = _span(tile, q_len, kv_len, CAUSAL, QUERIES, KEYS)
    first = tile + PART * HALF
    key = first + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    dk = gl.zeros([HALF, HEAD_DIM], gl.float32, wide)
    dv = gl.zeros([HALF, HEAD_DIM], gl.float32, wide)
    hopper.mbarrier.wait(kv_full, 0)
    for number in range(0, share):
        head = kv_head * share + number
        before = number * (end - begin) - begin  # a block's turn less its number
        for block in range(begin, masked):
            dk, dv = _turn(
                dk, dv, sum_desc, batch, head, _turned(block, begin, end, blocks, CAUSAL), before + block, key,
                kv_len - q_len, kv_len, exponent, qs, ks, vs, douts, lses, deltas, dscores, sums,
                q_full, q_empty, dout_full, dout_empty, exchanged,
                PART, True, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES, layout, left, dq_layout,
            )  # fmt: skip
        for block in range(masked, end):
            dk, dv = _turn(
                dk, dv, sum_desc, batch, head, _turned(block, begin, end, blocks, CAUSAL), before + block, key,
                kv_len - q_len, kv_len, exponent, qs, ks, vs, douts, lses, deltas, dscores, sums,
                q_full, q_empty, dout_full, dout_empty, exchanged,
                PART, False, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES, layout, left, dq_layout,
            )  # fmt: skip
    room = vs.index(PART).reshape([HALF, HEAD_DIM])  # this warpgroup's values are done with
    room.store(dv.to(dv_desc.dtype))
    hopper.fence_async_shared()
    tile_out(dv_desc, [batch, kv_head, first, 0], vs.index(PART))
    hopper.tma.store_wait(0)
    meet()
    room.store((dk * scale).to(dk_desc.dtype))
    hopper.fence_async_shared()
    tile_out(dk_desc, [batch, kv_head, first, 0], vs.index(PART))
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "kv_heads", "share", "blocks", "padded", "plane"])
def _backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_ptr, sum_desc, dk_desc, dv_desc,
    q_len, kv_len, kv_heads, share, blocks, padded, plane, exponent, scale,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = KEYS // 2
    kind: gl.constexpr = q_desc.dtype
    ks = gl.allocate_shared_memory(kind, [2, 1, 1, HALF, HEAD_DIM], k_desc.layout)
    vs = gl.allocate_shared_memory(kind, [2, 1, 1, HALF, HEAD_DIM], v_desc.layout)
    qs = gl.allocate_shared_memory(kind, [STAGES, 1, 1, QUERIES, HEAD_DIM], q_desc.layout)
    douts = gl.allocate_shared_memory(kind, [STAGES, 1, 1, QUERIES, HEAD_DIM], dout_desc.layout)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, QUERIES], kind)
    dscores = gl.allocate_shared_memory(kind, [4, HALF, QUERIES], square)
    sums = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], sum_desc.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], line)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], line)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    dout_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    exchanged = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    hopper.mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(q_full.index(slot), count=1)
        hopper.mbarrier.init(dout_full.index(slot), count=1)
        hopper.mbarrier.init(q_empty.index(slot), count=2)  # both warpgroups are done with it
        hopper.mbarrier.init(dout_empty.index(slot), count=2)
    for slot in gl.static_range(2):
        hopper.mbarrier.init(exchanged.index(slot), count=2)
    hopper.fence_async_shared()  # the copy engine sees the barriers as they are now
    gl.warp_specialize(
        [
            (_multiply, (sum_desc, dk_desc, dv_desc, qs, ks, vs, douts, lses, deltas, dscores, sums, kv_full, q_full,
                         q_empty, dout_full, dout_empty, exchanged, q_len, kv_len, kv_heads, share, blocks, exponent,
                         scale, 0, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
            (_multiply, (sum_desc, dk_desc, dv_desc, qs, ks, vs, douts, lses, deltas, dscores, sums, kv_full, q_full,
                         q_empty, dout_full, dout_empty, exchanged, q_len, kv_len, kv_heads, share, blocks, exponent,
                         scale, 1, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
            (_copy, (q_desc, k_desc, v_desc, dout_desc, rows_ptr, qs, ks, vs, douts, lses, deltas, kv_full, q_full,
                     q_empty, dout_full, dout_empty, q_len, kv_len, kv_heads, share, blocks, padded, plane,
                     CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
        ],
        [4, 1],  # warps of the second warpgroup and of the copying one …
        [240, 24],  # … and registers of their threads
    )  # fmt: skip


def plan(
    dout: torch.Tensor, has_dlse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    mask: Mask, softcap: float, scale: float,
) -> Plan:  # fmt: skip
    """Five products in one pass; a gradient that the copy engine cannot read takes `flash`'s two passes."""
    if not has_copy_engine(facts(q), dout):
        return flash_backward.plan_backward(dout, has_dlse, q, k, v, out, mask, softcap, scale)
    sizes = sizes_of(q, k)
    entries, blocks = sizes.batch * sizes.heads, cdiv(sizes.kv_len, KEYS)
    queries = QUERIES[sizes.head_dim]
    row_blocks = cdiv(sizes.q_len, queries)
    padded, each = row_blocks * queries, sizes.q_len * sizes.head_dim
    buffers = {
        "dq": result_like(q), "dk": result_like(k), "dv": result_like(v),
        "rows": Buffer(shape=(2, entries, padded), dtype=torch.float32),
        "sum": Buffer(
            shape=tuple(q.shape), dtype=torch.float32, strides=(sizes.heads * each, each, sizes.head_dim, 1)
        ),
    }  # fmt: skip
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]

    def view(x: torch.Tensor | Buffer, strides: tuple[int, ...], rows: int, columns: int, kind: Any) -> View:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], kind)
        return replace(view_of(x.shape, strides, rows, columns), layout=layout)

    width, half = sizes.head_dim, KEYS // 2
    views = {
        0: view(q, strides_of(q), queries, width, kind),
        1: view(k, strides_of(k), half, width, kind),
        2: view(v, strides_of(v), half, width, kind),
        3: view(dout, strides_of(dout), queries, width, kind),
        5: view(buffers["sum"], buffers["sum"].strides, 64, 64, gl.float32),
        6: view(buffers["dk"], buffers["dk"].strides, half, width, kind),
        7: view(buffers["dv"], buffers["dv"].strides, half, width, kind),
    }
    begin = Step(
        _begin_kernel, (entries * row_blocks,), sizes.q_len, padded, entries * padded, sizes.heads, row_blocks,
        *strides_of(dout), *strides_of(out), on=f"dout out lse {'dlse' if has_dlse else 'lse'} rows sum",
        HAS_DLSE=has_dlse, HEAD_DIM=width, QUERIES=queries, num_warps=4,
    )  # fmt: skip
    main = Step(
        _backward_kernel, (blocks * sizes.batch * sizes.kv_heads,),
        sizes.q_len, sizes.kv_len, sizes.kv_heads, sizes.share, blocks, padded, entries * padded, scale * LOG2_E, scale,
        on="q k v dout rows sum dk dv", views=views,
        CAUSAL=mask.needed(sizes.q_len, sizes.kv_len).causal, QUERIES=queries, KEYS=KEYS, HEAD_DIM=width,
        STAGES=STAGES[width], num_warps=4,
    )  # fmt: skip
    end = Step(
        _end_kernel, (entries * row_blocks,), sizes.q_len, sizes.heads, row_blocks, *buffers["dq"].strides[:3], scale,
        on="sum dq", HEAD_DIM=width, QUERIES=queries, num_warps=4,
    )  # fmt: skip
    return Plan(
        provider="hopper",
        reason="weights again from their logarithms, five products in one pass, queries' gradients added up in memory",
        copies=copies_of(dout=dout, q=q, k=k, v=v, out=out),
        buffers=buffers,
        steps=(begin, main, end),
        outputs=("dq", "dk", "dv"),
    )
