"""The keys and values of sequences out of a cache in pages, in one piece: for whatever reads no pages.

Lengths and the block table stay on the device: the result has room for all that a row of the table can hold, and zeros
past a sequence's end. Codes come out as numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import kv_gather as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.attention.paged_attention import inputs as paged_inputs
from sublight.ops.attention.pages import (
    CODES,
    MAX_PAGE,
    cache_strides,
    check_cache,
    check_pages,
    copied,
    gathered_rows,
    keys_lacking,
    page_of,
    scales_at,
    why_no_fp8,
)
from sublight.ops.kernels.rows import why_no_kernel
from sublight.ops.record.library import Registered

Pair = tuple[torch.Tensor, torch.Tensor]
Maybe = torch.Tensor | None
ELEMENTS = 2048  # that a program moves of keys, and as many of values


def reference(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    k_scales: Maybe = None,
    v_scales: Maybe = None,
    dtype: torch.dtype | None = None,
) -> Pair:
    kind = k_cache.dtype if k_scales is None else dtype or torch.bfloat16
    key = torch.arange(block_table.shape[1] * k_cache.shape[1], device=k_cache.device)
    is_past = (key >= lengths[:, None])[..., None, None]
    k, v = (
        gathered_rows(cache, scales, block_table, kind).masked_fill(is_past, 0.0)
        for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
    )
    return k, v


@triton.jit
def _kv_gather_kernel(
    k_ptr, v_ptr, table_ptr, length_ptr, k_scales_ptr, v_scales_ptr, k_out_ptr, v_out_ptr,
    pages, capacity, table_row, kv_heads, blocks, k_page, k_row, k_head, v_page, v_row, v_head,
    CODED: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some keys and values of one sequence and head."""
    kv_head, rest = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    batch, start = rest // blocks, rest % blocks * KEYS
    length = tl.load(length_ptr + batch).to(tl.int32)
    key, col = start + tl.arange(0, KEYS), tl.arange(0, WIDTH)[None, :]
    wanted = key < length
    table_ptr += batch.to(tl.int64) * table_row
    page, there = page_of(table_ptr + key // PAGE, key, wanted, capacity, pages)
    lacks = (wanted & ~there)[:, None]  # a page that is not there: never in silence
    mask = there[:, None] & (col < HEAD_DIM)
    k_place, v_place = page * k_page + key % PAGE * k_row, page * v_page + key % PAGE * v_row
    k = tl.load(k_ptr + (k_place + kv_head * k_head)[:, None] + col, mask=mask, other=0.0)
    v = tl.load(v_ptr + (v_place + kv_head * v_head)[:, None] + col, mask=mask, other=0.0)
    if CODED:
        k = k.to(tl.float32) * scales_at(k_scales_ptr, page, key, there, kv_head, kv_heads, PAGE)[:, None]
        v = v.to(tl.float32) * scales_at(v_scales_ptr, page, key, there, kv_head, kv_heads, PAGE)[:, None]
    place = ((batch.to(tl.int64) * capacity + key) * kv_heads + kv_head)[:, None] * HEAD_DIM + col
    inside = (key < capacity)[:, None] & (col < HEAD_DIM)
    k, v = tl.where(lacks, float("nan"), k), tl.where(lacks, float("nan"), v)
    tl.store(k_out_ptr + place, k.to(k_out_ptr.dtype.element_ty), mask=inside)
    tl.store(v_out_ptr + place, v.to(v_out_ptr.dtype.element_ty), mask=inside)


def plan_gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    k_scales: Maybe, v_scales: Maybe, dtype: torch.dtype, provider: str,
) -> Plan:  # fmt: skip
    pages, page, heads, size = k_cache.shape
    batch, capacity = len(block_table), block_table.shape[1] * page
    width = next_power_of_2(size)
    keys = max(1, ELEMENTS // width)
    blocks = cdiv(capacity, keys)
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "lengths": lengths}
    copies = copied({"k_scales": k_scales, "v_scales": v_scales}, **tensors)
    k_at, v_at = (cache_strides(x, name in copies) for name, x in (("k_cache", k_cache), ("v_cache", v_cache)))
    table_row = block_table.shape[1] if "block_table" in copies else block_table.stride(0)
    step = Step(
        _kv_gather_kernel, (batch * heads * blocks,), pages, capacity, table_row, heads, blocks, *k_at, *v_at,
        on=f"k_cache v_cache block_table lengths {'k v' if k_scales is None else 'k_scales v_scales'} k v",
        CODED=k_scales is not None, PAGE=page, HEAD_DIM=size, KEYS=keys, WIDTH=width, num_warps=4,
    )  # fmt: skip
    out = Buffer(shape=(batch, capacity, heads, size), dtype=dtype)
    return Plan(
        provider="sublight",
        reason="keys and values in one pass; zeros past each sequence's end in the same",
        copies=copies,
        buffers={"k": out, "v": out},
        steps=(step,),
        outputs=("k", "v"),
    )


def why_no_way(k_cache: torch.Tensor, block_table: torch.Tensor) -> str:
    probe = k_cache.new_empty(0, dtype=torch.float32) if k_cache.dtype in CODES else k_cache
    if reason := why_no_kernel(probe) or why_no_fp8(k_cache):
        return reason
    return "" if k_cache.numel() and block_table.numel() else "nothing to do for a tensor without elements"


