"""What rope and qk_norm_rope share: pairs of a head's values, their angles, and how rows are shared out.

A row is one head of one token. Rows may lie anywhere, (batch, q_len, heads, head_dim) or its transpose, as long as a
row's own values follow one another. A tile is some tokens by some heads, so that its three dimensions say where rows
lie without a table.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.errors import BadInput
from sublight.ops.kernels.rows import generator_for, why_torch
from sublight.ops.record.tuning import Tile

Style = Literal["half", "interleaved"]
Pair = tuple[torch.Tensor, torch.Tensor]
STYLES = ("half", "interleaved")  # what is paired: value i with value i + rotary_dim / 2, or neighbours
WARPS = 4
MAX_HEAD_DIM = 1024
MAX_BATCH = 65535  # of a grid's third dimension
BASE = 10_000.0  # of the angles that tests and benchmarks draw
START = 17  # their first position: at 0 nothing turns, and nothing would show
KEYS = ("batch", "q_len", "heads", "kv_heads", "head_dim")
SHAPES: tuple[Shape, ...] = tuple(
    dict(zip(KEYS, sizes, strict=True))
    for sizes in (
        *((8, 4096, 32, 8, 128), (4, 8192, 32, 32, 128), (8, 4096, 16, 16, 64), (16, 2048, 28, 4, 128)),
        *((4, 4096, 32, 32, 80), (4, 4096, 16, 8, 256)),
        *((batch, 1, 32, 8, 128) for batch in (1, 16, 128)),
    )
)
TEST_SHAPES: tuple[Shape, ...] = tuple(
    dict(zip(KEYS, sizes, strict=True))
    for sizes in (
        *((1, 1, 1, 1, 2), (3, 37, 5, 3, 6), (1, 17, 4, 2, 64), (3, 1, 8, 8, 128)),
        *((1, 9, 28, 4, 32), (2, 3, 5, 5, 80), (2, 33, 4, 2, 130)),
    )
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What every kernel of the family is told: where things lie, and how they are shared out."""

    tables: tuple[torch.Tensor, ...]  # cos, sin, and positions or something in their place
    numbers: tuple[int, ...]  # q_len, max_len, and the strides of the tables
    strides: list[int]  # batch, token, head: of each tensor of rows in turn
    batch: int
    token_tiles: int
    constants: dict[str, Any]

    @property
    def head_tiles(self) -> int:
        return int(self.constants["Q_TILES"] + self.constants["K_TILES"])

    @property
    def grid(self) -> tuple[int, int, int]:
        """One program a tile, as `tile_here` counts them."""
        if self.constants["HEADS_FIRST"]:
            return self.token_tiles * self.head_tiles, 1, self.batch
        return self.token_tiles, self.head_tiles, self.batch


def layout(
    tensors: Inputs,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    tile: Tile,
    *,
    weights: Inputs = (),
) -> Layout:
    """Of tensors whose rows have unit stride: q, k, and others shaped as they are, in turn."""
    q, k = tensors[:2]
    if cos.stride(1) != 1 or sin.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    where = positions.expand(q.shape[:2]).stride() if positions is not None else None
    pair = 2 * q.element_size()
    placed = _placed(
        tuple(q.shape), k.shape[2], tuple([x.stride() for x in tensors]), q.element_size(),
        tuple(cos.shape), (cos.stride(0), sin.stride(0)), cos.element_size(), where, rotary_dim, interleaved,
        interleaved and all(x.data_ptr() % pair == 0 for x in (*tensors, *weights)), tile,
    )  # fmt: skip
    numbers, strides, batch, token_tiles, constants = placed
    tables = (cos, sin, cos if positions is None else positions)
    return Layout(
        tables=tables, numbers=numbers, strides=strides, batch=batch, token_tiles=token_tiles, constants=constants
    )


