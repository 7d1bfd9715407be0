"""Decoding over a cache in pages, for Hopper, in Gluon: every warp has keys of its own, and waits for no other.

A warp takes every n-th 16 keys of its program's blocks, with a running maximum, sum and result of its own: products
are batched over warps, so nothing passes between them before the end. Keys and values come into a ring in shared memory
without passing through registers, several blocks ahead; the numbers of the first pages are asked for before the
sequence's length is known, since blocks are dealt to programs in turn and begin at the same places whatever it is.

A small batch is cut into parts. The launch that joins them is a dependent one: it is set up while the parts are still
being read, and waits inside for their end. It adds them up in their order, so results are the same bits every time.
"""

from __future__ import annotations

from typing import Any

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

ROWS = tl.constexpr(16)  # of a product: the heads that share keys, and zeros
SHARES = (1, 2, 4, 8, 16)
KEYS, STAGES, WARPS = 64, 3, 4  # of a block, blocks on their way, warps that share a block
PROGRAMS = 2  # on a multiprocessor at the same time
COLUMNS = 32  # of a result, that a program joins


@triton.constexpr_function
def _lines(warps: int, across: int) -> Any:
    """(warps, keys, numbers) as they are copied: 16 bytes a thread."""
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [warps, 1, 1], [2, 1, 0])


@triton.constexpr_function
def _products(warps: int) -> Any:
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


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
def _scores(product, scale, softcap, SOFTCAP: gl.constexpr):
    """In units of log(2), since exp2 is what the hardware has."""
    if SOFTCAP:
        return (1.0 - 2.0 / (gl.exp2(2.8853900817779268 * (product * (scale / softcap))) + 1.0)) * (
            softcap * 1.4426950408889634
        )
    else:
        return product * scale


