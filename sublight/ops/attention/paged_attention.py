"""Decoding over a cache in pages: one new query a sequence, its keys and values wherever the block table says.

Decoding reads the cache once and computes little, so all is about reading: the heads that share keys are one tile, so
that one read serves them; long sequences are cut, so that a small batch fills the GPU, and a second launch puts the
parts together. Lengths and the table stay on the device: how much is cut depends on the table's width alone, a program
whose part lies past the end stops at once, and a CUDA graph stays good as sequences grow.

A page or a length that is not there would have to be looked for on the device, which the host would wait for. So on a
GPU the kernel reads no such page, and the sequence's result is NaN; tensors on the CPU are checked before any launch,
and `check_pages` does it anywhere, with the wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import paged_attention as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.attention import paged_hopper
from sublight.ops.attention.ladder import check_numbers, check_tensors, scale_of
from sublight.ops.attention.pages import (
    MAX_PAGE,
    cache_strides,
    check_cache,
    check_pages,
    copied,
    gathered_rows,
    nan_where_lacking,
    page_of,
    scales_at,
    why_no_way,
)
from sublight.ops.attention.parts import exponent_scale, head_at, log_sum, power, scores_of
from sublight.ops.attention.reference import is_true
from sublight.ops.kernels.pointwise import like
from sublight.ops.kernels.rows import generator_for
from sublight.ops.matmul.order import add_block
from sublight.ops.record.library import Registered

MOST_KEYS = 2048  # that one program takes …
MANY_KEYS = 1024  # … and where there are programs for several rounds: a long one at the end would be waited for
INVARIANT_KEYS = 512  # the same, where it may not depend on the batch
PROGRAMS = 4  # on a multiprocessor at the same time


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Keys and values gathered, then PyTorch's attention."""
    how = window or 0, softcap, scale_of(q[:, :, None], scale), 0, ""
    return gathered(q, k_cache, v_cache, block_table, lengths, k_scales, v_scales, *how)


def gathered(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    k_scales: torch.Tensor | None, v_scales: torch.Tensor | None, window: int, softcap: float, scale: float,
    keys_per_program: int, provider: str, dependent: bool = False,
) -> torch.Tensor:  # fmt: skip
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    capacity = block_table.shape[1] * k_cache.shape[1]
    key = torch.arange(capacity, device=q.device)
    seen = key < lengths[:, None]
    if window:
        seen &= key >= lengths[:, None] - window

    def rows(cache: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        flat = gathered_rows(cache, scales, block_table, q.dtype)
        return flat.masked_fill(~seen[:, :, None, None], 0.0).transpose(1, 2)  # unused pages may hold anything

    k, v, mask = rows(k_cache, k_scales), rows(v_cache, v_scales), seen[:, None, None]
    if not softcap:
        is_shared = is_true(heads != kv_heads)
        out = scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=is_shared)
        return out[:, :, 0]
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.tanh((q[:, :, None] @ k.mT) * (scale / softcap)) * softcap
    wide = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(~mask, -torch.inf)
    weights = torch.softmax(wide, -1).masked_fill(~mask.any(-1, keepdim=True), 0.0)  # of nothing: zeros, not NaN
    return (weights.to(q.dtype) @ v)[:, :, 0]


