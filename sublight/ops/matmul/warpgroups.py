"""Products of up to 128 rows with packed weights on Hopper: unpacked values never leave the registers.

A warpgroup multiplies 64 x 16 values of the weight, its left operand, by 16 x up to 128 of A's rows. The right operand
must lie in shared memory, the left one may lie in registers: there words become values, two at a time, less their zero
and by their scale. The result is C turned over. Which words a lane takes follows from the operand's layout: of a
block's sixteen the four at q, q + 4, q + 8, q + 12, whose values at a place are then what the tensor cores expect of
lane q of four (`packing.py` lays neighbours along k in the two halves of a word).

The copy engine keeps STAGES blocks of words and of A on their way. While the tensor cores multiply a block, the
integer units take the next one apart.

A value of b bits, put under the exponent of 128 (bf16) or 1024 (fp16), is that number too large, exactly. Its zero is
taken off in two steps, so that each rounding is small: what 128 + zero is in 16 bits, which leaves a whole number, and
the rest, which is less than a value's rounding, with the scale.
"""

from __future__ import annotations

from sublight.backend.jit import gl, gluon, hopper, meet, tile_in, triton
from sublight.op import Kernel
from sublight.ops.matmul.packing import WORDS

_WORDS = gl.constexpr(WORDS)
CHUNK = 4  # places whose values are multiplied together: 128 along k


@triton.constexpr_function
def _words_layout(rows, warps):
    """Of (rows, 16) words: as lanes of the left operand hold them, rows 8 apart and every fourth word."""
    down = [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], [8, 0], *down],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, WORDS],
    )


@triton.constexpr_function
def _take_apart(place, bits, is_bf16):
    """PTX: the values at a place of both halves of word $2, less $3 and by $4, with $5 added, as two 16-bit floats."""
    kind, exponent = ("bf16x2", 0x4300) if is_bf16 else ("f16x2", 0x6400)
    return (
        "{ .reg .b32 t; "
        f"shr.u32 t, $2, {place * bits}; lop3.b32 t, t, {((1 << bits) - 1) * 0x10001}, {exponent * 0x10001}, 0xEA; "
        f"sub.rn.{kind} t, t, $3; fma.rn.{kind} t, t, $4, $5; mov.b32 {{$0, $1}}, t; }}"
    )


