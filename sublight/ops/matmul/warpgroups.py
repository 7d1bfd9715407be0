"""Products of 17 to 128 rows with packed weights on Hopper: values go from registers into the tensor cores.

A warpgroup multiplies 64 x 16 values of the weight, its left operand, by 16 x up to 128 of A's rows. The right operand
must lie in shared memory, the left one may lie in registers: there words become values, two at a time, less their zero
and by their scale. The result is C turned over. Which words a lane takes follows from the operand's layout: of a
block's sixteen those at q, q + 4, q + 8, q + 12, whose values at a place are then what the tensor cores expect of lane
q of four (`packing.py` lays neighbours along k in the two halves of a word).

One warp has the copy engine bring blocks of words and of A, STAGES of them ahead. Two warpgroups share what is brought
of A: while one's products run, the other takes words apart.

A value of b bits, put under the exponent of 128 (bf16) or 1024 (fp16), is that number too large, exactly. Its zero is
taken off in two steps, so that only the last one rounds: first what 128 + zero is in 16 bits, which leaves a whole
number, then the rest, at most half of one, with the scale. So no scale overflows that does not in the weight itself.
"""

from __future__ import annotations

from sublight.backend.jit import gl, gluon, hopper, tile_in, triton
from sublight.op import Kernel
from sublight.ops.attention.slots import slot_of
from sublight.ops.matmul.packing import WORDS

_WORDS = gl.constexpr(WORDS)
GROUPS = 2  # warpgroups …
ROWS = 64  # … and rows of the weight of each
REGISTERS = 160  # of the second warpgroup's threads; the first one has what is left
_GROUPS, _ROWS, _REGISTERS = gl.constexpr(GROUPS), gl.constexpr(ROWS), gl.constexpr(REGISTERS)


