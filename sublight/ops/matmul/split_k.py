"""Whole rounds of tiles first; the tiles of the last round are split along k, so that fewer multiprocessors wait.

Of 256 x 4096 there are 32 tiles of 128 x 256, for 132 multiprocessors: 100 of them would have nothing to do, and
smaller tiles ask the L2 for more than it gives. So each tile of the last round is cut into equal pieces along k. Every
program writes the sums of its piece as fp32, and a second launch adds the pieces of each tile in their order: the same
bits every time, and no program waits for another.

Pieces must be equal. Shares of equal length over all tiles (stream-K) keep every multiprocessor at work, but then no
two programs are at the same place of k: what one has loaded into the L2 is gone before the next one wants it.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished, halves, scaled, store_finished
from sublight.ops.matmul.order import tile_of


@triton.jit
def _store_part(acc, to, COLS: tl.constexpr):
    """COLS columns at a time: on their way out they change hands through shared memory, of which little is left."""
    if acc.shape[1] == COLS:
        tl.store(to + tl.arange(0, COLS)[None, :], acc)
    else:
        left, right = halves(acc)
        _store_part(left, to, COLS)
        _store_part(right, to + acc.shape[1] // 2, COLS)


@triton.jit(do_not_specialize=["rounds", "pieces"])
def _split_kernel(
    a_desc, b_desc, c_desc, bias_ptr, residual_ptr, c_ptr, scale_a_ptr, scale_b_ptr, parts_ptr, m, n, k, rounds, pieces,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, BY_ENGINE: tl.constexpr,
    SCALED: tl.constexpr, C_COLS: tl.constexpr, PART_COLS: tl.constexpr,
):  # fmt: skip
    """`rounds` whole tiles, then a piece of one that is left, if there is one for this program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    down, across, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    first_left = rounds * programs
    left = down * across - first_left
    each = tl.cdiv(steps, pieces)
    begin = tl.minimum(program // left * each, steps)  # of its piece; none where that is the end
    total = rounds * steps + tl.minimum(each, steps - begin) * (program < left * pieces)
    turn = -1  # how many tiles, whole or not, this program has begun
    step = steps - 1
    first_row, first_col = 0, 0
    acc = tl.zeros([BM, BN], tl.float32)
    for at in tl.range(0, total):
        step += 1
        if step == steps:  # of scalars alone, so that the next tile's loads go ahead of this one's end
            turn += 1
            is_whole = turn < rounds
            step = tl.where(is_whole, 0, begin)
            tile = tl.where(is_whole, program + turn * programs, first_left + program % left)
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
                store_finished(
                    acc, first_row, first_col, c_desc, bias_ptr, residual_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n,
                    HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BY_ENGINE, SCALED, C_COLS,
                )  # fmt: skip
            else:
                _store_part(acc, parts_ptr + program * (BM * BN) + tl.arange(0, BM)[:, None] * BN, PART_COLS)
            acc = tl.zeros([BM, BN], tl.float32)


@triton.jit(do_not_specialize=["first_left", "pieces"])
def _add_pieces_kernel(
    parts_ptr, bias_ptr, residual_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n, first_left, pieces,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile that was split: its pieces, added in the order of k."""
    left = tl.num_programs(0)
    tile_m, tile_n = tile_of(first_left + tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    inside = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = parts_ptr + tl.program_id(0) * (BM * BN) + inside[:, None] * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros([ROWS, BN], tl.float32)
    for _ in range(pieces):
        acc += tl.load(at)
        at += left * (BM * BN)
    row = tile_m.to(tl.int64) * BM + inside
    col = tile_n * BN + tl.arange(0, BN)
    acc = scaled(acc, scale_a_ptr, scale_b_ptr, row, col, m, n, SCALED)
    acc = finished(acc, bias_ptr, residual_ptr, 0, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(c_ptr + row[:, None] * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


SPLIT = Kernel(jit=_split_kernel, targets=(90,), narrow="where C's rows begin anywhere, it is stored so")
ADD_PIECES = Kernel(jit=_add_pieces_kernel, narrow="rows of odd width begin anywhere: their elements move one by one")
