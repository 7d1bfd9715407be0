"""Decoding where all sequences begin with the same prompt: its keys are read once for the batch, not once a sequence.

The prompt's pages meet a tile of queries, those of many sequences at once; each sequence's own pages meet its own, as
in `paged_attention`. Both give parts of a result with the logarithms of their sums, and one more launch puts all parts
of a head together, each by its share of the whole sum: exactly the attention over prompt and own keys in a row.
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
from sublight.cost.attention import cascade as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.attention.ladder import check_numbers, scale_of
from sublight.ops.attention.paged_attention import inputs as paged_inputs
from sublight.ops.attention.pages import (
    MAX_PAGE,
    WHOLE,
    cache_strides,
    check_cache,
    check_pages,
    copied,
    gathered_rows,
    nan_where_lacking,
    page_of,
    why_no_way,
)
from sublight.ops.attention.parts import exponent_scale, log_sum, power, scores_of
from sublight.ops.attention.reference import is_true
from sublight.ops.kernels.pointwise import like
from sublight.ops.kernels.rows import generator_for
from sublight.ops.matmul.order import add_block
from sublight.ops.record.library import Registered

MOST_KEYS = 2048  # that one program takes
PROGRAMS = 2  # on a multiprocessor at the same time
COMBINED = 64  # columns that one program of the last launch puts together


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix_table: torch.Tensor,
    prefix_length: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Keys and values gathered, the prefix again for each sequence, then PyTorch's attention."""
    tensors = (q, k_cache, v_cache, prefix_table, prefix_length, block_table, lengths)
    return gathered(*tensors, scale_of(q[:, :, None], scale), 0, "")


def gathered(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prefix_table: torch.Tensor,
    prefix_length: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, scale: float,
    keys_per_program: int, provider: str,
) -> torch.Tensor:  # fmt: skip
    page, batch = k_cache.shape[1], len(q)
    table = torch.cat([prefix_table.expand(batch, -1).to(block_table.dtype), block_table], 1)
    first, own = (torch.arange(n * page, device=q.device) for n in (len(prefix_table), block_table.shape[1]))
    seen = torch.cat([(first < prefix_length).expand(batch, -1), own < lengths[:, None]], 1)

    def rows(cache: torch.Tensor) -> torch.Tensor:
        flat = gathered_rows(cache, None, table, q.dtype)
        return flat.masked_fill(~seen[:, :, None, None], 0.0).transpose(1, 2)  # unused pages may hold anything

    is_shared = is_true(q.shape[1] != k_cache.shape[2])
    out = scaled_dot_product_attention(
        q[:, :, None], rows(k_cache), rows(v_cache), attn_mask=seen[:, None, None], scale=scale, enable_gqa=is_shared
    )
    return out[:, :, 0].masked_fill(~seen.any(1)[:, None, None], 0.0)  # of nothing: zeros, not NaN