@triton.constexpr_function
def _words_layout():
    """Of (64, 16) words: as four warps' lanes hold the left operand, rows 8 apart and every fourth word."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS, WORDS],
    )


@triton.constexpr_function
def _take_apart(place, bits, is_bf16):
    """PTX: the values at a place of both halves of word $1, less $2 and by $3, with $4 added, as two 16-bit floats."""
    kind, exponent = ("bf16x2", 0x4300) if is_bf16 else ("f16x2", 0x6400)
    return (
        "{ .reg .b32 t; "
        f"shr.u32 t, $1, {place * bits}; lop3.b32 t, t, {((1 << bits) - 1) * 0x10001}, {exponent * 0x10001}, 0xEA; "
        f"sub.rn.{kind} t, t, $2; fma.rn.{kind} $0, t, $3, $4; }}"
    )


@gluon.jit
def _twice(x):
    """A 16-bit float in both halves of a register."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _at_place(words, factors, PLACE: gl.constexpr, BITS: gl.constexpr, PER_SCALE: gl.constexpr, kind: gl.constexpr):
    """Pairs of values at a place, neighbours along k, in one register each."""
    less, scale, rest = factors[PLACE // PER_SCALE]
    return gl.inline_asm_elementwise(
        _take_apart(PLACE, BITS, kind == gl.bfloat16), "=r,r,r,r,r", [words, less, scale, rest],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _pairs(words, factors, CHUNK: gl.constexpr, BITS: gl.constexpr, PER_SCALE: gl.constexpr, kind: gl.constexpr):
    """Those at four places."""
    return (
        _at_place(words, factors, CHUNK * 4, BITS, PER_SCALE, kind),
        _at_place(words, factors, CHUNK * 4 + 1, BITS, PER_SCALE, kind),
        _at_place(words, factors, CHUNK * 4 + 2, BITS, PER_SCALE, kind),
        _at_place(words, factors, CHUNK * 4 + 3, BITS, PER_SCALE, kind),
    )


@gluon.jit
def _halves(pairs, kind: gl.constexpr):
    if kind == gl.bfloat16:
        lower, upper = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        lower, upper = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.join(lower, upper)


@gluon.jit
def _operand(pairs, kind: gl.constexpr, left: gl.constexpr):
    """(64, 128) values: the same registers, as the left operand of a product."""
    a, b, c, d = _halves(pairs[0], kind), _halves(pairs[1], kind), _halves(pairs[2], kind), _halves(pairs[3], kind)
    joined = gl.join(gl.join(a, c), gl.join(b, d))  # rows, words, halves, place // 2, place % 2
    values = gl.reshape(gl.permute(joined, [0, 3, 4, 1, 2]), [a.shape[0], 128])
    return gl.convert_layout(values, left, assert_trivial=True)


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
        factors = factors + (_factors(scales[part][0], scales[part][1]),)  # type: ignore[assignment]  # noqa: RUF005
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
        loaded = loaded + ((scale, zero),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _copy(
    a_desc, words_desc, a_at, words_at, full, empty, begin, count, tile_row, tile_col,
    HALF: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: blocks of words, of each warpgroup's rows, and what of A meets them."""
    CHUNKS: gl.constexpr = HALF // 4
    for turn in range(0, count):
        slot, phase = slot_of(turn, STAGES)
        bar = full.index(slot)
        hopper.mbarrier.wait(empty.index(slot), phase ^ 1)
        hopper.mbarrier.expect(bar, _GROUPS * _ROWS * _WORDS * 4 + BM * HALF * 64)
        for part in gl.static_range(_GROUPS):
            place = [tile_col + part * _ROWS, (begin + turn) * _WORDS]
            tile_in(words_desc, place, bar, words_at.index(slot * _GROUPS + part))
        for chunk in gl.static_range(CHUNKS):
            place = [tile_row, ((begin + turn) * CHUNKS + chunk) * 128]
            tile_in(a_desc, place, bar, a_at.index(slot * CHUNKS + chunk))


@gluon.jit
def _multiply(
    scales_ptr, zeros_ptr, c_ptr, a_at, words_at, full, empty, m, n, groups, begin, count, tile_row, tile_col,
    PART: gl.constexpr, BITS: gl.constexpr, PER_SCALE: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr, IS_PART: gl.constexpr,
):  # fmt: skip
    """A warpgroup."""
    HALF: gl.constexpr = 16 // BITS
    CHUNKS: gl.constexpr = HALF // 4
    kind: gl.constexpr = scales_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    of_words: gl.constexpr = _words_layout()
    first = tile_col + PART * _ROWS
    row = first + gl.arange(0, _ROWS, gl.SliceLayout(1, of_words))
    scales = _load_scales(scales_ptr, zeros_ptr, row, begin, row < n, groups, GROUP, PER_SCALE, HALF)
    acc = gl.zeros([_ROWS, BM], gl.float32, layout)
    for turn in range(0, count):
        slot, phase = slot_of(turn, STAGES)
        factors = _all_factors(scales)
        scales = _load_scales(
            scales_ptr, zeros_ptr, row, begin + turn + 1, row < n, groups, GROUP, PER_SCALE, HALF
        )  # of the next block; behind the last one, those of the last again
        hopper.mbarrier.wait(full.index(slot), phase)
        words = words_at.index(slot * _GROUPS + PART).load(of_words)
        for chunk in gl.static_range(CHUNKS):
            values = _operand(_pairs(words, factors, chunk, BITS, PER_SCALE, kind), kind, left)
            right = a_at.index(slot * CHUNKS + chunk).permute((1, 0))
            acc = hopper.warpgroup_mma(values, right, acc, use_acc=(turn > 0) | (chunk > 0), is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        hopper.mbarrier.arrive(empty.index(slot), count=1)
    col = first + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    of_a = tile_row + gl.arange(0, BM, gl.SliceLayout(0, layout))
    at = (gl.program_id(1) * m * IS_PART + of_a)[None, :].to(gl.int64) * n + col[:, None]
    gl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=(of_a < m)[None, :] & (col < n)[:, None])


@gluon.jit
def _warpgroups_kernel(
    a_desc, words_desc, scales_ptr, zeros_ptr, c_ptr, m, n, blocks, groups, per_split,
    BITS: gl.constexpr, PER_SCALE: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    IS_PART: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """128 rows of the weight by BM rows of A, over some of the blocks: the sums, or with IS_PART a part of them."""
    HALF: gl.constexpr = 16 // BITS
    CHUNKS: gl.constexpr = HALF // 4
    a_at = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STAGES * CHUNKS, BM, 128], a_desc.layout)
    words_at = gl.allocate_shared_memory(gl.int32, [STAGES * _GROUPS, _ROWS, _WORDS], words_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(slot), count=1)
        hopper.mbarrier.init(empty.index(slot), count=_GROUPS)
    hopper.fence_async_shared()  # the copy engine sees the barriers as they are now
    tile_col, tile_row = gl.program_id(0) * (_GROUPS * _ROWS), gl.program_id(2) * BM
    begin = gl.program_id(1) * per_split
    count = gl.minimum(blocks - begin, per_split)
    gl.warp_specialize(
        [
            (_multiply, (scales_ptr, zeros_ptr, c_ptr, a_at, words_at, full, empty, m, n, groups, begin, count,
                         tile_row, tile_col, 0, BITS, PER_SCALE, GROUP, BM, STAGES, IS_PART)),
            (_multiply, (scales_ptr, zeros_ptr, c_ptr, a_at, words_at, full, empty, m, n, groups, begin, count,
                         tile_row, tile_col, 1, BITS, PER_SCALE, GROUP, BM, STAGES, IS_PART)),
            (_copy, (a_desc, words_desc, a_at, words_at, full, empty, begin, count, tile_row, tile_col,
                     HALF, BM, STAGES)),
        ],
        [4, 1],  # warps of the second warpgroup and of the copying one …
        [_REGISTERS, 24],  # … and registers of their threads
    )  # fmt: skip


WARPGROUPS = Kernel(
    jit=_warpgroups_kernel, targets=(90,), narrow="a group's scale and zero are 2 bytes, and C lies turned over"
)
