"""How linear_cross_entropy cuts its matrix products, rows into chunks and the vocabulary into parts, and what is
launched between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv
from sublight.backend.launch import Step
from sublight.op import Buffer, Plan
from sublight.ops.cross_entropy.batch import loss_buffers, total_step
from sublight.ops.cross_entropy.cross_entropy import row_losses
from sublight.ops.cross_entropy.finished import scale_step
from sublight.ops.cross_entropy.options import Options, is_late
from sublight.ops.kernels.rows import Rows, copies_of, rows_of

# Of the weight's gradient as it grows by chunks; past that, or where there is room, it is fp32. On an H200 in bf16 four
# roundings have 1.45 to over 2 times PyTorch's largest error, eight 2.03; two have 0.99 to 1.04.
MOST_ROUNDINGS = 2
CHUNK_BYTES = 1280 * 2**20  # of logits held at once: two chunks for 8192 tokens of today's largest vocabularies
HELD_BYTES = 256 * 2**20  # logits that are held at once, if they are all; unless more than CHUNK_BYTES are allowed
ROW_STEP, TILE_FEATURES = 128, 256  # what a tile of a matrix product takes; rows of a chunk are a multiple
EVEN = 64  # a vocabulary that 8 does not divide is cut where this does
WAVE_COST = 3  # a wave of tiles, in passes over the weight's gradient: 1.5 ms against 0.5 for 4096 features on an H200


def chunks_of(
    rows: int, row_bytes: int, chunk_bytes: int, *, features: int = 1, multiprocessors: int = 132
) -> Iterator[slice]:
    """Rows shared out evenly in steps of a tile, each chunk's logits within `chunk_bytes` where one step is.

    Of the counts that do this it is the cheapest: a chunk costs a pass over the weight's gradient, and its product with
    the weight takes a tile for so many rows and features, in whole waves over the multiprocessors.

    >>> [chunk.stop - chunk.start for chunk in chunks_of(1000, 2 * 50257, 2**25)]
    [256, 256, 256, 232]
    >>> {chunk.stop - chunk.start for chunk in chunks_of(8192, 2 * 128256, 1280 * 2**20, features=4096)}
    {4096}
    >>> [chunk.stop - chunk.start for chunk in chunks_of(32768, 2 * 50304, 2**40, features=768)]
    [32768]
    """
    most = max(1, chunk_bytes // (row_bytes * ROW_STEP))
    steps, across = cdiv(rows, ROW_STEP), cdiv(features, TILE_FEATURES)
    is_held = rows * row_bytes <= HELD_BYTES or chunk_bytes > CHUNK_BYTES
    fewest = max(cdiv(steps, most), 1 if is_held else min(steps, 2))

    def cost(count: int) -> int:
        each = (steps * (i + 1) // count - steps * i // count for i in range(count))
        return count + WAVE_COST * sum(cdiv(size * across, multiprocessors) for size in each)

    most_chunks = max(fewest, min(2 * fewest, steps, MOST_ROUNDINGS))
    count = min(range(fewest, most_chunks + 1), key=cost)
    for i in range(count):
        yield slice(steps * i // count * ROW_STEP, min(rows, steps * (i + 1) // count * ROW_STEP))


def parts_of(classes: int) -> list[slice]:
    """The vocabulary as products take it: one of odd width is several times as slow, so its end is one of its own, and
    the first: its small sums are rounded then, not the large ones.

    >>> parts_of(50257), parts_of(128256)
    ([slice(50240, 50257, None), slice(0, 50240, None)], [slice(0, 128256, None)])
    """
    whole = classes // EVEN * EVEN
    return [slice(whole, classes), slice(0, whole)] if classes % 8 and whole else [slice(0, classes)]


class Chunk(NamedTuple):
    """Some rows, and what is launched between the products that give and take their logits."""

    rows: slice
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPlan(Plan):
    """A plan whose launches stand between matrix products."""

    chunks: tuple[Chunk, ...]
    parts: tuple[slice, ...]  # of the vocabulary: a product each
    alpha: float  # what the weight's gradient is multiplied by


def plan_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    options: Options,
    chunk_bytes: int,
    wants: tuple[bool, bool],
    *,
    wide: bool = False,
    dloss: torch.Tensor | None = None,
    outputs: tuple[str, ...] = ("loss", "dh", "dw", "count"),
) -> ChunkedPlan:
    """Loss, gradients of hidden and weight (of no size where not wanted), count of labels.

    With `dloss`, one number a row, the rows' gradients are scaled by it: what a loss without reduction needs.
    """
    h, w, gpu = rows_of(hidden), rows_of(weight), facts(hidden)
    classes, item = w.rows, h.itemsize
    wants_hidden, wants_weight = wants
    sizes = {"features": h.cols, "multiprocessors": gpu.multiprocessors}
    slices = list(chunks_of(h.rows, classes * item, chunk_bytes, **sizes))
    room = 16 * cdiv(classes, 16)  # so that every row starts at a 16-byte boundary
    losses = "loss" if options.reduction == "none" else "losses"
    steps: dict[int, tuple[Step, ...]] = {}
    words = 0
    for rows in {each.stop - each.start for each in slices}:
        x = Rows(rows, classes, room, item, is_aligned=True)
        found = row_losses(x, x if any(wants) else None, options, hidden, losses=losses, is_counted=True)
        steps[rows], words = found.steps, max(words, found.words)
        if dloss is not None:
            steps[rows] += (scale_step(x, dloss, late=False, on="logits dloss count"),)
    often = len(slices) > MOST_ROUNDINGS or (len(slices) > 1 and 4 * weight.numel() <= HELD_BYTES)
    buffers = loss_buffers(hidden, labels, loss_dtype(hidden, wide), options) | {
        "dh": Buffer(shape=tuple(hidden.shape) if wants_hidden else (0,), dtype=hidden.dtype),
        "dw": Buffer(shape=tuple(weight.shape) if wants_weight else (0,), dtype=weight.dtype),
        "logits": Buffer(shape=(max(steps), room), dtype=hidden.dtype),
    }
    if wants_weight and item == 2 and often:  # its gradient is added up in fp32, and rounded once
        buffers["exact_dw"] = Buffer(shape=tuple(weight.shape), dtype=torch.float32)
    if words:
        buffers["part"] = Buffer(shape=(words,), dtype=torch.int64)
    chunks = tuple(Chunk(each, steps[each.stop - each.start]) for each in slices)
    total = () if options.reduction == "none" else (total_step(h.rows, options, is_counted=True),)
    return ChunkedPlan(
        provider="sublight",
        reason="some rows' logits at a time, between torch's products",
        copies=copies_of(hidden=h.is_copy, weight=w.is_copy, labels=not labels.is_contiguous()),
        buffers=buffers,
        steps=(*(step for chunk in chunks for step in chunk.steps), *total),
        outputs=outputs,
        chunks=chunks,
        parts=tuple(parts_of(classes)),
        alpha=alpha_of(h.rows, late=is_late(hidden, options)),
    )


def alpha_of(rows: int, *, late: bool) -> float:
    """What the weight's gradient is multiplied by until the backward pass: a power of two, so exact.

    Only where one over the count waits for that: fp16 then holds a sum over rows, which must neither overflow nor, with
    a loss scale yet to come, vanish. This keeps it at 256 times a mean's gradient.
    """
    return 2.0 ** min(0, 8 - math.ceil(math.log2(rows))) if late else 1.0


def loss_dtype(x: torch.Tensor, wide: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