@triton.jit
def _paged_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, k_scales_ptr, v_scales_ptr, out_ptr, lse_ptr,
    kv_heads, parts, chunk, pages, capacity, table_row, q_batch, q_head,
    k_page, k_row, k_head, v_page, v_row, v_head, window, scale, softcap,
    CODED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for the heads that share its keys; with one part alone, the result itself."""
    entry, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    batch, kv_head = entry // kv_heads, entry % kv_heads
    length = tl.load(length_ptr + batch).to(tl.int32)
    begin = part * chunk
    end = tl.minimum(tl.where(part + 1 < parts, begin + chunk, capacity + 1), length)  # one key too many gives NaN
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(length - window, 0) // KEYS * KEYS)
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    row, col = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    inside = (row[:, None] < SHARE) & (col[None, :] < HEAD_DIM)
    first = kv_head * SHARE
    q = tl.load(
        head_at(q_ptr, batch, first, q_batch, q_head) + row[:, None] * q_head + col[None, :], mask=inside, other=0.0
    )
    k_ptr, v_ptr, table_ptr = (
        k_ptr + kv_head * k_head,
        v_ptr + kv_head * v_head,
        table_ptr + batch.to(tl.int64) * table_row,
    )
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in tl.range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        wanted = key < end
        page, there = page_of(table_ptr + key // PAGE, key, wanted, capacity, pages)
        mask = there[:, None] & (col[None, :] < HEAD_DIM)
        k = tl.load(k_ptr + (page * k_page + key % PAGE * k_row)[:, None] + col[None, :], mask=mask, other=0.0)
        product = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if CODED:
            product = product * scales_at(k_scales_ptr, page, key, there, kv_head, kv_heads, PAGE)[None, :]
        scores = scores_of(product, scale, softcap, SOFTCAP, EXACT)
        seen = wanted & (key >= length - window) if WINDOW else wanted
        scores = tl.where(seen[None, :], scores, -float("inf"))
        scores = tl.where((seen & ~there)[None, :], float("nan"), scores)  # a page that is not there: never in silence
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = power(scores - base[:, None], EXACT)
        shrink = power(top - base, EXACT)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + (page * v_page + key % PAGE * v_row)[:, None] + col[None, :], mask=mask, other=0.0)
        if CODED:
            weights = weights * scales_at(v_scales_ptr, page, key, there, kv_head, kv_heads, PAGE)[None, :]
        out = add_block(out * shrink[:, None], weights.to(q.dtype), v.to(q.dtype), "ieee")
        top = new_top
    some = tl.where(total == 0.0, 1.0, total)
    place = (entry.to(tl.int64) * SHARE + row) * parts + part
    tl.store(lse_ptr + place, log_sum(top, some, EXACT), mask=row < SHARE)
    result = (out / some[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] * HEAD_DIM + col[None, :], result, mask=inside)


@triton.jit
def _combine_kernel(
    part_ptr, lse_ptr, length_ptr, out_ptr, heads, parts, chunk,
    PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The parts of one head, each by its share of the sum."""
    entry = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + entry // heads).to(tl.int32)
    part, col = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    used = (part < parts) & (part * chunk < length)
    lse = tl.load(lse_ptr + entry * parts + part, mask=used, other=-float("inf"))
    top = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    places = (entry * parts + part)[:, None] * HEAD_DIM + col[None, :]
    rows = tl.load(part_ptr + places, mask=used[:, None] & (col[None, :] < HEAD_DIM), other=0.0)
    out = tl.sum(rows * weight[:, None], 0)
    tl.store(out_ptr + entry * HEAD_DIM + col, out.to(out_ptr.dtype.element_ty), mask=col < HEAD_DIM)


def chunk_for(pairs: int, capacity: int, keys: int, multiprocessors: int) -> int:
    """Keys that one program takes: the GPU is filled once, no part is tiny, and none so long that others wait for it.

    >>> chunk_for(8, 4096, 64, 132), chunk_for(8, 32768, 64, 132), chunk_for(128, 8192, 64, 132)
    (64, 512, 2048)
    >>> chunk_for(512, 1184, 64, 132)  # whole: a second part of 32 keys would cost a launch more
    1216
    """
    each = cdiv(capacity, max(1, PROGRAMS * multiprocessors // pairs))
    return cdiv(each, keys) * keys if each <= MOST_KEYS else MANY_KEYS


def plan_forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    k_scales: torch.Tensor | None, v_scales: torch.Tensor | None, window: int, softcap: float, scale: float,
    keys_per_program: int, provider: str, dependent: bool = False,
) -> Plan:  # fmt: skip
    batch, heads, head_dim = q.shape
    pages, page, kv_heads, _ = k_cache.shape
    capacity, keys = block_table.shape[1] * page, 16 if is_interpreted() else 64
    if paged_hopper.is_chosen(provider, q, k_cache, v_cache, capacity, k_scales, keys_per_program):
        return paged_hopper.plan(q, k_cache, block_table, lengths, window, softcap, scale, dependent)
    wanted = keys_per_program or chunk_for(batch * kv_heads, capacity, keys, facts(q).multiprocessors)
    chunk = cdiv(wanted, keys) * keys
    parts, share, width = cdiv(capacity, chunk), heads // kv_heads, max(16, next_power_of_2(head_dim))
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "lengths": lengths}
    copies = copied({"k_scales": k_scales, "v_scales": v_scales}, **tensors)
    k_at, v_at = (cache_strides(x, name in copies) for name, x in (("k_cache", k_cache), ("v_cache", v_cache)))
    q_at = q.stride()[:2] if "q" not in copies else (heads * head_dim, head_dim)
    table_row = block_table.stride(0) if "block_table" not in copies else block_table.shape[1]
    out = Buffer(shape=tuple(q.shape), dtype=q.dtype)
    buffers = {"out": out, "lse": Buffer(shape=(batch, heads, parts), dtype=torch.float32)}
    # whole sequences: with two blocks under way instead of three a third program fits (64 of 1100 keys 102 -> 76 µs)
    stages = 1 if q.element_size() != 2 else 3 if parts > 1 else 2
    is_cut, scales = parts > 1, "lse lse" if k_scales is None else "k_scales v_scales"
    if is_cut:
        buffers["part"] = Buffer(shape=(batch, heads, parts, head_dim), dtype=torch.float32)
    steps = [
        Step(
            _paged_kernel, (batch * kv_heads * parts,), kv_heads, parts, chunk, pages, capacity, table_row,
            *q_at, *k_at, *v_at, window, exponent_scale(q, scale, softcap), float(softcap),
            on=f"q k_cache v_cache block_table lengths {scales} {'part' if is_cut else 'out'} lse",
            CODED=k_scales is not None, WINDOW=window > 0, SOFTCAP=softcap > 0,
            PAGE=page, SHARE=share, QUERIES=max(16, next_power_of_2(share)),
            KEYS=keys, HEAD_DIM=head_dim, WIDTH=width, num_warps=4, num_stages=stages,
        )
    ]  # fmt: skip
    if is_cut:
        steps.append(
            Step(
                _combine_kernel, (batch * heads,), heads, parts, chunk, on="part lse lengths out",
                PARTS=next_power_of_2(parts), HEAD_DIM=head_dim, WIDTH=width, num_warps=4,
            )
        )  # fmt: skip
    return Plan(
        provider="flash",
        reason=f"{chunk} keys a program, {parts} part{'s' if is_cut else ''} a sequence, shared heads in one tile",
        copies=copies,
        buffers=buffers,
        steps=tuple(steps),
        outputs=("out",),
    )


