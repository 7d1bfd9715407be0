"""One row by a weight, dense or packed, on Hopper: the weight streams through shared memory without a pause.

A product of one row is as fast as its weight is read, and a weight of four bits is read in ten microseconds: what
counts is that memory has work from the first one to the last. So there is one program a multiprocessor, for all of its
rows. One warp has the copy engine fill a ring in shared memory, as far ahead as there is room, and does so from the
start where the weight is older than the launch before (EARLY). The other eight meanwhile norm the row and lay it into
shared memory.

Values go into the tensor cores as in `fragments.py`: a lane takes 16 bytes of a row of the weight, and which k these
are is free, as long as the row's values, which the lane reads beside them, agree. A word is two values of 16 bits or
eight of four (`packing.py`). What their exponent adds to values of few bits is the same for all, so it is as many times
the sum of a block of x, which is known before.

A tile is 8 rows and 8 more: the next ones, or with GATED, where gates lie above ups, the ups of these gates. A piece of
a tile is 16 lines of 128 bytes for each warp, whose sums are added in the warps' order. Rows of a piece are dealt to
lanes so that no two lanes of a quarter of a warp meet in a bank.
"""

from __future__ import annotations

from sublight.backend.jit import gl, gluon, hopper, meet, seen_as, tile_in, triton
from sublight.op import Kernel
from sublight.ops.attention.slots import slot_of
from sublight.ops.kernels.dependent import gluon_next_may_begin, gluon_wait_for_the_last
from sublight.ops.matmul.fragments import _pick, _product

WARPS = 8  # that multiply, each with a line of 128 bytes along k
HALF_ROWS = 8  # of a tile
LINE_WORDS = 32
PIECE_BYTES = 2 * WARPS * HALF_ROWS * LINE_WORDS * 4
_WARPS, _HALF_ROWS, _LINE_WORDS = gl.constexpr(WARPS), gl.constexpr(HALF_ROWS), gl.constexpr(LINE_WORDS)
_THREADS = gl.constexpr(32 * WARPS)


@triton.constexpr_function
def _words_layout():
    """Of (lines, rows, words): a warp has a line, a lane 16 bytes of both of its halves."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 16]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 4, 0], [0, 1, 0], [0, 2, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        block_bases=[],
        shape=[WARPS, HALF_ROWS, LINE_WORDS],
    )


@triton.constexpr_function
def _scales_layout():
    """Of (rows, groups, quarters of 16 bytes): a warp has its line's two groups."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [4, 0, 0], [1, 0, 0], [2, 0, 0]],
        warp_bases=[[0, 2, 0], [0, 4, 0], [0, 8, 0]],
        block_bases=[],
        shape=[HALF_ROWS, 2 * WARPS, 4],
    )


@triton.constexpr_function
def _x_layout(places):
    """Of (rows, pairs along k of a piece): every row the same pairs, which each warp has those of its line of."""
    count = 16 * places  # pairs that meet a block of 16 words
    places_bits = [[0, 16 << bit] for bit in range(places.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *places_bits, [0, count]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 2 * count], [0, 4 * count], [0, 8 * count]],
        block_bases=[],
        shape=[HALF_ROWS, 2 * WARPS * count],
    )


