"""Decoding over a cache in pages, for Hopper, in Gluon: one launch, in which every warp has keys of its own.

A warp takes its share of each block of keys, with a running maximum, sum and result of its own: products are batched
over warps, so nothing passes between them before the end. Keys and values come into a ring in shared memory without
passing through registers, several blocks ahead; the numbers of the first pages are asked for before the sequence's
length is known, since blocks are dealt out in turn and begin at the same places whatever it is.

A small batch is cut: the programs of a cluster share a sequence. Each writes its warps' parts, which stay in the L2,
they wait for each other, and each adds up some columns of the result, parts in their order: no second launch, no
counter to clear, and the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import (
    async_copy,
    cdiv,
    copy_in,
    gl,
    gluon,
    next_power_of_2,
    small_product,
    tl,
    triton,
    why_no_gluon,
)
from sublight.backend.launch import Step
from sublight.op import Buffer, Plan
from sublight.ops.attention.pages import copied
from sublight.ops.attention.parts import exponent_scale
from sublight.ops.kernels.dependent import gluon_next_may_begin, gluon_wait_for_the_last

ROWS = tl.constexpr(16)  # of a product: the heads that share keys, and zeros
SHARES = (1, 2, 4, 8, 16)
PROGRAMS = 2  # on a multiprocessor, that a cut batch is to fill
SHORT = 1024  # keys below which nothing was timed
LONG, VERY_LONG = 2048, 16384  # keys from which on wide programs were faster: where nothing is cut, where much is


class Cut(NamedTuple):
    """How a sequence is shared out: programs in its cluster; keys in a block, blocks on their way, warps of each."""

    cluster: int
    keys: int
    stages: int
    warps: int


@triton.constexpr_function
def _divided(cluster: int, axis: int, rank: int) -> Any:
    """How a cluster's programs divide a tensor: along one axis."""
    return [[(1 << i) if axis == at else 0 for at in range(rank)] for i in range(cluster.bit_length() - 1)]


@triton.constexpr_function
def _lines(cluster: int, warps: int, across: int) -> Any:
    """(warps of the cluster, keys, numbers) as they are copied: 16 bytes a thread."""
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [warps, 1, 1], [2, 1, 0], _divided(cluster, 0, 3))


@triton.constexpr_function
def _room(cluster: int) -> Any:
    return gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0], _divided(cluster, 0, 3))


@triton.constexpr_function
def _products(cluster: int, warps: int) -> Any:
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8], _divided(cluster, 0, 3))