def _why_torch(k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, *rest: Any) -> str:
    return why_no_way(k_cache, block_table)


def _fake(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    k_scales: Maybe, v_scales: Maybe, dtype: torch.dtype, provider: str,
) -> Pair:  # fmt: skip
    size = (block_table.shape[0], block_table.shape[1] * k_cache.shape[1], *k_cache.shape[2:])
    return k_cache.new_empty(size, dtype=dtype), k_cache.new_empty(size, dtype=dtype)


def _by_torch(*args: Any) -> Pair:
    """NaN for keys without a page, as from our kernel: on a GPU nobody has looked at the pages before."""
    cache, _, table, lengths, *_ = args
    lacking = keys_lacking(table, lengths, cache.shape[1], len(cache))[..., None, None]
    k, v = reference(*args[:-1])
    return k.masked_fill(lacking, torch.nan), v.masked_fill(lacking, torch.nan)


_kv_gather = Registered(
    schema="kv_gather(Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor lengths, Tensor? k_scales, "
    "Tensor? v_scales, ScalarType dtype, str provider) -> (Tensor k, Tensor v)",
    reference=_by_torch,
    theirs="torch.Tensor.index, then masked_fill",
    why_torch=_why_torch,
    plan=plan_gather,
    fake=_fake,
)


def _arguments(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    k_scales: Maybe = None, v_scales: Maybe = None, dtype: torch.dtype | None = None, provider: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    if k_cache.dim() != 4 or block_table.dim() != 2:
        given = f"{tuple(k_cache.shape)} and {tuple(block_table.shape)}"
        raise BadInput(f"cache and block_table {given}: use (pages, page_size, kv_heads, head_dim), (sequences, pages)")
    if k_scales is None and dtype not in (None, k_cache.dtype):
        raise BadInput(f"dtype {dtype} of caches of {k_cache.dtype}: it is for 8-bit codes alone, use .to() behind it")
    kind = (dtype or torch.bfloat16) if k_scales is not None else k_cache.dtype
    if not kind.is_floating_point or kind.itemsize < 2:
        raise BadInput(f"keys as {kind}: use k_scales and v_scales with 8-bit caches, and a dtype of 16 bits or more")
    q = k_cache.new_empty((0, *k_cache.shape[2:]), dtype=kind)  # for whom the cache is checked
    check_cache(q, k_cache, v_cache, block_table, lengths, k_scales, v_scales, len(block_table))
    if provider not in ("", "sublight"):
        raise BadInput(f"unknown provider {provider!r} of kv_gather: use 'sublight', or leave it out")
    if provider and (reason := why_no_way(k_cache, block_table)):
        raise BadInput(f"kv_gather's kernel does not take this ({reason}): leave provider out for PyTorch's")
    if torch.is_grad_enabled() and (k_cache.requires_grad or v_cache.requires_grad):
        raise BadInput("kv_gather has no gradient: call it under torch.no_grad()")
    if k_cache.device.type == "cpu" and not torch.compiler.is_compiling():
        check_pages(k_cache, block_table, lengths)
    return k_cache, v_cache, block_table, lengths, k_scales, v_scales, kind, provider


def kv_gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    k_scales: Maybe = None,
    v_scales: Maybe = None,
    *,
    dtype: torch.dtype | None = None,
    provider: str = "",
) -> Pair:
    """Keys and values (sequences, pages of the table · page_size, kv_heads, head_dim) of the sequences that
    `block_table` and `lengths` describe, as for `paged_attention`; zeros past a sequence's length.

    Codes come out as numbers of `dtype` (bfloat16 by default). On a GPU keys of a page that is not there are NaN; on
    the CPU that is refused.
    """
    tensors = (k_cache, v_cache, block_table, lengths, k_scales, v_scales)
    return _kv_gather.call(*_arguments(*tensors, dtype, provider))  # type: ignore[no-any-return]


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `kv_gather` runs with these arguments, and why."""
    return _kv_gather.decide(*_arguments(*tensors, **options))


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """The inputs of `paged_attention` without the query; ragged lengths go from 1 to kv_len."""
    return paged_inputs({**shape, "heads": shape["kv_heads"], "q_len": 1}, dtype, device, seed)[1:]


_shapes = partial(shapes, "batch kv_heads kv_len head_dim page ragged")


KV_GATHER = Op(
    name="kv_gather",
    summary="keys and values out of a cache in pages, in one piece",
    reference=reference,
    call=kv_gather,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=lambda *tensors: kv_gather(*tensors, provider="sublight"), kernels=(Kernel(jit=_kv_gather_kernel),)
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes((16, 8, 8192, 128, 16, 0), (128, 8, 4095, 128, 16, 1), (1, 8, 4096, 128, 16, 0)),
    test_shapes=_shapes((1, 1, 1, 16, 16, 0), (3, 2, 17, 24, 4, 1), (2, 3, 130, 32, 7, 1)),
    options={"page": (16, *range(1, 16), *range(17, MAX_PAGE + 1)), "ragged": (0, 1)},
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=lambda *tensors: (*tensors, None, None, tensors[0].dtype, "sublight"),
)
