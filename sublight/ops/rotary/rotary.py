"""What rope and qk_norm_rope share on the host: where rows lie, how they are shared out, and what is refused.

A row is one head of one token. Rows may lie anywhere, (batch, q_len, heads, head_dim) or its transpose, as long as a
row's own values follow one another. A tile is some tokens by some heads, so that its three dimensions say where rows
lie without a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from sublight.backend.jit import cdiv, next_power_of_2
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.errors import BadInput
from sublight.op import Buffer
from sublight.ops.kernels.rows import copies_of, generator_for, why_torch
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


class Heads(NamedTuple):
    """A tensor (batch, q_len, heads, head_dim) as the kernels see it: rows whose values follow one another."""

    strides: tuple[int, ...]  # of batch, token and head, in elements
    is_copy: bool = False  # its rows have no unit stride: it is copied into one piece first
    is_paired: bool = True  # its first element lies where a pair may begin, so that a pair can be moved as one word


def heads_of(x: torch.Tensor) -> Heads:
    if x.stride(-1) != 1:
        _, tokens, heads, width = x.shape
        return Heads((tokens * heads * width, heads * width, width), is_copy=True)
    return Heads(x.stride()[:3], is_paired=x.data_ptr() % (2 * x.element_size()) == 0)


def room_like(x: torch.Tensor) -> Buffer:
    """The buffer of a result for x: its dimensions in x's own order, rows of unit stride."""
    return Buffer(shape=tuple(x.shape), dtype=x.dtype, strides=like(x, device="meta").stride())


def heads_of_room(room: Buffer) -> Heads:
    return Heads(room.strides[:3])


