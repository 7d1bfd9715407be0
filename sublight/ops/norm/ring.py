"""The norms' backward pass for Hopper: rows of x and dy stream through shared memory, the weight's gradient stays put.

With a residual (add_rms_norm, add_layer_norm) its gradient is a third stream, added to the result. Registers then hold
only the running sums of the weight's gradient; x, dy and the weight are read out of shared memory once for a row's two
sums and once more for its result, while the rows to come are on their way. A row that one program cannot hold is shared
by several, which pass their sums to one another through the L2 and are a row ahead while they do.
"""

from __future__ import annotations

import torch

from sublight.backend.device import Facts
from sublight.backend.jit import async_copy, cdiv, copy_in, gl, gluon, next_power_of_2
from sublight.backend.launch import Step
from sublight.op import Buffer, Kernel
from sublight.ops.kernels.column_sums import shares_for
from sublight.ops.record.tuning import Tile


@gluon.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _fetch(xs, dys, sums, slot, x_row, dy_row, sum_row, col, limit, RESIDUAL: gl.constexpr):
    copy_in(xs.index(slot), x_row + col, mask=col < limit)
    copy_in(dys.index(slot), dy_row + col, mask=col < limit)
    if RESIDUAL:
        copy_in(sums.index(slot), sum_row + col, mask=col < limit)


@gluon.jit
def _thread_sums(xs, dys, ws, slot, first, cols, layout: gl.constexpr, CENTER: gl.constexpr):
    """What each thread's columns add to the sums of g * x and of g; `first` is the first column of each vector."""
    g = dys.index(slot).load(layout).to(gl.float32) * ws.load(layout).to(gl.float32)
    x = xs.index(slot).load(layout).to(gl.float32)
    along = gl.sum(gl.where(first < cols, gl.sum(g * x, 2), 0.0), 0)
    if CENTER:
        return along, gl.sum(gl.where(first < cols, gl.sum(g, 2), 0.0), 0)
    else:
        return along, along


