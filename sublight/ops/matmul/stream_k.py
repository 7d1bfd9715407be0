"""Whole rounds of tiles first; the tiles that are left over are shared out along k, so that nobody waits (stream-K).

Of 256 x 6144 there are 48 tiles of 128 x 256, for 132 multiprocessors: 84 of them would have nothing to do, and smaller
tiles ask the L2 for more than it can give. So the blocks along k of all leftover tiles stand in one line, and each
program takes the same number of them: the end of one tile, the beginning of the next. What it has of a tile it writes
as fp32, and a second launch adds the parts of each tile in their order: the same bits every time, and no program waits
for another.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished
from sublight.ops.matmul.order import tile_of


@triton.jit
def share_of(helper, blocks, helpers):
    """The first of the blocks that a helper takes; those of the next one end its share."""
    each, more = blocks // helpers, blocks % helpers
    return helper * each + tl.minimum(helper, more)


@triton.jit
def helper_of(block, blocks, helpers):
    """Whose share a block is in."""
    each, more = blocks // helpers, blocks % helpers
    long = more * (each + 1)  # blocks in the shares that have one more
    return tl.where(block < long, block // (each + 1), more + (block - long) // tl.maximum(each, 1))


@triton.jit
def _halves(x):
    """Left and right columns; they stay in the registers they are in."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def _store_part(acc, to, COLS: tl.constexpr):
    """COLS columns at a time: on their way out they change hands through shared memory, of which little is left."""
    if acc.shape[1] == COLS:
        tl.store(to + tl.arange(0, COLS)[None, :], acc)
    else:
        left, right = _halves(acc)
        _store_part(left, to, COLS)
        _store_part(right, to + acc.shape[1] // 2, COLS)


@triton.jit
def _store_finished(
    acc, first_row, first_col, c_desc, bias_ptr, residual_ptr, c_ptr, m, n,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BY_ENGINE: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    if acc.shape[1] == COLS:
        row = first_row.to(tl.int64) + tl.arange(0, acc.shape[0])
        col = first_col + tl.arange(0, COLS)
        acc = finished(acc, bias_ptr, residual_ptr, 0, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
        c = acc.to(c_ptr.dtype.element_ty)
        if BY_ENGINE:
            c_desc.store([first_row, first_col], c)
        else:  # rows of C that begin anywhere
            tl.store(c_ptr + row[:, None] * n + col[None, :], c, mask=(row < m)[:, None] & (col < n)[None, :])
    else:
        left, right = _halves(acc)
        _store_finished(
            left, first_row, first_col, c_desc, bias_ptr, residual_ptr, c_ptr, m, n,
            HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BY_ENGINE, COLS,
        )  # fmt: skip
        _store_finished(
            right, first_row, first_col + acc.shape[1] // 2, c_desc, bias_ptr, residual_ptr, c_ptr, m, n,
            HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BY_ENGINE, COLS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rounds", "helpers"])
def _stream_kernel(
    a_desc, b_desc, c_desc, bias_ptr, residual_ptr, c_ptr, parts_ptr, m, n, k, rounds, helpers,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, BY_ENGINE: tl.constexpr,
    C_COLS: tl.constexpr, PART_COLS: tl.constexpr,
):  # fmt: skip
    """`rounds` whole tiles, then a share of what is left: at most two pieces of tiles, in fp32."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    down, across, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    first_left = rounds * programs  # of the tiles that are shared
    blocks = (down * across - first_left) * steps
    helper = tl.minimum(program, helpers)
    begin = share_of(helper, blocks, helpers)
    end = share_of(tl.minimum(program + 1, helpers), blocks, helpers)
    total = rounds * steps + end - begin
    turn = -1  # how many tiles, whole or not, this program has begun
    step = steps - 1
    first_row, first_col = 0, 0
    acc = tl.zeros([BM, BN], tl.float32)
    for at in tl.range(0, total):
        step += 1
        if step == steps:  # of scalars alone, so that the next tile's loads go ahead of this one's end
            turn += 1
            is_whole = turn < rounds
            step = tl.where(turn == rounds, begin % steps, 0)
            tile = tl.where(is_whole, program + turn * programs, first_left + begin // steps + turn - rounds)
            tile_m, tile_n = tile_of(tile, down, across, GROUP)
            first_row, first_col = tile_m * BM, tile_n * BN
        if A_TURNED:  # (k, m) in memory
            a = a_desc.load([step * BK, first_row]).T
        else:
            a = a_desc.load([first_row, step * BK])
        if B_TURNED:  # (n, k) in memory
            b = b_desc.load([first_col, step * BK]).T
        else:
            b = b_desc.load([step * BK, first_col])
        acc = tl.dot(a, b, acc)
        if (step == steps - 1) | (at == total - 1):
            if turn < rounds:
                _store_finished(
                    acc, first_row, first_col, c_desc, bias_ptr, residual_ptr, c_ptr, m, n,
                    HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BY_ENGINE, C_COLS,
                )  # fmt: skip
            else:
                to = parts_ptr + (2 * program + turn - rounds) * (BM * BN)
                _store_part(acc, to + tl.arange(0, BM)[:, None] * BN, PART_COLS)
            acc = tl.zeros([BM, BN], tl.float32)


@triton.jit(do_not_specialize=["first_left", "helpers"])
def _add_shares_kernel(
    parts_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, first_left, helpers,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a shared tile: its parts, added in the order of k."""
    down, across, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    left = tl.program_id(0)
    blocks = (down * across - first_left) * steps
    tile_m, tile_n = tile_of(first_left + left, down, across, GROUP)
    inside = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = inside[:, None] * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros([ROWS, BN], tl.float32)
    for helper in range(
        helper_of(left * steps, blocks, helpers), helper_of(left * steps + steps - 1, blocks, helpers) + 1
    ):
        piece = left - share_of(helper, blocks, helpers) // steps  # its first piece of a tile, or its second
        acc += tl.load(parts_ptr + (2 * helper + piece) * (BM * BN) + place)
    row = tile_m.to(tl.int64) * BM + inside
    col = tile_n * BN + tl.arange(0, BN)
    acc = finished(acc, bias_ptr, residual_ptr, 0, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(c_ptr + row[:, None] * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


STREAM = Kernel(jit=_stream_kernel, targets=(90,), narrow="where C's rows begin anywhere, it is stored so")
ADD_SHARES = Kernel(
    jit=_add_shares_kernel, narrow="rows of odd width begin anywhere, so their elements move one by one"
)