def like(x: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A tensor of that kind, on x's device by default."""
    room = torch.empty_like(x, device=device)
    return room if room.stride(-1) == 1 else torch.empty_like(x, device=device, memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What every kernel of the family is given: where things lie, and how they are shared out."""

    numbers: tuple[int, ...]  # q_len, max_len, the tables' strides; then batch, token, head of each tensor in turn
    tables: str  # the names of cos, sin, and positions or something in their place
    copies: tuple[str, ...]  # of the tables
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
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    tile: Tile,
    tensors: Sequence[Heads],
    *,
    weights: Inputs = (),
) -> Layout:
    """The layout of tensors shaped as q and k, in turn: q and k, or their gradients."""
    batch, q_len, heads, head_dim = q.shape
    kv_heads, itemsize = k.shape[2], q.element_size()
    strides = [each.strides for each in tensors]
    is_copied = cos.stride(1) != 1 or sin.stride(1) != 1
    table_strides = [cos.shape[1]] * 2 if is_copied else [cos.stride(0), sin.stride(0)]
    places = positions.expand(q.shape[:2]).stride() if positions is not None else (0, 0)
    first = q_len == 1 or strides[0][2] <= strides[0][1]  # heads nearer to one another than tokens
    if q_len == 1:  # one token of each sequence: taken for the tokens of one, all of the same position by default
        batch, q_len, places = 1, batch, (0, places[0])
        strides = [(0, each[0], each[2]) for each in strides]
        table_strides = table_strides if positions is not None else [0, 0]
    unit = stride_unit(itemsize, [size for three in strides for size in three])
    table_unit = stride_unit(cos.element_size(), table_strides)
    are_paired = all(each.is_paired for each in tensors) and all(w.data_ptr() % (2 * itemsize) == 0 for w in weights)
    pairs, run = _pairs(interleaved, unit, itemsize, are_paired)
    tokens_each, heads_each = share(q_len, math.gcd(heads, kv_heads), tile.rows, first)
    rest = head_dim - rotary_dim
    constants = {
        **{"TOKENS": tokens_each, "HEADS": heads_each, "HEADS_FIRST": first},
        **{"Q_TILES": heads // heads_each, "K_TILES": kv_heads // heads_each},
        **{"HALF": rotary_dim // 2, "BLOCK": tile.block, "REST": rest},
        **{"REST_BLOCK": next_power_of_2(max(1, rest)), "PAIRS": pairs, "UNIT": unit},
        **{"STEP": 2 if interleaved and cos.shape[1] == rotary_dim else 1, "RUN": run, "TABLE_UNIT": table_unit},
        "POSITIONS": positions is not None,
    }
    of_tables = (q_len, cos.shape[0], *(stride // table_unit for stride in table_strides), *places)
    return Layout(
        numbers=(*of_tables, *(size // unit for three in strides for size in three)),
        tables=f"cos sin {'cos' if positions is None else 'positions'}",
        copies=copies_of(cos=is_copied, sin=is_copied),
        batch=batch,
        token_tiles=cdiv(q_len, tokens_each),
        constants=constants,
    )


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
    """The tile by rule: so many rows that a program's threads load 16 bytes from each half, `loads` times."""
    block = next_power_of_2(rotary_dim // 2)
    return Tile(block=block, warps=warps, rows=max(1, loads * warps * 32 * 16 // (block * itemsize)), **more)


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
    width: int,
) -> None:
    """What does not fit together is refused before a kernel reads past an end; `width` values of a head are turned.

    Plans and references ask, not the calls themselves: for each kind of arguments a plan is made once.
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
        raise BadInput(f"{shapes} must be (batch, q_len, heads, head_dim), alike in all but heads: transpose(1, 2)?")
    if width % 2 or not 2 <= width <= q.shape[3]:
        raise BadInput(f"rotary_dim {width} must be even, and from 2 to head_dim, which is {q.shape[3]}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] not in (width, width // 2):
        shapes = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        raise BadInput(f"{shapes} must both be (max_len, {width // 2} or {width}): half of rotary_dim, or all of it")
    if positions is None and q.shape[1] > cos.shape[0]:
        raise BadInput(f"{q.shape[1]} tokens need as many rows of cos and sin, which have {cos.shape[0]}")
    if positions is not None:
        if positions.dtype not in (torch.int32, torch.int64):
            raise BadInput(f"positions must be int32 or int64, not {positions.dtype}")
        if positions.shape not in (q.shape[:2], (1, q.shape[1])):
            raise BadInput(f"positions {tuple(positions.shape)} must be (batch, q_len), here {tuple(q.shape[:2])}")
    if not q.is_floating_point() or q.dtype != k.dtype or not (cos.is_floating_point() and sin.is_floating_point()):
        types = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, cos, sin))
        raise BadInput(f"q and k must be of one floating-point type, cos and sin of floating point too, not {types}")
    given = [x for x in (q, k, cos, sin, positions) if x is not None]
    if len({x.device for x in given}) > 1:
        devices = ", ".join(str(x.device) for x in given)
        raise BadInput(f"q, k, cos, sin and positions must be on one device, not on {devices}")


def check_memory(*tensors: torch.Tensor) -> None:
    """Refuse tensors that cannot be written into."""
    for x in tensors:
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise BadInput("rope_ cannot write into an expanded tensor, whose elements share memory: use rope")


def is_interleaved(style: str) -> bool:
    if style not in STYLES:
        raise BadInput(f"unknown style {style!r}: use 'half' (Llama, NeoX) or 'interleaved' (GPT-J)")
    return style == "interleaved"


def style_of(interleaved: bool) -> Style:
    return "interleaved" if interleaved else "half"


def random_heads(shape: Shape, dtype: str, device: str, seed: int) -> Pair:
    generator = generator_for(device, seed)
    before, head_dim, kind = (shape["batch"], shape["q_len"]), shape["head_dim"], getattr(torch, dtype)
    q, k = (
        torch.randn(*before, heads, head_dim, generator=generator, device=device, dtype=kind)
        for heads in (shape["heads"], shape["kv_heads"])
    )
    return q, k


def angles(length: int, rotary_dim: int, device: str) -> torch.Tensor:
    """The angle of every position and pair, (length, rotary_dim / 2), in fp32."""
    rates = BASE ** -(torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim)
    return (START + torch.arange(length, device=device, dtype=torch.float32))[:, None] * rates


def random_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """q, k, and tables in the same data type, as models hand them over."""
    turned = angles(shape["q_len"], shape["head_dim"], device)
    kind = getattr(torch, dtype)
    return *random_heads(shape, dtype, device, seed), turned.cos().to(kind), turned.sin().to(kind)
