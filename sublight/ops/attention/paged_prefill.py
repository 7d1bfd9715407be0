"""Prefill over a cache in pages: a chunk of new queries a sequence, against all of its keys so far, wherever they lie.

The keys of the chunk are in the cache already (`kv_write`), behind those of the prompt's earlier chunks or of a prefix
that other sequences share: a block table may name the same page twice. A tile holds the queries of all heads that
share keys, so that a page is read once for them; each program finds its sequence on the device. Blocks of keys do not
depend on pages, so pages of any size and order give the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import packed_lengths
from sublight.cost.attention import paged_prefill as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.attention import flash
from sublight.ops.attention.extended import NO_EXTRAS, composed
from sublight.ops.attention.extras import sequence_at
from sublight.ops.attention.ladder import check_numbers, scale_of
from sublight.ops.attention.masks import is_seen, keys_seen
from sublight.ops.attention.packed_attention import check_starts
from sublight.ops.attention.paged_attention import inputs as paged_inputs
from sublight.ops.attention.pages import (
    MAX_PAGE,
    WHOLE,
    cache_strides,
    check_cache,
    check_pages,
    copied,
    gathered_rows,
    page_of,
    scales_at,
    why_no_way,
)
from sublight.ops.attention.parts import Sizes, exponent_scale, power, rounding_of, scores_of
from sublight.ops.kernels.rows import generator_for
from sublight.ops.matmul.order import add_block
from sublight.ops.record.library import Registered


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    tensors = (q, k_cache, v_cache, block_table, lengths, cu_seqlens_q, k_scales, v_scales)
    return gathered(*tensors, window or 0, softcap, scale_of(q[None], scale), False, "")


def gathered(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    cu_seqlens_q: torch.Tensor, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None,
    window: int, softcap: float, scale: float, invariant: bool, provider: str,
) -> torch.Tensor:  # fmt: skip
    """Sequence by sequence, for which the host waits for their lengths; queries past the last one get zeros."""
    starts, out = cu_seqlens_q.tolist(), torch.zeros_like(q)
    for i, length in enumerate(lengths.tolist()):
        rows = slice(starts[i], starts[i + 1])
        table = block_table[i : i + 1, : -(-length // k_cache.shape[1])]
        k, v = (
            gathered_rows(cache, scales, table, q.dtype)[:, :length].transpose(1, 2)
            for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
        )
        own = q[rows].transpose(0, 1)[None]
        how: tuple[Any, ...] = (*NO_EXTRAS, True, window, softcap, scale)
        out[rows] = composed(own, k, v, *how)[0][0].transpose(0, 1)
    return out


@triton.jit
def _paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, cu_ptr, k_scales_ptr, v_scales_ptr, out_ptr,
    tokens, sequences, kv_heads, pages, capacity, table_row, q_token, q_head,
    k_page, k_row, k_head, v_page, v_row, v_head, window, scale, softcap,
    CODED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, SHARE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of a tile are queries, and for each of them the heads that share keys."""
    kv_head, block = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    EACH: tl.constexpr = QUERIES // SHARE
    sequence, first, q_start, q_len = sequence_at(block, cu_ptr, sequences, tokens, EACH)
    kv_len = tl.minimum(tl.load(length_ptr + sequence).to(tl.int32), capacity + 1)  # one key too many gives NaN
    row, col = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    query, head = first + row // SHARE, kv_head * SHARE + row % SHARE
    inside = ((row < EACH * SHARE) & (query < q_len))[:, None] & (col[None, :] < HEAD_DIM)
    token = (q_start + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * q_token + head[:, None] * q_head + col[None, :], mask=inside, other=0.0)
    k_ptr, v_ptr = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head
    table_ptr += sequence.to(tl.int64) * table_row
    ahead = kv_len - q_len  # from a query's number to its position
    last = tl.minimum(first + EACH, q_len) - 1 + ahead
    begin, _, _, end = keys_seen(first + ahead, last, kv_len, window, True, WINDOW, KEYS)
    end = tl.where(first < q_len, end, 0)  # a block past its sequence's end has nothing to do
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    EXACT: tl.constexpr = q.dtype == tl.float32
    for start in tl.range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        page, there = page_of(table_ptr + key // PAGE, key, key < kv_len, capacity, pages)
        mask = there[:, None] & (col[None, :] < HEAD_DIM)
        k = tl.load(k_ptr + (page * k_page + key % PAGE * k_row)[:, None] + col[None, :], mask=mask, other=0.0)
        product = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if CODED:
            product = product * scales_at(k_scales_ptr, page, key, there, kv_head, kv_heads, PAGE)[None, :]
        scores = scores_of(product, scale, softcap, SOFTCAP, EXACT)
        seen = is_seen((query + ahead)[:, None], key[None, :], window, True, WINDOW) & (key < kv_len)[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        scores = tl.where(seen & ~there[None, :], float("nan"), scores)  # a page that is not there: never in silence
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
    result = (out / some[:, None]).to(out_ptr.dtype.element_ty)
    place = (token * (kv_heads * SHARE) + head[:, None]) * HEAD_DIM + col[None, :]
    tl.store(out_ptr + place, result, mask=inside)


def plan_forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    cu_seqlens_q: torch.Tensor, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None,
    window: int, softcap: float, scale: float, invariant: bool, provider: str,
) -> Plan:  # fmt: skip
    tokens, heads, head_dim = q.shape
    pages, page, kv_heads, _ = k_cache.shape
    capacity, sequences = block_table.shape[1] * page, block_table.shape[0]
    sizes = Sizes(1, heads, kv_heads, tokens, capacity, head_dim)
    tile = flash.tile_for(sizes, q.element_size(), facts(q))
    tile = replace(tile, block=min(64, tile.block))  # every key has an address of its own: more of them spill
    tensors = {
        **{"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "lengths": lengths},
        "cu_seqlens_q": cu_seqlens_q,
    }
    copies = copied({"k_scales": k_scales, "v_scales": v_scales}, **tensors)
    q_at = (heads * head_dim, head_dim) if "q" in copies else q.stride()[:2]
    k_at, v_at = (cache_strides(x, name in copies) for name, x in (("k_cache", k_cache), ("v_cache", v_cache)))
    table_row = block_table.shape[1] if "block_table" in copies else block_table.stride(0)
    each = tile.rows // sizes.share
    scales = "out out" if k_scales is None else "k_scales v_scales"
    step = Step(
        _paged_prefill_kernel, ((tokens // each + sequences) * kv_heads,),
        tokens, sequences, kv_heads, pages, capacity, table_row, *q_at, *k_at, *v_at,
        window, exponent_scale(q, scale, softcap), float(softcap),
        on=f"q k_cache v_cache block_table lengths cu_seqlens_q {scales} out", tile=tile,
        CODED=k_scales is not None, WINDOW=window > 0, SOFTCAP=softcap > 0, PAGE=page, SHARE=sizes.share,
        QUERIES=tile.rows, KEYS=tile.block, HEAD_DIM=head_dim, WIDTH=sizes.width,
        num_warps=tile.warps, num_stages=min(2, tile.stages), **rounding_of(q, invariant),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason=f"{each} queries of {sizes.share} heads a tile, each page read once for them",
        copies=copies,
        buffers={"out": Buffer(shape=tuple(q.shape), dtype=q.dtype, is_zero=True)},
        steps=(step,),
        outputs=("out",),
    )


def why_not(q: torch.Tensor, k_cache: torch.Tensor, *rest: Any) -> str:
    """Why our kernel does not take these; empty where it does."""
    share = q.shape[1] // max(1, k_cache.shape[2])
    return why_no_way(q, k_cache) or (f"{share} heads share keys: ours take 16 at most" if share > 16 else "")


def _by_torch(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> torch.Tensor:
    """On a GPU nobody has looked at the pages before; here the host waits for the lengths anyway."""
    if not torch.compiler.is_compiling():
        check_pages(k_cache, *rest[:2])
    return gathered(q, k_cache, v_cache, *rest)


_paged_prefill = Registered(
    schema="paged_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor lengths, "
    "Tensor cu_seqlens_q, Tensor? k_scales, Tensor? v_scales, int window, float softcap, float scale, "
    "bool invariant, str provider) -> Tensor out",
    reference=_by_torch,
    theirs="gather, then attention sequence by sequence",
    why_torch=why_not,
    plan=plan_forward,
    fake=lambda q, *rest: q.new_empty(q.shape),
)


def _arguments(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    cu_seqlens_q: torch.Tensor, k_scales: torch.Tensor | None = None, v_scales: torch.Tensor | None = None,
    window: int | None = None, softcap: float = 0.0, scale: float | None = None, batch_invariant: bool = False,
    check: bool = False, provider: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    if q.dim() != 3:
        raise BadInput(f"q has {q.dim()} dimensions: use 3, (tokens, heads, head_dim)")
    if cu_seqlens_q.dim() != 1 or len(cu_seqlens_q) < 2 or cu_seqlens_q.dtype not in WHOLE:
        given = f"{cu_seqlens_q.dtype} {tuple(cu_seqlens_q.shape)}"
        raise BadInput(f"cu_seqlens_q is {given}: use int32 (sequences + 1,)")
    check_cache(q, k_cache, v_cache, block_table, lengths, k_scales, v_scales, len(cu_seqlens_q) - 1)
    if cu_seqlens_q.device != q.device:
        raise BadInput(f"cu_seqlens_q is on {cu_seqlens_q.device}, q on {q.device}: use one device")
    check_numbers(window, softcap, scale)
    if provider not in ("", "sublight"):
        raise BadInput(f"unknown provider {provider!r} of paged_prefill: use 'sublight', or leave it out")
    if provider and (reason := why_not(q, k_cache)):
        raise BadInput(f"paged_prefill's kernel does not take this ({reason}): leave provider out for PyTorch's")
    if (check or q.device.type == "cpu") and not torch.compiler.is_compiling():
        check_pages(k_cache, block_table, lengths)
        check_starts("cu_seqlens_q", cu_seqlens_q, len(q))
        for entry in (cu_seqlens_q.diff() > lengths).nonzero().flatten().tolist():
            given = f"{cu_seqlens_q.diff()[entry]} queries and {lengths[entry]} keys"
            raise BadInput(f"sequence {entry} has {given}: write the chunk's keys into the cache first")
    tensors = (q, k_cache, v_cache, block_table, lengths, cu_seqlens_q, k_scales, v_scales)
    return *tensors, window or 0, float(softcap), float(scale_of(q[None], scale)), batch_invariant, provider


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    batch_invariant: bool = False,
    check: bool = False,
    provider: str = "",
) -> torch.Tensor:
    """Causal attention of several sequences' new tokens, q (tokens, heads, head_dim), over their caches in pages.

    Sequence i has the queries from cu_seqlens_q[i] to cu_seqlens_q[i + 1] and lengths[i] keys, of which the last are
    those of its queries; earlier ones are of chunks before, or of a prefix. Caches, `block_table`, `lengths` and scales
    are those of `paged_attention`; queries past the last sequence get zeros. It has no gradient. On a GPU the call runs
    on our kernel: PyTorch's way would wait for the lengths. With `batch_invariant` results have the bits of
    `attention(…, causal=True, batch_invariant=True)` over the same keys in one piece. With `check` pages, lengths and
    starts are looked at on a GPU, too, for which the host waits.
    """
    tensors = (q, k_cache, v_cache, block_table, lengths, cu_seqlens_q, k_scales, v_scales)
    return _paged_prefill.call(*_arguments(*tensors, window, softcap, scale, batch_invariant, check, provider))  # type: ignore[no-any-return]


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `paged_prefill` runs with these arguments, and why."""
    return _paged_prefill.decide(*_arguments(*tensors, **options))


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """A cache whose pages are in no order; ragged chunks go from 1 to q_len queries, behind kv_len - q_len keys."""
    pairs = packed_lengths(shape)
    _, k_cache, v_cache, table, _ = paged_inputs(shape, dtype, device, seed)
    tokens = sum(queries for queries, _ in pairs)
    size = (tokens, shape["heads"], shape["head_dim"])
    generator = generator_for(device, seed + 1)
    q = torch.randn(size, generator=generator, device=device, dtype=getattr(torch, dtype))
    starts = [sum(queries for queries, _ in pairs[:i]) for i in range(len(pairs) + 1)]
    lengths = torch.tensor([keys for _, keys in pairs], dtype=torch.int32)
    return q, k_cache, v_cache, table, lengths.to(device), torch.tensor(starts, dtype=torch.int32).to(device)


_shapes = partial(shapes, "batch heads kv_heads q_len kv_len head_dim page ragged")


PAGED_PREFILL = Op(
    name="paged_prefill",
    summary="a chunk of new tokens a sequence over a cache in pages",
    reference=reference,
    call=paged_prefill,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=lambda *tensors: paged_prefill(*tensors, provider="sublight"),
            kernels=(Kernel(jit=_paged_prefill_kernel),),
            why_not=why_not,
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes(
        (4, 32, 8, 512, 4096, 128, 16, 0), (16, 32, 8, 256, 2048, 128, 16, 1), (1, 32, 8, 2048, 8192, 128, 16, 0)
    ),
    test_shapes=_shapes((1, 2, 1, 3, 3, 16, 16, 0), (3, 4, 2, 9, 21, 16, 4, 1), (2, 2, 2, 17, 40, 24, 1, 0)),
    options={"page": (16, *range(1, 16), *range(17, MAX_PAGE + 1)), "ragged": (0, 1)},
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=lambda *tensors: (*tensors, None, None, 0, 0.0, scale_of(tensors[0][None], None), False, "sublight"),
)
