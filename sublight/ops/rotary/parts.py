"""Parts that the kernels of rope and qk_norm_rope share: tiles of rows, pairs of a head's values, and their angles."""

from __future__ import annotations

from sublight.backend.jit import tl, triton


@triton.jit
def tile_here(HEAD_TILES: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """This program's batch, tile of tokens and tile of heads, of q's and then k's: neighbours in memory run together,
    and nothing is divided but by a constant."""
    if HEADS_FIRST:
        token_tile, head_tile = tl.program_id(0) // HEAD_TILES, tl.program_id(0) % HEAD_TILES
    else:
        token_tile, head_tile = tl.program_id(0), tl.program_id(1)
    return tl.program_id(2), token_tile, head_tile


@triton.jit
def row_places(batch, token, head, batch_stride, token_stride, head_stride, UNIT: tl.constexpr):
    """Where the rows begin. Strides count in UNIT elements: Triton knows of a number only whether 16 divides it, and a
    row of 72 could be moved by vectors too."""
    places = token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride  # elements may pass 2**31
    return (batch.to(tl.int64) * batch_stride + places) * UNIT


@triton.jit
def load_pairs(ptr, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Both values of every pair of the rows at `ptr`, in fp32.

    Neighbours are loaded as one "word" of twice the bits and taken apart by the thread that has it; splitting a block
    of them would go through shared memory. In rows that start at an odd element they are loaded one by one.
    """
    col = tl.arange(0, BLOCK)[None, None, :]
    mask = mask & (col < HALF)
    if PAIRS == "words":
        KIND: tl.constexpr = ptr.dtype.element_ty
        WORD: tl.constexpr = tl.int32 if KIND.primitive_bitwidth == 16 else tl.int64
        PART: tl.constexpr = tl.int16 if KIND.primitive_bitwidth == 16 else tl.int32
        word = tl.load(ptr.to(tl.pointer_type(WORD)) + col, mask=mask, other=0)
        first = word.to(PART).to(KIND, bitcast=True)
        second = (word >> KIND.primitive_bitwidth).to(PART).to(KIND, bitcast=True)
    elif PAIRS == "neighbours":
        first = tl.load(ptr + 2 * col, mask=mask, other=0.0)
        second = tl.load(ptr + 2 * col + 1, mask=mask, other=0.0)
    else:
        first = tl.load(ptr + col, mask=mask, other=0.0)
        second = tl.load(ptr + HALF + col, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(ptr, first, second, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    KIND: tl.constexpr = ptr.dtype.element_ty
    col = tl.arange(0, BLOCK)[None, None, :]
    mask = mask & (col < HALF)
    first, second = first.to(KIND), second.to(KIND)
    if PAIRS == "words":
        WORD: tl.constexpr = tl.int32 if KIND.primitive_bitwidth == 16 else tl.int64
        PART: tl.constexpr = tl.uint16 if KIND.primitive_bitwidth == 16 else tl.uint32
        low = first.to(PART, bitcast=True).to(WORD)
        high = second.to(PART, bitcast=True).to(WORD) << KIND.primitive_bitwidth
        tl.store(ptr.to(tl.pointer_type(WORD)) + col, low | high, mask=mask)
    elif PAIRS == "neighbours":
        tl.store(ptr + 2 * col, first, mask=mask)
        tl.store(ptr + 2 * col + 1, second, mask=mask)
    else:
        tl.store(ptr + col, first, mask=mask)
        tl.store(ptr + HALF + col, second, mask=mask)


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, positions_ptr, batch, token, q_len, max_len,
    cos_stride, sin_stride, positions_batch, positions_token,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr,
    UNIT: tl.constexpr, POSITIONS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Cosine and sine for every pair of the tile; NaN where a position is outside the tables.

    They are loaded again for every head, out of the nearest cache: a tile of tokens alone would be laid out over the
    threads in a way of its own, and q would go through shared memory to meet it.
    """
    col = tl.broadcast_to(tl.arange(0, BLOCK)[None, None, :], (1, HEADS, BLOCK))
    if RUN:  # so that the compiler sees no longer runs, and gives a thread as many angles as it has words
        col = col // RUN * RUN + col % RUN
    position = token
    mask = (token < q_len) & (col < HALF)
    if POSITIONS:
        place = batch.to(tl.int64) * positions_batch + token.to(tl.int64) * positions_token
        position = tl.load(positions_ptr + place, mask=token < q_len, other=0)
        known = (position >= 0) & (position < max_len)
        mask = mask & known
    row = position.to(tl.int64) * UNIT
    cos = tl.load(cos_ptr + row * cos_stride + col * STEP, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * sin_stride + col * STEP, mask=mask, other=0.0).to(tl.float32)
    if POSITIONS:
        cos = tl.where(known, cos, float("nan"))
    if INVERSE:
        sin = -sin
    return cos, sin
