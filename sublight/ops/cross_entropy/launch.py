"""Which kernel of cross_entropy takes which rows, and its launches; linear_cross_entropy launches them, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2
from sublight.ops.cross_entropy.kernels import (
    CLEAR_BLOCK,
    _prepare_kernel,
    _row_kernel,
    _scale_kernel,
    _tile_kernel,
    _total_kernel,
    _trailing_kernel,
)
from sublight.ops.cross_entropy.terms import FEW_LABELS
from sublight.ops.kernels.rows import as_rows, is_packed, is_ragged, sums_of
from sublight.ops.record.tuning import TUNED_CAPABILITY, Tile, tile_for
from sublight.ops.softmax.launch import LAG_BYTES, ROW_BYTES, TILE_COLS, plan

SCALE_BLOCK = 4096
REGISTERS = {8192: 64, 16384: 80, 32768: 128}  # a packed row of eight warps, two rows to a multiprocessor or more
NARROW_COLS = 512  # up to here several rows share a program; above, a warp takes 2 KB of one


class Options(NamedTuple):
    """What the loss is, beyond logits and labels."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    reduction: str = "mean"


OPTIONS_SCHEMA = "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction"  # as in Options


def is_late(logits: torch.Tensor, options: Options) -> bool:
    """Whether one over the count waits for the backward pass."""
    return options.reduction == "mean" and logits.dtype == torch.float16


def loss_dtype(logits: torch.Tensor) -> torch.dtype:
    """Of the rows' losses, before they are added up."""
    return torch.float32 if logits.element_size() == 2 else torch.float64