@triton.constexpr_function
def _columns(cluster: int, warps: int, count: int) -> Any:
    """(parts, columns), each program its columns; parts never lie in several warps: sums need no shared memory."""
    across = max(1, min(32, count // cluster // warps))
    return gl.BlockedLayout([1, 1], [32 // across, across], [1, warps], [1, 0], _divided(cluster, 1, 2))


@gluon.jit
def _rank(CLUSTER: gl.constexpr):
    """Of a program in its cluster."""
    if CLUSTER == 1:
        return gl.to_tensor(0)
    else:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def _pages_at(table_ptr, key, capacity, PAGE: gl.constexpr):
    return gl.load(table_ptr + key // PAGE, mask=key < capacity, other=0)


@gluon.jit
def _fetch(ks, vs, slot, k_ptr, v_ptr, page, key, end, pages, page_stride, row_stride, col, PAGE: gl.constexpr):
    """A block of keys and values on its way; zeros past the end, and for pages that are not there."""
    there = (key < end) & (page >= 0) & (page < pages)
    offset = page.to(gl.int64) * page_stride + key % PAGE * row_stride
    mask = there[:, :, None] & (col >= 0)
    copy_in(ks.index(slot), k_ptr + offset[:, :, None] + col, mask=mask)
    copy_in(vs.index(slot), v_ptr + offset[:, :, None] + col, mask=mask)
    async_copy.commit_group()
    return ((key < end) & ((page < 0) | (page >= pages))).to(gl.int32)


@gluon.jit
def _fetch_first(
    bad, ks, vs, where, begin, place, newest, col,
    WHICH: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The blocks that the ring has room for: all, those before the newest key, or the others."""
    k_ptr, v_ptr, first, end, pages, page_stride, row_stride = where
    for stage in gl.static_range(STAGES):
        start = begin + stage * STEP
        key = start + place
        if WHICH == "all" or (start + KEYS <= newest) == (WHICH == "old"):
            bad = bad | _fetch(
                ks, vs, stage, k_ptr, v_ptr, first[stage], key, end, pages, page_stride, row_stride, col, PAGE
            )
    return bad


@gluon.jit
def _scores(product, scale, softcap, SOFTCAP: gl.constexpr):
    """In units of log(2), since exp2 is what the hardware has."""
    if SOFTCAP:
        return (1.0 - 2.0 / (gl.exp2(2.8853900817779268 * (product * (scale / softcap))) + 1.0)) * (
            softcap * 1.4426950408889634
        )
    else:
        return product * scale


@gluon.jit
def _store_whole(
    out_ptr, out, top, total, entry, kind: gl.constexpr, SHARE: gl.constexpr, HEAD_DIM: gl.constexpr, mma: gl.constexpr
):
    """The result of a program that has a sequence to itself: its warps' parts, through shared memory."""
    flat: gl.constexpr = gl.SliceLayout(0, mma)
    highest = gl.max(top, 0)
    share = gl.exp2(top - gl.where(highest == float("-inf"), 0.0, highest)[None, :])
    some = gl.sum(total * share, 0)
    some = gl.convert_layout(gl.where(some == 0.0, 1.0, some), gl.SliceLayout(1, flat))
    head = gl.arange(0, ROWS, gl.SliceLayout(1, flat))[:, None]
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, flat))[None, :]
    result = gl.sum(out * share[:, :, None], 0) / some[:, None]
    at = (entry.to(gl.int64) * SHARE + head) * HEAD_DIM + col
    gl.store(out_ptr + at, result.to(kind), mask=(head < SHARE) & (col >= 0))


@gluon.jit
def _join(
    part_ptr, sums_ptr, out_ptr, entry, kind: gl.constexpr, PARTS: gl.constexpr, SHARE: gl.constexpr,
    HEAD_DIM: gl.constexpr, CLUSTER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """This program's columns of the result: the parts, each by its share of the sum."""
    layout: gl.constexpr = _columns(CLUSTER, num_warps, SHARE * HEAD_DIM)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, layout))[:, None]
    col = gl.arange(0, SHARE * HEAD_DIM, gl.SliceLayout(0, layout))
    at = (entry.to(gl.int64) * PARTS + part) * SHARE + (col // HEAD_DIM)[None, :]
    top = gl.load(sums_ptr + at * 2, cache_modifier=".cg")  # from the L2: this program's L1 may hold older bytes
    total = gl.load(sums_ptr + at * 2 + 1, cache_modifier=".cg")
    out = gl.load(part_ptr + at * HEAD_DIM + (col % HEAD_DIM)[None, :], cache_modifier=".cg")
    highest = gl.max(top, 0)
    share = gl.exp2(top - gl.where(highest == float("-inf"), 0.0, highest)[None, :])
    some = gl.sum(total * share, 0)
    result = gl.sum(out * share, 0) / gl.where(some == 0.0, 1.0, some)
    gl.store(out_ptr + entry.to(gl.int64) * SHARE * HEAD_DIM + col, result.to(kind))


@gluon.jit
def _paged_hopper_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, part_ptr, sums_ptr, out_ptr,
    kv_heads, pages, capacity, table_row, q_batch, q_head, page_stride, row_stride, head_stride,
    window, scale, softcap, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, PAGE: gl.constexpr, SHARE: gl.constexpr,
    KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr,
    DEPENDENT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A cluster takes one sequence for the heads that share its keys. Tensors' first axis is the cluster's warps."""
    if DEPENDENT:
        gluon_next_may_begin()
    WARPS: gl.constexpr = CLUSTER * num_warps
    KEYS_OF_WARP: gl.constexpr = KEYS // num_warps
    kind: gl.constexpr = q_ptr.dtype.element_ty
    mma: gl.constexpr = _products(CLUSTER, num_warps)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    lines: gl.constexpr = _lines(CLUSTER, num_warps, HEAD_DIM // 8)
    keys_lines: gl.constexpr = gl.SliceLayout(2, lines)
    rows: gl.constexpr = gl.SliceLayout(2, mma)
    ks = gl.allocate_shared_memory(kind, [STAGES, WARPS, KEYS_OF_WARP, HEAD_DIM], _room(CLUSTER))
    vs = gl.allocate_shared_memory(kind, [STAGES, WARPS, KEYS_OF_WARP, HEAD_DIM], _room(CLUSTER))

    entry, rank = gl.program_id(0), _rank(CLUSTER)
    batch, kv_head = entry // kv_heads, entry % kv_heads
    length = gl.load(length_ptr + batch).to(gl.int32)
    table_ptr += batch.to(gl.int64) * table_row
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    end = gl.minimum(length, capacity)
    begin = rank * KEYS
    if WINDOW:
        begin += gl.maximum(length - window, 0) // KEYS * KEYS
    STEP: gl.constexpr = CLUSTER * KEYS

    warp = gl.arange(0, WARPS, gl.SliceLayout(1, keys_lines)) % num_warps
    place = warp[:, None] * KEYS_OF_WARP + gl.arange(0, KEYS_OF_WARP, gl.SliceLayout(0, keys_lines))[None, :]
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, lines)))[None, None, :]
    bad = gl.zeros([WARPS, KEYS_OF_WARP], gl.int32, keys_lines)
    first = ()  # type: ignore[var-annotated]
    for stage in gl.static_range(STAGES + 1):
        first = first + (_pages_at(table_ptr, begin + stage * STEP + place, capacity, PAGE),)  # type: ignore  # noqa: RUF005
    newest = length - 1
    where = (k_ptr, v_ptr, first, end, pages, page_stride, row_stride)
    if DEPENDENT:  # the launches before write q and the newest key: what is older comes in meanwhile
        bad = _fetch_first(bad, ks, vs, where, begin, place, newest, col, "old", STAGES, STEP, KEYS, PAGE)
        gluon_wait_for_the_last()
        bad = _fetch_first(bad, ks, vs, where, begin, place, newest, col, "new", STAGES, STEP, KEYS, PAGE)
    else:
        bad = _fetch_first(bad, ks, vs, where, begin, place, newest, col, "all", STAGES, STEP, KEYS, PAGE)
    page = first[STAGES]  # type: ignore

    q_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None]
    q_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
    q_col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    q_ptr += batch.to(gl.int64) * q_batch
    inside = (q_row < SHARE) & (q_col >= 0) & (q_warp >= 0)
    q = gl.load(q_ptr + (kv_head * SHARE + q_row) * q_head + q_col + q_warp * 0, mask=inside, other=0.0)

    out = gl.zeros([WARPS, ROWS, HEAD_DIM], gl.float32, mma)
    none = gl.zeros([WARPS, ROWS, KEYS_OF_WARP], gl.float32, mma)
    top = gl.full([WARPS, ROWS], float("-inf"), gl.float32, rows)
    total = gl.zeros([WARPS, ROWS, 8], gl.float32, mma)  # of each thread's own columns
    key_at = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None] % num_warps * KEYS_OF_WARP
    key_at = key_at + gl.arange(0, KEYS_OF_WARP, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    slot = 0
    for start in range(begin, end, STEP):
        async_copy.wait_group(STAGES - 1)
        product = small_product(q, ks.index(slot).permute((0, 2, 1)).load(right), none)
        seen = start + key_at < end
        if WINDOW:
            seen = seen & (start + key_at >= length - window)
        scores = gl.where(seen, _scores(product, scale, softcap, SOFTCAP), float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 2))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        weights = gl.exp2(scores - base[:, :, None])
        shrink = gl.exp2(top - base)
        sums = gl.sum(weights.reshape([WARPS, ROWS, KEYS_OF_WARP // 8, 8]), 2)
        total = total * shrink[:, :, None] + gl.convert_layout(sums, mma)
        packed = gl.convert_layout(weights.to(kind), left)
        out = small_product(packed, vs.index(slot).load(right), out * shrink[:, :, None])
        top = new_top
        key = start + STAGES * STEP + place
        after = _pages_at(table_ptr, key + STEP, capacity, PAGE)
        bad = bad | _fetch(ks, vs, slot, k_ptr, v_ptr, page, key, end, pages, page_stride, row_stride, col, PAGE)
        page = after
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)

    wrong = gl.convert_layout(gl.max(bad, 1), gl.SliceLayout(1, rows))[:, None]
    is_wrong = (wrong > 0) | (length > capacity) | (length < 0)  # never in silence
    total = gl.where(is_wrong, float("nan"), gl.sum(total, 2))
    if CLUSTER == 1:
        _store_whole(out_ptr, out, top, total, entry, kind, SHARE, HEAD_DIM, mma)
    else:
        part = gl.arange(0, WARPS, gl.SliceLayout(1, rows))[:, None]
        head = gl.arange(0, ROWS, gl.SliceLayout(0, rows))[None, :]
        at = (entry.to(gl.int64) * WARPS + part) * SHARE + head
        inside = (head < SHARE) & (part >= 0)
        gl.store(sums_ptr + at * 2, top, mask=inside)
        gl.store(sums_ptr + at * 2 + 1, total, mask=inside)
        out_col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
        gl.store(part_ptr + at[:, :, None] * HEAD_DIM + out_col, out, mask=inside[:, :, None] & (out_col >= 0))
        gl.inline_asm_elementwise(  # what each program of the cluster has written, all others see
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        _join(part_ptr, sums_ptr, out_ptr, entry, kind, WARPS, SHARE, HEAD_DIM, CLUSTER, num_warps)


def why_not(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scales: torch.Tensor | None, keys_per_program: int
) -> str:
    """Why this step does not take these arguments; empty where it does."""
    if why_no_gluon or (is_interpreted() and q.device.type == "cpu"):
        return why_no_gluon or "Gluon is not interpreted"
    if facts(q).capability != 90:
        return f"written for Hopper (sm_90), this is sm_{facts(q).capability}"
    share = q.shape[1] // k_cache.shape[2]
    if q.element_size() != 2 or k_scales is not None or q.shape[2] not in (64, 128) or share not in SHARES:
        return "16-bit caches, heads of 64 or 128, 1, 2, 4, 8 or 16 of them over the same keys"
    if keys_per_program:
        return "parts of a given length"
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or q.stride(2) != 1:
        return "two caches that lie in memory alike"
    whole = all(stride % 8 == 0 for stride in (*k_cache.stride()[:3], *q.stride()[:2]))
    is_there = whole and all(x.data_ptr() % 16 == 0 for x in (q, k_cache, v_cache))
    return "" if is_there else "rows at 16-byte boundaries"


def cut_for(pairs: int, capacity: int, multiprocessors: int) -> Cut:
    """What was fastest on an H200 for so many pairs of a sequence and a head of keys, and no more programs than blocks.

    >>> [cut_for(batch * 8, keys, 132) for batch, keys in ((1, 4096), (4, 4096), (8, 1024))]
    [Cut(cluster=16, keys=32, stages=4, warps=2), Cut(cluster=8, keys=32, stages=3, warps=2), \
Cut(cluster=2, keys=64, stages=3, warps=4)]
    >>> [cut_for(batch * 8, keys, 132) for batch, keys in ((16, 8192), (128, 4096), (64, 512), (1, 40))]
    [Cut(cluster=2, keys=64, stages=3, warps=4), Cut(cluster=1, keys=64, stages=3, warps=4), \
Cut(cluster=1, keys=32, stages=3, warps=2), Cut(cluster=2, keys=32, stages=4, warps=2)]
    """
    room = PROGRAMS * multiprocessors // pairs
    if room < 2:
        return Cut(1, 64, 3, 4) if capacity >= LONG else Cut(1, 32, 3, 2)
    if room < 8:
        return Cut(_fitting(2 if room < 5 else 4, capacity, 64), 64, 3, 4)
    if room < 16:
        return Cut(_fitting(8, capacity, 32), 32, 3, 2)
    return Cut(16, 64, 3, 4) if capacity >= VERY_LONG else Cut(_fitting(16, capacity, 32), 32, 4, 2)


def is_faster(capacity: int) -> bool:
    """Whether this step was faster than `flash` on an H200 at such sizes: 64 texts of 1100 keys, uncut, take 76.5 µs
    instead of 78.4; shorter ones were not timed."""
    return capacity >= SHORT


def is_chosen(
    provider: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, capacity: int,
    k_scales: torch.Tensor | None, keys_per_program: int,
) -> bool:  # fmt: skip
    """Whether a call goes to this step: where it is named, or where none is and it was faster."""
    if provider == "flash" or why_not(q, k_cache, v_cache, k_scales, keys_per_program):
        return False
    return provider == "hopper" or is_faster(capacity)


def _fitting(cluster: int, capacity: int, keys: int) -> int:
    """So many programs as there are blocks for, by powers of two."""
    return min(cluster, next_power_of_2(cdiv(capacity, keys)))


def plan(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, window: int,
    softcap: float, scale: float, dependent: bool,
) -> Plan:  # fmt: skip
    batch, heads, head_dim = q.shape
    pages, page, kv_heads, _ = k_cache.shape
    pairs, share, capacity = batch * kv_heads, heads // kv_heads, block_table.shape[1] * page
    cut = cut_for(pairs, capacity, facts(q).multiprocessors)
    copies = copied({}, block_table=block_table, lengths=lengths)
    dependent = dependent and not copies  # which a launch before writes, and this one reads at once
    table_row = block_table.stride(0) if "block_table" not in copies else block_table.shape[1]
    buffers = {"out": Buffer(shape=tuple(q.shape), dtype=q.dtype)}
    is_cut = cut.cluster > 1
    if is_cut:
        parts = (pairs, cut.cluster * cut.warps, share)
        buffers["part"] = Buffer(shape=(*parts, head_dim), dtype=torch.float32)
        buffers["sums"] = Buffer(shape=(*parts, 2), dtype=torch.float32)
    step = Step(
        _paged_hopper_kernel, (pairs,), kv_heads, pages, capacity, table_row, *q.stride()[:2],
        *k_cache.stride()[:3], window, exponent_scale(q, scale, softcap), float(softcap),
        on=f"q k_cache v_cache block_table lengths {'part sums' if is_cut else 'out out'} out", tile=cut,
        WINDOW=window > 0, SOFTCAP=softcap > 0, PAGE=page, SHARE=share, KEYS=cut.keys, HEAD_DIM=head_dim,
        STAGES=cut.stages, CLUSTER=cut.cluster, DEPENDENT=dependent, num_warps=cut.warps, num_ctas=cut.cluster,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    how = f"a cluster of {cut.cluster} programs shares a sequence" if is_cut else "one program a sequence"
    return Plan(
        provider="hopper",
        reason=f"one launch, {how}, every warp with keys of its own" + ", launched early" * dependent,
        copies=copies,
        buffers=buffers,
        steps=(step,),
        outputs=("out",),
    )