@functools.lru_cache(maxsize=4096)
def _placed(
    shape: tuple[int, ...],
    kv_heads: int,
    four_strides: tuple[tuple[int, ...], ...],
    itemsize: int,
    table: tuple[int, int],
    steps: tuple[int, int],
    table_itemsize: int,
    where: tuple[int, int] | None,
    rotary_dim: int,
    interleaved: bool,
    pairs_aligned: bool,
    tile: Tile,
) -> tuple[tuple[int, ...], list[int], int, int, dict[str, Any]]:
    """What a layout says without its tables: the same for every layer and step, so it is worked out once."""
    batch, q_len, heads, head_dim = shape
    strides = [each[:3] for each in four_strides]
    table_strides, places = list(steps), where or (0, 0)
    first = q_len == 1 or strides[0][2] <= strides[0][1]  # heads nearer to one another than tokens
    if q_len == 1:  # one token of each sequence: taken for the tokens of one, all of the same position unless told
        batch, q_len, places = 1, batch, (0, places[0])
        strides = [(0, stride[0], stride[2]) for stride in strides]
        table_strides = table_strides if where is not None else [0, 0]
    unit = stride_unit(itemsize, [size for three in strides for size in three])
    table_unit = stride_unit(table_itemsize, table_strides)
    pairs, run = _pairs(interleaved, unit, itemsize, pairs_aligned)
    tokens_each, heads_each = share(q_len, math.gcd(heads, kv_heads), tile.rows, first)
    rest = head_dim - rotary_dim
    constants = {
        **{"TOKENS": tokens_each, "HEADS": heads_each, "HEADS_FIRST": first},
        **{"Q_TILES": heads // heads_each, "K_TILES": kv_heads // heads_each},
        **{"HALF": rotary_dim // 2, "BLOCK": tile.block, "REST": rest},
        **{"REST_BLOCK": next_power_of_2(max(1, rest)), "PAIRS": pairs, "UNIT": unit},
        **{"STEP": 2 if interleaved and table[1] == rotary_dim else 1, "RUN": run, "TABLE_UNIT": table_unit},
        "POSITIONS": where is not None,
    }
    numbers = (q_len, table[0], *(stride // table_unit for stride in table_strides), *places)
    return numbers, [size // unit for three in strides for size in three], batch, cdiv(q_len, tokens_each), constants


def stride_unit(itemsize: int, strides: list[int]) -> int:
    """The elements that strides are counted in: a vector of 16 bytes, or a pair, or one.

    >>> stride_unit(2, [72, 144]), stride_unit(2, [6, 18]), stride_unit(2, [7, 14])
    (8, 2, 1)
    """
    return next(unit for unit in (16 // itemsize, 2, 1) if all(stride % unit == 0 for stride in strides))


def _pairs(interleaved: bool, unit: int, itemsize: int, aligned: bool) -> tuple[str, int]:
    """How the kernels load and store pairs, and the pairs in 16 bytes where they are words (else 0)."""
    if not interleaved:
        return "halves", 0
    return ("words", 8 // itemsize) if unit > 1 and aligned else ("neighbours", 0)


def share(q_len: int, heads: int, rows: int, first: bool) -> tuple[int, int]:
    """Tokens and heads of one program, powers of two, the latter such that no program has heads of both q and k;
    `heads` is what both can be divided by.

    >>> share(4096, 8, 16, True), share(2048, 4, 16, True), share(4096, 8, 16, False)
    ((2, 8), (4, 4), (16, 1))
    """
    even = heads & -heads
    if first:
        return rows // min(rows, even), min(rows, even)
    tokens = min(rows, next_power_of_2(q_len))
    return tokens, min(rows // tokens, even)


def rule(rotary_dim: int, itemsize: int, *, warps: int = WARPS, loads: int = 1, **more: Any) -> Tile:
    """As many rows a program as let its threads load 16 bytes from each half, `loads` times."""
    block = next_power_of_2(rotary_dim // 2)
    return Tile(block=block, warps=warps, rows=max(1, loads * warps * 32 * 16 // (block * itemsize)), **more)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of unit stride: x itself, or a copy where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def like(x: torch.Tensor) -> torch.Tensor:
    """Room for a result in x's own order of dimensions, with rows of unit stride."""
    room = torch.empty_like(x)
    return room if room.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not_ours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str:
    """Why a call on these tensors goes to PyTorch; empty where one of our kernels takes it."""
    if reason := why_torch(q, k):
        return reason
    if k.numel() == 0:
        return "nothing to do for a tensor without rows"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"heads wider than {MAX_HEAD_DIM}"
    if q.shape[0] > MAX_BATCH and q.shape[1] > 1:
        return f"more than {MAX_BATCH} sequences"
    if cos.dtype != sin.dtype or cos.dtype not in (q.dtype, torch.float32):
        return "the tables are neither in q's data type nor in float32"
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "the tables want a gradient, which our backward pass does not give"
    return ""


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    style: str,
    rotary_dim: int | None,
) -> int:
    """How many values of a head are turned; what does not fit together is refused before a kernel reads past an end."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        told = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
        raise BadInput(f"{told} must be (batch, q_len, heads, head_dim), alike in all but heads: transpose(1, 2)?")
    width = q.shape[3] if rotary_dim is None else rotary_dim
    if style not in STYLES:
        raise BadInput(f"unknown style {style!r}: use 'half' (Llama, NeoX) or 'interleaved' (GPT-J)")
    if width % 2 or not 2 <= width <= q.shape[3]:
        raise BadInput(f"rotary_dim {width} must be even, and from 2 to head_dim, which is {q.shape[3]}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] not in (width, width // 2):
        told = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        raise BadInput(f"{told} must both be (max_len, {width // 2} or {width}): half of rotary_dim, or all of it")
    if positions is None and q.shape[1] > cos.shape[0]:
        raise BadInput(f"{q.shape[1]} tokens need as many rows of cos and sin, which have {cos.shape[0]}")
    if positions is not None:
        if positions.dtype not in (torch.int32, torch.int64):
            raise BadInput(f"positions must be int32 or int64, not {positions.dtype}")
        if positions.shape not in (q.shape[:2], (1, q.shape[1])):
            raise BadInput(f"positions {tuple(positions.shape)} must be (batch, q_len), here {tuple(q.shape[:2])}")
    if not q.is_floating_point() or q.dtype != k.dtype or not (cos.is_floating_point() and sin.is_floating_point()):
        told = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, cos, sin))
        raise BadInput(f"q and k must be of one floating-point type, cos and sin of floating point too, not {told}")
    given = [x for x in (q, k, cos, sin, positions) if x is not None]
    if len({x.device for x in given}) > 1:
        told = ", ".join(str(x.device) for x in given)
        raise BadInput(f"q, k, cos, sin and positions must be on one device, not on {told}")
    return int(width)


def random_heads(shape: Shape, dtype: str, device: str, seed: int) -> Pair:
    generator = generator_for(device, seed)
    before, head_dim, kind = (shape["batch"], shape["q_len"]), shape["head_dim"], getattr(torch, dtype)
    q, k = (
        torch.randn(*before, heads, head_dim, generator=generator, device=device, dtype=kind)
        for heads in (shape["heads"], shape["kv_heads"])
    )
    return q, k


def angles(length: int, rotary_dim: int, device: str) -> torch.Tensor:
    """Of every position and pair, (length, rotary_dim / 2), in fp32."""
    rates = BASE ** -(torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim)
    return (START + torch.arange(length, device=device, dtype=torch.float32))[:, None] * rates


def random_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """q, k, and tables in the same data type, as models hand them over."""
    turned = angles(shape["q_len"], shape["head_dim"], device)
    kind = getattr(torch, dtype)
    return *random_heads(shape, dtype, device, seed), turned.cos().to(kind), turned.sin().to(kind)