def kernel_for(x: torch.Tensor, d: torch.Tensor, options: Options) -> tuple[str, Tile]:
    """Which kernel takes these rows, their gradient going to `d`, and with what tile."""
    item, cols = x.element_size(), x.shape[1]
    packed, capability = is_packed(x, d), facts(x).capability
    plain = not options.softcap and not options.label_smoothing  # else arithmetic needs registers more than rows do
    tile = plan("cross_entropy", cols, item, packed=packed, capability=capability)
    ragged = cols > TILE_COLS and is_ragged(x, d)
    if tile is None or ragged or not (plain or tile.block * item <= ROW_BYTES // 2):
        name, table, tile = "trailing", "cross_entropy_trailing", Tile(block=4096, warps=4)
    else:
        name, table = ("tile" if cols <= NARROW_COLS else "row"), "cross_entropy"
        if NARROW_COLS < cols <= TILE_COLS:
            tile = Tile(block=tile.block, warps=max(1, tile.block * item // 2048), packed=packed)
        elif packed and plain and tile.block in REGISTERS:
            tile = replace(tile, warps=8, registers=REGISTERS[tile.block])
    if not plain or capability != TUNED_CAPABILITY:  # fewer registers than it asks for are tried out there alone
        tile = replace(tile, registers=None)
    if not plain and name == "trailing":
        tile = replace(tile, warps=2 * tile.warps)
    return name, tile_for(table, cols, item, packable=packed and plain, capability=capability, rule=tile)


def launch_rows(
    x: torch.Tensor,
    labels: torch.Tensor,
    options: Options,
    *,
    losses: torch.Tensor,
    d: torch.Tensor | None,
    count: torch.Tensor,
    counted: bool = False,
) -> bool:
    """Each row's loss into `losses`, and with `d` its gradient there, which may be x itself.

    A mean's gradient is divided by `count`, which is worked out here unless it is already `counted`. Gives whether
    `count` holds the labels' count afterwards: few are counted on the way, by each program for itself.
    """
    rows, cols = x.shape
    into = x if d is None else d
    name, tile = kernel_for(x, into, options)
    mean = d is not None and options.reduction == "mean" and not is_late(x, options)
    inline = mean and not counted and rows <= FEW_LABELS.value and name != "trailing"
    flags = {
        "GRAD": d is not None,
        "COUNT": "labels" if inline else "given" if mean else "no",
        "SMOOTH": options.label_smoothing > 0,
        "CAP": options.softcap > 0,
        "Z": options.z_loss > 0,
        "SUMS": sums_of(x),
    }
    numbers = (options.ignore_index, float(options.label_smoothing), float(options.z_loss), float(options.softcap))
    strides = (rows, cols, x.stride(0), into.stride(0))
    to_count = mean and not counted and not inline
    if name == "trailing":
        vector = 16 // x.element_size() if is_ragged(x, into) else 1
        parts = cdiv(cols + vector - 1, tile.block)
        lag = min(rows, cdiv(LAG_BYTES, parts * tile.block * x.element_size()))  # rows
        words = rows * parts * (2 if flags["SMOOTH"] else 1)
        part = torch.empty(words, dtype=torch.int64, device=x.device)
        _prepare(labels, count, part, options, to_count)
        _trailing_kernel[((rows + lag) * parts,)](
            x, labels, count, into, losses, part, *strides, lag, parts, *numbers,
            BLOCK=tile.block, PARTS=next_power_of_2(parts), VECTOR=vector, **flags, **tile.options(),
        )  # fmt: skip
        return counted or to_count
    if to_count:
        _prepare(labels, count, labels[:0], options, True)
    if name == "tile":
        _tile_kernel[(cdiv(rows, tile.rows),)](
            x, labels, count, into, losses, *strides, *numbers,
            ROWS=tile.rows, BLOCK=tile.block, **flags, **tile.options(),
        )  # fmt: skip
    else:
        _row_kernel[(rows,)](
            x, labels, count, into, losses, *strides, *numbers,
            BLOCK=tile.block, PACKED=tile.packed, **flags, **tile.options(),
        )  # fmt: skip
    return counted or to_count


def _prepare(labels: torch.Tensor, count: torch.Tensor, part: torch.Tensor, options: Options, to_count: bool) -> None:
    block, warps = _step(labels.numel(), 8)
    _prepare_kernel[(max(1, cdiv(part.numel(), CLEAR_BLOCK)),)](
        labels, count, part, labels.numel(), part.numel(), options.ignore_index,
        COUNT=to_count, LABELS=block if to_count else 1, BLOCK=CLEAR_BLOCK, num_warps=warps if to_count else 8,
    )  # fmt: skip


def _step(rows: int, row_bytes: int) -> tuple[int, int]:
    """Rows that a lone program takes at a time, and its warps: nobody else works meanwhile, so all that registers hold
    is on its way at once."""
    return (1024, 4) if rows <= 1024 else (2**17 // row_bytes, 32)


def new_count(x: torch.Tensor, options: Options) -> torch.Tensor:
    """Room for the count of labels, where a mean needs one."""
    return torch.empty(() if options.reduction == "mean" else 0, dtype=torch.float32, device=x.device)


def new_losses(x: torch.Tensor, rows: int, options: Options) -> torch.Tensor:
    return torch.empty(rows, dtype=x.dtype if options.reduction == "none" else loss_dtype(x), device=x.device)


def launch_total(
    losses: torch.Tensor,
    labels: torch.Tensor,
    count: torch.Tensor,
    dtype: torch.dtype,
    options: Options,
    *,
    counted: bool,
) -> torch.Tensor:
    """The rows' losses as one; a mean's `count` is written, too, unless it is already `counted`."""
    loss = torch.empty((), dtype=dtype, device=losses.device)
    mode = "no" if options.reduction != "mean" else "given" if counted else "labels"
    block, warps = _step(losses.numel(), 16 if mode == "labels" else 8)
    _total_kernel[(1,)](
        losses, labels, loss, count, losses.numel(), options.ignore_index,
        COUNT=mode, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return loss


def run(
    logits: torch.Tensor, labels: torch.Tensor, options: Options, *, gradient: Literal["no", "new", "in place"]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, gradient of the logits (of no size where it is not wanted), count of labels (the same)."""
    x, target = as_rows(logits.detach()), labels.reshape(-1).contiguous()
    rows, cols = x.shape
    d = None
    if gradient == "in place" and (rows == 1 or x.stride(0) >= cols):  # rows that share memory have no place to lie in
        d = x
    elif gradient != "no":
        d = torch.empty_like(x, memory_format=torch.contiguous_format)
    losses, count = new_losses(x, rows, options), new_count(x, options)
    counted = launch_rows(x, target, options, losses=losses, d=d, count=count)
    if options.reduction == "none":
        loss = losses.view(labels.shape)
    else:
        loss = launch_total(losses, target, count, x.dtype, options, counted=counted)
    return loss, x.new_empty(0) if d is None else d.view(logits.shape), count


def launch_scale(d: torch.Tensor, dloss: torch.Tensor, count: torch.Tensor, late: bool, factor: float = 1.0) -> None:
    """d *= dloss (and one over the count where that is `late`), row by row where there is a loss a row."""
    flat = d.view(-1, d.shape[-1]) if d.dim() != 2 else d
    by = dloss.reshape(-1)
    rows, cols = flat.shape
    chunks = cdiv(cols, SCALE_BLOCK)
    programs = 8 * facts(d).multiprocessors  # few: where there is nothing to do, ending them is all that this costs
    across = min(rows, programs)
    _scale_kernel[(across, min(chunks, max(1, programs // across)))](
        flat, by, count, rows, cols, flat.stride(0), by.stride(0), float(factor),
        PER_ROW=dloss.dim() > 0, LATE=late, BLOCK=SCALE_BLOCK, num_warps=8,
    )  # fmt: skip