def _why_torch(q: torch.Tensor, k_cache: torch.Tensor, *rest: Any) -> str:
    return why_no_way(q, k_cache)


_paged_attention = Registered(
    schema="paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor lengths, "
    "Tensor? k_scales, Tensor? v_scales, int window, float softcap, float scale, int keys_per_program, "
    "str provider, bool dependent) -> Tensor out",
    reference=lambda *args: nan_where_lacking(gathered(*args), args[1], args[3], args[4], window=args[7]),
    theirs="gather, then torch.nn.functional.scaled_dot_product_attention",
    why_torch=_why_torch,
    plan=plan_forward,
    fake=lambda q, *rest: like(q),
)


def _arguments(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    k_scales: torch.Tensor | None = None, v_scales: torch.Tensor | None = None, window: int | None = None,
    softcap: float = 0.0, scale: float | None = None, keys_per_program: int | None = None,
    batch_invariant: bool = False, check: bool = False, provider: str = "", dependent: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    check_tensors(q=q)
    check_numbers(window, softcap, scale)
    if q.dim() != 3:
        raise BadInput(f"q has {q.dim()} dimensions: use 3, (batch, heads, head_dim), one new token a sequence")
    check_cache(q, k_cache, v_cache, block_table, lengths, k_scales, v_scales, q.shape[0])
    if keys_per_program is not None and keys_per_program < 1:
        raise BadInput(f"keys_per_program {keys_per_program}: use a positive number, or leave it out")
    if provider not in ("", "flash", "hopper"):
        raise BadInput(f"unknown provider {provider!r} of paged_attention: use 'flash' or 'hopper', or leave it out")
    if provider and (reason := why_no_way(q, k_cache)):
        raise BadInput(f"paged_attention's kernels do not take this ({reason}): leave provider out for PyTorch's")
    fixed = keys_per_program or (INVARIANT_KEYS if batch_invariant else 0)
    is_compiled = torch.compiler.is_compiling()
    if (
        provider == "hopper"
        and not is_compiled
        and (reason := paged_hopper.why_not(q, k_cache, v_cache, k_scales, fixed))
    ):
        raise BadInput(f"paged_attention's hopper does not take this ({reason}): leave provider out")
    if (check or q.device.type == "cpu") and not is_compiled:
        check_pages(k_cache, block_table, lengths)
    size = scale_of(q[:, :, None], scale)
    tensors = (q, k_cache, v_cache, block_table, lengths, k_scales, v_scales)
    return *tensors, window or 0, float(softcap), float(size), fixed, provider, dependent


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    keys_per_program: int | None = None,
    batch_invariant: bool = False,
    check: bool = False,
    provider: str = "",
    dependent: bool = False,
) -> torch.Tensor:
    """Attention of one new token a sequence, q (batch, heads, head_dim), over its cache in pages.

    `k_cache` and `v_cache` are (pages, page_size, kv_heads, head_dim); key i of a sequence lies in page
    `block_table[sequence, i // page_size]`, row i % page_size. `lengths` count a sequence's keys, the new one included;
    what lies past them is never read. How sequences are cut depends on the batch: `keys_per_program` fixes it, and a
    sequence's result is then the same bits whatever else is in the batch; `batch_invariant` fixes it at a usual number.
    With `check` pages and lengths are looked at on a GPU, too, for which the host waits. Caches of int8 or
    float8_e4m3fn hold codes; `k_scales` and `v_scales` (pages, page_size, kv_heads) in float32 are what they are
    multiplied by. With `dependent` a Hopper GPU begins this launch before the last ones have ended: of what those write
    it may need q and each sequence's last key, and nothing else. A step inside of a CUDA graph gains by that.
    """
    args = _arguments(
        q, k_cache, v_cache, block_table, lengths, k_scales, v_scales, window, softcap, scale, keys_per_program,
        batch_invariant, check, provider, dependent,
    )  # fmt: skip
    return _paged_attention.call(*args)  # type: ignore[no-any-return]


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `paged_attention` runs with these arguments, and why."""
    return _paged_attention.decide(*_arguments(*tensors, **options))


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """A cache whose pages are in no order, with some that nobody has; ragged lengths go from 1 to kv_len."""
    batch, kv_len, page, kind = shape["batch"], shape["kv_len"], shape["page"], getattr(torch, dtype)
    generator = generator_for(device, seed)
    width = cdiv(kv_len, page)
    q = torch.randn(batch, shape["heads"], shape["head_dim"], generator=generator, device=device, dtype=kind)
    size = (batch * width + 2, page, shape["kv_heads"], shape["head_dim"])
    k, v = (torch.randn(size, generator=generator, device=device, dtype=kind) for _ in range(2))
    if device == "meta":
        table = torch.empty(batch, width, dtype=torch.int32, device=device)
    else:
        order = torch.randperm(batch * width + 2, generator=generator, device=device)[: batch * width]
        table = order.view(batch, width).to(torch.int32)
    lengths = torch.full((batch,), float(kv_len), device=device)
    if shape["ragged"]:
        lengths = torch.linspace(1, kv_len, batch, device=device).round()
    return q, k, v, table, lengths.to(torch.int32)


_shapes = partial(shapes, "batch heads kv_heads q_len kv_len head_dim page ragged")


PAGED_ATTENTION = Op(
    name="paged_attention",
    summary="one new token a sequence over a cache in pages",
    reference=reference,
    call=paged_attention,
    plan=plan,
    providers={
        "hopper": Provider(
            launch=lambda *tensors: paged_attention(*tensors, provider="hopper"),
            variants=(lambda *tensors: paged_attention(*tensors, provider="hopper", dependent=True),),
            why_not=lambda q, k, v, table, lengths: paged_hopper.why_not(q, k, v, None, 0),
            kernels=(Kernel(jit=paged_hopper._paged_hopper_kernel, targets=(90,)),),
            summary="one launch: every warp has keys of its own, the programs of a cluster share a sequence",
        ),
        "flash": Provider(  # the last takes every input
            launch=lambda *tensors: paged_attention(*tensors, provider="flash"),
            kernels=(Kernel(jit=_paged_kernel), Kernel(jit=_combine_kernel)),
            summary="shared heads in one tile, long sequences cut, parts put together by a second launch",
        ),
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        *((16, 32, 8, 1, 8192, 128, 16, 0), (1, 32, 8, 1, 4096, 128, 16, 0), (1, 32, 8, 1, 32768, 128, 16, 0)),
        *((128, 32, 8, 1, 4095, 128, 16, 1), (64, 32, 8, 1, 2048, 128, 1, 0), (64, 32, 32, 1, 2048, 128, 256, 0)),
    ),
    test_shapes=_shapes(
        *((1, 2, 1, 1, 1, 16, 16, 0), (3, 4, 2, 1, 17, 16, 4, 1), (2, 4, 1, 1, 50, 24, 1, 0)),
        *((2, 2, 2, 1, 65, 32, 7, 1), (5, 16, 1, 1, 130, 16, 16, 1)),
    ),
    options={"page": (16, *range(1, 16), *range(17, MAX_PAGE + 1)), "ragged": (0, 1)},
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=lambda *tensors: (
        *(*tensors, None, None, 0, 0.0, scale_of(tensors[0][:, :, None], None)),
        *(0, "flash", False),
    ),
)
