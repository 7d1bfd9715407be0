"""Kernels for products with packed weights: of one row, of up to 128, and the weight made whole for more.

A value of a few bits costs an instruction to be a float: at bit b of a word, masked, with the exponent of 2**(23 - b)
put in front of it, it is the float 2**(23 - b) + value. What was added is taken off again where it is cheap: of one
row, once for all values of a word, by the sum of x.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.packing import BLOCK

_BLOCK = tl.constexpr(BLOCK)
LOWEST = 12  # the bit that values are shifted to; eight bits from there on fit into a mantissa


@triton.constexpr_function
def _bit(place, bits):
    """Where values at this place of their words are shifted to."""
    return LOWEST + place * bits % 8


@triton.constexpr_function
def _shift(place, bits):
    """To the left, to get them there."""
    return LOWEST - place * bits // 8 * 8


@triton.constexpr_function
def _mask(place, bits):
    return ((1 << bits) - 1) << _bit(place, bits)


@triton.constexpr_function
def _exponent(place, bits):
    """Of the float whose lowest mantissa bits are worth a whole number at that bit."""
    return (127 + 23 - _bit(place, bits)) << 23


@triton.constexpr_function
def _added(place, bits):
    """That float."""
    return float(1 << (23 - _bit(place, bits)))


@triton.jit
def _value(words, PLACE: tl.constexpr, BITS: tl.constexpr):
    """The values at bits PLACE * BITS of their words, as floats, `_added` too large."""
    if _shift(PLACE, BITS) >= 0:
        moved = words << _shift(PLACE, BITS)
    else:
        moved = words >> -_shift(PLACE, BITS)
    return ((moved & _mask(PLACE, BITS)) | _exponent(PLACE, BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _group_of(at, GROUP: tl.constexpr):
    """The group of a place along k; GROUP is 0 where there is only one."""
    if GROUP == 0:
        return at * 0
    else:
        return at // GROUP


@triton.jit
def _row_kernel(
    a_ptr, packed_ptr, scales_ptr, zeros_ptr, c_ptr, n, k, words, groups,
    BITS: tl.constexpr, PER_SCALE: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One row of A, in one piece; PER_SCALE places of a word share a scale. EVEN: n and the words are whole tiles."""
    WORDS_A_BLOCK: tl.constexpr = _BLOCK * BITS // 32
    col = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    is_col = (col < n)[:, None] | EVEN
    acc = tl.zeros([BN, BW], tl.float32)
    for start in range(0, words, BW):
        word = start + tl.arange(0, BW)
        is_word = (word < words) | EVEN
        packed = tl.load(
            packed_ptr + col[:, None] * words + word[None, :], mask=is_col & is_word[None, :], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        first = word // WORDS_A_BLOCK * _BLOCK + word % WORDS_A_BLOCK  # k of the lowest place
        for part in tl.static_range(32 // BITS // PER_SCALE):
            sums = tl.zeros([BN, BW], tl.float32)
            added = tl.zeros([BW], tl.float32)
            plain = tl.zeros([BW], tl.float32)
            for i in tl.static_range(PER_SCALE):
                at = first + (part * PER_SCALE + i) * WORDS_A_BLOCK
                a = tl.load(a_ptr + at, mask=(at < k) | EVEN, other=0.0).to(tl.float32)
                sums += _value(packed, part * PER_SCALE + i, BITS) * a[None, :]
                added += a * _added(part * PER_SCALE + i, BITS)
                plain += a
            group = _group_of(first + part * PER_SCALE * WORDS_A_BLOCK, GROUP)
            mask = is_col & ((group < groups) | EVEN)[None, :]
            scale = tl.load(scales_ptr + col[:, None] * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros_ptr + col[:, None] * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
            acc += scale * ((sums - added[None, :]) - zero * plain[None, :])
    tl.store(c_ptr + col, tl.sum(acc, axis=1).to(c_ptr.dtype.element_ty), mask=col < n)


@triton.jit
def _whole(packed, scale, zero, PLACE: tl.constexpr, BITS: tl.constexpr):
    """The weights at one place of their words, in fp32."""
    return ((_value(packed, PLACE, BITS) - _added(PLACE, BITS)) - zero.to(tl.float32)) * scale.to(tl.float32)


@triton.jit
def _rows_kernel(
    a_ptr, packed_ptr, scales_ptr, zeros_ptr, c_ptr, m, n, k, am, words, groups, per_split,
    BITS: tl.constexpr, PER_SCALE: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BW: tl.constexpr, IS_PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All rows of A, which lie along k, over a part of the words: the sums, or with IS_PART a part of them, in fp32."""
    WORDS_A_BLOCK: tl.constexpr = _BLOCK * BITS // 32
    col = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    row = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    is_col = (col < n)[:, None]
    begin = tl.program_id(1) * per_split
    end = tl.minimum(words, begin + per_split)
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(begin, end, BW):
        word = start + tl.arange(0, BW)
        is_word = word < end
        packed = tl.load(
            packed_ptr + col[:, None] * words + word[None, :], mask=is_col & is_word[None, :], other=0
        )  # fmt: skip
        first = word // WORDS_A_BLOCK * _BLOCK + word % WORDS_A_BLOCK
        for part in tl.static_range(32 // BITS // PER_SCALE):
            group = _group_of(first + part * PER_SCALE * WORDS_A_BLOCK, GROUP)
            mask = is_col & (group < groups)[None, :]
            scale = tl.load(scales_ptr + col[:, None] * groups + group[None, :], mask=mask, other=0.0)
            zero = tl.load(zeros_ptr + col[:, None] * groups + group[None, :], mask=mask, other=0.0)
            for i in tl.static_range(PER_SCALE):
                at = first + (part * PER_SCALE + i) * WORDS_A_BLOCK
                is_here = ((at < k) & is_word)[:, None] & (row < m)[None, :]
                a = tl.load(a_ptr + row[None, :] * am + at[:, None], mask=is_here, other=0.0)
                weight = _whole(packed, scale, zero, part * PER_SCALE + i, BITS).to(a.dtype)
                acc = tl.dot(weight, a, acc, input_precision=PRECISION)
    sums = tl.trans(acc)
    part_of_k = tl.program_id(1).to(tl.int64)
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(
        c_ptr + (part_of_k * m * IS_PART + row[:, None]) * n + col[None, :],
        sums.to(c_ptr.dtype.element_ty), mask=mask,
    )  # fmt: skip


@triton.jit
def _unpack_kernel(
    packed_ptr, scales_ptr, zeros_ptr, weight_ptr, n, k, words, groups, weight_stride,
    BITS: tl.constexpr, PER_SCALE: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The weight, made whole."""
    WORDS_A_BLOCK: tl.constexpr = _BLOCK * BITS // 32
    col = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    word = tl.program_id(1) * BW + tl.arange(0, BW)
    is_col = (col < n)[:, None]
    packed = tl.load(packed_ptr + col[:, None] * words + word[None, :], mask=is_col & (word < words)[None, :], other=0)
    first = word // WORDS_A_BLOCK * _BLOCK + word % WORDS_A_BLOCK
    for part in tl.static_range(32 // BITS // PER_SCALE):
        group = _group_of(first + part * PER_SCALE * WORDS_A_BLOCK, GROUP)
        mask = is_col & (group < groups)[None, :]
        scale = tl.load(scales_ptr + col[:, None] * groups + group[None, :], mask=mask, other=0.0)
        zero = tl.load(zeros_ptr + col[:, None] * groups + group[None, :], mask=mask, other=0.0)
        for i in tl.static_range(PER_SCALE):
            at = first + (part * PER_SCALE + i) * WORDS_A_BLOCK
            weight = _whole(packed, scale, zero, part * PER_SCALE + i, BITS).to(weight_ptr.dtype.element_ty)
            tl.store(weight_ptr + col[:, None] * weight_stride + at[None, :], weight, mask=is_col & (at < k)[None, :])


_SCALES = "a group's scale and zero are 2 bytes, which many lanes share"
ROW = Kernel(jit=_row_kernel, narrow=_SCALES)
ROWS = Kernel(jit=_rows_kernel, narrow=_SCALES)
UNPACK = Kernel(jit=_unpack_kernel, narrow=_SCALES)
