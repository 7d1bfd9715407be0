"""The kernels behind layer_norm and rms_norm: one row's statistics, then the row scaled; read x, write y.

RMSNorm is LayerNorm without the mean and the bias, so `CENTER` is a constant of the same kernels. The backward pass
keeps one program on each multiprocessor busy with many rows: it adds up its share of the weight's gradient on the way,
in a fixed order, so the result is the same every time; a second launch adds the shares.
"""

from __future__ import annotations

import torch

from sublight.jit import tl, triton
from sublight.op import BadInput, Choice, Kernel
from sublight.ops.rows import Facts, as_rows, block_for, facts, forget, is_interpreted, is_packed
from sublight.ops.tuning import Tile, tile_for

TILE_COLS = 2048  # up to here several rows share a program
MAX_COLS = 16384  # up to here a multiprocessor's registers hold a row in fp32 …
MAX_PACKED_COLS = 32768  # … and in its 16-bit form
FEW_ROWS = 2  # a multiprocessor: up to here a row's own latency counts, not how many are under way
STREAM_BLOCK = 8192
BACKWARD_BYTES = 32 * 1024  # of x; with dy, the weight and the fp32 sums this is what the registers hold
SHARES = 32  # of the weight's gradient that one step of the second launch adds


@triton.jit
def reciprocal_root(squares, cols, eps):
    """1 / sqrt(squares / cols + eps), rounded as IEEE says: once a row, so the hardware's quick forms save nothing."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, cols * 1.0) + eps))


@triton.jit
def load_columns(w_ptr, b_ptr, col, cols, CENTER: tl.constexpr):
    """Weight and bias. With few rows they are loaded next to x, so that the two waits overlap; with many rows after the
    statistics, out of a cache that has them by then, and in no register before."""
    w = tl.load(w_ptr + col, mask=col < cols, other=0.0)
    b = w
    if CENTER:
        b = tl.load(b_ptr + col, mask=col < cols, other=0.0)
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
    CENTER: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    if EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    mean = 0.0
    if CENTER:
        mean = tl.div_rn(tl.sum(x.to(tl.float32), 0), cols * 1.0)
        tl.store(mean_ptr + row, mean)
        x = forget(x, mean, PACKED)
    centred = tl.where(mask, x.to(tl.float32) - mean, 0.0)
    rstd = reciprocal_root(tl.sum(centred * centred, 0), cols, eps)
    tl.store(rstd_ptr + row, rstd)
    x = forget(x, rstd, PACKED)
    if not EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    y = (x.to(tl.float32) - mean) * rstd * w.to(tl.float32)
    if CENTER:
        y += b.to(tl.float32)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


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
        y = (x - mean) * rstd * tl.load(w_ptr + col, mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            y += tl.load(b_ptr + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, cols, dy_stride, x_stride,
    CENTER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    w = tl.load(w_ptr + col, mask=mask, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(share, rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.full([], 0, tl.int64) + index  # rows * cols may pass 2**31
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTER:
            mean = tl.load(mean_ptr + row)
        g = dy.to(tl.float32) * w.to(tl.float32)
        along = tl.sum(g * (x.to(tl.float32) - mean), 0) * rstd / cols  # of the gradient, along the normalised row
        offset = 0.0
        if CENTER:
            offset = tl.sum(g, 0) / cols
        x, dy = forget(x, along, PACKED), forget(dy, along, PACKED)
        normal = (x.to(tl.float32) - mean) * rstd
        dw += dy.to(tl.float32) * normal
        if CENTER:
            db += dy.to(tl.float32)
        dx = (dy.to(tl.float32) * forget(w, along, PACKED).to(tl.float32) - normal * along - offset) * rstd
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + share.to(tl.int64) * cols + col, dw, mask=mask)
    if CENTER:
        tl.store(db_ptr + share.to(tl.int64) * cols + col, db, mask=mask)


@triton.jit
def _stream_backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, cols, dy_stride, x_stride,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTER:
        mean = tl.load(mean_ptr + row)
    along = tl.zeros([BLOCK], tl.float32)
    offset = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        g = dy.to(tl.float32) * tl.load(w_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        along += g * (x.to(tl.float32) - mean)
        offset += g
    along_row = tl.sum(along, 0) * rstd / cols
    offset_row = 0.0
    if CENTER:
        offset_row = tl.sum(offset, 0) / cols
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        g = dy * tl.load(w_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        dx = (g - (x - mean) * rstd * along_row - offset_row) * rstd
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _columns_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, cols, dy_stride, x_stride, rows_each,
    CENTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shares of the weight's gradient where rows are too wide to be held: a block of columns over a run of rows."""
    share = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    last = tl.minimum(rows, (share + 1) * rows_each)
    for start in tl.range(share * rows_each, last, ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (row < last) & (col < cols)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < last, other=0.0)
        if CENTER:
            x -= tl.load(mean_ptr + row, mask=row < last, other=0.0)
            db += dy
        dw += dy * x * rstd
    place = share.to(tl.int64) * cols + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < cols
    tl.store(dw_ptr + place, tl.sum(dw, 0), mask=inside)
    if CENTER:
        tl.store(db_ptr + place, tl.sum(db, 0), mask=inside)


