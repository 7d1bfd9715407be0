"""Decoding with latent attention: all heads read the same row of numbers for a key, and most of that row is its value.

A token is kept as one vector, 512 numbers that all heads share and 64 that carry its position; what made keys and
values of them is folded into the query and into the projection behind. So the cache is read once for both products: a
tile of it is turned for the scores and used as it is for the result. Heads are the tile's other side, which keeps the
tensor cores busy where ordinary decoding has one row; long sequences are cut, as in `paged_attention`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.backend.device import Facts, facts, is_interpreted
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape, shapes
from sublight.cost.attention import mla_decode as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.attention.ladder import check_numbers
from sublight.ops.attention.pages import MAX_PAGE, WHOLE, check_pages, nan_where_lacking, page_of
from sublight.ops.attention.parts import exponent_scale, log_sum, power
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.matmul.order import add_block
from sublight.ops.record.library import Registered
from sublight.ops.record.tuning import Tile

VALUE_DIM = 512
SCALE = (128 + 64) ** -0.5  # of the heads before they are folded, in DeepSeek V2 and V3
SPILLS = "Triton 3.9 keeps some words of 64 heads by 512 columns on the stack, 3.6 none; not yet timed beside 32 heads"
MOST_KEYS = 2048  # that one program takes
COMBINED = 64  # columns that one program of the second launch puts together


def reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float = SCALE,
    value_dim: int | None = None,
) -> torch.Tensor:
    """The rows gathered, then PyTorch's products."""
    return gathered(q, cache, block_table, lengths, scale, value_dim or _values_of(q), 0, "")


def _values_of(q: torch.Tensor) -> int:
    """By default the largest power of two below the row's size, as 512 of 576."""
    return 1 << ((int(q.shape[-1]) - 1).bit_length() - 1)  # sizes are tensors while torch.jit traces


def gathered(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, scale: float,
    value_dim: int, keys_per_program: int, provider: str,
) -> torch.Tensor:  # fmt: skip
    rows = cache[block_table.clamp(0, max(cache.shape[0] - 1, 0)).long()].flatten(1, 2)
    seen = torch.arange(rows.shape[1], device=q.device) < lengths[:, None]
    rows = rows.masked_fill(~seen[..., None], 0.0)  # unused pages may hold anything
    scores = ((q @ rows.mT) * scale).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~seen.any(1)[:, None, None], 0.0)  # of nothing: zeros, not NaN
    return weights.to(q.dtype) @ rows[..., :value_dim]


