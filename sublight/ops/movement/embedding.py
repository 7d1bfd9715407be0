"""Rows of a table by number, and the table's gradient without atomics: the same bits every time.

Forward is a copy by vectors of 16 bytes, whichever row they lie in. Backward sorts the ids (stable, on the device), so
that the positions of one row of the table stand together in their order. A program sums one row's; where a token is so
frequent that one program would hold up the rest, programs of a launch before have summed runs of its positions. No
grid depends on the data, so a CUDA graph captures it all.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend.jit import cdiv, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.movement import embedding as cost
from sublight.errors import BadInput
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels.rows import add_pairs, as_rows, block_for, generator_for, sums_of, why_no_kernel
from sublight.ops.record.library import LIBRARY
from sublight.ops.record.tuning import TRIAL, Tile

RUN = 64  # positions that a program sums ahead of a frequent token's own program
BLOCK = 256  # vectors of a program of the forward pass
STREAMED_BYTES = 2**26  # a result larger than this leaves the cache to the table's rows
MOST_COLS = 4096  # of a row that one program of the backward pass sums
NO_PADDING = -1
ID_DTYPES = (torch.int64, torch.int32)


def reference(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    return F.embedding(ids, weight, padding_idx)


@triton.jit
def _gather_kernel(
    ids_ptr, w_ptr, y_ptr, rows, vocab, vectors, w_stride,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, ONE_ROW: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """BLOCK vectors of the output, which has `vectors` in a row and w_stride from row to row of the table.

    Output elements may pass 2**31 and so take 64 bits, but those are multiplied only: dividing them would take longer
    than the copy. Where BLOCK divides a row, a program needs one id.
    """
    program = tl.program_id(0)
    if ONE_ROW:
        parts = vectors // BLOCK
        row = program // parts
        vector = program % parts * BLOCK + tl.arange(0, BLOCK)[:, None]
        inside = vector < vectors  # all of them
        token = tl.load(ids_ptr + row).to(tl.int64) + tl.zeros([BLOCK, 1], tl.int64)
    else:  # `vectors` programs have BLOCK rows between them
        vector = program % vectors * BLOCK + tl.arange(0, BLOCK)[:, None]
        row = program // vectors * BLOCK + vector // vectors
        vector = vector % vectors
        inside = row < rows
        token = tl.load(ids_ptr + row, mask=inside, other=0).to(tl.int64)
    known = inside & (token >= 0) & (token < vocab)
    lane = tl.arange(0, VECTOR)[None, :]
    # never read out of bounds: a token that the table has not gets a row of NaN
    x = tl.load(w_ptr + token * w_stride * VECTOR + (vector * VECTOR + lane), mask=known, other=float("nan"))
    y_ptr += program.to(tl.int64) * (BLOCK * VECTOR)
    tl.store(
        y_ptr + tl.arange(0, BLOCK)[:, None] * VECTOR + lane, x, mask=inside, cache_modifier=".cs" if STREAM else ""
    )


@triton.jit
def _keys_kernel(ids_ptr, key_ptr, rows, vocab, skipped, BLOCK: tl.constexpr):
    """What is sorted: the id in 32 bits, and `vocab` for every id without a gradient."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + place, mask=place < rows, other=0).to(tl.int64)
    counts = (token >= 0) & (token < vocab) & (token != skipped)
    tl.store(key_ptr + place, tl.where(counts, token, vocab).to(tl.int32), mask=place < rows)