@triton.jit
def _cascade_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, lse_ptr,
    batch, kv_heads, blocks, parts, first_part, all_parts, chunk, pages, capacity, table_row, q_batch, q_head,
    k_page, k_row, k_head, v_page, v_row, v_head, scale,
    SHARED: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One part of the keys that are shared, for queries of several sequences, or of one sequence's own."""
    entry, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    kv_head, block = entry % kv_heads, entry // kv_heads
    row, col = tl.arange(0, QUERIES), tl.arange(0, WIDTH)[None, :]
    if SHARED:
        row += block * QUERIES
        sequence, inside = row // SHARE, row < batch * SHARE
        length = tl.load(length_ptr).to(tl.int32)
    else:
        sequence, inside = row * 0 + block, row < SHARE
        length = tl.load(length_ptr + block).to(tl.int32)
        table_ptr += block.to(tl.int64) * table_row
    head = kv_head * SHARE + row % SHARE
    begin = part * chunk
    end = tl.minimum(tl.where(part + 1 < parts, begin + chunk, capacity + 1), length)  # one key too many gives NaN
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    mask = inside[:, None] & (col < HEAD_DIM)
    q_at = q_ptr + (sequence.to(tl.int64) * q_batch + head * q_head)[:, None]
    q = tl.load(q_at + col, mask=mask, other=0.0)
    k_ptr, v_ptr = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in tl.range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        wanted = key < end
        page, there = page_of(table_ptr + key // PAGE, key, wanted, capacity, pages)
        here = there[:, None] & (col < HEAD_DIM)
        k = tl.load(k_ptr + (page * k_page + key % PAGE * k_row)[:, None] + col, mask=here, other=0.0)
        scores = scores_of(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, 0.0, False, EXACT)
        scores = tl.where(wanted[None, :], scores, -float("inf"))
        scores = tl.where(
            (wanted & ~there)[None, :], float("nan"), scores
        )  # a page that is not there: never in silence
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = power(scores - base[:, None], EXACT)
        shrink = power(top - base, EXACT)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + (page * v_page + key % PAGE * v_row)[:, None] + col, mask=here, other=0.0)
        out = add_block(out * shrink[:, None], weights.to(q.dtype), v, "ieee")
        top = new_top
    some = tl.where(total == 0.0, 1.0, total)
    place = (sequence.to(tl.int64) * kv_heads * SHARE + head) * all_parts + first_part + part
    tl.store(lse_ptr + place, log_sum(top, some, EXACT), mask=inside)
    tl.store(out_ptr + place[:, None] * HEAD_DIM + col, out / some[:, None], mask=mask)


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, out_ptr, parts, blocks, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, COLS: tl.constexpr
):
    """The parts of one head, each by its share of the sum, for some of its columns."""
    entry = (tl.program_id(0) // blocks).to(tl.int64)
    part, col = tl.arange(0, PARTS), tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    lse = tl.load(lse_ptr + entry * parts + part, mask=part < parts, other=-float("inf"))
    top = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    used = lse > -float("inf")  # NaN, of a page that is not there, shows through the weights
    places = (entry * parts + part)[:, None] * HEAD_DIM + col[None, :]
    rows = tl.load(part_ptr + places, mask=used[:, None] & (col[None, :] < HEAD_DIM), other=0.0)
    out = tl.sum(rows * weight[:, None], 0)
    tl.store(out_ptr + entry * HEAD_DIM + col, out.to(out_ptr.dtype.element_ty), mask=col < HEAD_DIM)


def chunk_for(pairs: int, capacity: int, keys: int, multiprocessors: int) -> int:
    """Keys that one program takes: the GPU is filled once, no part is tiny, and none so long that others wait for it.

    >>> chunk_for(8, 32768, 64, 132), chunk_for(1024, 8192, 64, 132)
    (1024, 2048)
    """
    whole = cdiv(capacity * pairs, PROGRAMS * multiprocessors)
    return max(keys, min(MOST_KEYS, cdiv(whole, keys) * keys))


def plan_forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prefix_table: torch.Tensor,
    prefix_length: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, scale: float,
    keys_per_program: int, provider: str,
) -> Plan:  # fmt: skip
    batch, heads, head_dim = q.shape
    pages, page, kv_heads, _ = k_cache.shape
    share, width = heads // kv_heads, max(16, next_power_of_2(head_dim))
    is_small = is_interpreted() or q.element_size() == 4
    keys = 16 if is_interpreted() else 32 if is_small or width > 128 else 64
    many = 16 if is_small else 64  # queries that meet the prefix at once
    few = max(16, next_power_of_2(share))
    blocks = cdiv(batch * share, many)
    sms = facts(q).multiprocessors
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "prefix_table": prefix_table}
    copies = copied({}, **tensors, prefix_length=prefix_length, block_table=block_table, lengths=lengths)
    k_at, v_at = (cache_strides(x, name in copies) for name, x in (("k_cache", k_cache), ("v_cache", v_cache)))
    q_at = (heads * head_dim, head_dim) if "q" in copies else q.stride()[:2]
    table_row = block_table.shape[1] if "block_table" in copies else block_table.stride(0)
    room = len(prefix_table) * page, block_table.shape[1] * page
    chunks = tuple(
        cdiv(keys_per_program or chunk_for(pairs, capacity, keys, sms), keys) * keys
        for pairs, capacity in zip((blocks * kv_heads, batch * kv_heads), room, strict=True)
    )
    parts = tuple(cdiv(capacity, chunk) for capacity, chunk in zip(room, chunks, strict=True))

    def step(at: int, programs: int, rows: int, names: str, row: int) -> Step:
        return Step(
            _cascade_kernel, (programs * kv_heads * parts[at],), batch, kv_heads, programs, parts[at],
            0 if at == 0 else parts[0], sum(parts), chunks[at], pages, room[at], row, *q_at, *k_at, *v_at,
            exponent_scale(q, scale, 0.0), on=f"q k_cache v_cache {names} part lse",
            SHARED=at == 0, PAGE=page, SHARE=share, QUERIES=rows, KEYS=keys, HEAD_DIM=head_dim, WIDTH=width,
            num_warps=4, num_stages=1 if is_small else 2,
        )  # fmt: skip

    cols = min(COMBINED, width)
    merge = Step(
        _merge_kernel, (batch * heads * cdiv(head_dim, cols),), sum(parts), cdiv(head_dim, cols), on="part lse out",
        PARTS=next_power_of_2(sum(parts)), HEAD_DIM=head_dim, COLS=cols, num_warps=4,
    )  # fmt: skip
    steps = (
        *((step(0, blocks, many, "prefix_table prefix_length", 0),) if parts[0] else ()),
        *((step(1, batch, few, "block_table lengths", table_row),) if parts[1] else ()),
        merge,
    )
    return Plan(
        provider="sublight",
        reason=f"the prefix in {parts[0]} parts for {many} queries at a time, own keys in {parts[1]} a sequence",
        copies=copies,
        buffers={
            "out": Buffer(shape=tuple(q.shape), dtype=q.dtype),
            "lse": Buffer(shape=(batch, heads, sum(parts)), dtype=torch.float32),
            "part": Buffer(shape=(batch, heads, sum(parts), head_dim), dtype=torch.float32),
        },
        steps=steps,
        outputs=("out",),
    )


