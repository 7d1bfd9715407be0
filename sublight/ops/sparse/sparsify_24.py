"""Two of every four weights, those with the largest magnitude: packed values and where they were, from one pass.

The sparse tensor cores multiply a matrix of which every four neighbours along k hold two zeros. A training step needs W
for the forward product and its transpose for the backward one, and both must be the same matrix: so of every 4x4 block
the pattern with two in each row *and* each column is taken that keeps the largest sum of magnitudes. There are 90 such
patterns; a thread has a block in its registers and adds up each of them.

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

ROW_MASKS = (0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100)  # two of four
LARGEST = {torch.float16: 65504.0, torch.bfloat16: 2.0**124, torch.float32: 2.0**124}  # eight of them add up in fp32


ROWS, COLS = 4, 512  # that a program takes at once
DOWN, ACROSS = 32, 16  # blocks of 4x4 that it takes: a thread has one


def patterns() -> list[int]:
    """4x4 blocks with two in each row and column, as 16 bits, row by row, in the kernel's order."""
    found = []
    for third, second, first in itertools.product(ROW_MASKS, repeat=3):
        counts = [sum(mask >> col & 1 for mask in (first, second, third)) for col in range(4)]
        if max(counts) <= 2 and min(counts) >= 1:
            fourth = sum((2 - count) << col for col, count in enumerate(counts))
            found.append(first | second << 4 | third << 8 | fourth << 12)
    return found