@triton.jit
def _shares_kernel(
    dw_ptr, db_ptr, out_dw_ptr, out_db_ptr, shares, cols,
    CENTER: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([SHARES, BLOCK], tl.float32)
    db = tl.zeros([SHARES, BLOCK], tl.float32)
    for start in tl.range(0, shares, SHARES):
        share = start + tl.arange(0, SHARES)[:, None]
        mask = (share < shares) & (col < cols)[None, :]
        dw += tl.load(dw_ptr + share * cols + col[None, :], mask=mask, other=0.0)
        if CENTER:
            db += tl.load(db_ptr + share * cols + col[None, :], mask=mask, other=0.0)
    tl.store(out_dw_ptr + col, tl.sum(dw, 0).to(out_dw_ptr.dtype.element_ty), mask=col < cols)
    if CENTER:
        tl.store(out_db_ptr + col, tl.sum(db, 0).to(out_db_ptr.dtype.element_ty), mask=col < cols)


KERNELS = (
    Kernel(jit=_tile_kernel),
    Kernel(
        jit=_row_kernel,
        spills="up to 32 bytes a thread at 16,384 columns, in the fastest of six tiles that were measured",
    ),
    Kernel(jit=_stream_kernel),
    Kernel(
        jit=_backward_kernel,
        spills="from 8,192 columns on x, dy, the weight and two fp32 sums overflow the registers; on an H200 that took "
        "356 µs (layer_norm, 8192x16384), the kernels that read the rows twice 423 µs (4096x32768)",
    ),
    Kernel(jit=_stream_backward_kernel),
    Kernel(jit=_columns_kernel),
    Kernel(jit=_shares_kernel),
)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, and each row's mean (empty without a bias: RMSNorm) and reciprocal deviation for the backward pass."""
    x2 = as_rows(x)
    rows, cols = x2.shape
    y = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
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
        _tile_kernel[(triton.cdiv(rows, tile.rows),)](
            x2, weight, bias, y, mean, rstd, rows, cols, x2.stride(0), eps,
            CENTER=center, ROWS=tile.rows, BLOCK=tile.block, EARLY=few, **tile.options(),
        )  # fmt: skip
    else:
        _row_kernel[(rows,)](
            x2, weight, bias, y, mean, rstd, cols, x2.stride(0), eps,
            CENTER=center, BLOCK=tile.block, PACKED=tile.packed, EARLY=few, **tile.options(),
        )  # fmt: skip
    return y.view(x.shape), mean, rstd


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, of the weight, and of the bias (empty where `mean` is: RMSNorm has none)."""
    dy2, x2 = as_rows(dy), as_rows(x)
    rows, cols = x2.shape
    center = mean.numel() > 0
    dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    dw = torch.empty(cols, dtype=weight.dtype, device=x.device)
    db = torch.empty(cols if center else 0, dtype=weight.dtype, device=x.device)
    weight = weight.contiguous()
    block, gpu = block_for(cols), facts(x)
    if block * x.element_size() <= BACKWARD_BYTES:
        name = "layer_norm_backward" if center else "rms_norm_backward"
        packed = is_packed(dy2, x2)
        tile = plan_backward(name, cols, x.element_size(), gpu, packed=packed)
        shares = min(rows, tile.programs * gpu.multiprocessors)
        dw_shares, db_shares = _shares(shares, cols, center, x.device)
        _backward_kernel[(shares,)](
            dy2, x2, weight, mean, rstd, dx, dw_shares, db_shares, rows, cols, dy2.stride(0), x2.stride(0),
            CENTER=center, BLOCK=block, STAGES=tile.stages, PACKED=tile.packed and packed, **tile.options(),
        )  # fmt: skip
    else:
        _stream_backward_kernel[(rows,)](
            dy2, x2, weight, mean, rstd, dx, cols, dy2.stride(0), x2.stride(0),
            CENTER=center, BLOCK=STREAM_BLOCK, num_warps=16,
        )  # fmt: skip
        columns = triton.cdiv(cols, 128)
        shares = max(1, min(triton.cdiv(rows, 32), triton.cdiv(8 * gpu.multiprocessors, columns)))
        rows_each = triton.cdiv(rows, shares)
        dw_shares, db_shares = _shares(shares, cols, center, x.device)
        _columns_kernel[(columns, shares)](
            dy2, x2, mean, rstd, dw_shares, db_shares, rows, cols, dy2.stride(0), x2.stride(0), rows_each,
            CENTER=center, ROWS=16, BLOCK=128, num_warps=8,
        )  # fmt: skip
    width = 32 if cols <= 16384 else 128  # narrow rows need many programs to fill the GPU, wide ones have them
    _shares_kernel[(triton.cdiv(cols, width),)](
        dw_shares, db_shares, dw, db, shares, cols, CENTER=center, SHARES=SHARES, BLOCK=width, num_warps=4
    )
    return dx.view(x.shape), dw, db


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


def fake_backward(x: torch.Tensor, weight: torch.Tensor, *, center: bool) -> tuple[torch.Tensor, ...]:
    """The shapes that `backward` gives."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return dx, dw, torch.empty_like(dw) if center else weight.new_empty(0)


def _shares(shares: int, cols: int, center: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    dw = torch.empty((shares, cols), dtype=torch.float32, device=device)
    return dw, torch.empty_like(dw) if center else dw


def plan(
    kernel: str, cols: int, itemsize: int, *, packed: bool, capability: int = 90, few: bool = False
) -> Tile | None:
    """How the forward pass shares a row out; None where no multiprocessor holds it."""
    block = block_for(cols)
    if block > MAX_COLS and not (packed and block <= MAX_PACKED_COLS):
        return None
    if few and block <= MAX_COLS:  # all the threads there are, each with one load
        return Tile(block=block, warps=min(32, max(1, block // 256)))
    if cols <= TILE_COLS:  # about 2 KB a warp, so that few reductions leave their warp
        rule = Tile(rows=max(1, 1024 // block), block=block, warps=max(1, block * itemsize // 2048))
    elif block > MAX_COLS:
        rule = Tile(block=block, warps=32, registers=64, packed=True)
    else:  # few warps, each with much of the row: the barriers of a reduction cost more than registers do here
        rule = Tile(block=block, warps=max(4, block // 2048))
    return tile_for(kernel, cols, itemsize, packable=packed, capability=capability, rule=rule)


def plan_backward(kernel: str, cols: int, itemsize: int, gpu: Facts, *, packed: bool) -> Tile:
    """For programs that take many rows each: how many, with what, and how many rows are on their way."""
    block = block_for(cols)
    if is_interpreted():
        return Tile(block=block, warps=4, programs=1)
    fits = 2 * 2 * block * itemsize + 1024 <= gpu.shared_bytes  # two rows ahead, of x and of dy
    if block <= 1024:
        rule = Tile(block=block, warps=4, registers=128, packed=True, programs=4, stages=4)
    elif block <= 4096:
        rule = Tile(block=block, warps=8, registers=128, packed=True, programs=2, stages=3)
    elif itemsize == 4:
        rule = Tile(block=block, warps=32, registers=64, programs=1, stages=3 if fits else 2)
    else:
        rule = Tile(block=block, warps=16, registers=128, packed=True, programs=1, stages=3 if fits else 2)
    return tile_for(kernel, cols, itemsize, packable=packed, capability=gpu.capability, rule=rule)
