"""The gradient of an embedding's table, without atomics: the same bits every time.

Ids are sorted (stable, on the device), so that the positions of one row of the table stand together in their order. A
program sums one row's; where a token is so frequent that one program would hold up the rest, programs of a launch
before have summed runs of its positions. No grid depends on the data, so a CUDA graph captures it all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.op import Buffer, Kernel, Plan
from sublight.ops.kernels.rows import add_pairs, block_for, copies_of, rows_of, sums_of
from sublight.ops.record.by_name import take, tensors_of
from sublight.ops.record.library import Registered
from sublight.ops.record.tuning import TRIAL, Tile

RUN = 64  # positions that a program sums ahead of a frequent token's own program
MOST_COLS = 4096  # of a row that one program sums
NO_PADDING = -1


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


def plan_backward(dy: torch.Tensor, ids: torch.Tensor, vocab: int, padding_idx: int) -> Plan:
    """The table's gradient, in the data type of dy, summed in fp32: what is sorted, then what follows the sort."""
    grads = rows_of(dy)
    rows, cols, apart = grads.rows, grads.cols, grads.apart
    runs, sums = rows // RUN, sums_of(dy)
    tile = trial("embedding_backward") or tile_of_backward(cols, grads.itemsize)
    blocks, block = (cdiv(rows, 256),), min(512, block_for(cols))
    steps = (
        Step(_keys_kernel, blocks, rows, vocab, padding_idx, on="ids keys", BLOCK=256, num_warps=4),
        Step(_ends_kernel, blocks, rows, vocab, on="keys starts ends", BLOCK=256, num_warps=4),
        Step(
            _runs_kernel, (runs, cdiv(cols, block)), rows, cols, vocab, apart,
            on="dy keys positions starts ends parts",
            RUN=RUN, BLOCK=block, TOGETHER=16, SUMS=sums, num_warps=max(1, block // 128),
        ),
        Step(
            _rows_kernel, (cdiv(vocab, tile.rows), cdiv(cols, tile.block)), vocab, cols, apart,
            on="dy positions starts ends parts dw", tile=tile,
            RUN=RUN, ROWS=tile.rows, BLOCK=tile.block, TOGETHER=tile.stages, SUMS=sums, **tile.options(),
        ),
    )  # fmt: skip
    buffers = {
        "dw": Buffer(shape=(vocab, cols), dtype=dy.dtype, is_zero=not rows),
        "keys": Buffer(shape=(rows,), dtype=torch.int32),
        "bounds": Buffer(shape=(2, vocab), dtype=torch.int32, is_zero=True),  # starts and ends
        "parts": Buffer(shape=(max(1, runs), cols), dtype=torch.float32),
    }
    return Plan(
        provider="sublight",
        reason="positions sorted by id, each row's summed in their order",
        copies=copies_of(dy=grads.is_copy, ids=not ids.is_contiguous()),
        buffers=buffers,
        steps=tuple(step for step in steps if math.prod(step.grid)) if rows else (),
        outputs=("dw",),
    )


def tile_of_backward(cols: int, itemsize: int) -> Tile:
    """Two rows of the table a program, since starting one that has nothing to sum costs time as well; narrow rows wait
    more than they move, so that more programs do better.

    `stages` rows of dy are on their way at once: two, so that the registers hold many programs.
    """
    block = min(block_for(cols), MOST_COLS * 2 // itemsize)
    rows = 1 if block * itemsize <= 2048 else 2
    return Tile(block=block, warps=max(1, block * itemsize // 1024), rows=rows, stages=2)


def _run_backward(plan: Plan, dy: torch.Tensor, ids: torch.Tensor, vocab: int, padding_idx: int) -> torch.Tensor:
    """The plan's launches, and between the first and the others the sort."""
    tensors = tensors_of(plan, dy=dy, ids=ids)
    for step in plan.steps[:1]:
        take(step, tensors)
        tensors["keys"], tensors["positions"] = torch.sort(tensors["keys"], stable=True)
        tensors["starts"], tensors["ends"] = tensors["bounds"].unbind()
    for step in plan.steps[1:]:
        take(step, tensors)
    return tensors["dw"]


def by_torch(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[torch.Tensor]:
    ids, vocab, padding_idx = saved["ids"], saved["vocab"], saved["padding_idx"]
    known = (ids >= 0) & (ids < vocab)  # PyTorch's op would read out of bounds
    dy = torch.where(known.unsqueeze(-1), grads[0], 0.0)
    return (torch.ops.aten.embedding_dense_backward(dy, torch.where(known, ids, 0), vocab, padding_idx, False),)


embedding_backward = Registered(
    schema="embedding_backward(Tensor dy, Tensor ids, SymInt vocab, SymInt padding_idx) -> Tensor dw",
    plan=plan_backward,
    launch=_run_backward,
    fake=lambda dy, ids, vocab, padding_idx: dy.new_empty((vocab, dy.shape[-1])),
    reference=lambda dy, ids, vocab, padding_idx: torch.ops.aten.embedding_dense_backward(
        dy, ids, vocab, padding_idx, False
    ),
)


def launch_backward(dy: torch.Tensor, ids: torch.Tensor, vocab: int, padding_idx: int = NO_PADDING) -> torch.Tensor:
    """The table's gradient by our kernels, whether or not they win."""
    return embedding_backward.by_kernels(dy, ids, vocab, padding_idx)  # type: ignore[no-any-return]


def trial(kernel: str) -> Tile | None:
    """The tile that is tried now for this kernel (`bench --tune`), if one is."""
    found = TRIAL.get()
    return found[1] if found is not None and found[0] == kernel else None


KERNELS = tuple(Kernel(jit=jit) for jit in (_keys_kernel, _ends_kernel, _runs_kernel, _rows_kernel))