def why_not(q: torch.Tensor, k_cache: torch.Tensor, *rest: Any) -> str:
    """Why our kernels do not take these; empty where they do."""
    if reason := why_no_way(q, k_cache):
        return reason
    prefix_table, block_table = (rest[i] if len(rest) > i else None for i in (1, 3))
    if prefix_table is not None and block_table is not None and not prefix_table.numel() + block_table.numel():
        return "nothing to do without a page"
    return ""


def _by_torch(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> torch.Tensor:
    prefix, count, table, lengths, *_ = rest
    out = nan_where_lacking(gathered(q, k_cache, v_cache, *rest), k_cache, table, lengths)
    return nan_where_lacking(out, k_cache, prefix[None], count)


_cascade = Registered(
    schema="cascade(Tensor q, Tensor k_cache, Tensor v_cache, Tensor prefix_table, Tensor prefix_length, "
    "Tensor block_table, Tensor lengths, float scale, int keys_per_program, str provider) -> Tensor out",
    reference=_by_torch,
    theirs="gather, then torch.nn.functional.scaled_dot_product_attention",
    why_torch=why_not,
    plan=plan_forward,
    fake=lambda q, *rest: like(q),
)


def _arguments(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prefix_table: torch.Tensor,
    prefix_length: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, scale: float | None = None,
    keys_per_program: int | None = None, provider: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    if q.dim() != 3:
        raise BadInput(f"q has {q.dim()} dimensions: use 3, (batch, heads, head_dim), one new token a sequence")
    check_numbers(None, 0.0, scale)
    check_cache(q, k_cache, v_cache, block_table, lengths, None, None, q.shape[0])
    for name, x, wanted in (("prefix_table", prefix_table, "(pages,)"), ("prefix_length", prefix_length, "(1,)")):
        if x.dim() != 1 or x.dtype not in WHOLE or x.device != q.device or (wanted == "(1,)" and len(x) != 1):
            raise BadInput(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}: use int32 {wanted} on {q.device}")
    if keys_per_program is not None and keys_per_program < 1:
        raise BadInput(f"keys_per_program {keys_per_program}: use a positive number, or leave it out")
    if provider not in ("", "sublight"):
        raise BadInput(f"unknown provider {provider!r} of cascade: use 'sublight', or leave it out")
    if provider and (reason := why_not(q, k_cache, v_cache, prefix_table, prefix_length, block_table)):
        raise BadInput(f"cascade's kernels do not take this ({reason}): leave provider out for PyTorch's")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache)):
        raise BadInput("cascade has no gradient: call it under torch.no_grad()")
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_pages(k_cache, block_table, lengths)
        check_pages(k_cache, prefix_table[None], prefix_length, "the prefix")
    size = scale_of(q[:, :, None], scale)
    tensors = (q, k_cache, v_cache, prefix_table, prefix_length, block_table, lengths)
    return *tensors, float(size), keys_per_program or 0, provider


