"""Kernels for products with packed weights: of one row, of up to 128, and the weight made whole for more.

A value of a few bits costs an instruction to be a float: at bit b of a word, masked, with the exponent of 2**(23 - b)
put in front of it, it is the float 2**(23 - b) + value. What was added is taken off again where it is cheap: of one
row, once for all values of a word, by the sum of x. A group's scale is applied to its sums, not to its values. "Place"
is one in half a word: the value in the other half, a neighbour along k, is at place + HALF (`packing.py`).
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.packing import WORDS

_WORDS = tl.constexpr(WORDS)
LOWEST = 15  # the bit that values are shifted to: the last eight of a mantissa, so that little is added


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
def _group_of(block, PART: tl.constexpr, PER_SCALE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The group of some places of a block; GROUP is 0 where there is only one."""
    if GROUP == 0:
        return block * 0
    else:
        return (block * (16 // BITS) + PART * PER_SCALE) * 2 * _WORDS // GROUP  # of what fills a block up: none


@triton.jit
def _scale_of(
    scales_ptr, zeros_ptr, col, n, block, groups,
    PART: tl.constexpr, PER_SCALE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of some columns of the weight, for some places of a block; behind the last, of the last."""
    group = tl.minimum(_group_of(block, PART, PER_SCALE, BITS, GROUP), groups - 1)
    scale = tl.load(scales_ptr + col * groups + group, mask=col < n, other=0.0)
    return scale.to(tl.float32), tl.load(zeros_ptr + col * groups + group, mask=col < n, other=0.0).to(tl.float32)


@triton.jit
def _row_kernel(
    a_ptr, packed_ptr, scales_ptr, zeros_ptr, c_ptr, n, k, blocks, groups,
    BITS: tl.constexpr, PER_SCALE: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row of A, in one piece. EVEN: n, k, blocks are whole tiles; EXACT: what was added is taken off first."""
    HALF: tl.constexpr = 16 // BITS
    col = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    word = tl.arange(0, _WORDS)
    acc = tl.zeros([BN, BB, _WORDS], tl.float32)
    for start in range(0, blocks, BB):
        block = start + tl.arange(0, BB)
        is_here = ((col < n)[:, None] & (block < blocks)[None, :]) | EVEN
        packed = tl.load(
            packed_ptr + (col[:, None] * blocks + block[None, :])[:, :, None] * _WORDS + word[None, None, :],
            mask=is_here[:, :, None], other=0, eviction_policy="evict_first",
        )  # fmt: skip
        for part in tl.static_range(HALF // PER_SCALE):
            sums = tl.zeros([BN, BB, _WORDS], tl.float32)
            added = tl.zeros([BB, _WORDS], tl.float32)
            plain = tl.zeros([BB, _WORDS], tl.float32)
            for i in tl.static_range(2 * PER_SCALE):
                at = ((block[:, None] * HALF + part * PER_SCALE + i // 2) * _WORDS + word[None, :]) * 2 + i % 2
                a = tl.load(a_ptr + at, mask=(at < k) | EVEN, other=0.0).to(tl.float32)
                value = _value(packed, part * PER_SCALE + i // 2 + HALF * (i % 2), BITS)
                if EXACT:
                    value -= _added(part * PER_SCALE + i // 2 + HALF * (i % 2), BITS)
                else:
                    added += a * _added(part * PER_SCALE + i // 2 + HALF * (i % 2), BITS)
                sums += value * a[None, :, :]
                plain += a
            group = tl.minimum(_group_of(block, part, PER_SCALE, BITS, GROUP), groups - 1)
            place_of_scale = col[:, None] * groups + group[None, :]
            scale = tl.load(scales_ptr + place_of_scale, mask=is_here, other=0.0).to(tl.float32)
            zero = tl.load(zeros_ptr + place_of_scale, mask=is_here, other=0.0).to(tl.float32)
            acc += scale[:, :, None] * ((sums - added[None, :, :]) - zero[:, :, None] * plain[None, :, :])
    c = tl.sum(tl.sum(acc, axis=2), axis=1)
    tl.store(c_ptr + col, c.to(c_ptr.dtype.element_ty), mask=col < n)


@triton.constexpr_function
def _two_at_once(place, bits, mantissa, bias):
    """PTX that makes the values at this place of both halves of a word two 16-bit floats: a value's bits become the
    highest of the mantissa of 2**bits, which makes it 2**bits + value."""
    left = mantissa - bits - place * bits
    shift = f"shl.b32 t, $2, {left}" if left >= 0 else f"shr.u32 t, $2, {-left}"
    mask, one = ((1 << bits) - 1) << (mantissa - bits), (bias + bits) << mantissa
    return f"{{ .reg .b32 t; {shift}; lop3.b32 t, t, {mask * 0x10001}, {one * 0x10001}, 0xEA; mov.b32 {{$0, $1}}, t; }}"


@triton.jit
def _pair(words, PLACE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Values at a place as 16-bit floats, 2**BITS too large, and exact: of the lower halves, and of the upper ones."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _two_at_once(PLACE, BITS, 7, 127), "=h,=h,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _two_at_once(PLACE, BITS, 10, 15), "=h,=h,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )


@triton.jit
def _one(words, zero, PLACE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Values at a place of a whole word, less their zeros."""
    if dtype.primitive_bitwidth == 32:
        return (_value(words, PLACE, BITS) - _added(PLACE, BITS)) - zero
    else:  # a 16-bit zero leaves bits enough to take both off at once
        return (_value(words, PLACE, BITS) - (zero + _added(PLACE, BITS))).to(dtype)


@triton.jit
def _in_order(
    words, zero, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, PAIRS: tl.constexpr
):
    """Values at COUNT places: (rows, words, halves, 2, 2, …), the last 2 for the highest bit of the place; less their
    zeros, or with PAIRS as `_pair` makes them."""
    if COUNT > 1:
        low = _in_order(words, zero, FIRST, COUNT // 2, BITS, dtype, PAIRS)
        return tl.join(low, _in_order(words, zero, FIRST + COUNT // 2, COUNT // 2, BITS, dtype, PAIRS))
    elif PAIRS:
        lower, upper = _pair(words, FIRST, BITS, dtype)
        return tl.join(lower, upper)
    else:
        lower = _one(words, zero, FIRST, BITS, dtype)
        return tl.join(lower, _one(words, zero, FIRST + 16 // BITS, BITS, dtype))


@triton.jit
def _along_k(values, COUNT: tl.constexpr):
    """The same as (rows, COUNT * words * 2)."""
    if COUNT == 2:
        values = tl.permute(values, (0, 3, 1, 2))
    elif COUNT == 4:
        values = tl.permute(values, (0, 4, 3, 1, 2))
    elif COUNT == 8:
        values = tl.permute(values, (0, 5, 4, 3, 1, 2))
    elif COUNT == 16:
        values = tl.permute(values, (0, 6, 5, 4, 3, 1, 2))
    return tl.reshape(values, (values.shape[0], COUNT * _WORDS * 2))


@triton.jit
def _rows_kernel(
    a_ptr, packed_ptr, scales_ptr, zeros_ptr, c_ptr, m, n, k, am, blocks, groups, per_split,
    BITS: tl.constexpr, PER_SCALE: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    IS_PART: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """All rows of A, which lie along k, over some of the blocks: the sums, or with IS_PART a part of them, in fp32.

    With PAIRS the tensor cores get values that are too large by a known number: what that and the zeros add is as many
    times the sum of A's row, which a product with ones gives. So no value is touched by plain arithmetic.
    """
    HALF: tl.constexpr = 16 // BITS
    SPAN: tl.constexpr = PER_SCALE * _WORDS * 2  # of k that share a scale
    col = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    row = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(blocks, begin + per_split)
    ones = tl.full([BN, SPAN], 1.0, a_ptr.dtype.element_ty)
    acc = tl.zeros([BN, BM], tl.float32)
    for block in range(begin, end):
        words = (col[:, None] * blocks + block) * _WORDS + tl.arange(0, _WORDS)[None, :]
        packed = tl.load(packed_ptr + words, mask=(col < n)[:, None], other=0)
        for part in tl.static_range(HALF // PER_SCALE):
            scale, zero = _scale_of(scales_ptr, zeros_ptr, col, n, block, groups, part, PER_SCALE, BITS, GROUP)
            at = (block * HALF + part * PER_SCALE) * (2 * _WORDS) + tl.arange(0, SPAN)
            a = tl.load(a_ptr + row[None, :] * am + at[:, None], mask=(at < k)[:, None] & (row < m)[None, :], other=0.0)
            values = _in_order(packed, zero[:, None], part * PER_SCALE, PER_SCALE, BITS, a.dtype, PAIRS)
            sums = tl.dot(_along_k(values, PER_SCALE), a, input_precision=PRECISION)
            if PAIRS:
                sums -= (zero + 2**BITS)[:, None] * tl.dot(ones, a)
            acc += scale[:, None] * sums
    part_of_k = tl.program_id(1).to(tl.int64)
    tl.store(
        c_ptr + (part_of_k * m * IS_PART + row[:, None]) * n + col[None, :],
        tl.trans(acc).to(c_ptr.dtype.element_ty), mask=(row < m)[:, None] & (col < n)[None, :],
    )  # fmt: skip


@triton.jit
def _unpack_kernel(
    packed_ptr, scales_ptr, zeros_ptr, weight_ptr, n, k, blocks, groups, weight_stride,
    BITS: tl.constexpr, PER_SCALE: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of the weight, made whole."""
    HALF: tl.constexpr = 16 // BITS
    block = tl.program_id(0) % blocks
    col = tl.program_id(0).to(tl.int64) // blocks * BN + tl.arange(0, BN)
    words = (col[:, None] * blocks + block) * _WORDS + tl.arange(0, _WORDS)[None, :]
    packed = tl.load(packed_ptr + words, mask=(col < n)[:, None], other=0)
    for part in tl.static_range(HALF // PER_SCALE):
        scale, zero = _scale_of(scales_ptr, zeros_ptr, col, n, block, groups, part, PER_SCALE, BITS, GROUP)
        values = _in_order(packed, zero[:, None], part * PER_SCALE, PER_SCALE, BITS, tl.float32, False)
        weight = _along_k(values, PER_SCALE) * scale[:, None]
        at = (block * HALF + part * PER_SCALE) * (2 * _WORDS) + tl.arange(0, PER_SCALE * _WORDS * 2)
        tl.store(
            weight_ptr + col[:, None] * weight_stride + at[None, :], weight.to(weight_ptr.dtype.element_ty),
            mask=(col < n)[:, None] & (at < k)[None, :],
        )  # fmt: skip


_SCALES = "a group's scale and zero are 2 bytes, which many lanes share"
ROW = Kernel(jit=_row_kernel, narrow=_SCALES)
ROWS = Kernel(jit=_rows_kernel, narrow=_SCALES)
UNPACK = Kernel(jit=_unpack_kernel, narrow=_SCALES)
