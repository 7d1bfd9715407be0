"""What is one number of a whole batch: how many labels count, and the sum or mean of the rows' losses."""

from __future__ import annotations

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.op import Buffer, Kernel
from sublight.ops.cross_entropy.options import Options

CLEAR_BLOCK = 4096  # words that a program clears


@triton.jit
def _prepare_kernel(
    label_ptr, count_ptr, part_ptr, rows, words, ignore_index,
    COUNT: tl.constexpr, LABELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros for what `trailing` publishes, and by the first program the count of labels that are not ignored."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < words)
    if COUNT:  # noqa: SIM102 (one for the compiler, one for the GPU)
        if tl.program_id(0) == 0:
            counts = tl.zeros([LABELS], tl.int32)
            for start in range(0, rows, LABELS):
                row = start + tl.arange(0, LABELS)
                label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
                counts += (label != ignore_index).to(tl.int32)
            tl.store(count_ptr, tl.sum(counts, 0).to(tl.float32))


@triton.jit
def _total_kernel(
    loss_ptr, label_ptr, out_ptr, count_ptr, rows, ignore_index, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The rows' losses added up in a fixed order, and for a mean over how many."""
    totals = tl.zeros([BLOCK], loss_ptr.dtype.element_ty)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        totals += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        if COUNT == "labels":
            label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
            counts += (label != ignore_index).to(tl.int32)
    total = tl.sum(totals, 0)
    if COUNT == "labels":
        count = tl.sum(counts, 0).to(tl.float32)
        tl.store(count_ptr, count)
        total = total / count  # none: 0 / 0 is NaN, as PyTorch has it
    elif COUNT == "given":
        total = total / tl.load(count_ptr)
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty))


KERNELS = (Kernel(jit=_prepare_kernel), Kernel(jit=_total_kernel))


def prepare_step(rows: int, words: int, options: Options, *, is_counting: bool) -> Step:
    """Clear so many words of `part`, and count the labels where `is_counting`."""
    block, warps = lone_tile(rows, 8)
    return Step(
        _prepare_kernel, (max(1, cdiv(words, CLEAR_BLOCK)),), rows, words, options.ignore_index,
        on="labels count part" if words else "labels count labels",
        COUNT=is_counting, LABELS=block if is_counting else 1, BLOCK=CLEAR_BLOCK,
        num_warps=warps if is_counting else 8,
    )  # fmt: skip


def total_step(rows: int, options: Options, *, is_counted: bool) -> Step:
    """The rows' `losses` as one `loss`; a mean's `count` is written, too, unless `is_counted`."""
    mode = "no" if options.reduction != "mean" else "given" if is_counted else "labels"
    block, warps = lone_tile(rows, 16 if mode == "labels" else 8)
    return Step(
        _total_kernel, (1,), rows, options.ignore_index,
        on="losses labels loss count", COUNT=mode, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def lone_tile(rows: int, row_bytes: int) -> tuple[int, int]:
    """Rows that a lone program takes at a time, and its warps: nobody else works meanwhile, so all that registers hold
    is on its way at once."""
    return (1024, 4) if rows <= 1024 else (2**17 // row_bytes, 32)


def loss_buffers(like: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype, options: Options) -> dict[str, Buffer]:
    """The loss, the rows' losses in more digits where they are added up, and room for a mean's count of labels."""
    count = Buffer(shape=() if options.reduction == "mean" else (0,), dtype=torch.float32)
    if options.reduction == "none":
        return {"loss": Buffer(shape=tuple(labels.shape), dtype=like.dtype), "count": count}
    wide = torch.float32 if like.element_size() == 2 else torch.float64
    losses = Buffer(shape=(labels.numel(),), dtype=wide)
    return {"loss": Buffer(shape=(), dtype=dtype), "count": count, "losses": losses}
