"""Products of a few rows with packed weights: words go from memory straight into the tensor cores' registers.

A tensor core wants 16 x 16 values of the weight, spread over a warp's lanes: a lane holds pairs of values, neighbours
along k, of two of its rows. Which k is whose neighbour is free, as long as A agrees. So a lane takes four words of a
row (16 bytes of a block of 64), and its pairs are what lies at one place in the lower and the upper half of a word:
a shift and a mask make two values of few bits two 16-bit floats, and nothing passes through shared memory. A's values
for them lie side by side (`packing.py`).

Written in Gluon as threads would be: a tensor has one element for each thread. Warps share a row of the weight, each
has a stretch of k; their sums are added at the end, always in the same order.
"""

from __future__ import annotations

from sublight.backend.jit import gl, gluon, triton
from sublight.op import Kernel
from sublight.ops.matmul.packing import WORDS

_WORDS = gl.constexpr(WORDS)


@triton.constexpr_function
def _shift(place, bits, is_bf16):
    """To the right, for the values at this place to lie in a mantissa: as seldom as can be, so that places share it."""
    room = 7 if is_bf16 else 10  # bits of a mantissa
    return place * bits - place * bits % (room // bits * bits)


@triton.constexpr_function
def _added(place, bits, is_bf16):
    """With the exponent that makes its lowest bit worth one, a value in a mantissa is this number too large."""
    return float(1 << ((7 if is_bf16 else 10) - (place * bits - _shift(place, bits, is_bf16))))


@triton.constexpr_function
def _pair_of(number, is_bf16):
    """A power of two as two 16-bit floats."""
    mantissa, bias = (7, 127) if is_bf16 else (10, 15)
    return ((bias + int(number).bit_length() - 1) << mantissa) * 0x10001


@triton.constexpr_function
def _two_values(place, bits, is_bf16):
    """PTX that makes the values at this place of both halves of a word two 16-bit floats, `_added` too large."""
    shift = _shift(place, bits, is_bf16)
    mask = (((1 << bits) - 1) << (place * bits - shift)) * 0x10001
    one = _pair_of(_added(place, bits, is_bf16), is_bf16)
    return f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; lop3.b32 $0, t, {mask}, {one}, 0xEA; }}"


@triton.constexpr_function
def _multiply(is_bf16):
    kind = "bf16" if is_bf16 else "f16"
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )


@gluon.jit
def _pick(x, INDEX: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr):
    """Of (threads, COUNT) values the one at INDEX of each thread."""
    THREADS: gl.constexpr = x.shape[0]
    if COUNT == 1:
        return gl.convert_layout(gl.reshape(x, [THREADS]), layout, assert_trivial=True)
    else:
        HALF: gl.constexpr = COUNT // 2
        low, high = gl.split(gl.permute(gl.reshape(x, [THREADS, 2, HALF]), [0, 2, 1]))
        if INDEX < HALF:
            return _pick(low, INDEX, HALF, layout)
        else:
            return _pick(high, INDEX - HALF, HALF, layout)


