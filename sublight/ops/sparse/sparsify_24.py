"""Two of every four weights, those with the largest magnitude: packed values and where they were, from one pass.

The sparse tensor cores multiply a matrix of which every four neighbours along k hold two zeros. A training step needs W
for the forward product and its transpose for the backward one, and both must be the same matrix: so of every 4x4 block
the pattern with two in each row *and* each column is taken that keeps the largest sum of magnitudes. There are 90 such
patterns, and all their sums are one small product of magnitudes with zeros and ones.

Storage: `packed` (rows, cols / 2), and `meta` (rows, cols / 16) in int16, for each four columns the places of the two
in 2 bits each, the first four lowest: what NVIDIA's instruction reads, before the reordering that CUTLASS adds.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.sparse import sparsify_24 as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.record.library import Registered

TILES_DOWN, TILES_ACROSS = 4, 16  # of 4x4 elements that a program takes: 16 rows, which one number of `meta` holds
ROW_MASKS = (0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100)  # two of four
ALL_ROW_MASKS = tl.constexpr(sum(mask << 4 * place for place, mask in enumerate(ROW_MASKS)))
ROWS_OF_THREE = tl.constexpr(len(ROW_MASKS) ** 3)  # choices for three rows of a block; the fourth is what is left
LARGEST = {torch.float16: 65504.0, torch.bfloat16: 2.0**124, torch.float32: 2.0**124}  # eight of them add up in fp32


def patterns() -> list[int]:
    """4x4 blocks with two in each row and column, as 16 bits, row by row, in the kernel's order."""
    found = []
    for third, second, first in itertools.product(ROW_MASKS, repeat=3):
        counts = [sum(mask >> col & 1 for mask in (first, second, third)) for col in range(4)]
        if max(counts) <= 2 and min(counts) >= 1:
            fourth = sum((2 - count) << col for col, count in enumerate(counts))
            found.append(first | second << 4 | third << 8 | fourth << 12)
    return found


def reference(w: torch.Tensor, both: bool = False) -> tuple[torch.Tensor, ...]:
    mask = _mask_of_blocks(w) if both else _mask_of_rows(w)
    return (*_pack(w, mask), *_pack(w.T, mask.T)) if both else _pack(w, mask)


def _magnitudes(w: torch.Tensor) -> torch.Tensor:
    """NaN counts for the largest number: what is wrong stays to be seen."""
    return torch.nan_to_num(w.double().abs(), nan=torch.inf, posinf=torch.inf).clamp(max=LARGEST.get(w.dtype, 2.0**124))


