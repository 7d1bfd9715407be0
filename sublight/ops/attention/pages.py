"""A cache in pages: what is checked of it, how kernels read it, and what lies in it, gathered.

Keys and values may be kept in 8 bits, as fp8 or whole numbers, with a scale for each token and head: what is read from
memory is then half as much. Codes are multiplied as they are; scales go to the scores and to the weights.
"""

from __future__ import annotations

import torch

from sublight.backend.device import facts, is_interpreted
from sublight.backend.jit import tl, triton
from sublight.errors import BadInput
from sublight.ops.attention.parts import why_no_head
from sublight.ops.kernels.rows import why_no_kernel
from sublight.ops.quantize.codes import FP8_CAPABILITY

MAX_PAGE = 256
CODES = (torch.int8, torch.float8_e4m3fn)
WHOLE = (torch.int32, torch.int64)


@triton.jit
def page_of(table_ptr, key, wanted, capacity, pages):
    """The page of each key, and whether there is one; a table that points outside is never followed."""
    page = tl.load(table_ptr, mask=wanted & (key < capacity), other=-1).to(tl.int64)
    return page, wanted & (page >= 0) & (page < pages)


@triton.jit
def scales_at(ptr, page, key, there, kv_head, kv_heads, PAGE: tl.constexpr):
    return tl.load(ptr + (page * PAGE + key % PAGE) * kv_heads + kv_head, mask=there, other=0.0)