@triton.jit
def _mla_kernel(
    q_ptr, cache_ptr, table_ptr, length_ptr, out_ptr, lse_ptr, heads, groups, parts, chunk, pages, capacity, table_row,
    q_batch, q_head, cache_page, cache_row, scale,
    PAGE: tl.constexpr, VALUE: tl.constexpr, TURNED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for some heads; with one part alone, the result itself."""
    entry, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    batch, group = entry // groups, entry % groups
    length = tl.load(length_ptr + batch).to(tl.int32)
    begin = part * chunk
    end = tl.minimum(tl.where(part + 1 < parts, begin + chunk, capacity + 1), length)  # one key too many gives NaN
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    head = group * QUERIES + tl.arange(0, QUERIES)
    col, turn = tl.arange(0, VALUE)[None, :], VALUE + tl.arange(0, TURNED)[None, :]
    q_at = q_ptr + batch.to(tl.int64) * q_batch + head[:, None] * q_head
    q = tl.load(q_at + col, mask=head[:, None] < heads, other=0.0)
    q_turned = tl.load(q_at + turn, mask=head[:, None] < heads, other=0.0)
    table_ptr += batch.to(tl.int64) * table_row
    out = tl.zeros([QUERIES, VALUE], tl.float32)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in tl.range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        wanted = key < end
        page, there = page_of(table_ptr + key // PAGE, key, wanted, capacity, pages)
        at = cache_ptr + (page * cache_page + key % PAGE * cache_row)[:, None]
        latent = tl.load(at + col, mask=there[:, None], other=0.0)  # keys, and values
        turned = tl.load(at + turn, mask=there[:, None], other=0.0)
        product = tl.dot(q, tl.trans(latent), input_precision="ieee")
        product = tl.dot(q_turned, tl.trans(turned), product, input_precision="ieee")
        scores = tl.where(wanted[None, :], product * scale, -float("inf"))
        scores = tl.where(
            (wanted & ~there)[None, :], float("nan"), scores
        )  # a page that is not there: never in silence
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = power(scores - base[:, None], EXACT)
        shrink = power(top - base, EXACT)
        total = total * shrink + tl.sum(weights, 1)
        out = add_block(out * shrink[:, None], weights.to(q.dtype), latent, "ieee")
        top = new_top
    some = tl.where(total == 0.0, 1.0, total)
    place = (batch.to(tl.int64) * heads + head) * parts + part
    tl.store(lse_ptr + place, log_sum(top, some, EXACT), mask=head < heads)
    result = (out / some[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] * VALUE + col, result, mask=head[:, None] < heads)


@triton.jit
def _mla_combine_kernel(
    part_ptr, lse_ptr, length_ptr, out_ptr, heads, parts, chunk, blocks,
    PARTS: tl.constexpr, VALUE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The parts of one head, each by its share of the sum, for some of its columns."""
    entry = (tl.program_id(0) // blocks).to(tl.int64)
    length = tl.load(length_ptr + entry // heads).to(tl.int32)
    part, col = tl.arange(0, PARTS), tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    used = (part < parts) & (part * chunk < length)
    lse = tl.load(lse_ptr + entry * parts + part, mask=used, other=-float("inf"))
    top = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    places = (entry * parts + part)[:, None] * VALUE + col[None, :]
    rows = tl.load(part_ptr + places, mask=used[:, None], other=0.0)
    tl.store(out_ptr + entry * VALUE + col, tl.sum(rows * weight[:, None], 0).to(out_ptr.dtype.element_ty))


def chunk_for(pairs: int, capacity: int, keys: int, multiprocessors: int) -> int:
    """Keys that one program takes: its tiles fill a multiprocessor, so that there is one program for each.

    >>> chunk_for(2, 4096, 64, 132), chunk_for(128, 8192, 64, 132)
    (64, 2048)
    """
    whole = cdiv(capacity * pairs, multiprocessors)
    return max(keys, min(MOST_KEYS, cdiv(whole, keys) * keys))


def tile_for(heads: int, itemsize: int, gpu: Facts) -> Tile:
    """Rows are heads, the block is keys: what compiles without a spill and fits, not yet timed."""
    if is_interpreted() or itemsize == 4:
        return Tile(rows=16, block=16, warps=4 if is_interpreted() else 8)
    if gpu.capability not in (90, 100):
        return Tile(rows=16, block=32, warps=4, stages=2)
    rows = min(64, max(16, next_power_of_2(heads)))
    return Tile(rows=rows, block=32 if rows == 64 else 64, warps=8, stages=2)


def plan_forward(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, scale: float,
    value_dim: int, keys_per_program: int, provider: str,
) -> Plan:  # fmt: skip
    batch, heads, size = q.shape
    pages, page, _ = cache.shape
    capacity, tile = block_table.shape[1] * page, tile_for(heads, q.element_size(), facts(q))
    queries, keys = tile.rows, tile.block
    groups = cdiv(heads, queries)
    wanted = keys_per_program or chunk_for(batch * groups, capacity, keys, facts(q).multiprocessors)
    chunk = cdiv(wanted, keys) * keys
    parts = cdiv(capacity, chunk)
    tensors = {"q": q, "cache": cache, "block_table": block_table, "lengths": lengths}
    copies = tuple(name for name, x in tensors.items() if x.stride(-1) != 1 and x.shape[-1] > 1)
    q_at = (heads * size, size) if "q" in copies else q.stride()[:2]
    cache_at = (page * size, size) if "cache" in copies else cache.stride()[:2]
    table_row = block_table.shape[1] if "block_table" in copies else block_table.stride(0)
    buffers = {
        "out": Buffer(shape=(batch, heads, value_dim), dtype=q.dtype),
        "lse": Buffer(shape=(batch, heads, parts), dtype=torch.float32),
    }
    is_cut = parts > 1
    if is_cut:
        buffers["part"] = Buffer(shape=(batch, heads, parts, value_dim), dtype=torch.float32)
    steps = [
        Step(
            _mla_kernel, (batch * groups * parts,), heads, groups, parts, chunk, pages, capacity, table_row,
            *q_at, *cache_at, exponent_scale(q, scale, 0.0),
            on=f"q cache block_table lengths {'part' if is_cut else 'out'} lse",
            PAGE=page, VALUE=value_dim, TURNED=size - value_dim, QUERIES=queries, KEYS=keys,
            tile=tile, num_warps=tile.warps, num_stages=tile.stages,
        )
    ]  # fmt: skip
    if is_cut:
        cols = min(COMBINED, value_dim)
        steps.append(
            Step(
                _mla_combine_kernel, (batch * heads * (value_dim // cols),), heads, parts, chunk, value_dim // cols,
                on="part lse lengths out", PARTS=next_power_of_2(parts), VALUE=value_dim, COLS=cols, num_warps=4,
            )
        )  # fmt: skip
    return Plan(
        provider="sublight",
        reason=f"{queries} heads a tile read a key's row once; {chunk} keys a program, {parts} a sequence",
        copies=copies,
        buffers=buffers,
        steps=tuple(steps),
        outputs=("out",),
    )


def why_no_way(q: torch.Tensor, cache: torch.Tensor, value_dim: int = VALUE_DIM) -> str:
    """Why our kernels do not take these; empty where they do."""
    if reason := why_no_kernel(q):
        return reason
    if not q.numel() or not cache.numel():
        return "nothing to do for a tensor without elements"
    parts = value_dim, q.shape[-1] - value_dim
    if any(size < 16 or size & (size - 1) for size in parts) or value_dim > VALUE_DIM or parts[1] > value_dim:
        return f"rows of {parts[0]} + {parts[1]}: ours take powers of two from 16 to {VALUE_DIM}, as 512 + 64"
    return ""


def _why_torch(
    q: torch.Tensor, cache: torch.Tensor, table: Any, lengths: Any, scale: Any, value_dim: int, *_: Any
) -> str:
    return why_no_way(q, cache, value_dim)


_mla_decode = Registered(
    schema="mla_decode(Tensor q, Tensor cache, Tensor block_table, Tensor lengths, float scale, int value_dim, "
    "int keys_per_program, str provider) -> Tensor out",
    reference=lambda *args: nan_where_lacking(gathered(*args), *args[1:4]),
    theirs="gather, then two products",
    why_torch=_why_torch,
    plan=plan_forward,
    fake=lambda q, cache, table, lengths, scale, value_dim, *rest: q.new_empty((*q.shape[:2], value_dim)),
)


def _arguments(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, scale: float = SCALE,
    value_dim: int | None = None, keys_per_program: int | None = None, provider: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    if q.dim() != 3 or cache.dim() != 3 or q.shape[2] != cache.shape[2] or q.dtype != cache.dtype:
        raise BadInput(
            f"q {q.dtype} {tuple(q.shape)}, cache {cache.dtype} {tuple(cache.shape)}: use (batch, heads, size) and "
            "(pages, page_size, size), of one data type"
        )
    check_numbers(None, 0.0, scale)
    value_dim = _values_of(q) if value_dim is None else value_dim
    if not 0 < value_dim <= q.shape[2]:
        raise BadInput(f"value_dim {value_dim} of rows of {q.shape[2]}: use what is a value of them, as 512 of 576")
    if not 1 <= cache.shape[1] <= MAX_PAGE:
        raise BadInput(f"pages of {cache.shape[1]} keys: use 1 to {MAX_PAGE}")
    if block_table.dim() != 2 or len(block_table) != len(q) or block_table.dtype not in WHOLE:
        raise BadInput(f"block_table is {block_table.dtype} {tuple(block_table.shape)}: use int32 ({len(q)}, pages)")
    if lengths.shape != q.shape[:1] or lengths.dtype not in WHOLE:
        raise BadInput(f"lengths are {lengths.dtype} {tuple(lengths.shape)}: use int32 ({len(q)},)")
    if len({x.device for x in (q, cache, block_table, lengths)}) > 1:
        raise BadInput(f"q is on {q.device}: cache, block_table and lengths must be there, too")
    if keys_per_program is not None and keys_per_program < 1:
        raise BadInput(f"keys_per_program {keys_per_program}: use a positive number, or leave it out")
    if provider not in ("", "sublight"):
        raise BadInput(f"unknown provider {provider!r} of mla_decode: use 'sublight', or leave it out")
    if provider and (reason := why_no_way(q, cache, value_dim)):
        raise BadInput(f"mla_decode's kernels do not take this ({reason}): leave provider out for PyTorch's")
    if torch.is_grad_enabled() and (q.requires_grad or cache.requires_grad):
        raise BadInput("mla_decode has no gradient: call it under torch.no_grad()")
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_pages(cache, block_table, lengths)
    return q, cache, block_table, lengths, float(scale), value_dim, keys_per_program or 0, provider


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float = SCALE,
    value_dim: int | None = None,
    keys_per_program: int | None = None,
    provider: str = "",
) -> torch.Tensor:
    """Latent attention of one new token a sequence: (batch, heads, value_dim) for q (batch, heads, size).

    `cache` (pages, page_size, size) holds one row a token, for all heads: its first `value_dim` numbers (512) are key
    and value, the rest (64, turned by position) is key alone; by default `value_dim` is the largest power of two
    below the size. q has the key's projection folded in, the caller's next product the value's. `scale` belongs to the
    heads before that and cannot be seen from shapes: by default (128 + 64) ** -0.5, as DeepSeek V2 and V3 have it.
    `block_table` and `lengths` as in `paged_attention`; `keys_per_program` fixes how sequences are cut, and a result
    then has the same bits whatever else is in the batch.
    """
    args = _arguments(q, cache, block_table, lengths, scale, value_dim, keys_per_program, provider)
    return _mla_decode.call(*args)  # type: ignore[no-any-return]


def plan(*tensors: Any, **options: Any) -> Plan:
    """What `mla_decode` runs with these arguments, and why."""
    return _mla_decode.decide(*_arguments(*tensors, **options))


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """A cache whose pages are in no order, with some that nobody has; ragged lengths go from 1 to kv_len."""
    batch, kv_len, page, kind = shape["batch"], shape["kv_len"], shape["page"], getattr(torch, dtype)
    generator, width = generator_for(device, seed), cdiv(kv_len, page)
    size = shape["value_dim"] + shape["rope_dim"]
    q = torch.randn(batch, shape["heads"], size, generator=generator, device=device, dtype=kind)
    cache = torch.randn(batch * width + 2, page, size, generator=generator, device=device, dtype=kind)
    if device == "meta":
        table = torch.empty(batch, width, dtype=torch.int32, device=device)
    else:
        order = torch.randperm(batch * width + 2, generator=generator, device=device)[: batch * width]
        table = order.view(batch, width).to(torch.int32)
    lengths = torch.full((batch,), float(kv_len), device=device)
    if shape["ragged"]:
        lengths = torch.linspace(1, kv_len, batch, device=device).round()
    return q, cache, table, lengths.to(torch.int32)


_shapes = partial(shapes, "batch heads kv_len value_dim rope_dim page ragged")


MLA_DECODE = Op(
    name="mla_decode",
    summary="one new token a sequence over a latent cache in pages",
    reference=reference,
    call=mla_decode,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=lambda *tensors: mla_decode(*tensors, provider="sublight"),
            kernels=(Kernel(jit=_mla_kernel, spills=SPILLS), Kernel(jit=_mla_combine_kernel)),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=_shapes((16, 128, 8192, 512, 64, 64, 0), (1, 128, 4096, 512, 64, 64, 0), (64, 16, 2048, 512, 64, 64, 1)),
    test_shapes=_shapes((1, 1, 1, 16, 16, 16, 0), (3, 5, 17, 32, 16, 4, 1), (2, 17, 50, 64, 32, 7, 0)),
    options={"page": (64, *range(1, 64), *range(65, MAX_PAGE + 1)), "ragged": (0, 1)},
    wrt=(),
    directions=("fwd",),
    batch="",
    library_args=lambda *tensors: (*tensors, SCALE, _values_of(tensors[0]), 0, "sublight"),
)