@gluon.jit
def _paged_hopper_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, part_ptr, sums_ptr, out_ptr,
    kv_heads, splits, pages, capacity, table_row, q_batch, q_head, page_stride, row_stride, head_stride,
    window, scale, softcap, WHOLE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    PAGE: gl.constexpr, SHARE: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One part of one sequence for the heads that share its keys: a result, maximum and sum for each warp."""
    if not WHOLE:  # the joining launch may be set up from here on
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    KEYS_OF_WARP: gl.constexpr = KEYS // num_warps
    kind: gl.constexpr = q_ptr.dtype.element_ty
    mma: gl.constexpr = _products(num_warps)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    lines: gl.constexpr = _lines(num_warps, HEAD_DIM // 8)
    keys_lines: gl.constexpr = gl.SliceLayout(2, lines)
    rows: gl.constexpr = gl.SliceLayout(2, mma)
    room: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ks = gl.allocate_shared_memory(kind, [STAGES, num_warps, KEYS_OF_WARP, HEAD_DIM], room)
    vs = gl.allocate_shared_memory(kind, [STAGES, num_warps, KEYS_OF_WARP, HEAD_DIM], room)

    entry, rank = gl.program_id(0) // splits, gl.program_id(0) % splits
    batch, kv_head = entry // kv_heads, entry % kv_heads
    length = gl.load(length_ptr + batch).to(gl.int32)
    table_ptr += batch.to(gl.int64) * table_row
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    end = gl.minimum(length, capacity)
    begin = rank * KEYS
    if WINDOW:
        begin += gl.maximum(length - window, 0) // KEYS * KEYS
    step = splits * KEYS

    warp = gl.arange(0, num_warps, gl.SliceLayout(1, keys_lines))
    place = warp[:, None] * KEYS_OF_WARP + gl.arange(0, KEYS_OF_WARP, gl.SliceLayout(0, keys_lines))[None, :]
    col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, lines)))[None, None, :]
    bad = gl.zeros([num_warps, KEYS_OF_WARP], gl.int32, keys_lines)
    first = ()
    for stage in gl.static_range(STAGES + 1):
        first = first + (_pages_at(table_ptr, begin + stage * step + place, capacity, PAGE),)  # noqa: RUF005
    for stage in gl.static_range(STAGES):
        key = begin + stage * step + place
        bad = bad | _fetch(
            ks, vs, stage, k_ptr, v_ptr, first[stage], key, end, pages, page_stride, row_stride, col, PAGE
        )
    page = first[STAGES]

    q_warp = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None]
    q_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
    q_col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    q_ptr += batch.to(gl.int64) * q_batch
    inside = (q_row < SHARE) & (q_col >= 0) & (q_warp >= 0)
    q = gl.load(q_ptr + (kv_head * SHARE + q_row) * q_head + q_col + q_warp * 0, mask=inside, other=0.0)

    out = gl.zeros([num_warps, ROWS, HEAD_DIM], gl.float32, mma)
    none = gl.zeros([num_warps, ROWS, KEYS_OF_WARP], gl.float32, mma)
    top = gl.full([num_warps, ROWS], float("-inf"), gl.float32, rows)
    total = gl.zeros([num_warps, ROWS, 8], gl.float32, mma)  # of each thread's own columns
    key_at = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None] * KEYS_OF_WARP
    key_at = key_at + gl.arange(0, KEYS_OF_WARP, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    slot = 0
    for start in range(begin, end, step):
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
        sums = gl.sum(weights.reshape([num_warps, ROWS, KEYS_OF_WARP // 8, 8]), 2)
        total = total * shrink[:, :, None] + gl.convert_layout(sums, mma)
        packed = gl.convert_layout(weights.to(kind), left)
        out = small_product(packed, vs.index(slot).load(right), out * shrink[:, :, None])
        top = new_top
        key = start + STAGES * step + place
        after = _pages_at(table_ptr, key + step, capacity, PAGE)
        bad = bad | _fetch(ks, vs, slot, k_ptr, v_ptr, page, key, end, pages, page_stride, row_stride, col, PAGE)
        page = after
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)

    wrong = gl.convert_layout(gl.max(bad, 1), gl.SliceLayout(1, rows))[:, None]
    is_wrong = (wrong > 0) | (length > capacity) | (length < 0)  # never in silence
    total = gl.where(is_wrong, float("nan"), gl.sum(total, 2))
    if WHOLE:
        flat: gl.constexpr = gl.SliceLayout(0, mma)
        highest = gl.max(top, 0)
        share = gl.exp2(top - gl.where(highest == float("-inf"), 0.0, highest)[None, :])
        some = gl.sum(total * share, 0)
        some = gl.convert_layout(gl.where(some == 0.0, 1.0, some), gl.SliceLayout(1, flat))
        head = gl.arange(0, ROWS, gl.SliceLayout(1, flat))[:, None]
        out_col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, flat))[None, :]
        result = gl.sum(out * share[:, :, None], 0) / some[:, None]
        at = (entry.to(gl.int64) * SHARE + head) * HEAD_DIM + out_col
        gl.store(out_ptr + at, result.to(kind), mask=(head < SHARE) & (out_col >= 0))
    else:
        part = rank * num_warps + gl.arange(0, num_warps, gl.SliceLayout(1, rows))[:, None]
        head = gl.arange(0, ROWS, gl.SliceLayout(0, rows))[None, :]
        at = (entry.to(gl.int64) * (splits * num_warps) + part) * SHARE + head
        inside = (head < SHARE) & (part >= 0)
        gl.store(sums_ptr + at * 2, top, mask=inside)
        gl.store(sums_ptr + at * 2 + 1, total, mask=inside)
        out_col = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
        gl.store(part_ptr + at[:, :, None] * HEAD_DIM + out_col, out, mask=inside[:, :, None] & (out_col >= 0))


@triton.jit
def _join_kernel(
    part_ptr, sums_ptr, out_ptr, parts,
    PARTS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Some columns of one result: the parts, each by its share of the sum. Waits for the launch that makes them."""
    PIECES: tl.constexpr = SHARE * HEAD_DIM // COLS
    entry = (tl.program_id(0) // PIECES).to(tl.int64)
    col = tl.program_id(0) % PIECES * COLS + tl.arange(0, COLS)
    part = tl.arange(0, PARTS)[:, None]
    at = (entry * parts + part) * SHARE + (col // HEAD_DIM)[None, :]
    used = (part < parts) & (col >= 0)[None, :]
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    top = tl.load(sums_ptr + at * 2, mask=used, other=-float("inf"))
    total = tl.load(sums_ptr + at * 2 + 1, mask=used, other=0.0)
    rows = tl.load(part_ptr + at * HEAD_DIM + (col % HEAD_DIM)[None, :], mask=used, other=0.0)
    highest = tl.max(top, 0)
    share = tl.exp2(top - tl.where(highest == -float("inf"), 0.0, highest)[None, :])
    some = tl.sum(total * share, 0)
    out = tl.sum(rows * share, 0) / tl.where(some == 0.0, 1.0, some)
    tl.store(out_ptr + entry * SHARE * HEAD_DIM + col, out.to(out_ptr.dtype.element_ty))


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


def parts_for(pairs: int, capacity: int, multiprocessors: int) -> int:
    """Programs that share a sequence's keys: the GPU is filled once, and none has a block more than it must.

    >>> [parts_for(batch * 8, keys, 132) for batch, keys in ((1, 4096), (1, 32768), (16, 8192), (128, 4096), (1, 64))]
    [32, 33, 2, 1, 1]
    """
    blocks = cdiv(capacity, KEYS)
    most = max(1, min(blocks, PROGRAMS * multiprocessors // pairs))
    return cdiv(blocks, cdiv(blocks, most))


def plan(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, window: int,
    softcap: float, scale: float,
) -> Plan:  # fmt: skip
    batch, heads, head_dim = q.shape
    pages, page, kv_heads, _ = k_cache.shape
    pairs, share, capacity = batch * kv_heads, heads // kv_heads, block_table.shape[1] * page
    splits = parts_for(pairs, capacity, facts(q).multiprocessors)
    copies = copied({}, block_table=block_table, lengths=lengths)
    table_row = block_table.stride(0) if "block_table" not in copies else block_table.shape[1]
    buffers = {"out": Buffer(shape=tuple(q.shape), dtype=q.dtype)}
    given = "q k_cache v_cache block_table lengths"
    is_whole, parts = splits == 1, splits * WARPS
    if not is_whole:
        buffers["part"] = Buffer(shape=(pairs, parts, share, head_dim), dtype=torch.float32)
        buffers["sums"] = Buffer(shape=(pairs, parts, share, 2), dtype=torch.float32)
    steps = [
        Step(
            _paged_hopper_kernel, (pairs * splits,), kv_heads, splits, pages, capacity, table_row, *q.stride()[:2],
            *k_cache.stride()[:3], window, exponent_scale(q, scale, softcap), float(softcap),
            on=f"{given} {'out out' if is_whole else 'part sums'} out",
            WHOLE=is_whole, WINDOW=window > 0, SOFTCAP=softcap > 0, PAGE=page, SHARE=share, KEYS=KEYS,
            HEAD_DIM=head_dim, STAGES=STAGES, num_warps=WARPS,
        )
    ]  # fmt: skip
    if not is_whole:
        columns = min(COLUMNS, share * head_dim)
        steps.append(
            Step(
                _join_kernel, (pairs * share * head_dim // columns,), parts, on="part sums out",
                PARTS=next_power_of_2(parts), SHARE=share, HEAD_DIM=head_dim, COLS=columns,
                num_warps=4, launch_pdl=True,
            )
        )  # fmt: skip
    how = "one program a sequence" if is_whole else f"{splits} programs a sequence, joined by a dependent launch"
    return Plan(
        provider="hopper",
        reason=f"{how}; every warp has keys of its own",
        copies=copies,
        buffers=buffers,
        steps=tuple(steps),
        outputs=("out",),
    )