def gathered_rows(
    cache: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(batch, keys, kv_heads, head_dim) of the pages that a table names; codes times their scales."""
    place = table.clamp(0, max(cache.shape[0] - 1, 0)).long()
    is_fp8 = cache.dtype == CODES[1]  # which PyTorch does not index
    rows = cache.view(torch.uint8)[place].view(cache.dtype) if is_fp8 else cache[place]
    rows = rows.flatten(1, 2)
    if scales is None:
        return rows
    wide = torch.promote_types(dtype, torch.float32)
    return (rows.to(wide) * scales[place].flatten(1, 2).to(wide)[..., None]).to(dtype)


def keys_lacking(table: torch.Tensor, lengths: torch.Tensor, page: int, pages: int, window: int = 0) -> torch.Tensor:
    """(batch, keys): those that a sequence needs and its table has no page for. On a GPU nobody has looked at the
    numbers before: PyTorch's ops give NaN then, as our kernels do."""
    place = torch.arange(table.shape[1] * page, device=table.device)
    needed = place < lengths[:, None]
    if window:
        needed = needed & (place >= lengths[:, None] - window)
    return needed & ((table < 0) | (table >= pages)).repeat_interleave(page, 1)


def nan_where_lacking(
    out: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, window: int = 0
) -> torch.Tensor:
    """`out` (batch, heads, size) with NaN for sequences that lack a key, or have a length that their table has not."""
    pages, page = cache.shape[:2]
    is_none = (lengths < 0) | (lengths > table.shape[1] * page)
    is_lacking = is_none | keys_lacking(table, lengths, page, pages, window).any(1)
    return out.masked_fill(is_lacking[:, None, None], torch.nan)


def why_no_fp8(cache: torch.Tensor) -> str:
    if cache.dtype == CODES[1] and not is_interpreted() and facts(cache).capability < FP8_CAPABILITY:
        return f"fp8 on a GPU before sm_{FP8_CAPABILITY}, which does not convert it"
    return ""


def why_no_way(q: torch.Tensor, k_cache: torch.Tensor) -> str:
    if reason := why_no_kernel(q):
        return reason
    if reason := why_no_fp8(k_cache):
        return reason
    if not q.numel() or not k_cache.numel():
        return "nothing to do for a tensor without elements"
    return why_no_head(q.shape[-1])


def cache_strides(cache: torch.Tensor, is_copied: bool) -> tuple[int, int, int]:
    """The cache's strides: of page, row and head."""
    _, page, heads, size = cache.shape
    return (page * heads * size, heads * size, size) if is_copied else cache.stride()[:3]  # type: ignore[return-value]


def copied(scales: dict[str, torch.Tensor | None], **tensors: torch.Tensor) -> tuple[str, ...]:
    """The tensors that are copied first, since kernels cannot read them as they lie."""
    turned = [name for name, x in tensors.items() if x.stride(-1) != 1 and x.shape[-1] > 1]
    return (*turned, *(name for name, x in scales.items() if x is not None and not x.is_contiguous()))


def check_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    k_scales: torch.Tensor | None, v_scales: torch.Tensor | None, sequences: int,
) -> None:  # fmt: skip
    """What the shapes alone show to be wrong, for q (…, heads, head_dim)."""
    given = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "lengths": lengths}
    for name, each in given.items():
        if not isinstance(each, torch.Tensor):
            raise BadInput(f"{name} is {type(each).__name__}: use a torch.Tensor on {q.device}")
    heads, head_dim = q.shape[-2:]
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[3] != head_dim:
        raise BadInput(
            f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}: use (pages, page_size, kv_heads, {head_dim})"
        )
    has_scales = k_scales is not None and v_scales is not None
    kinds = CODES if has_scales else (q.dtype,)
    if k_cache.dtype not in kinds or v_cache.dtype != k_cache.dtype or (k_scales is None) != (v_scales is None):
        wanted = "8-bit caches need k_scales and v_scales" if k_cache.dtype in CODES else "make them alike"
        wanted = "scales are for int8 or float8_e4m3fn" if has_scales else wanted
        raise BadInput(f"caches are {k_cache.dtype} and {v_cache.dtype}, q is {q.dtype}: {wanted}")
    for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
        if x is not None and (x.shape != k_cache.shape[:3] or x.dtype != torch.float32):
            wanted = f"float32 {tuple(k_cache.shape[:3])}, one a token and head"
            raise BadInput(f"{name} are {x.dtype} {tuple(x.shape)}: use {wanted}")
    if not k_cache.shape[2] or heads % k_cache.shape[2]:
        raise BadInput(f"{heads} query heads over {k_cache.shape[2]} heads of keys: the second must divide the first")
    if not 1 <= k_cache.shape[1] <= MAX_PAGE:
        raise BadInput(f"pages of {k_cache.shape[1]} keys: use 1 to {MAX_PAGE}")
    if block_table.dim() != 2 or block_table.shape[0] != sequences or block_table.dtype not in WHOLE:
        raise BadInput(f"block_table is {block_table.dtype} {tuple(block_table.shape)}: use int32 ({sequences}, pages)")
    if lengths.shape != (sequences,) or lengths.dtype not in WHOLE:
        raise BadInput(f"lengths are {lengths.dtype} {tuple(lengths.shape)}: use int32 ({sequences},)")
    scales = [x for x in (k_scales, v_scales) if x is not None]
    if len({x.device for x in (q, k_cache, v_cache, block_table, lengths, *scales)}) > 1:
        raise BadInput(f"q is on {q.device}: caches, their scales, block_table and lengths must be there, too")


def check_pages(k_cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, whose: str = "") -> None:
    """Refuse lengths beyond the table, and pages that are not there. On a GPU the host waits for the values."""
    pages, page = k_cache.shape[:2]
    table, counts = block_table.cpu(), lengths.cpu()
    capacity = table.shape[1] * page
    for entry in ((counts < 0) | (counts > capacity)).nonzero().flatten().tolist():
        name = whose or f"sequence {entry}"
        raise BadInput(f"{name} has length {counts[entry]}: its row of the block table holds 0 to {capacity}")
    needed = torch.arange(table.shape[1]) * page < counts[:, None]
    for entry, place in (needed & ((table < 0) | (table >= pages))).nonzero().tolist():
        where = f"page {place} of {whose}" if whose else f"block_table[{entry}, {place}]"
        raise BadInput(f"{where} is {table[entry, place]}: the cache has pages 0 to {pages - 1}")