@triton.jit
def _ends_kernel(key_ptr, start_ptr, end_ptr, rows, vocab, BLOCK: tl.constexpr):
    """Where each id's positions begin and end among the sorted; both stay zero for an id that has none."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + place, mask=place < rows, other=vocab)
    before = tl.load(key_ptr + place - 1, mask=(place > 0) & (place < rows), other=-1)
    after = tl.load(key_ptr + place + 1, mask=place + 1 < rows, other=-1)
    tl.store(start_ptr + key, place, mask=(key < vocab) & (key != before))
    tl.store(end_ptr + key, place + 1, mask=(key < vocab) & (key != after))


@triton.jit
def _add_rows(total, rest, x, SUMS: tl.constexpr):
    """total + the rows of x, with the rest that rounding took unless SUMS is "plain"."""
    if SUMS == "carried":
        more, more_rest = tl.reduce((x, tl.zeros_like(x)), 0, add_pairs)
        return add_pairs(total, rest, more, more_rest)
    elif SUMS == "double":
        exact = tl.sum(x.to(tl.float64), 0)
        more = exact.to(tl.float32)
        return add_pairs(total, rest, more, (exact - more).to(tl.float32))
    else:
        return total + tl.sum(x, 0), rest


@triton.jit
def _whole(total, rest):
    """Total and rest, rounded once; an infinite total has no rest."""
    return total + tl.where(rest == rest, rest, 0.0)


@triton.jit
def _add_positions(
    total, rest, dy_ptr, position_ptr, first, last, col, mask, dy_stride, TOGETHER: tl.constexpr, SUMS: tl.constexpr
):
    """total + the rows of dy at the sorted places from first to last, TOGETHER of them on their way at once."""
    for start in tl.range(first, last, TOGETHER):
        place = start + tl.arange(0, TOGETHER)
        position = tl.load(position_ptr + place, mask=place < last, other=0)
        offset = position[:, None] * dy_stride + col[None, :]
        dy = tl.load(dy_ptr + offset, mask=(place < last)[:, None] & mask[None, :], other=0.0)
        total, rest = _add_rows(total, rest, dy.to(tl.float32), SUMS)
    return total, rest


@triton.jit
def _runs_kernel(
    dy_ptr, key_ptr, position_ptr, start_ptr, end_ptr, part_ptr, rows, cols, vocab, dy_stride,
    RUN: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The sums of those runs of RUN sorted places that lie within one token's; the others are nobody's business."""
    run = tl.program_id(0)
    first = run * RUN
    key = tl.load(key_ptr + first)
    if key < vocab:  # noqa: SIM102 (Triton would load both sides of an `and`)
        if (tl.load(start_ptr + key) <= first) & (tl.load(end_ptr + key) >= first + RUN):
            col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            total, rest = _add_positions(
                total, total, dy_ptr, position_ptr, first, first + RUN, col, col < cols, dy_stride, TOGETHER, SUMS
            )
            tl.store(part_ptr + run.to(tl.int64) * cols + col, _whole(total, rest), mask=col < cols)