def _mask_of_rows(w: torch.Tensor) -> torch.Tensor:
    """Of equal ones the first."""
    order = (
        _magnitudes(w)
        .reshape(w.shape[0], w.shape[1] // 4, 4)
        .sort(stable=True, dim=-1, descending=True)
        .indices[..., :2]
    )
    mask = torch.zeros(w.shape[0], w.shape[1] // 4, 4, dtype=torch.bool, device=w.device)
    return mask.scatter(-1, order, True).view(w.shape)


def _mask_of_blocks(w: torch.Tensor) -> torch.Tensor:
    rows, cols = w.shape
    blocks = _magnitudes(w).reshape(rows // 4, 4, cols // 4, 4).transpose(1, 2).reshape(-1, 16)
    bits = torch.tensor(patterns(), device=w.device)
    choices = (bits[:, None] >> torch.arange(16, device=w.device)) & 1  # (90, 16)
    sums = blocks @ choices.T.double()
    is_best = sums == sums.amax(1, keepdim=True)
    number = torch.arange(len(bits), device=w.device)
    best = torch.where(is_best, number, len(bits) - 1).amin(1)  # of equal ones the first
    chosen = choices[best].bool().view(rows // 4, cols // 4, 4, 4)
    return chosen.transpose(1, 2).reshape(rows, cols)


def _pack(w: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = w.shape
    places = mask.reshape(rows, cols // 4, 4).nonzero()[:, 2].view(rows, cols // 4, 2)
    values = w.reshape(rows, cols // 4, 4).gather(2, places).reshape(rows, cols // 2)
    fours = torch.nn.functional.pad(places[..., 0] | places[..., 1] << 2, (0, -(cols // 4) % 4))
    words = (fours.view(rows, cdiv(cols, 16), 4) << 4 * torch.arange(4, device=w.device)).sum(2)
    return values.contiguous(), torch.where(words >= 2**15, words - 2**16, words).to(torch.int16)


@triton.jit
def _pattern(number):
    """The 16 bits of a pattern by its number, and whether it has two in each column."""
    first = (ALL_ROW_MASKS >> (number % 6) * 4) & 15
    second = (ALL_ROW_MASKS >> (number // 6 % 6) * 4) & 15
    third = (ALL_ROW_MASKS >> (number // 36 % 6) * 4) & 15
    none = (first | second | third) != 15  # a column without one cannot get two from the fourth row
    three = (first & second & third) != 0
    fourth = 15 ^ ((first & second) | (first & third) | (second & third))  # columns that have one so far
    fits = (number < ROWS_OF_THREE) & (none == 0) & (three == 0)
    return first | (second << 4) | (third << 8) | (fourth << 12), fits


@triton.jit
def _best_pattern(magnitude, T: tl.constexpr, PRECISION: tl.constexpr):
    """Of each block (T, 16): the pattern with the largest sum, the first of equal ones."""
    place = tl.arange(0, 16)
    best = tl.full([T], -1.0, tl.float32)
    chosen = tl.zeros([T], tl.int32)
    for start in tl.static_range(0, 256, 64):
        number = start + tl.arange(0, 64)
        bits, fits = _pattern(number)
        choices = ((bits[None, :] >> place[:, None]) & 1).to(magnitude.dtype)
        sums = tl.dot(magnitude, choices, input_precision=PRECISION)
        sums = tl.where(fits[None, :], sums, -1.0)
        top = tl.max(sums, 1)
        first = tl.min(tl.where(sums == top[:, None], number[None, :], 256), 1)
        chosen = tl.where(top > best, first, chosen)
        best = tl.maximum(best, top)
    bits, _ = _pattern(chosen)
    return ((bits[:, None] >> place[None, :]) & 1) != 0


@triton.jit
def _two_of(x, mask, AXIS: tl.constexpr):
    """Of blocks (T, 4, 4), along an axis: the two that are chosen, and their places in four bits."""
    if AXIS == 2:
        place = tl.arange(0, 4)[None, None, :]
    else:
        place = tl.arange(0, 4)[None, :, None]
    first = tl.min(tl.where(mask, place, 4), AXIS)
    second = tl.max(tl.where(mask, place, -1), AXIS)
    one = tl.sum(tl.where(place == tl.expand_dims(first, AXIS), x, 0.0), AXIS)
    other = tl.sum(tl.where(place == tl.expand_dims(second, AXIS), x, 0.0), AXIS)
    return one, other, first | (second << 2)


@triton.jit
def _sparsify_kernel(
    w_ptr, packed_ptr, meta_ptr, packed_t_ptr, meta_t_ptr, rows, cols, row_stride, col_stride, words, words_t, largest,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, BOTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = DOWN * ACROSS
    tile = tl.arange(0, T)
    down = tl.program_id(1).to(tl.int64) * DOWN
    across = tl.program_id(0).to(tl.int64) * ACROSS
    inner = tl.arange(0, 16)
    row = (down + tile // ACROSS)[:, None] * 4 + (inner // 4)[None, :]
    col = (across + tile % ACROSS)[:, None] * 4 + (inner % 4)[None, :]
    x = tl.load(w_ptr + row * row_stride + col * col_stride, mask=(row < rows) & (col < cols), other=0.0)
    wide = x.to(tl.float32)
    magnitude = tl.where(wide != wide, largest, tl.minimum(tl.abs(wide), largest))
    block = tl.reshape(wide, [T, 4, 4])
    if BOTH:
        mask = tl.reshape(_best_pattern(magnitude.to(x.dtype), T, PRECISION), [T, 4, 4])
    else:
        size = tl.reshape(magnitude, [T, 4, 4])
        place = tl.arange(0, 4)
        one, other = tl.expand_dims(size, 3), tl.expand_dims(size, 2)  # (T, row, col, 1) and (T, row, 1, other)
        is_before = (place[None, :] < place[:, None])[None, None, :, :]
        beaten = (other > one) | ((other == one) & is_before)
        mask = tl.sum(beaten.to(tl.int32), 3) < 2
    first, second, fours = _two_of(block, mask, 2)  # (T, row)
    four = tl.arange(0, 4)[None, :]
    pair = tl.arange(0, 2)[None, None, :]
    at_row = (down + tile // ACROSS)[:, None] * 4 + four
    at_four = (across + tile % ACROSS)[:, None]
    at = tl.expand_dims(at_row * (cols // 2) + at_four * 2, 2) + pair
    inside = tl.expand_dims((at_row < rows) & (at_four * 4 < cols), 2) & (pair >= 0)
    tl.store(packed_ptr + at, tl.join(first, second).to(x.dtype), mask=inside)
    shift = tl.arange(0, 4) * 4
    fours = tl.where((at_row < rows) & (at_four * 4 < cols), fours, 0)
    word = tl.sum(tl.reshape(fours, [DOWN, ACROSS // 4, 4, 4]) << shift[None, None, :, None], 2)  # (DOWN, words, row)
    at_row = ((down + tl.arange(0, DOWN))[:, None, None] * 4) + tl.arange(0, 4)[None, None, :]
    at_word = (across // 4 + tl.arange(0, ACROSS // 4))[None, :, None]
    tl.store(meta_ptr + at_row * words + at_word, word.to(tl.int16), mask=(at_row < rows) & (at_word < words))
    if BOTH:
        first, second, fours = _two_of(block, mask, 1)  # (T, col)
        at_col = (across + tile % ACROSS)[:, None] * 4 + four
        at_four = (down + tile // ACROSS)[:, None]
        at = tl.expand_dims(at_col * (rows // 2) + at_four * 2, 2) + pair
        inside = tl.expand_dims((at_col < cols) & (at_four * 4 < rows), 2) & (pair >= 0)
        tl.store(packed_t_ptr + at, tl.join(first, second).to(x.dtype), mask=inside)
        fours = tl.where((at_col < cols) & (at_four * 4 < rows), fours, 0)
        word = tl.sum(tl.reshape(fours, [DOWN // 4, 4, ACROSS, 4]) << shift[None, :, None, None], 1)
        at_col = ((across + tl.arange(0, ACROSS))[None, :, None] * 4) + tl.arange(0, 4)[None, None, :]
        at_word = (down // 4 + tl.arange(0, DOWN // 4))[:, None, None]
        tl.store(meta_t_ptr + at_col * words_t + at_word, word.to(tl.int16), mask=(at_col < cols) & (at_word < words_t))


def _storage(w: torch.Tensor, both: bool) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    rows, cols = w.shape
    found: dict[str, tuple[tuple[int, int], torch.dtype]] = {
        "packed": ((rows, cols // 2), w.dtype), "meta": ((rows, cdiv(cols, 16)), torch.int16)
    }  # fmt: skip
    if both:
        found |= {"packed_t": ((cols, rows // 2), w.dtype), "meta_t": ((cols, cdiv(rows, 16)), torch.int16)}
    return found


def plan_sparsify(w: torch.Tensor, both: bool) -> Plan:
    rows, cols = w.shape
    buffers = {name: Buffer(shape=shape, dtype=kind) for name, (shape, kind) in _storage(w, both).items()}
    if not both:
        buffers |= {"packed_t": Buffer(shape=(0,), dtype=w.dtype), "meta_t": Buffer(shape=(0,), dtype=torch.int16)}
    step = Step(
        _sparsify_kernel, (cdiv(cols, 4 * TILES_ACROSS), cdiv(rows, 4 * TILES_DOWN)),
        rows, cols, *w.stride(), cdiv(cols, 16), cdiv(rows, 16), LARGEST[w.dtype],
        on="w packed meta packed_t meta_t" if both else "w packed meta packed meta",
        DOWN=TILES_DOWN, ACROSS=TILES_ACROSS, BOTH=both, PRECISION="ieee",
        num_warps=8 if both and w.dtype == torch.float32 else 4,
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="one pass, W and its transpose with the same zeros" if both else "one pass",
        buffers=buffers,
        steps=(step,),
        outputs=("packed", "meta", "packed_t", "meta_t"),
    )


def _fake(w: torch.Tensor, both: bool) -> tuple[torch.Tensor, ...]:
    made = [w.new_empty(shape, dtype=kind) for shape, kind in _storage(w, both).values()]
    return tuple(made) if both else (*made, w.new_empty((0,)), w.new_empty((0,), dtype=torch.int16))


def _whole_reference(w: torch.Tensor, both: bool) -> tuple[torch.Tensor, ...]:
    found = reference(w, both)
    return found if both else (*found, w.new_empty((0,)), w.new_empty((0,), dtype=torch.int16))


def why_torch(w: torch.Tensor, both: bool) -> str:
    return why_no_kernel(w) or ("nothing to choose from" if w.numel() == 0 else "")


_sparsify = Registered(
    schema="sparsify_24(Tensor w, bool both) -> (Tensor packed, Tensor meta, Tensor packed_t, Tensor meta_t)",
    reference=_whole_reference,
    theirs="a sort of every four",
    why_torch=why_torch,
    plan=plan_sparsify,
    fake=_fake,
)


def sparsify_24(w: torch.Tensor, both: bool = False) -> tuple[torch.Tensor, ...]:
    """The two largest of every four weights along a row, as (packed, meta); with `both` also those of w's transpose,
    (packed, meta, packed_t, meta_t), and then both stand for one matrix, with two zeros in every four both ways.

    `unpack_24(packed, meta, cols)` gives the matrix itself.
    """
    check(w, both)
    return _results(_sparsify.call(w, both), both)


def _results(found: Any, both: bool) -> tuple[torch.Tensor, ...]:
    return tuple(found) if both else tuple(found[:2])


def check(w: torch.Tensor, both: bool) -> None:
    if w.dim() != 2 or not w.is_floating_point():
        kind = str(w.dtype).removeprefix("torch.")
        raise BadInput(f"sparsify_24 takes a matrix of floating point, not {kind} {tuple(w.shape)}")
    if w.shape[1] % 4 or (both and w.shape[0] % 4):
        sides = "rows and columns" if both else "columns"
        raise BadInput(f"sparsify_24 needs {sides} in fours, not {tuple(w.shape)}")


def unpack_24(packed: torch.Tensor, meta: torch.Tensor, cols: int) -> torch.Tensor:
    """The matrix (rows, cols) that was packed, zeros where it is zero."""
    rows = packed.shape[0]
    if packed.shape != (rows, cols // 2) or meta.shape != (rows, cdiv(cols, 16)):
        raise BadInput(f"packed {tuple(packed.shape)} and meta {tuple(meta.shape)} do not fit {cols} columns")
    shift = 4 * torch.arange(4, device=meta.device)
    fours = (meta.to(torch.int64).unsqueeze(-1) >> shift & 15).view(rows, -1)[:, : cols // 4]
    places = torch.stack((fours & 3, fours >> 2), -1)
    whole = packed.new_zeros(rows, cols // 4, 4)
    return whole.scatter(2, places, packed.view(rows, -1, 2)).view(rows, cols)


def launch(w: torch.Tensor, both: bool = False) -> tuple[torch.Tensor, ...]:
    return _results(_sparsify.by_kernels(w, both), both)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator = generator_for(device, seed)
    w = torch.randn(shape["rows"], shape["cols"], generator=generator, device=device)
    return (w.to(getattr(torch, dtype)),)


SPARSIFY_24 = Op(
    name="sparsify_24",
    summary="the two largest of every four weights, packed, and where they were",
    reference=reference,
    call=sparsify_24,
    plan=lambda w, both=False: _sparsify.decide(w, both),
    providers={
        "sublight": Provider(
            launch=launch,
            kernels=(Kernel(jit=_sparsify_kernel, narrow="sixteen columns share one word of 16 bits"),),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=tuple({"rows": n, "cols": k, "both": both} for n, k in ((8192, 8192), (14336, 4096)) for both in (0, 1)),
    test_shapes=(
        {"rows": 4, "cols": 4, "both": 0},
        {"rows": 20, "cols": 68, "both": 0},
        {"rows": 20, "cols": 132, "both": 1},
        {"rows": 17, "cols": 64, "both": 0},
        {"rows": 16, "cols": 16, "both": 1},
    ),
    options={"both": (0, 1)},
    call_options=lambda shape: {"both": bool(shape["both"])},
    directions=("fwd",),
    wrt=(),
    batch="",
    library_args=lambda w, both=False: (w, both),
)
