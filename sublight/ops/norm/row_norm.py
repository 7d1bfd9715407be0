"""The kernels behind layer_norm and rms_norm: one row's statistics, then the row scaled; read x, write y.

RMSNorm is LayerNorm without the mean and the bias, so `CENTER` is a constant of the same kernels. A row that fills no
power of two is held as two blocks: 5,120 columns in one block of 8,192 took 161 µs on an H200, in two 131 µs.
"""

from __future__ import annotations

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.errors import BadInput
from sublight.op import Choice, Kernel
from sublight.ops.kernels.rows import ODD_WIDTHS, aligned_as, as_rows, block_for, facts, forget, is_packed, split
from sublight.ops.norm.row_norm_backward import KERNELS as BACKWARD_KERNELS
from sublight.ops.norm.row_norm_backward import SHARES, _shares_kernel, backward, fake_backward
from sublight.ops.record.tuning import Tile, planned, tile_for

__all__ = ["KERNELS", "SHARES", "_shares_kernel", "backward", "fake_backward", "forward"]
TILE_COLS = 512  # up to here several rows share a program
MAX_COLS = 16384  # up to here a multiprocessor's registers hold a row in fp32 …
MAX_PACKED_COLS = 65536  # … and in its 16-bit form
FEW_ROWS = 2  # a multiprocessor: up to here a row's own latency counts, not how many are under way
STREAM_BLOCK = 8192


@triton.jit
def reciprocal_root(squares, cols, eps):
    """1 / sqrt(squares / cols + eps), rounded as IEEE says: once a row, so the hardware's quick forms save nothing."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, cols * 1.0) + eps))


@triton.jit
def load_columns(w_ptr, b_ptr, col, cols, CENTER: tl.constexpr):
    """Weight and bias. With few rows they are loaded next to x, so that the two waits overlap; with many rows after the
    statistics, out of a cache that has them by then, and in no register before."""
    place = aligned_as(cols) + col
    w = tl.load(w_ptr + place, mask=col < cols, other=0.0)
    b = w
    if CENTER:
        b = tl.load(b_ptr + place, mask=col < cols, other=0.0)
    return w, b


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, rows, cols, x_stride, eps,
    CENTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    if CENTER:
        mean = tl.div_rn(tl.sum(x, 1), cols * 1.0)[:, None]
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(mask, x - mean, 0.0)
    rstd = reciprocal_root(tl.sum(x * x, 1)[:, None], cols, eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if not EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    y = x * rstd * w.to(tl.float32)
    if CENTER:
        y += b.to(tl.float32)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, cols, x_stride, eps,
    CENTER: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * cols
    col = tl.arange(0, BLOCK)
    mask = col < (cols if TAIL == 0 else BLOCK)  # the first of two blocks is full
    x = tl.load(x_row + col, mask=mask, other=0.0)
    if TAIL > 0:
        far = BLOCK + tl.arange(0, TAIL)
        rest = tl.load(x_row + far, mask=far < cols, other=0.0)
    if EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
        if TAIL > 0:
            far_w, far_b = load_columns(w_ptr, b_ptr, far, cols, CENTER)
    mean = 0.0
    if CENTER:
        total = tl.sum(x.to(tl.float32), 0)
        if TAIL > 0:
            total += tl.sum(rest.to(tl.float32), 0)
        mean = tl.div_rn(total, cols * 1.0)
        tl.store(mean_ptr + row, mean)
        x = forget(x, mean, PACKED)
        if TAIL > 0:
            rest = forget(rest, mean, PACKED)
    centred = tl.where(mask, x.to(tl.float32) - mean, 0.0)
    squares = tl.sum(centred * centred, 0)
    if TAIL > 0:
        centred = tl.where(far < cols, rest.to(tl.float32) - mean, 0.0)
        squares += tl.sum(centred * centred, 0)
    rstd = reciprocal_root(squares, cols, eps)
    tl.store(rstd_ptr + row, rstd)
    x = forget(x, rstd, PACKED)
    if not EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    tl.store(y_row + col, scaled(x, mean, rstd, w, b, CENTER).to(y_ptr.dtype.element_ty), mask=mask)
    if TAIL > 0:
        rest = forget(rest, rstd, PACKED)
        if not EARLY:
            far_w, far_b = load_columns(w_ptr, b_ptr, far, cols, CENTER)
        y = scaled(rest, mean, rstd, far_w, far_b, CENTER)
        tl.store(y_row + far, y.to(y_ptr.dtype.element_ty), mask=far < cols)


@triton.jit
def scaled(x, mean, rstd, w, b, CENTER: tl.constexpr):
    y = (x.to(tl.float32) - mean) * rstd * w.to(tl.float32)
    if CENTER:
        y += b.to(tl.float32)
    return y


@triton.jit
def _stream_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, cols, x_stride, eps, CENTER: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    mean, squares, count = 0.0, 0.0, 0.0
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        size = tl.minimum(cols - start, BLOCK).to(tl.float32)
        if CENTER:  # chunks merge by their means and squared deviations, so that a large mean costs no digits
            chunk_mean = tl.sum(x, 0) / size
            deviation = tl.where(mask, x - chunk_mean, 0.0)
            shift = chunk_mean - mean
            squares += tl.sum(deviation * deviation, 0) + shift * shift * count * size / (count + size)
            mean += shift * size / (count + size)
            count += size
        else:
            squares += tl.sum(x * x, 0)
    rstd = reciprocal_root(squares, cols, eps)
    if CENTER:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
        y = (x - mean) * rstd * w.to(tl.float32)
        if CENTER:
            y += b.to(tl.float32)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


KERNELS = (
    Kernel(jit=_tile_kernel, narrow=ODD_WIDTHS),
    Kernel(
        jit=_row_kernel,
        spills="up to 56 bytes a thread at 65,536 columns (an H200 32), in the fastest of six tiles that were measured",
    ),
    Kernel(jit=_stream_kernel, narrow=ODD_WIDTHS),
    *BACKWARD_KERNELS,
)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, and each row's mean (empty without a bias: RMSNorm) and reciprocal deviation for the backward pass."""
    x2 = as_rows(x)
    rows, cols = x2.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows if bias is not None else 0, dtype=torch.float32, device=x.device)
    center = bias is not None
    weight, bias = weight.contiguous(), (weight if bias is None else bias).contiguous()
    name = "layer_norm" if center else "rms_norm"
    gpu = facts(x)
    few = rows <= FEW_ROWS * gpu.multiprocessors
    tile = plan(name, cols, x.element_size(), packed=is_packed(x2), capability=gpu.capability, few=few)
    if tile is None:
        _stream_kernel[(rows,)](
            x2, weight, bias, y, mean, rstd, cols, x2.stride(0), eps, CENTER=center, BLOCK=STREAM_BLOCK, num_warps=16
        )
    elif cols <= TILE_COLS:
        _tile_kernel[(cdiv(rows, tile.rows),)](
            x2, weight, bias, y, mean, rstd, rows, cols, x2.stride(0), eps,
            CENTER=center, ROWS=tile.rows, BLOCK=tile.block, EARLY=few, **tile.options(),
        )  # fmt: skip
    else:
        _row_kernel[(rows,)](
            x2, weight, bias, y, mean, rstd, cols, x2.stride(0), eps,
            CENTER=center, BLOCK=tile.block, TAIL=tile.tail, PACKED=tile.packed, EARLY=few, **tile.options(),
        )  # fmt: skip
    return y, mean, rstd