@triton.jit
def _rows_kernel(
    dy_ptr, position_ptr, start_ptr, end_ptr, part_ptr, dw_ptr, vocab, cols, dy_stride,
    RUN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Rows of the gradient, zeros where no token is: the places before the first whole run, the runs, the rest."""
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    for row in tl.range(tl.program_id(0) * ROWS, tl.minimum(vocab, (tl.program_id(0) + 1) * ROWS)):
        first = tl.load(start_ptr + row)
        last = tl.load(end_ptr + row)
        first_run = (first + RUN - 1) // RUN
        last_run = tl.maximum(first_run, last // RUN)
        total = tl.zeros([BLOCK], tl.float32)
        total, rest = _add_positions(
            total, total, dy_ptr, position_ptr, first, tl.minimum(last, first_run * RUN), col, mask, dy_stride,
            TOGETHER, SUMS,
        )  # fmt: skip
        for start in tl.range(first_run, last_run, TOGETHER):
            run = start + tl.arange(0, TOGETHER)[:, None]
            part = tl.load(
                part_ptr + run.to(tl.int64) * cols + col[None, :], mask=(run < last_run) & mask[None, :], other=0.0
            )
            total, rest = _add_rows(total, rest, part, SUMS)
        total, rest = _add_positions(
            total, rest, dy_ptr, position_ptr, tl.maximum(first, last_run * RUN), last, col, mask, dy_stride,
            TOGETHER, SUMS,
        )  # fmt: skip
        dw = _whole(total, rest).to(dw_ptr.dtype.element_ty)
        tl.store(dw_ptr + tl.cast(row, tl.int64) * cols + col, dw, mask=mask)


def launch(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Our forward kernel, whatever `choose` would say."""
    table = as_rows(weight)
    tile = _trial("embedding") or plan(table.shape[1] // vector_of(table))
    y_bytes = ids.numel() * table.shape[1] * table.element_size()
    return _gather(ids, table, tile, stream=y_bytes > STREAMED_BYTES)


def _gather(ids: torch.Tensor, table: torch.Tensor, tile: Tile, *, stream: bool) -> torch.Tensor:
    ids1 = ids.contiguous().view(-1)
    rows, (vocab, cols) = ids1.numel(), table.shape
    y = torch.empty((rows, cols), dtype=table.dtype, device=table.device)
    vector = vector_of(table)
    vectors = cols // vector
    if rows * cols:
        _gather_kernel[(cdiv(rows * vectors, tile.block),)](
            ids1, table, y, rows, vocab, vectors, table.stride(0) // vector,
            BLOCK=tile.block, VECTOR=vector, ONE_ROW=vectors % tile.block == 0, STREAM=stream, **tile.options(),
        )  # fmt: skip
    return y.view(*ids.shape, cols)


def plan(vectors: int) -> Tile:
    """Two vectors a thread, and if that leaves two warps a program, all of one row."""
    block = BLOCK // 2 if vectors % BLOCK and vectors % (BLOCK // 2) == 0 else BLOCK
    return Tile(block=block, warps=block // 64)


def launch_backward(dy: torch.Tensor, ids: torch.Tensor, vocab: int, padding_idx: int = NO_PADDING) -> torch.Tensor:
    """The table's gradient by our kernels, in the data type of dy, summed in fp32."""
    ids1, dy2 = ids.contiguous().view(-1), as_rows(dy)
    rows, cols = dy2.shape
    new = functools.partial(torch.empty, device=dy.device)
    dw = new((vocab, cols), dtype=dy.dtype)
    keys = new(rows, dtype=torch.int32)
    if not rows * cols:
        return dw.zero_()
    blocks = (cdiv(rows, 256),)
    _keys_kernel[blocks](ids1, keys, rows, vocab, padding_idx, BLOCK=256, num_warps=4)
    keys, positions = torch.sort(keys, stable=True)
    starts, ends = torch.zeros((2, vocab), dtype=torch.int32, device=dy.device)
    _ends_kernel[blocks](keys, starts, ends, rows, vocab, BLOCK=256, num_warps=4)
    runs = rows // RUN
    parts = new((max(1, runs), cols), dtype=torch.float32)
    if runs:
        block = min(512, block_for(cols))
        _runs_kernel[(runs, cdiv(cols, block))](
            dy2, keys, positions, starts, ends, parts, rows, cols, vocab, dy2.stride(0),
            RUN=RUN, BLOCK=block, TOGETHER=16, SUMS=sums_of(dy), num_warps=max(1, block // 128),
        )  # fmt: skip
    tile = _trial("embedding_backward") or plan_backward(cols, dy.element_size())
    _rows_kernel[(cdiv(vocab, tile.rows), cdiv(cols, tile.block))](
        dy2, positions, starts, ends, parts, dw, vocab, cols, dy2.stride(0),
        RUN=RUN, ROWS=tile.rows, BLOCK=tile.block, TOGETHER=tile.stages, SUMS=sums_of(dy), **tile.options(),
    )  # fmt: skip
    return dw


def plan_backward(cols: int, itemsize: int) -> Tile:
    """Two rows of the table a program, since starting one that has nothing to sum costs time as well; narrow rows wait
    more than they move, so that more programs do better.

    `stages` rows of dy are on their way at once: two, so that the registers hold many programs.
    """
    block = min(block_for(cols), MOST_COLS * 2 // itemsize)
    rows = 1 if block * itemsize <= 2048 else 2
    return Tile(block=block, warps=max(1, block * itemsize // 1024), rows=rows, stages=2)


def vector_of(table: torch.Tensor) -> int:
    """Elements that one load takes: 16 bytes, or what divides the rows and their distance."""
    most = 16 // table.element_size()
    return math.gcd(most, table.shape[1], table.stride(0), table.data_ptr() // table.element_size())


def _trial(kernel: str) -> Tile | None:
    trial = TRIAL.get()
    return trial[1] if trial is not None and trial[0] == kernel else None


def _why_torch(ids: torch.Tensor, weight: torch.Tensor) -> str:
    if reason := why_no_kernel(weight):
        return reason
    if ids.dtype not in ID_DTYPES or ids.device != weight.device or weight.dim() != 2:
        return "ids must be int32 or int64 on the weight's GPU, the weight a matrix: PyTorch says what is wrong"
    if weight.numel() == 0 or ids.numel() == 0:
        return "nothing to look up"
    if ids.numel() >= 2**31 or weight.shape[0] >= 2**31 - 1:
        return "more than 2**31 ids or rows"
    return ""


def choose(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> Choice:
    """What `embedding(ids, weight)` runs, and why."""
    if reason := _why_torch(ids, weight):
        return Choice(provider="torch", kernel="torch.nn.functional.embedding", reason=reason)
    return Choice(provider="sublight", kernel="_gather_kernel", reason="a copy by vectors; a gradient that repeats")


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """weight[ids], with a gradient that is the same bits every time; the row `padding_idx` gets none.

    On a GPU an id that the table has not gives a row of NaN and no gradient (PyTorch stops the process's CUDA context);
    elsewhere PyTorch raises its own error.
    """
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise BadInput(f"padding_idx {padding_idx} is no row of a table of {weight.shape[0]}: use one that is, or None")
    if _why_torch(ids, weight):
        return reference(ids, weight, padding_idx)
    padding = NO_PADDING if padding_idx is None else padding_idx % weight.shape[0]
    return _embedding(ids, weight, padding)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ids, weight, ctx.padding_idx = inputs
    ctx.vocab = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return None, _embedding_backward(dy, ids, ctx.vocab, ctx.padding_idx), None


_embedding = LIBRARY.op(
    "embedding(Tensor ids, Tensor weight, SymInt padding_idx) -> Tensor",
    cpu=lambda ids, weight, padding_idx: F.embedding(ids, weight).contiguous(),
    cuda=lambda ids, weight, padding_idx: launch(ids, weight),
    fake=lambda ids, weight, padding_idx: weight.new_empty((*ids.shape, weight.shape[1])),
    backward=_backward,
    setup_context=_setup_context,
)
_embedding_backward = LIBRARY.op(
    "embedding_backward(Tensor dy, Tensor ids, SymInt vocab, SymInt padding_idx) -> Tensor",
    cpu=lambda dy, ids, vocab, padding_idx: torch.ops.aten.embedding_dense_backward(dy, ids, vocab, padding_idx, False),
    cuda=launch_backward,
    fake=lambda dy, ids, vocab, padding_idx: dy.new_empty((vocab, dy.shape[-1])),
)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """Ids as frequent as words are: the n-th about 1/n times as often as the first."""
    generator = generator_for(device, seed)
    vocab, kind = shape["vocab"], getattr(torch, dtype)
    drawn = torch.rand(shape["rows"], generator=generator, device=device, dtype=torch.float64)
    ids = ((vocab + 1.0) ** drawn - 1).long().clamp_(0, vocab - 1)
    return ids, torch.randn(vocab, shape["cols"], generator=generator, device=device, dtype=kind)


def _shapes(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple({"rows": rows, "cols": cols, "vocab": vocab} for rows, cols, vocab in sizes)


EMBEDDING = Op(
    name="embedding",
    summary="rows of a table by number, with a gradient that repeats bit for bit",
    reference=reference,
    call=embedding,
    launch=launch,
    launch_backward=lambda dy, ids, weight: (launch_backward(dy, ids, weight.shape[0]),),
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=tuple(Kernel(jit=jit) for jit in (_gather_kernel, _keys_kernel, _ends_kernel, _runs_kernel, _rows_kernel)),
    shapes=_shapes(
        *((65536, 4096, 32000), (32768, 4096, 128256), (65536, 768, 50257), (65536, 1600, 50257)),
        *((65536, 2560, 51200), (32768, 5120, 151936), (16384, 8192, 128256)),
        *((1, 4096, 128256), (16, 4096, 128256), (128, 4096, 128256)),
    ),
    test_shapes=_shapes((1, 1, 1), (3, 127, 5), (65, 128, 40), (257, 24, 3), (300, 129, 7), (200, 33, 700)),
    library_args=lambda ids, weight: (ids, weight, NO_PADDING),
)
