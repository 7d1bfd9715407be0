"""Attention as it is written down: every score in memory, then every weight, then the result.

Three launches, of which two are products of matrices. The scores of a head take q_len x kv_len numbers, written once
and read twice: that traffic is what `online` saves.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.backend.device import is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.op import Buffer, Plan
from sublight.ops.attention.flash_backward import gradient_buffers
from sublight.ops.attention.masks import Mask, is_seen
from sublight.ops.attention.parts import (
    Sizes,
    copies_of,
    exp,
    flags,
    head_at,
    log,
    result_like,
    sizes_of,
    strides_of,
    sums_buffers,
    sums_name,
    tanh,
)
from sublight.ops.matmul.order import add_block

TILE = 32  # rows, columns, and depth of a step
CHUNK = 128 if is_interpreted() else 512  # keys of a row at once: 8 bytes a thread


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, c_ptr, total_ptr, rows, cols, depth, heads, row_blocks, col_blocks,
    a_batch, a_head, a_row, a_in, b_batch, b_head, b_in, b_col, c_batch, c_head, c_row, scale,
    TURNS: tl.constexpr, SHARE: tl.constexpr, DIVIDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """c = scale * a @ b for every head. SHARE heads of a have the same b; TURNS heads of both are added up in one c;
    DIVIDED: each row of c by its total."""
    tile, entry = tl.program_id(0) % (row_blocks * col_blocks), tl.program_id(0) // (row_blocks * col_blocks)
    batch, head = entry // heads, entry % heads
    row = tile // col_blocks * TILE + tl.arange(0, TILE)[:, None]
    col = tile % col_blocks * TILE + tl.arange(0, TILE)[None, :]
    c = tl.zeros([TILE, TILE], tl.float32)
    for turn in range(TURNS):
        a_at = head_at(a_ptr, batch, head * TURNS + turn, a_batch, a_head)
        b_at = head_at(b_ptr, batch, (head * TURNS + turn) // SHARE, b_batch, b_head)
        for start in tl.range(0, depth, TILE):
            across, down = start + tl.arange(0, TILE)[None, :], start + tl.arange(0, TILE)[:, None]
            a = tl.load(
                a_at + row.to(tl.int64) * a_row + across * a_in, mask=(row < rows) & (across < depth), other=0.0
            )
            b = tl.load(b_at + down.to(tl.int64) * b_in + col * b_col, mask=(down < depth) & (col < cols), other=0.0)
            c = add_block(c, a, b, "ieee")
    c_at = head_at(c_ptr, batch, head, c_batch, c_head)
    inside = (row < rows) & (col < cols)
    if DIVIDED:
        c = c / tl.load(total_ptr + entry.to(tl.int64) * rows + row, mask=row < rows, other=1.0)
    tl.store(c_at + row.to(tl.int64) * c_row + col, (c * scale).to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _score(score_ptr, row, key, q_len, kv_len, window, softcap, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
           SOFTCAP: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    score = tl.load(score_ptr + key, mask=key < kv_len, other=0.0)
    if SOFTCAP:
        score = tanh(score / softcap, EXACT) * softcap
    seen = is_seen(row + (kv_len - q_len), key, window, CAUSAL, WINDOW) & (key < kv_len)
    return tl.where(seen, score, -float("inf"))


@triton.jit
def _softmax_rows_kernel(
    score_ptr, weight_ptr, lse_ptr, sums_ptr, total_ptr, plane, q_len, kv_len, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scores of one query to weights and their sum: once over them for the maximum, once more for its distances.

    The sum divides the result, not the weights: the largest weight is then 1, which no data type rounds.
    """
    line = tl.program_id(0).to(tl.int64)
    row = (line % q_len).to(tl.int32)
    score_ptr, weight_ptr = score_ptr + line * kv_len, weight_ptr + line * kv_len
    exact: tl.constexpr = weight_ptr.dtype.element_ty == tl.float32
    tops, totals = tl.full([CHUNK], -float("inf"), tl.float32), tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, kv_len, CHUNK):
        key = start + tl.arange(0, CHUNK)
        score = _score(score_ptr, row, key, q_len, kv_len, window, softcap, CAUSAL, WINDOW, SOFTCAP, exact)
        new_tops = tl.maximum(tops, score)
        base = tl.where(new_tops == -float("inf"), 0.0, new_tops)
        totals = totals * exp(tops - base, exact) + exp(score - base, exact)
        tops = new_tops
    top = tl.max(tops, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(totals * exp(tops - base, exact), 0)
    some = tl.where(total == 0.0, 1.0, total)
    tl.store(lse_ptr + line, top + log(some, exact))
    tl.store(total_ptr + line, some)
    if exact:
        tl.store(sums_ptr + line, top)
        tl.store(sums_ptr + plane + line, some)
    for start in tl.range(0, kv_len, CHUNK):
        key = start + tl.arange(0, CHUNK)
        score = _score(score_ptr, row, key, q_len, kv_len, window, softcap, CAUSAL, WINDOW, SOFTCAP, exact)
        weight = exp(score - base, exact)
        tl.store(weight_ptr + key, weight.to(weight_ptr.dtype.element_ty), mask=key < kv_len)


@triton.jit
def _softmax_rows_backward_kernel(
    score_ptr, dweight_ptr, sums_ptr, dlse_ptr, weight_ptr, dscore_ptr, plane, q_len, kv_len, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_DLSE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Weights again and their gradients to those of scores: once over them for what every key's loses, once more."""
    line = tl.program_id(0).to(tl.int64)
    row = (line % q_len).to(tl.int32)
    score_ptr, dweight_ptr = score_ptr + line * kv_len, dweight_ptr + line * kv_len
    weight_ptr, dscore_ptr = weight_ptr + line * kv_len, dscore_ptr + line * kv_len
    exact: tl.constexpr = weight_ptr.dtype.element_ty == tl.float32
    top = tl.load(sums_ptr + line)
    total = tl.load(sums_ptr + plane + line) if exact else 1.0
    deltas = tl.zeros([CHUNK], tl.float32)
    for start in tl.range(0, kv_len, CHUNK):
        key = start + tl.arange(0, CHUNK)
        score = _score(score_ptr, row, key, q_len, kv_len, window, softcap, CAUSAL, WINDOW, SOFTCAP, exact)
        weight = tl.where(score == -float("inf"), 0.0, exp(score - top, exact) / total)
        deltas += weight * tl.load(dweight_ptr + key, mask=key < kv_len, other=0.0)
    delta = tl.sum(deltas, 0)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + line)
    for start in tl.range(0, kv_len, CHUNK):
        key = start + tl.arange(0, CHUNK)
        score = _score(score_ptr, row, key, q_len, kv_len, window, softcap, CAUSAL, WINDOW, SOFTCAP, exact)
        weight = tl.where(score == -float("inf"), 0.0, exp(score - top, exact) / total)
        dscore = weight * (tl.load(dweight_ptr + key, mask=key < kv_len, other=0.0) - delta)
        if SOFTCAP:
            share = tl.where(score == -float("inf"), 0.0, score / softcap)
            dscore = dscore * (1.0 - share * share)
        tl.store(weight_ptr + key, weight.to(weight_ptr.dtype.element_ty), mask=key < kv_len)
        tl.store(dscore_ptr + key, dscore.to(dscore_ptr.dtype.element_ty), mask=key < kv_len)


def _product(
    on: str, sizes: Sizes, rows: int, cols: int, depth: int,
    a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...], scale: float = 1.0, adds: bool = False,
    total: str = "",
) -> Step:  # fmt: skip
    """Strides are those of batch, head, row and column; with `adds`, heads that share keys are added up; `total` names
    what rows of the result are divided by."""
    heads, turns = (sizes.kv_heads, sizes.share) if adds else (sizes.heads, 1)
    row_blocks, col_blocks = cdiv(rows, TILE), cdiv(cols, TILE)
    return Step(
        _product_kernel, (row_blocks * col_blocks * sizes.batch * heads,),
        rows, cols, depth, heads, row_blocks, col_blocks, *a, *b, *c[:3], scale,
        on=f"{on} {total or on.split()[0]}", TURNS=turns, SHARE=1 if adds else sizes.share, DIVIDED=bool(total),
        TILE=TILE, num_warps=4, num_stages=1,
    )  # fmt: skip