@gluon.jit
def _twice(x):
    """A 16-bit float in both halves of a register."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _pairs(words, less, scale, rest, PLACE: gl.constexpr, BITS: gl.constexpr, kind: gl.constexpr):
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            _take_apart(PLACE, BITS, True), "=h,=h,r,r,r,r", [words, less, scale, rest],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _take_apart(PLACE, BITS, False), "=h,=h,r,r,r,r", [words, less, scale, rest],
            dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def _values(words, factors, CHUNK_AT: gl.constexpr, BITS: gl.constexpr, PER_SCALE: gl.constexpr, kind: gl.constexpr):
    """(rows, 128) values at four places."""
    first: gl.constexpr = CHUNK_AT * 4
    a = _at_place(words, factors, first, BITS, PER_SCALE, kind)
    b = _at_place(words, factors, first + 1, BITS, PER_SCALE, kind)
    c = _at_place(words, factors, first + 2, BITS, PER_SCALE, kind)
    d = _at_place(words, factors, first + 3, BITS, PER_SCALE, kind)
    joined = gl.join(gl.join(a, c), gl.join(b, d))  # rows, words, halves, place // 2, place % 2
    return gl.reshape(gl.permute(joined, [0, 3, 4, 1, 2]), [words.shape[0], 4 * _WORDS * 2])


@gluon.jit
def _at_place(words, factors, PLACE: gl.constexpr, BITS: gl.constexpr, PER_SCALE: gl.constexpr, kind: gl.constexpr):
    less, scale, rest = factors[PLACE // PER_SCALE]
    lower, upper = _pairs(words, less, scale, rest, PLACE, BITS, kind)
    return gl.join(lower, upper)


@gluon.jit
def _factors(scales, zeros):
    """What `_pairs` takes off, multiplies by and adds, for each row."""
    kind: gl.constexpr = scales.dtype
    base: gl.constexpr = 128.0 if kind == gl.bfloat16 else 1024.0
    raised = zeros.to(gl.float32) + base
    less = raised.to(kind)
    rest = (less.to(gl.float32) - raised) * scales.to(gl.float32)
    return (
        gl.expand_dims(_twice(less), 1),
        gl.expand_dims(_twice(scales), 1),
        gl.expand_dims(_twice(rest.to(kind)), 1),
    )


@gluon.jit
def _all_factors(scales):
    factors = ()
    for part in gl.static_range(len(scales)):
        factors = factors + (_factors(scales[part][0], scales[part][1]),)
    return factors


@gluon.jit
def _load_scales(
    scales_ptr, zeros_ptr, row, block, is_here, groups,
    GROUP: gl.constexpr, PER_SCALE: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Scales and zeros of a block, of one part of its places after the other; GROUP is 0 where a row has one."""
    loaded = ()
    for part in gl.static_range(HALF // PER_SCALE):
        if GROUP == 0:
            group = 0
        else:
            group = gl.minimum((block * HALF + part * PER_SCALE) * 2 * _WORDS // GROUP, groups - 1)
        at = row.to(gl.int64) * groups + group
        scale = gl.load(scales_ptr + at, mask=is_here, other=0.0)
        zero = gl.load(zeros_ptr + at, mask=is_here, other=0.0)
        loaded = loaded + ((scale, zero),)
    return loaded


@gluon.jit
def _fetch(
    a_desc, words_desc, a_at, words_at, full, slot, block, tile_row, tile_col, is_there,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """A block of words and what of A meets it, on their way into a slot."""
    CHUNKS: gl.constexpr = HALF // 4
    bar = full.index(slot)
    hopper.mbarrier.expect(bar, BN * _WORDS * 4 + BM * HALF * 64, pred=is_there)
    tile_in(words_desc, [tile_col, block * _WORDS], bar, words_at.index(slot), pred=is_there)
    for chunk in gl.static_range(CHUNKS):
        k = (block * CHUNKS + chunk) * 128
        tile_in(a_desc, [tile_row, k], bar, a_at.index(slot * CHUNKS + chunk), pred=is_there)


@gluon.jit
def _warpgroups_kernel(
    a_desc, words_desc, scales_ptr, zeros_ptr, c_ptr, m, n, blocks, groups, per_split,
    BITS: gl.constexpr, PER_SCALE: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, IS_PART: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """BN rows of the weight by BM rows of A, over some of the blocks: the sums, or with IS_PART a part of them."""
    HALF: gl.constexpr = 16 // BITS
    CHUNKS: gl.constexpr = HALF // 4
    kind: gl.constexpr = scales_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BM, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    of_words: gl.constexpr = _words_layout(BN, num_warps)
    a_at = gl.allocate_shared_memory(kind, [STAGES * CHUNKS, BM, 128], a_desc.layout)
    words_at = gl.allocate_shared_memory(gl.int32, [STAGES, BN, _WORDS], words_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
    hopper.fence_async_shared()  # the copy engine sees the barriers as they are now

    tile_col, tile_row = gl.program_id(0) * BN, gl.program_id(2) * BM
    begin = gl.program_id(1) * per_split
    count = gl.minimum(blocks - begin, per_split)
    for ahead in gl.static_range(STAGES):
        _fetch(
            a_desc, words_desc, a_at, words_at, full, ahead, begin + ahead, tile_row, tile_col, ahead < count,
            HALF, BM, BN,
        )  # fmt: skip
    row = tile_col + gl.arange(0, BN, gl.SliceLayout(1, of_words))
    scales = _load_scales(scales_ptr, zeros_ptr, row, begin, row < n, groups, GROUP, PER_SCALE, HALF)
    factors = _all_factors(scales)
    scales = _load_scales(scales_ptr, zeros_ptr, row, begin + 1, row < n, groups, GROUP, PER_SCALE, HALF)
    hopper.mbarrier.wait(full.index(0), 0)
    words = words_at.index(0).load(of_words)
    values = gl.convert_layout(_values(words, factors, 0, BITS, PER_SCALE, kind), left, assert_trivial=True)
    acc = gl.zeros([BN, BM], gl.float32, layout)
    for turn in range(0, count):
        slot = turn % STAGES
        for chunk in gl.static_range(CHUNKS):
            right = a_at.index(slot * CHUNKS + chunk).permute((1, 0))
            acc = hopper.warpgroup_mma(values, right, acc, use_acc=(turn > 0) | (chunk > 0), is_async=True)
            after = (turn + 1) % STAGES
            is_there = turn + 1 < count
            if chunk == CHUNKS - 1:
                factors = _all_factors(scales)
                scales = _load_scales(
                    scales_ptr, zeros_ptr, row, begin + turn + 2, row < n, groups, GROUP, PER_SCALE, HALF
                )  # behind the last block those of the last again
                hopper.mbarrier.wait(full.index(after), (turn + 1) // STAGES & 1, pred=is_there)
                words = words_at.index(after).load(of_words)
            others = _values(words, factors, (chunk + 1) % CHUNKS, BITS, PER_SCALE, kind)
            others = gl.convert_layout(others, left, assert_trivial=True)
            # the assembler would move the wait for the product up, but not over a branch, which this is
            hopper.mbarrier.wait(full.index(slot), turn // STAGES & 1, deps=(words_at,))
            acc, values, others = hopper.warpgroup_mma_wait(0, deps=(acc, values, others))
            values = others
        meet()  # all warps are done with this turn's place
        _fetch(
            a_desc, words_desc, a_at, words_at, full, slot, begin + turn + STAGES, tile_row, tile_col,
            turn + STAGES < count, HALF, BM, BN,
        )  # fmt: skip
    col = tile_col + gl.arange(0, BN, gl.SliceLayout(1, layout))
    of_a = tile_row + gl.arange(0, BM, gl.SliceLayout(0, layout))
    at = (gl.program_id(1) * m * IS_PART + of_a)[None, :].to(gl.int64) * n + col[:, None]
    gl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=(of_a < m)[None, :] & (col < n)[:, None])


WARPGROUPS = Kernel(
    jit=_warpgroups_kernel, targets=(90,), narrow="a group's scale and zero are 2 bytes, and C lies turned over"
)