@gluon.jit
def _values(words, PLACE: gl.constexpr, BITS: gl.constexpr, IS_BF16: gl.constexpr):
    return gl.inline_asm_elementwise(
        _two_values(PLACE, BITS, IS_BF16), "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _product(a0, a1, a2, a3, b, c, IS_BF16: gl.constexpr):
    """c + a @ b of 16 x 16 by 16 x 8 values, over a warp."""
    return gl.inline_asm_elementwise(
        _multiply(IS_BF16), "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _fragments_kernel(
    a_ptr, packed_ptr, scales_ptr, zeros_ptr, c_ptr, m, n, blocks, groups, rounds,
    BITS: gl.constexpr, PER_GROUP: gl.constexpr, AT_ONCE: gl.constexpr, EVEN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """16 rows of the weight by 8 rows of A; each warp has `rounds` times AT_ONCE blocks of k.

    PER_GROUP blocks share a scale, all with 0. EVEN: rows and blocks are whole.
    """
    THREADS: gl.constexpr = 32 * num_warps
    HALF: gl.constexpr = 16 // BITS  # places in half a word
    IS_BF16: gl.constexpr = scales_ptr.dtype.element_ty == gl.bfloat16
    COUNT: gl.constexpr = 2 * AT_ONCE
    one: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 2, AT_ONCE, 4], [32, 1, 1, 1], [num_warps, 1, 1, 1], [3, 2, 1, 0]
    )  # of words: thread, upper or lower row, block, word
    by_block: gl.constexpr = gl.SliceLayout(3, wide)
    by_row: gl.constexpr = gl.SliceLayout(2, by_block)

    t = gl.arange(0, THREADS, gl.SliceLayout(1, by_row))
    lower = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, by_row)), 0)
    row = gl.program_id(0) * 16 + gl.expand_dims(t % 32 // 4, 1) + 8 * lower
    ahead = gl.expand_dims(gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(0, gl.SliceLayout(0, by_block))), 0), 0)
    block = gl.expand_dims(gl.expand_dims(t // 32 * rounds * AT_ONCE, 1), 2) + ahead
    is_row = gl.expand_dims(row < n, 2)
    part = gl.expand_dims(gl.expand_dims(gl.expand_dims(t % 4 * 4, 1), 2), 3)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, wide))))
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 0), 0)
    block_at = gl.expand_dims(gl.expand_dims(row.to(gl.int64) * blocks, 2) + block, 3)
    words_at = packed_ptr + (block_at * _WORDS + part + word)
    groups_at = gl.expand_dims(row.to(gl.int64) * groups, 2)

    nothing = gl.zeros([THREADS], gl.float32, one)
    none = (nothing, nothing, nothing, nothing)
    sums = none
    ones = gl.full([THREADS], _pair_of(1, IS_BF16), gl.int32, one)
    for done in range(0, rounds * AT_ONCE, AT_ONCE):
        is_here = (is_row & (block + done < blocks)) | EVEN
        packed = gl.load(words_at, mask=gl.expand_dims(is_here, 3), other=0, eviction_policy="evict_first")
        words_at += AT_ONCE * _WORDS
        if PER_GROUP == 0:
            group = block * 0
        else:
            group = (block + done) // PER_GROUP
        scales = gl.load(scales_ptr + (groups_at + group), mask=is_here, other=0.0)
        zeros = gl.load(zeros_ptr + (groups_at + group), mask=is_here, other=0.0)
        packed = gl.reshape(packed, [THREADS, COUNT * 4])
        scales, zeros = gl.reshape(scales, [THREADS, COUNT]), gl.reshape(zeros, [THREADS, COUNT])
        for u in gl.static_range(AT_ONCE):
            c, o = none, none
            for p in gl.static_range(HALF):
                added = gl.full([THREADS], _pair_of(_added(p, BITS, IS_BF16), IS_BF16), gl.int32, one)
                b0, b1 = _a_pairs(a_ptr, rounds * AT_ONCE, done + u, m, blocks, p, HALF, EVEN, one)
                o = _product(ones, added, ones, added, b0, o, IS_BF16)
                o = _product(ones, added, ones, added, b1, o, IS_BF16)
                c = _tile(packed, u, p, b0, b1, c, BITS, IS_BF16, AT_ONCE, one)
            sums = _scaled(sums, c, o, scales, zeros, u, AT_ONCE, one)
    _store_sums(c_ptr, sums, m, n, num_warps)


@gluon.jit
def _a_pairs(
    a_ptr, per_warp, block, m, blocks, PLACE: gl.constexpr, HALF: gl.constexpr, EVEN: gl.constexpr, one: gl.constexpr
):
    """A's values at a place of the lane's four words: for words 0 and 1, and for 2 and 3."""
    four: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [one.warps_per_cta[0], 1], [1, 0])
    THREADS: gl.constexpr = 32 * one.warps_per_cta[0]
    t = gl.arange(0, THREADS, gl.SliceLayout(1, four))
    row = gl.minimum(t % 32 // 4, m - 1)  # what rows beyond give is not stored
    at = t // 32 * per_warp + block
    first = (row * blocks + at) * (HALF * 16) + t % 4 * 4
    places = gl.expand_dims(first, 1) + (PLACE * 16 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, four)), 0))
    is_here = gl.expand_dims((at < blocks) | EVEN, 1)
    pairs = gl.load(a_ptr.to(gl.pointer_type(gl.int32)) + places, mask=is_here, other=0)
    return (_pick(pairs, 0, 4, one), _pick(pairs, 1, 4, one)), (_pick(pairs, 2, 4, one), _pick(pairs, 3, 4, one))