@gluon.jit
def _finish(
    xs, dys, sums, ws, slot, col, cols, dx_row, mean, rstd, along, offset, dw, db,
    layout: gl.constexpr, CENTER: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """dx = rstd * (dy * w - normal * along - offset), in few instructions: a third of all is spent on converting."""
    dy = dys.index(slot).load(layout).to(gl.float32)
    normal = xs.index(slot).load(layout).to(gl.float32) * rstd - mean * rstd
    dx = dy * ws.load(layout).to(gl.float32) * rstd - offset * rstd - normal * (along * rstd)
    dw += dy * normal
    if CENTER:
        db += dy
    if RESIDUAL:
        dx += sums.index(slot).load(layout).to(gl.float32)
    gl.store(dx_row + col, dx.to(xs.dtype), mask=col < cols)
    return dw, db


@gluon.jit
def _ring_backward_kernel(
    dy_ptr, x_ptr, sum_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, part_ptr,
    rows, cols, dy_stride, x_stride, sum_stride,
    CENTER: gl.constexpr, RESIDUAL: gl.constexpr, PARTS: gl.constexpr, BLOCK: gl.constexpr, TAIL: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    VECTOR: gl.constexpr = 8
    THREADS: gl.constexpr = 32 * num_warps
    LEAD: gl.constexpr = 1 if PARTS > 1 else 0  # rows that are summed up before the one that is finished
    ROUNDS: gl.constexpr = BLOCK // (THREADS * VECTOR)
    TAIL_ROUNDS: gl.constexpr = TAIL // (THREADS * VECTOR)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    kind: gl.constexpr = x_ptr.dtype.element_ty
    xs = gl.allocate_shared_memory(kind, [STAGES, ROUNDS, THREADS, VECTOR], shared)
    dys = gl.allocate_shared_memory(kind, [STAGES, ROUNDS, THREADS, VECTOR], shared)
    ws = gl.allocate_shared_memory(kind, [ROUNDS, THREADS, VECTOR], shared)
    far_xs = gl.allocate_shared_memory(kind, [STAGES, TAIL_ROUNDS, THREADS, VECTOR], shared)
    far_dys = gl.allocate_shared_memory(kind, [STAGES, TAIL_ROUNDS, THREADS, VECTOR], shared)
    far_ws = gl.allocate_shared_memory(kind, [TAIL_ROUNDS, THREADS, VECTOR], shared)
    sums, far_sums = xs, far_xs
    if RESIDUAL:
        sums = gl.allocate_shared_memory(kind, [STAGES, ROUNDS, THREADS, VECTOR], shared)
        far_sums = gl.allocate_shared_memory(kind, [STAGES, TAIL_ROUNDS, THREADS, VECTOR], shared)

    group, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    groups = gl.num_programs(0) // PARTS
    mine = (rows - group + groups - 1) // groups
    thread = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(0, flat)), 0) * VECTOR
    lane = gl.expand_dims(gl.expand_dims(gl.arange(0, VECTOR, gl.SliceLayout(0, gl.SliceLayout(0, layout))), 0), 0)
    step = gl.expand_dims(gl.arange(0, ROUNDS, gl.SliceLayout(1, flat)), 1) * (THREADS * VECTOR)
    far_step = gl.expand_dims(gl.arange(0, TAIL_ROUNDS, gl.SliceLayout(1, flat)), 1) * (THREADS * VECTOR)
    first = part * (BLOCK + TAIL) + step + thread
    far_first = part * (BLOCK + TAIL) + BLOCK + far_step + thread
    col, far = gl.expand_dims(first, 2) + lane, gl.expand_dims(far_first, 2) + lane
    ws.store(gl.load(w_ptr + col, mask=col < cols, other=0.0))
    far_ws.store(gl.load(w_ptr + far, mask=far < cols, other=0.0))
    dw = gl.zeros([ROUNDS, THREADS, VECTOR], gl.float32, layout)
    db = gl.zeros([ROUNDS, THREADS, VECTOR], gl.float32, layout)
    far_dw = gl.zeros([TAIL_ROUNDS, THREADS, VECTOR], gl.float32, layout)
    far_db = gl.zeros([TAIL_ROUNDS, THREADS, VECTOR], gl.float32, layout)

    start = group.to(gl.int64)  # rows * cols may pass 2**31
    x_row, dy_row, dx_row = x_ptr + start * x_stride, dy_ptr + start * dy_stride, dx_ptr + start * cols
    apart = groups.to(gl.int64)
    x_step, dy_step, dx_step = apart * x_stride, apart * dy_stride, apart * cols
    sum_row, sum_step = sum_ptr + start * sum_stride, apart * sum_stride
    for slot in gl.static_range(STAGES - LEAD):
        limit = gl.where(slot < mine, cols, 0)
        _fetch(xs, dys, sums, slot, x_row, dy_row, sum_row, col, limit, RESIDUAL)
        _fetch(far_xs, far_dys, far_sums, slot, x_row, dy_row, sum_row, far, limit, RESIDUAL)
        async_copy.commit_group()
        x_row += x_step
        dy_row += dy_step
        sum_row += sum_step
    mean = gl.to_tensor(0.0)
    rstd = gl.load(rstd_ptr + group)
    if CENTER:
        mean = gl.load(mean_ptr + group)
    # not `= mean, rstd`: what starts a loop as the same value, the compiler takes for the same ever after
    old_mean, old_rstd = gl.to_tensor(0.0), gl.to_tensor(0.0)
    new_slot = gl.to_tensor(0)
    old_slot = gl.to_tensor(STAGES - 1 if LEAD else 0)
    for turn in range(mine + LEAD):
        follows = group + (turn + 1) * groups
        next_rstd = gl.load(rstd_ptr + follows, mask=follows < rows, other=0.0)
        next_mean = gl.to_tensor(0.0)
        if CENTER:
            next_mean = gl.load(mean_ptr + follows, mask=follows < rows, other=0.0)
        async_copy.wait_group(STAGES - LEAD - 1)
        a, b = _thread_sums(xs, dys, ws, new_slot, first, cols, layout, CENTER)
        far_a, far_b = _thread_sums(far_xs, far_dys, far_ws, new_slot, far_first, cols, layout, CENTER)
        offset = gl.to_tensor(0.0)
        if CENTER:
            along, offset = gl.reduce((a + far_a, b + far_b), 0, _add_two)
            along -= mean * offset  # what x's mean took part in; its digits suffice for the 16-bit rows that come here
        else:
            along = gl.sum(a + far_a, 0)
        if PARTS > 1:
            if turn < mine:
                high = along.to(gl.int32, bitcast=True).to(gl.int64) << 32
                word = high | offset.to(gl.uint32, bitcast=True).to(gl.int64)
                place = part_ptr + (turn * groups + group) * PARTS + part
                gl.atomic_xchg(place, word + (word == 0).to(gl.int64), sem="relaxed")  # zero: not there yet
            along, offset = gl.to_tensor(0.0), gl.to_tensor(0.0)
            if turn > 0:
                for other in gl.static_range(PARTS):
                    place = part_ptr + ((turn - 1) * groups + group) * PARTS + other
                    word = gl.load(place, volatile=True)
                    while word == 0:
                        word = gl.load(place, volatile=True)
                    along += (word >> 32).to(gl.int32).to(gl.float32, bitcast=True)
                    offset += word.to(gl.int32).to(gl.float32, bitcast=True)
        used_mean = old_mean if LEAD else mean
        used_rstd = old_rstd if LEAD else rstd
        along = along * used_rstd / cols
        offset = offset / cols
        # the same slot, in a way that the compiler cannot see: it would keep the row in registers, which are full
        hidden = old_slot + (along == -3.0e38).to(gl.int32)
        if turn >= LEAD:
            dw, db = _finish(
                xs, dys, sums, ws, hidden, col, cols, dx_row, used_mean, used_rstd, along, offset, dw, db,
                layout, CENTER, RESIDUAL,
            )  # fmt: skip
            far_dw, far_db = _finish(
                far_xs, far_dys, far_sums, far_ws, hidden, far, cols, dx_row, used_mean, used_rstd, along, offset,
                far_dw, far_db, layout, CENTER, RESIDUAL,
            )  # fmt: skip
            dx_row += dx_step
        limit = gl.where(turn + STAGES - LEAD < mine, cols, 0)
        _fetch(xs, dys, sums, old_slot, x_row, dy_row, sum_row, col, limit, RESIDUAL)
        _fetch(far_xs, far_dys, far_sums, old_slot, x_row, dy_row, sum_row, far, limit, RESIDUAL)
        async_copy.commit_group()
        x_row += x_step
        dy_row += dy_step
        sum_row += sum_step
        old_slot = gl.where(old_slot == STAGES - 1, 0, old_slot + 1)
        new_slot = gl.where(new_slot == STAGES - 1, 0, new_slot + 1)
        old_mean, old_rstd = mean, rstd
        mean, rstd = next_mean, next_rstd
    async_copy.wait_group(0)
    share = group.to(gl.int64) * cols
    gl.store(dw_ptr + share + col, dw, mask=col < cols)
    gl.store(dw_ptr + share + far, far_dw, mask=far < cols)
    if CENTER:
        gl.store(db_ptr + share + col, db, mask=col < cols)
        gl.store(db_ptr + share + far, far_db, mask=far < cols)