@triton.constexpr_function
def _sums_layout():
    """Of (threads of a warp, blocks)."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[0, 2], [0, 4], [0, 8]],
        block_bases=[],
        shape=[32, 2 * WARPS],
    )


@triton.constexpr_function
def _by_thread(count):
    return gl.BlockedLayout([1, count], [32, 1], [WARPS, 1], [1, 0])


@triton.constexpr_function
def _two_values(place, bits, is_bf16):
    """PTX that makes the values at a place of both halves of a word two 16-bit floats, 128 or 1024 too large."""
    mask, one = ((1 << bits) - 1) * 0x10001, (0x4300 if is_bf16 else 0x6400) * 0x10001
    return f"{{ .reg .b32 t; shr.u32 t, $1, {place * bits}; lop3.b32 $0, t, {mask}, {one}, 0xEA; }}"


@gluon.jit
def _pair(words, INDEX: gl.constexpr, PLACE: gl.constexpr, BITS: gl.constexpr, IS_BF16: gl.constexpr):
    """Two values, neighbours along k, of each thread's word at INDEX."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    word = _pick(words, INDEX, 8, one)
    if BITS == 16:
        return word
    else:
        return gl.inline_asm_elementwise(
            _two_values(PLACE, BITS, IS_BF16), "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def _words_of(at):
    """A half tile's piece as (threads, 8 words)."""
    words = at.load(_words_layout())
    words = gl.reshape(words, [_WARPS, 2, 2, 2, 2, 4, 4])  # line, row's bits 2, 1, 0, half of a line, quarter, word
    words = gl.reshape(gl.permute(words, [0, 2, 3, 1, 5, 4, 6]), [_THREADS, 8])
    return gl.convert_layout(words, _by_thread(8), assert_trivial=True)


@gluon.jit
def _scales_of(at):
    """A half tile's scales, or zeros, as two tensors in fp32, for the halves of a line."""
    layout: gl.constexpr = _scales_layout()
    one: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    scales = gl.expand_dims(at.load(gl.SliceLayout(2, layout)), 2)
    scales, _ = gl.broadcast(scales, gl.zeros([_HALF_ROWS, 2 * _WARPS, 4], scales.dtype, layout))
    scales = gl.reshape(scales, [2, 2, 2, _WARPS, 2, 4])  # row's bits 2, 1, 0, line, half of it, quarter
    scales = gl.reshape(gl.permute(scales, [3, 1, 2, 0, 5, 4]), [_THREADS, 2])
    scales = gl.convert_layout(scales, _by_thread(2), assert_trivial=True)
    return _pick(scales, 0, 2, one).to(gl.float32), _pick(scales, 1, 2, one).to(gl.float32)


@gluon.jit
def _x_of(at, PLACES: gl.constexpr):
    """The row's pairs that meet a piece, as (threads, pairs): half of a line, place, word."""
    layout: gl.constexpr = _x_layout(PLACES)
    pairs = gl.expand_dims(at.load(gl.SliceLayout(0, layout)), 0)
    pairs, _ = gl.broadcast(pairs, gl.zeros([_HALF_ROWS, 2 * _WARPS * 16 * PLACES], gl.int32, layout))
    pairs = gl.reshape(pairs, [_HALF_ROWS, _WARPS, 2, PLACES, 4, 4])  # row, line, half of it, place, quarter, word
    pairs = gl.reshape(gl.permute(pairs, [1, 0, 4, 2, 3, 5]), [_THREADS, 8 * PLACES])
    return gl.convert_layout(pairs, _by_thread(8 * PLACES), assert_trivial=True)


@gluon.jit
def _sums_of(at):
    """The sums of x over both halves of a warp's line."""
    layout: gl.constexpr = _sums_layout()
    one: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    sums = gl.expand_dims(at.load(gl.SliceLayout(0, layout)), 0)
    sums, _ = gl.broadcast(sums, gl.zeros([32, 2 * _WARPS], gl.float32, layout))
    sums = gl.reshape(gl.permute(gl.reshape(sums, [32, _WARPS, 2]), [1, 0, 2]), [_THREADS, 2])
    sums = gl.convert_layout(sums, _by_thread(2), assert_trivial=True)
    return _pick(sums, 0, 2, one), _pick(sums, 1, 2, one)


@gluon.jit
def _add_words(
    c, upper, lower, x, WORD: gl.constexpr, PAIR: gl.constexpr, PLACE: gl.constexpr,
    BITS: gl.constexpr, IS_BF16: gl.constexpr,
):  # fmt: skip
    """c and what two words of each thread add at a place, by the pairs of x at PAIR and behind it."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    pairs = (_pick(x, PAIR, x.shape[1], one), _pick(x, PAIR + 1, x.shape[1], one))
    return _product(
        _pair(upper, WORD, PLACE, BITS, IS_BF16), _pair(lower, WORD, PLACE, BITS, IS_BF16),
        _pair(upper, WORD + 1, PLACE, BITS, IS_BF16), _pair(lower, WORD + 1, PLACE, BITS, IS_BF16), pairs, c, IS_BF16,
    )  # fmt: skip


@gluon.jit
def _add_block(c, upper, lower, x, BLOCK: gl.constexpr, BITS: gl.constexpr, IS_BF16: gl.constexpr):
    """c and what half a line adds: 16 rows by the row of x, in all eight columns of the tensor cores' result."""
    PLACES: gl.constexpr = 16 // BITS
    for p in gl.static_range(PLACES):
        c = _add_words(c, upper, lower, x, 4 * BLOCK, (BLOCK * PLACES + p) * 4, p, BITS, IS_BF16)
        c = _add_words(c, upper, lower, x, 4 * BLOCK + 2, (BLOCK * PLACES + p) * 4 + 2, p, BITS, IS_BF16)
    return c


@gluon.jit
def _copy(
    words_desc, scales_desc, zeros_desc, words_at, scales_at, zeros_at, full, empty, tiles, pieces, lower, step,
    BITS: gl.constexpr, STAGES: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """The copying warp: piece after piece of this program's tiles. `lower`: from a tile's upper rows to its others.
    WAITS: the launch before may have written the weight."""
    if WAITS:
        gluon_wait_for_the_last()
    BYTES: gl.constexpr = _WARPS * _HALF_ROWS * _LINE_WORDS * 4 + (0 if BITS == 16 else _HALF_ROWS * 2 * _WARPS * 4)
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for piece in range(0, pieces):
            slot, phase = slot_of(turn, STAGES)
            bar = full.index(slot)
            hopper.mbarrier.wait(empty.index(slot), phase ^ 1)
            hopper.mbarrier.expect(bar, 2 * BYTES)
            for half in gl.static_range(2):
                row = tile * step + half * lower
                tile_in(words_desc, [piece * _WARPS, row, 0], bar, words_at.index(slot * 2 + half))
                if BITS < 16:
                    tile_in(scales_desc, [row, piece * 2 * _WARPS], bar, scales_at.index(slot * 2 + half))
                    tile_in(zeros_desc, [row, piece * 2 * _WARPS], bar, zeros_at.index(slot * 2 + half))
            turn += 1


@gluon.jit
def _lay_out(x_ptr, norm_ptr, x_at, sums_at, k, eps, BITS: gl.constexpr, HAS_NORM: gl.constexpr):
    """The row into shared memory, normed, and the sums of its blocks."""
    LENGTH: gl.constexpr = x_at.shape[0]
    BLOCK: gl.constexpr = 512 // BITS
    at = gl.arange(0, LENGTH, gl.BlockedLayout([8], [32], [_WARPS], [0]))
    x = gl.load(x_ptr + at, mask=at < k, other=0.0).to(gl.float32)
    if HAS_NORM:
        weight = gl.load(norm_ptr + at, mask=at < k, other=0.0).to(gl.float32)
        x = x * gl.rsqrt(gl.sum(x * x, 0) / k + eps) * weight
    rounded = x.to(x_at.dtype)
    x_at.store(rounded)
    if BITS < 16:
        sums = gl.sum(gl.reshape(rounded.to(gl.float32), [LENGTH // BLOCK, BLOCK]), 1)
        sums_at.store(gl.convert_layout(sums, gl.BlockedLayout([1], [32], [_WARPS], [0])))


@gluon.jit
def _multiply(
    x_ptr, norm_ptr, bias_ptr, residual_ptr, y_ptr, words_at, scales_at, zeros_at, x_at, sums_at, full, empty,
    n, k, tiles, pieces, lower, step, eps,
    PIECES: gl.constexpr, BITS: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warps that multiply."""
    kind: gl.constexpr = y_ptr.dtype.element_ty
    IS_BF16: gl.constexpr = kind == gl.bfloat16
    PLACES: gl.constexpr = 16 // BITS
    BASE: gl.constexpr = 128.0 if IS_BF16 else 1024.0
    one: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if DEPENDENT:
        gluon_wait_for_the_last()
    _lay_out(x_ptr, norm_ptr, x_at, sums_at, k, eps, BITS, HAS_NORM)
    meet()
    pairs_at = seen_as(x_at, gl.int32, [PIECES, 2 * _WARPS * 16 * PLACES], plain)
    if BITS < 16:
        sums_at = seen_as(sums_at, gl.float32, [PIECES, 2 * _WARPS], plain)
    lane = gl.arange(0, 32, one)
    row = lane // 4 % 2 * 4 + lane // 8  # of a half tile, as `_words_layout` deals them
    nothing = gl.zeros([_THREADS], gl.float32, one)
    none = (nothing, nothing, nothing, nothing)
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        upper_row = tile * step + row
        upper_bias, lower_bias, before, before_lower = 0.0, 0.0, 0.0, 0.0
        is_first = (lane % 4 == 0) & (upper_row < n)
        is_second = (lane % 4 == 0) & (upper_row + lower < n)
        if HAS_BIAS:
            upper_bias = gl.load(bias_ptr + upper_row, mask=is_first, other=0.0).to(gl.float32)
            has_lower = is_first if GATED else is_second
            lower_bias = gl.load(bias_ptr + upper_row + lower, mask=has_lower, other=0.0).to(gl.float32)
        if HAS_RESIDUAL:
            before = gl.load(residual_ptr + upper_row, mask=is_first, other=0.0).to(gl.float32)
            if not GATED:
                before_lower = gl.load(residual_ptr + upper_row + lower, mask=is_second, other=0.0).to(gl.float32)
        upper_sum, lower_sum, c = nothing, nothing, none
        for piece in range(0, pieces):
            slot, phase = slot_of(turn, STAGES)
            turn += 1
            x = _x_of(pairs_at.index(piece), PLACES)
            sums = _sums_of(sums_at.index(piece)) if BITS < 16 else (nothing, nothing)
            hopper.mbarrier.wait(full.index(slot), phase)
            words, words_lower = _words_of(words_at.index(slot * 2)), _words_of(words_at.index(slot * 2 + 1))
            if BITS == 16:
                hopper.mbarrier.arrive(empty.index(slot), count=1)
                c = _add_block(c, words, words_lower, x, 0, BITS, IS_BF16)
                c = _add_block(c, words, words_lower, x, 1, BITS, IS_BF16)
            else:
                scales, scales_lower = _scales_of(scales_at.index(slot * 2)), _scales_of(scales_at.index(slot * 2 + 1))
                zeros, zeros_lower = _scales_of(zeros_at.index(slot * 2)), _scales_of(zeros_at.index(slot * 2 + 1))
                hopper.mbarrier.arrive(empty.index(slot), count=1)
                for b in gl.static_range(2):
                    c = _add_block(none, words, words_lower, x, b, BITS, IS_BF16)
                    upper_sum = upper_sum + scales[b] * (c[0] - (zeros[b] + BASE) * sums[b])
                    lower_sum = lower_sum + scales_lower[b] * (c[2] - (zeros_lower[b] + BASE) * sums[b])
        if BITS == 16:
            upper_sum, lower_sum = c[0], c[2]
        both = gl.sum(gl.reshape(gl.join(upper_sum, lower_sum), [_WARPS, 32, 2]), 0)
        upper_sum, lower_sum = gl.split(gl.convert_layout(both, gl.BlockedLayout([1, 2], [32, 1], [_WARPS, 1], [1, 0])))
        first = gl.convert_layout(upper_sum, one) + upper_bias
        second = gl.convert_layout(lower_sum, one) + lower_bias
        if GATED:
            first = first / (1.0 + gl.exp(-first)) * second
        gl.store(y_ptr + upper_row, (first + before).to(kind), mask=is_first)
        if not GATED:
            gl.store(y_ptr + upper_row + lower, (second + before_lower).to(kind), mask=is_second)


@gluon.jit
def _stream_kernel(
    x_ptr, norm_ptr, words_desc, scales_desc, zeros_desc, bias_ptr, residual_ptr, y_ptr,
    n, k, tiles, pieces, lower, step, eps,
    PIECES: gl.constexpr, BITS: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, DEPENDENT: gl.constexpr, EARLY: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Tiles of `step` rows, every so manieth this program's; PIECES is a power of two, of which `pieces` are there."""
    kind: gl.constexpr = y_ptr.dtype.element_ty
    PLACES: gl.constexpr = 16 // BITS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if BITS < 16:
        place = gl.allocate_shared_memory(gl.int32, [2 * STAGES, _WARPS, _HALF_ROWS, _LINE_WORDS], words_desc.layout)
        words_at = place
    else:
        place = gl.allocate_shared_memory(kind, [2 * STAGES, _WARPS, _HALF_ROWS, 2 * _LINE_WORDS], words_desc.layout)
        words_at = seen_as(
            place, gl.int32, [2 * STAGES, _WARPS, _HALF_ROWS, _LINE_WORDS], gl.NVMMASharedLayout(128, 32, rank=3)
        )
    x_at = gl.allocate_shared_memory(kind, [PIECES * 2 * _WARPS * 32 * PLACES], plain)
    if BITS < 16:
        scales_at = gl.allocate_shared_memory(kind, [2 * STAGES, _HALF_ROWS, 2 * _WARPS], scales_desc.layout)
        zeros_at = gl.allocate_shared_memory(kind, [2 * STAGES, _HALF_ROWS, 2 * _WARPS], scales_desc.layout)
        sums_at = gl.allocate_shared_memory(gl.float32, [PIECES * 2 * _WARPS], plain)
    else:
        scales_at, zeros_at, sums_at = x_at, x_at, x_at
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(slot), count=1)
        hopper.mbarrier.init(empty.index(slot), count=1)
    hopper.fence_async_shared()  # the copy engine sees the barriers as they are now
    if DEPENDENT:
        gluon_next_may_begin()  # where there is room
    gl.warp_specialize(
        [
            (_multiply, (x_ptr, norm_ptr, bias_ptr, residual_ptr, y_ptr, words_at, scales_at, zeros_at, x_at, sums_at,
                         full, empty, n, k, tiles, pieces, lower, step, eps,
                         PIECES, BITS, STAGES, HAS_NORM, GATED, HAS_BIAS, HAS_RESIDUAL, DEPENDENT)),
            (_copy, (words_desc, scales_desc, zeros_desc, place, scales_at, zeros_at, full, empty,
                     tiles, pieces, lower, step, BITS, STAGES, DEPENDENT and not EARLY)),
        ],
        [1],  # warps that copy …
        [24],  # … and registers of their threads
    )  # fmt: skip


STREAM = Kernel(jit=_stream_kernel, targets=(90,), narrow="a row's sums leave four lanes of a warp in one number")
