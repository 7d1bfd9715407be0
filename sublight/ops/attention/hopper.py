"""Attention forward for Hopper, in Gluon: one warp copies, two warpgroups multiply, softmax runs under the products.

A program holds 128 queries, half of them in each warpgroup. The copying warp keeps two blocks of keys and two of values
on their way. A warpgroup starts the product of its queries with the next keys, then that of the last weights with their
values; while the tensor cores work on both, it makes the weights of the scores that are ready. Blocks come from the
last to the first, so that those with a mask come first.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, gl, gluon, hopper, tile_in, tile_out, why_no_gluon
from sublight.backend.launch import Step, View
from sublight.op import Buffer, Plan
from sublight.ops.attention.masks import Mask
from sublight.ops.attention.parts import (
    LOG2_E,
    copies_of,
    has_copy_engine,
    result_like,
    sizes_of,
    strides_of,
    sums_buffers,
    view_of,
)

QUERIES, KEYS, STAGES = 128, 128, 2


@gluon.jit
def _tile_of(blocks, together, heads, QUERIES: gl.constexpr):
    """Batch entry, head and first query of this program; with a causal mask the last queries have most to do."""
    turn = gl.program_id(0) % (together * blocks)
    entry = gl.program_id(0) // (together * blocks) * together + turn % together
    return entry // heads, entry % heads, (blocks - 1 - turn // together) * QUERIES


@gluon.jit
def _blocks_of(first, q_len, kv_len, CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """Blocks of keys that some of a program's queries see; one at least, which may be hidden whole."""
    end = kv_len
    if CAUSAL:
        end = gl.minimum(end, gl.minimum(first + QUERIES, q_len) + kv_len - q_len)
    return gl.maximum((gl.maximum(end, 0) + KEYS - 1) // KEYS, 1)


@gluon.jit
def _slot(turn, STAGES: gl.constexpr):
    """Where the block of a turn lies, and the phase of that place's barriers."""
    return turn % STAGES, turn // STAGES & 1


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty,
    q_len, kv_len, heads, share, blocks, together,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    batch, head, first = _tile_of(blocks, together, heads, QUERIES)
    count = _blocks_of(first, q_len, kv_len, CAUSAL, QUERIES, KEYS)
    hopper.mbarrier.expect(q_full, QUERIES * HEAD_DIM * 2)
    for half in gl.static_range(2):
        tile_in(q_desc, [batch, head, first + half * (QUERIES // 2), 0], q_full, qs.index(half))
    for turn in range(0, count):
        slot, phase = _slot(turn, STAGES)
        start = (count - 1 - turn) * KEYS
        hopper.mbarrier.wait(k_empty.index(slot), phase ^ 1)
        hopper.mbarrier.expect(k_full.index(slot), KEYS * HEAD_DIM * 2)
        tile_in(k_desc, [batch, head // share, start, 0], k_full.index(slot), ks.index(slot))
        hopper.mbarrier.wait(v_empty.index(slot), phase ^ 1)
        hopper.mbarrier.expect(v_full.index(slot), KEYS * HEAD_DIM * 2)
        tile_in(v_desc, [batch, head // share, start, 0], v_full.index(slot), vs.index(slot))


@gluon.jit
def _hidden(product, position, start, kv_len, CAUSAL: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr):
    """-inf where a query does not see a key."""
    key = start + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    seen = key[None, :] < kv_len
    if CAUSAL:
        seen = seen & (key[None, :] <= position[:, None])
    return gl.where(seen, product, float("-inf"))


@gluon.jit
def _sums(weights):
    """Of each thread's own columns: what the four threads of a row hold is added up once, at the end."""
    return gl.sum(weights.reshape([weights.shape[0], weights.shape[1] // 8, 8]), 1)


@gluon.jit
def _turn(
    out, weights, packed, top, total, q, ks, vs, k_full, k_empty, v_full, v_empty, turn, start, position, kv_len, scale,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    layout: gl.constexpr, out_layout: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """The scores of this turn's keys, under them the values of the turn before by their weights."""
    slot, phase = _slot(turn, STAGES)
    old_slot, old_phase = _slot(turn - 1, STAGES)
    none = gl.zeros([out.shape[0], KEYS], gl.float32, layout)
    k = ks.index(slot).reshape([KEYS, HEAD_DIM])
    v = vs.index(old_slot).reshape([KEYS, HEAD_DIM])
    hopper.mbarrier.wait(k_full.index(slot), phase)
    product = hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    hopper.mbarrier.wait(v_full.index(old_slot), old_phase)
    out = hopper.warpgroup_mma(packed, v, out, is_async=True)
    product = hopper.warpgroup_mma_wait(1, deps=(product,))
    hopper.mbarrier.arrive(k_empty.index(slot), count=1)
    if MASKED:
        product = _hidden(product, position, start, kv_len, CAUSAL, KEYS, layout)
    new_top = gl.maximum(top, gl.max(product, 1) * scale)
    base = gl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = gl.exp2(product * scale - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * gl.convert_layout(shrink[:, None], total.type.layout, assert_trivial=True) + _sums(weights)
    # the assembler would move the wait for the product above the softmax, but not over a branch, which this is
    hopper.mbarrier.wait(v_full.index(old_slot), old_phase, deps=(vs,))
    out, packed, weights = hopper.warpgroup_mma_wait(0, deps=(out, packed, weights))
    hopper.mbarrier.arrive(v_empty.index(old_slot), count=1)
    packed = gl.convert_layout(weights.to(packed.dtype), left)
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
    return out, weights, packed, new_top, total


@gluon.jit
def _multiply(
    out_desc, lse_ptr, qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty,
    q_len, kv_len, heads, blocks, together, scale, HALF: gl.constexpr,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup with its half of the queries."""
    ROWS: gl.constexpr = QUERIES // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    batch, head, tile = _tile_of(blocks, together, heads, QUERIES)
    count = _blocks_of(tile, q_len, kv_len, CAUSAL, QUERIES, KEYS)
    first = tile + HALF * ROWS
    position = first + kv_len - q_len + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    whole = kv_len // KEYS  # blocks that every query sees whole come last
    if CAUSAL:
        whole = gl.minimum(whole, gl.maximum(first + kv_len - q_len + 1, 0) // KEYS)
    q = qs.index(HALF).reshape([ROWS, HEAD_DIM])
    hopper.mbarrier.wait(q_full, 0)
    hopper.mbarrier.wait(k_full.index(0), 0)
    none = gl.zeros([ROWS, KEYS], gl.float32, layout)
    k = ks.index(0).reshape([KEYS, HEAD_DIM])
    product = hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    product = hopper.warpgroup_mma_wait(0, deps=(product,))
    hopper.mbarrier.arrive(k_empty.index(0), count=1)
    product = _hidden(product, position, (count - 1) * KEYS, kv_len, CAUSAL, KEYS, layout)
    top = gl.max(product, 1) * scale
    weights = gl.exp2(product * scale - gl.where(top == float("-inf"), 0.0, top)[:, None])
    total = _sums(weights)
    packed = gl.convert_layout(weights.to(qs.dtype), left)
    out = gl.zeros([ROWS, HEAD_DIM], gl.float32, out_layout)
    hidden = gl.maximum(count - whole, 1)  # turns with a mask, the one above among them
    for turn in range(1, hidden):
        out, weights, packed, top, total = _turn(
            out, weights, packed, top, total, q, ks, vs, k_full, k_empty, v_full, v_empty, turn,
            (count - 1 - turn) * KEYS, position, kv_len, scale,
            True, CAUSAL, KEYS, HEAD_DIM, STAGES, layout, out_layout, left,
        )  # fmt: skip
    for turn in range(hidden, count):
        out, weights, packed, top, total = _turn(
            out, weights, packed, top, total, q, ks, vs, k_full, k_empty, v_full, v_empty, turn,
            (count - 1 - turn) * KEYS, position, kv_len, scale,
            False, CAUSAL, KEYS, HEAD_DIM, STAGES, layout, out_layout, left,
        )  # fmt: skip
    slot, phase = _slot(count - 1, STAGES)
    hopper.mbarrier.wait(v_full.index(slot), phase)
    out = hopper.warpgroup_mma(packed, vs.index(slot).reshape([KEYS, HEAD_DIM]), out, is_async=True)
    out, packed = hopper.warpgroup_mma_wait(0, deps=(out, packed))
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, layout))
    some = gl.where(total == 0.0, 1.0, total)  # a query that sees nothing gets zeros
    out = out * gl.convert_layout(1.0 / some, gl.SliceLayout(1, out_layout))[:, None]
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    lse = (top + gl.log2(some)) * 0.6931471805599453
    place = (batch * heads + head).to(gl.int64) * q_len + row
    gl.store(lse_ptr + place, lse, mask=row < q_len)
    q.store(out.to(out_desc.dtype))  # this half of the queries is done with
    hopper.fence_async_shared()
    tile_out(out_desc, [batch, head, first, 0], qs.index(HALF))
    hopper.tma.store_wait(0)


@gluon.jit
def _hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, q_len, kv_len, heads, share, blocks, together, scale,
    CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    qs = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, QUERIES // 2, HEAD_DIM], q_desc.layout)
    ks = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], k_desc.layout)
    vs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, KEYS, HEAD_DIM], v_desc.layout)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    hopper.mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(slot), count=1)
        hopper.mbarrier.init(v_full.index(slot), count=1)
        hopper.mbarrier.init(k_empty.index(slot), count=2)  # both warpgroups are done with it
        hopper.mbarrier.init(v_empty.index(slot), count=2)
    hopper.fence_async_shared()  # the copy engine sees the barriers as they are now
    gl.warp_specialize(
        [
            (_multiply, (out_desc, lse_ptr, qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty, q_len, kv_len, heads,
                         blocks, together, scale, 0, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
            (_multiply, (out_desc, lse_ptr, qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty, q_len, kv_len, heads,
                         blocks, together, scale, 1, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
            (_copy, (q_desc, k_desc, v_desc, qs, ks, vs, q_full, k_full, k_empty, v_full, v_empty, q_len, kv_len, heads,
                     share, blocks, together, CAUSAL, QUERIES, KEYS, HEAD_DIM, STAGES)),
        ],
        [4, 1],  # warps of the second warpgroup and of the copying one …
        [240, 24],  # … and registers of their threads
    )  # fmt: skip


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float) -> str:
    """Why this step does not take these arguments; empty where it does."""
    if why_no_gluon or (is_interpreted() and q.device.type == "cpu"):
        return why_no_gluon or "Gluon is not interpreted"
    if facts(q).capability != 90:
        return f"written for Hopper (sm_90), this is sm_{facts(q).capability}"
    if q.element_size() != 2 or q.shape[3] not in (64, 128):
        return f"16-bit data types and heads of 64 or 128, not {q.dtype} and {q.shape[3]}"
    if mask.window or softcap or scale <= 0:
        return "no window, no soft cap, a positive scale"
    sources = [x.contiguous() if name in copies_of(q=q, k=k, v=v) else x for name, x in (("q", q), ("k", k), ("v", v))]
    return "" if has_copy_engine(facts(q), *sources) else "rows at 16-byte boundaries"


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float) -> Plan:
    sizes, out = sizes_of(q, k), result_like(q)
    blocks = cdiv(sizes.q_len, QUERIES)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]

    def view(x: torch.Tensor | Buffer, strides: tuple[int, ...], rows: int) -> View:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, sizes.head_dim], kind)
        return replace(view_of(x.shape, strides, rows, sizes.head_dim), layout=layout)

    views = {
        0: view(q, strides_of(q), QUERIES // 2),
        1: view(k, strides_of(k), KEYS),
        2: view(v, strides_of(v), KEYS),
        3: view(out, out.strides, QUERIES // 2),
    }
    step = Step(
        _hopper_kernel, (blocks * sizes.batch * sizes.heads,),
        sizes.q_len, sizes.kv_len, sizes.heads, sizes.share, blocks, sizes.together(), scale * LOG2_E,
        on="q k v out lse", views=views,
        CAUSAL=mask.needed(sizes.q_len, sizes.kv_len).causal, QUERIES=QUERIES, KEYS=KEYS, HEAD_DIM=sizes.head_dim,
        STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return Plan(
        provider="hopper",
        reason="one warp copies, two warpgroups multiply, softmax under the products",
        copies=copies_of(q=q, k=k, v=v),
        buffers={"out": out, **sums_buffers(q)},
        steps=(step,),
        outputs=("out", "lse", "sums"),
    )