@gluon.jit
def _tile(
    words, BLOCK: gl.constexpr, PLACE: gl.constexpr, b0, b1, c,
    BITS: gl.constexpr, IS_BF16: gl.constexpr, AT_ONCE: gl.constexpr, one: gl.constexpr,
):  # fmt: skip
    """What the words of a block add at a place."""
    COUNT: gl.constexpr = words.shape[1]
    upper: gl.constexpr = BLOCK * 4
    lower: gl.constexpr = upper + 4 * AT_ONCE
    w0 = _values(_pick(words, upper, COUNT, one), PLACE, BITS, IS_BF16)
    w1 = _values(_pick(words, lower, COUNT, one), PLACE, BITS, IS_BF16)
    w2 = _values(_pick(words, upper + 1, COUNT, one), PLACE, BITS, IS_BF16)
    w3 = _values(_pick(words, lower + 1, COUNT, one), PLACE, BITS, IS_BF16)
    c = _product(w0, w1, w2, w3, b0, c, IS_BF16)
    w0 = _values(_pick(words, upper + 2, COUNT, one), PLACE, BITS, IS_BF16)
    w1 = _values(_pick(words, lower + 2, COUNT, one), PLACE, BITS, IS_BF16)
    w2 = _values(_pick(words, upper + 3, COUNT, one), PLACE, BITS, IS_BF16)
    w3 = _values(_pick(words, lower + 3, COUNT, one), PLACE, BITS, IS_BF16)
    return _product(w0, w1, w2, w3, b1, c, IS_BF16)


@gluon.jit
def _scaled(sums, c, o, scales, zeros, BLOCK: gl.constexpr, AT_ONCE: gl.constexpr, one: gl.constexpr):
    """Sums and those of a block: o[0], o[1] are of A's values, o[2], o[3] of what was added to each times them."""
    COUNT: gl.constexpr = scales.shape[1]
    upper, lower = _pick(scales, BLOCK, COUNT, one), _pick(scales, AT_ONCE + BLOCK, COUNT, one)
    upper, lower = upper.to(gl.float32), lower.to(gl.float32)
    upper_zero, lower_zero = _pick(zeros, BLOCK, COUNT, one), _pick(zeros, AT_ONCE + BLOCK, COUNT, one)
    upper_zero, lower_zero = upper_zero.to(gl.float32), lower_zero.to(gl.float32)
    return (
        sums[0] + upper * ((c[0] - o[2]) - upper_zero * o[0]),
        sums[1] + upper * ((c[1] - o[3]) - upper_zero * o[1]),
        sums[2] + lower * ((c[2] - o[2]) - lower_zero * o[0]),
        sums[3] + lower * ((c[3] - o[3]) - lower_zero * o[1]),
    )


@gluon.jit
def _store_sums(c_ptr, sums, m, n, num_warps: gl.constexpr):
    """The sums of all warps, added up."""
    joined = gl.join(gl.join(sums[0], sums[2]), gl.join(sums[1], sums[3]))  # thread, down, right
    total = gl.sum(gl.reshape(joined, [num_warps, 32, 2, 2]), 0)
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 1], [32, 1, 1], [num_warps, 1, 1], [2, 1, 0])
    total = gl.convert_layout(total, flat)
    lane = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, flat))), 1), 2)
    down = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, flat))), 0), 2)
    right = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, flat))), 0), 0)
    col = gl.program_id(0) * 16 + lane // 4 + 8 * down
    row = lane % 4 * 2 + right
    gl.store(c_ptr + (row.to(gl.int64) * n + col), total.to(c_ptr.dtype.element_ty), mask=(row < m) & (col < n))


FRAGMENTS = Kernel(jit=_fragments_kernel, narrow="a group's scale and zero are 2 bytes, which four lanes share")