KERNEL = Kernel(
    jit=_ring_backward_kernel, targets=(90,), spills="8 bytes a thread at 65,536 columns by Triton 3.6, none by 3.9"
)


def blocks(cols: int, parts: int, warps: int) -> tuple[int, int]:
    """The two blocks of a program's part of a row: each whole vectors for all its threads.

    >>> blocks(5120, 1, 4), blocks(16384, 1, 16), blocks(65536, 8, 8)
    ((4096, 1024), (8192, 8192), (4096, 4096))
    """
    each = cdiv(cdiv(cols, parts), 8) * 8
    block = 1 << (each.bit_length() - 1)
    block, tail = (block // 2, block // 2) if block == each else (block, next_power_of_2(each - block))
    return max(block, 256 * warps), max(tail, 256 * warps)


def step(
    rows: int,
    cols: int,
    strides: tuple[int, int, int],
    tile: Tile,
    gpu: Facts,
    *,
    on: str,
    center: bool,
    residual: bool = False,
) -> Step:
    """The launch; `strides` are those of dy, x and the residual's gradient."""
    block, tail = blocks(cols, tile.parts, tile.warps)
    kind = {"CENTER": center, "RESIDUAL": residual, "PARTS": tile.parts}
    sizes = {"BLOCK": block, "TAIL": tail, "STAGES": tile.stages, **tile.options()}
    grid = (shares(rows, tile, gpu) * tile.parts,)
    return Step(_ring_backward_kernel, grid, rows, cols, *strides, on=f"{on} part", tile=tile, **kind, **sizes)


def shares(rows: int, tile: Tile, gpu: Facts) -> int:
    """The number of shares of the weight's gradient that the launch leaves: one for each group of programs."""
    groups = gpu.multiprocessors * tile.programs // tile.parts
    return shares_for(rows, groups, max(1, gpu.multiprocessors // tile.parts))


def exchange(rows: int, tile: Tile) -> dict[str, Buffer]:
    """Words through which the programs of a row pass their sums to one another."""
    words = rows * tile.parts if tile.parts > 1 else 0
    return {"part": Buffer(shape=(words,), dtype=torch.int64, is_zero=True)}