def choose(x: torch.Tensor) -> Choice:
    """Which of the forward kernels takes x, and why."""
    cols = x.shape[-1]
    if plan("", cols, x.element_size(), packed=x.element_size() == 2 and cols % 16 == 0) is None:
        return Choice(provider="sublight", kernel="_stream_kernel", reason=f"{cols} columns: in chunks, twice")
    if cols <= TILE_COLS:
        return Choice(provider="sublight", kernel="_tile_kernel", reason=f"{cols} columns: several rows a program")
    return Choice(provider="sublight", kernel="_row_kernel", reason=f"{cols} columns: one row in registers")


def check_width(x: torch.Tensor, *columns: torch.Tensor) -> None:
    """PyTorch's own check, before a kernel reads past the end of a short weight."""
    for column in columns:
        if column.shape != x.shape[-1:]:
            raise BadInput(f"weight and bias must have the {x.shape[-1]} columns of x, not {tuple(column.shape)}")


def fake_forward(x: torch.Tensor, *, center: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The shapes that `forward` gives."""
    rows = x.numel() // x.shape[-1]
    stats = [x.new_empty(size, dtype=torch.float32) for size in (rows if center else 0, rows)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), stats[0], stats[1]


@planned
def plan(
    kernel: str, cols: int, itemsize: int, *, packed: bool, capability: int = 90, few: bool = False
) -> Tile | None:
    """How the forward pass shares a row out; None where no multiprocessor holds it."""
    whole = block_for(cols)
    if whole > MAX_COLS and not (packed and whole <= MAX_PACKED_COLS):
        return None
    block, tail = (whole, 0) if cols <= TILE_COLS else split(cols)
    if few and whole <= MAX_COLS:  # all the threads there are, each with one load
        return Tile(block=block, tail=tail, warps=min(32, max(1, whole // 256)))
    if cols <= TILE_COLS:  # about 2 KB a warp, so that few reductions leave their warp
        return Tile(rows=max(1, 1024 // whole), block=whole, warps=max(1, whole * itemsize // 2048))
    if whole > MAX_COLS:  # in two blocks always, one after the other: fewer registers at once
        block, tail = (block, tail) if tail else (block // 2, block // 2)
        rule = Tile(block=block, tail=tail, warps=16 if whole <= 32768 else 32, registers=64, packed=True)
    else:  # few warps, each with much of the row: the barriers of a reduction cost more than registers do here
        rule = Tile(block=block, tail=tail, warps=max(1, block // (1024 if itemsize == 2 else 512)), packed=packed)
    return tile_for(kernel, cols, itemsize, packable=packed, capability=capability, rule=rule)