def _square(sizes: Sizes) -> tuple[int, int, int, int]:
    """Strides of a matrix of scores a head."""
    plane = sizes.q_len * sizes.kv_len
    return sizes.heads * plane, plane, sizes.kv_len, 1


def _turned(strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    batch, head, row, col = strides
    return batch, head, col, row


def _square_buffers(sizes: Sizes, **dtypes: torch.dtype) -> dict[str, Buffer]:
    shape = (sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
    return {name: Buffer(shape=shape, dtype=dtype) for name, dtype in dtypes.items()}


def _rows_step(kernel: Any, on: str, sizes: Sizes, mask: Mask, softcap: float, **more: bool) -> Step:
    return Step(
        kernel, (sizes.rows,), sizes.rows, sizes.q_len, sizes.kv_len, mask.window, float(softcap),
        on=on, **flags(mask, softcap), **more, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float) -> Plan:
    sizes, out = sizes_of(q, k), result_like(q)
    mask = mask.needed(sizes.q_len, sizes.kv_len)
    q_at, k_at, v_at, square = (*strides_of(q), 1), (*strides_of(k), 1), (*strides_of(v), 1), _square(sizes)
    q_len, kv_len, head_dim = sizes.q_len, sizes.kv_len, sizes.head_dim
    return Plan(
        provider="naive",
        reason="scores and weights through memory",
        copies=copies_of(q=q, k=k, v=v),
        buffers={
            "out": out,
            **sums_buffers(q),
            "total": Buffer(shape=tuple(q.shape[:3]), dtype=torch.float32),
            **_square_buffers(sizes, score=torch.float32, weight=q.dtype),
        },
        steps=(
            _product("q k score", sizes, q_len, kv_len, head_dim, q_at, _turned(k_at), square, scale),
            _rows_step(_softmax_rows_kernel, "score weight lse sums total", sizes, mask, softcap),
            _product("weight v out", sizes, q_len, head_dim, kv_len, square, v_at, out.strides, total="total"),
        ),
        outputs=("out", "lse", "sums"),
    )


def plan_backward(
    dout: torch.Tensor, has_dlse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    mask: Mask, softcap: float, scale: float,
) -> Plan:  # fmt: skip
    sizes, buffers = sizes_of(q, k), gradient_buffers(q, k, v)
    mask = mask.needed(sizes.q_len, sizes.kv_len)
    q_at, k_at, v_at, dout_at = ((*strides_of(x), 1) for x in (q, k, v, dout))
    square, (q_len, kv_len, head_dim) = _square(sizes), sizes[3:]
    rows = f"score dweight {sums_name(q)} {'dlse' if has_dlse else 'lse'} weight dscore"
    return Plan(
        provider="naive",
        reason="scores, weights and their gradients through memory",
        copies=copies_of(dout=dout, q=q, k=k, v=v),
        buffers=buffers
        | _square_buffers(sizes, score=torch.float32, dweight=torch.float32, weight=q.dtype, dscore=q.dtype),
        steps=(
            _product("q k score", sizes, q_len, kv_len, head_dim, q_at, _turned(k_at), square, scale),
            _product("dout v dweight", sizes, q_len, kv_len, head_dim, dout_at, _turned(v_at), square),
            _rows_step(_softmax_rows_backward_kernel, rows, sizes, mask, softcap, HAS_DLSE=has_dlse),
            _product("dscore k dq", sizes, q_len, head_dim, kv_len, square, k_at, buffers["dq"].strides, scale),
            _product(
                "dscore q dk", sizes, kv_len, head_dim, q_len, _turned(square), q_at, buffers["dk"].strides, scale, True
            ),
            _product(
                "weight dout dv", sizes, kv_len, head_dim, q_len, _turned(square), dout_at, buffers["dv"].strides, 1.0,
                True,
            ),
        ),
        outputs=("dq", "dk", "dv"),
    )  # fmt: skip