# for the kernel, which takes constants one by one out of whole numbers
PATTERNS = tl.constexpr(len(patterns()))
BITS = tl.constexpr(sum(bits << 16 * number for number, bits in enumerate(patterns())))
PLACES = tl.constexpr(sum(place << 4 * mask for place, mask in enumerate(ROW_MASKS)))  # of a mask among ROW_MASKS


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
    return mask.scatter(-1, order, 1).view(w.shape)


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
def _fours(x):
    """Each of every four neighbours along the columns of x (rows, 4 * n), as four tensors (rows, n)."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
    one, three = tl.split(even)
    two, four = tl.split(odd)
    return one, two, three, four


@triton.jit
def _sizes(x, largest):
    """In fp32; NaN counts for the largest number."""
    x = x.to(tl.float32)
    return tl.where(x != x, largest, tl.minimum(tl.abs(x), largest))


@triton.jit
def _store_two(values, kept, packed_ptr, at, inside):
    """The two of four that are kept, at `at` and behind it; gives their places, 2 bits each."""
    first = tl.where(kept[0], values[0], tl.where(kept[1], values[1], values[2]))
    second = tl.where(kept[3], values[3], tl.where(kept[2], values[2], values[1]))
    both = tl.join(first, second)
    to = tl.expand_dims(at, 2) + tl.arange(0, 2)[None, None, :]
    tl.store(packed_ptr + to, both, mask=tl.broadcast_to(tl.expand_dims(inside, 2), both.shape))
    one = tl.where(kept[0], 0, tl.where(kept[1], 1, 2))
    other = tl.where(kept[3], 3, tl.where(kept[2], 2, 1))
    return tl.where(inside, one | (other << 2), 0)


@triton.jit
def _words(fours, AXIS: tl.constexpr):
    """Every four of them along an axis as one number of 16 bits, the first lowest."""
    shift = tl.arange(0, 4) * 4
    if AXIS == 1:
        by_four = tl.reshape(fours, [fours.shape[0], fours.shape[1] // 4, 4])
        return tl.sum(by_four << shift[None, None, :], 2).to(tl.int16)
    else:
        by_four = tl.reshape(fours, [fours.shape[0] // 4, 4, fours.shape[1]])
        return tl.sum(by_four << shift[None, :, None], 1).to(tl.int16)


@triton.jit
def _rows_kernel(
    w_ptr, packed_ptr, meta_ptr, rows, cols, row_stride, col_stride, words, largest,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of every four along a row the two that beat two others; of equal ones the first."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    x = tl.load(w_ptr + row * row_stride + col * col_stride, mask=(row < rows) & (col < cols), other=0.0)
    a, b, c, d = _fours(_sizes(x, largest))
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    kept = (
        (ab & ac) | (ab & ad) | (ac & ad),
        (~ab & bc) | (~ab & bd) | (bc & bd),
        (~ac & ~bc) | (~ac & cd) | (~bc & cd),
        (~ad & ~bd) | (~ad & ~cd) | (~bd & ~cd),
    )
    four = tl.program_id(0) * (COLS // 4) + tl.arange(0, COLS // 4)[None, :]
    inside = (row < rows) & (four * 4 < cols)
    fours = _store_two(_fours(x), kept, packed_ptr, row * (cols // 2) + four * 2, inside)
    word = tl.program_id(0) * (COLS // 16) + tl.arange(0, COLS // 16)[None, :]
    tl.store(meta_ptr + row * words + word, _words(fours, 1), mask=(row < rows) & (word < words))


@triton.jit
def _pairs(x):
    """The sums of two of four, in the order of ROW_MASKS."""
    return x[0] + x[1], x[0] + x[2], x[1] + x[2], x[0] + x[3], x[1] + x[3], x[2] + x[3]


@triton.jit
def _blocks_kernel(
    w_ptr, packed_ptr, meta_ptr, packed_t_ptr, meta_t_ptr, rows, cols, row_stride, col_stride, words, words_t, largest,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Of each 4x4 block the pattern with the largest sum, the first of equal ones; W and its transpose of it."""
    down = tl.program_id(1).to(tl.int64) * DOWN + tl.arange(0, DOWN)[:, None]  # blocks of four rows
    across = tl.program_id(0).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)[None, :]
    col = tl.program_id(0).to(tl.int64) * (4 * ACROSS) + tl.arange(0, 4 * ACROSS)[None, :]
    at = w_ptr + down * 4 * row_stride + col * col_stride
    within = (down * 4 < rows) & (col < cols)
    x0 = tl.load(at, mask=within, other=0.0)
    x1 = tl.load(at + row_stride, mask=within, other=0.0)
    x2 = tl.load(at + 2 * row_stride, mask=within, other=0.0)
    x3 = tl.load(at + 3 * row_stride, mask=within, other=0.0)
    s0, s1 = _pairs(_fours(_sizes(x0, largest))), _pairs(_fours(_sizes(x1, largest)))
    s2, s3 = _pairs(_fours(_sizes(x2, largest))), _pairs(_fours(_sizes(x3, largest)))
    best = tl.full([DOWN, ACROSS], -1.0, tl.float32)
    bits = tl.zeros([DOWN, ACROSS], tl.int32)
    for number in tl.static_range(PATTERNS):  # rows in the order of ROW_MASKS, four bits of the pattern each
        total = (
            s0[(PLACES >> ((BITS >> 16 * number) & 15) * 4) & 15]
            + s1[(PLACES >> ((BITS >> 16 * number + 4) & 15) * 4) & 15]
        ) + (
            s2[(PLACES >> ((BITS >> 16 * number + 8) & 15) * 4) & 15]
            + s3[(PLACES >> ((BITS >> 16 * number + 12) & 15) * 4) & 15]
        )
        is_better = total > best
        best = tl.where(is_better, total, best)
        bits = tl.where(is_better, (BITS >> 16 * number) & 65535, bits)
    inside = (down * 4 < rows) & (across * 4 < cols)
    values = (_fours(x0), _fours(x1), _fours(x2), _fours(x3))
    word = tl.program_id(0) * (ACROSS // 4) + tl.arange(0, ACROSS // 4)[None, :]
    word_t = tl.program_id(1) * (DOWN // 4) + tl.arange(0, DOWN // 4)[:, None]
    for i in tl.static_range(4):
        of_row = ((bits >> 4 * i) & 1, (bits >> 4 * i + 1) & 1, (bits >> 4 * i + 2) & 1, (bits >> 4 * i + 3) & 1)
        kept = (of_row[0] != 0, of_row[1] != 0, of_row[2] != 0, of_row[3] != 0)
        row = down * 4 + i
        fours = _store_two(values[i], kept, packed_ptr, row * (cols // 2) + across * 2, inside)
        tl.store(meta_ptr + row * words + word, _words(fours, 1), mask=(row < rows) & (word < words))
        of_col = ((bits >> i) & 1, (bits >> 4 + i) & 1, (bits >> 8 + i) & 1, (bits >> 12 + i) & 1)
        kept = (of_col[0] != 0, of_col[1] != 0, of_col[2] != 0, of_col[3] != 0)
        col = across * 4 + i
        in_col = (values[0][i], values[1][i], values[2][i], values[3][i])
        fours = _store_two(in_col, kept, packed_t_ptr, col * (rows // 2) + down * 2, inside)
        tl.store(meta_t_ptr + col * words_t + word_t, _words(fours, 0), mask=(col < cols) & (word_t < words_t))


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
    numbers = rows, cols, *w.stride(), cdiv(cols, 16)
    if both:
        step = Step(
            _blocks_kernel, (cdiv(cols, 4 * ACROSS), cdiv(rows, 4 * DOWN)), *numbers, cdiv(rows, 16), LARGEST[w.dtype],
            on="w packed meta packed_t meta_t", DOWN=DOWN, ACROSS=ACROSS, num_warps=DOWN * ACROSS // 32,
        )  # fmt: skip
    else:
        step = Step(
            _rows_kernel, (cdiv(cols, COLS), cdiv(rows, ROWS)), *numbers, LARGEST[w.dtype],
            on="w packed meta", ROWS=ROWS, COLS=COLS, num_warps=4,
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


NARROW = "sixteen columns share one word of 16 bits, and rows of odd width begin anywhere"
SPARSIFY_24 = Op(
    name="sparsify_24",
    summary="the two largest of every four weights, packed, and where they were",
    reference=reference,
    call=sparsify_24,
    plan=lambda w, both=False: _sparsify.decide(w, both),
    providers={
        "sublight": Provider(
            launch=launch,
            kernels=(Kernel(jit=_rows_kernel, narrow=NARROW), Kernel(jit=_blocks_kernel, narrow=NARROW)),
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