def cascade(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix_table: torch.Tensor,
    prefix_length: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    keys_per_program: int | None = None,
    provider: str = "",
) -> torch.Tensor:
    """`paged_attention` of one new token a sequence, q (batch, heads, head_dim), where all share their first keys.

    The first prefix_length[0] keys lie in the pages `prefix_table` (pages,) and are read once for all; a sequence's
    own, `lengths` of them, follow in the pages of its row of `block_table`. All numbers stay on the device; a page or
    a length that is not there gives NaN on a GPU, and is refused on the CPU. `keys_per_program` fixes how keys are cut:
    a sequence's result then has the same bits whatever else is in the batch.
    """
    tensors = (q, k_cache, v_cache, prefix_table, prefix_length, block_table, lengths)
    return _cascade.call(*_arguments(*tensors, scale, keys_per_program, provider))  # type: ignore[no-any-return]


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `cascade` runs with these arguments, and why."""
    return _cascade.decide(*_arguments(*tensors, **options))


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Own keys as `paged_attention` has them; the prefix in pages of its own, in no order."""
    page, width = shape["page"], cdiv(shape["prefix_len"], shape["page"])
    q, k_cache, v_cache, table, lengths = paged_inputs({**shape, "q_len": 1}, dtype, device, seed)
    generator = generator_for(device, seed + 1)
    size, own = (width, page, shape["kv_heads"], shape["head_dim"]), len(k_cache)
    k_cache, v_cache = (
        torch.cat([x, torch.randn(size, generator=generator, device=device, dtype=x.dtype)]) for x in (k_cache, v_cache)
    )
    order = torch.empty(width, dtype=torch.int32, device=device)
    if device != "meta":
        order = torch.randperm(width, generator=generator, device=device).to(torch.int32) + own
    return q, k_cache, v_cache, order, torch.full_like(lengths[:1], shape["prefix_len"]), table, lengths


_shapes = partial(shapes, "batch heads kv_heads prefix_len kv_len head_dim page ragged")


CASCADE = Op(
    name="cascade",
    summary="one new token a sequence over a prefix that all share, and keys of its own",
    reference=reference,
    call=cascade,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=lambda *tensors: cascade(*tensors, provider="sublight"),
            kernels=(Kernel(jit=_cascade_kernel), Kernel(jit=_merge_kernel)),
            why_not=why_not,
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        (64, 32, 8, 8192, 512, 128, 16, 0), (16, 32, 8, 4096, 256, 128, 16, 1), (128, 32, 8, 1024, 1024, 64, 16, 0)
    ),
    test_shapes=_shapes((1, 2, 1, 3, 1, 16, 16, 0), (3, 4, 2, 21, 17, 24, 4, 1), (9, 4, 2, 40, 5, 16, 7, 0)),
    options={"page": (16, *range(1, 16), *range(17, MAX_PAGE + 1)), "ragged": (0, 1)},
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=lambda *tensors: (*tensors, scale_of(tensors[0][:, :, None], None), 0, "sublight"),
)
