"""The kernels behind reduce_sum, reduce_max and reduce_argmax: read x once, in an order that never changes.

Whatever the axis, a tensor is seen as (outer, n, inner) and reduced over n. Where n lies together in memory a program
takes several narrow rows (`tile`) or a piece of a long one (`rows`); where inner does, a block of columns (`columns`).
Too few rows or columns to fill the GPU are split along n, and a second launch (`finish`) joins the pieces in their
order: no atomics, so the result is the same every time.

A reduction is a pair of values that goes along: a sum and what rounding took from it, a maximum and where it stood.
"""

from __future__ import annotations

from typing import Literal

import torch

from sublight.backend.device import Facts, facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.op import Buffer, Kernel, Plan
from sublight.ops.kernels.plane import Plane, plane_of
from sublight.ops.kernels.rows import block_for, copies_of
from sublight.ops.record.tuning import Tile, tile_for

Kind = Literal["plain", "carried", "double", "max", "argmax"]
TILE_COLS = 2048  # up to here several rows share a program
RAGGED_COLS = 512  # up to here rows that start anywhere do, too
TILE_ELEMENTS = 4096  # of a program's tile of 16-bit values; half as many of fp32
SMALL_BYTES = 8 * 1024  # of columns that a single warp takes at once: more warps would wait for one another
PASS_BYTES = 16 * 1024  # of a row that a program has in flight at once
PIECE_BYTES = (8 * 1024, 64 * 1024)  # the least and the most of a row that a program takes, where rows are split
FULL = 16  # programs a multiprocessor, from where on nothing is split
COLUMN_PROGRAMS = 8  # a multiprocessor holds at once; the tenth would start when all of the first nine are done
JOINED, JOINED_COLS = 4096, 16  # pieces that one step of the second launch takes, and columns that a program joins
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _order(x):
    """Whole numbers in the order of the values, so that one maximum serves: NaN above all, -0.0 with 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ LAST, bits)
    return tl.where(x != x, LAST, key)


@triton.jit
def _value(key):
    return tl.where(key < 0, key ^ LAST, key).to(tl.float32, bitcast=True)


@triton.jit
def _add_pairs(a, a_rest, b, b_rest):
    """Sums that carry along what rounding took from them (Knuth's two-sum); past infinity nothing is left to carry."""
    total = a + b
    b_part = total - a
    rest = (a - (total - b_part)) + (b - b_part)
    return total, tl.where(rest == rest, rest, 0.0) + a_rest + b_rest


@triton.jit
def _begin(shape: tl.constexpr, step, KIND: tl.constexpr):
    """The pair that changes nothing; an index counts steps of the loop until the end."""
    if KIND == "argmax":
        return tl.full(shape, -float("inf"), tl.float32), tl.zeros(shape, tl.int32) + step
    elif KIND == "max":
        return tl.full(shape, -float("inf"), tl.float32), tl.zeros(shape, tl.int32)
    elif KIND == "double":
        return tl.zeros(shape, tl.float64), tl.zeros(shape, tl.int32)
    else:
        return tl.full(shape, -0.0, tl.float32), tl.zeros(shape, tl.float32)  # adding -0.0 costs no instruction


@triton.jit
def _take(first, second, x, step, KIND: tl.constexpr):
    """One more value for each pair."""
    if KIND == "argmax":
        new = x.to(tl.float32)
        better = (first == first) & ~(new <= first)  # of equals the first stays, and so does the first NaN
        return tl.where(better, new, first), tl.where(better, step, second)
    elif KIND == "max":
        return tl.maximum(first, x.to(tl.float32), propagate_nan=tl.PropagateNan.ALL), second
    elif KIND == "double":
        return first + x.to(tl.float64), second
    elif KIND == "carried":
        return _add_pairs(first, second, x, tl.zeros_like(x))
    else:
        return first + x.to(tl.float32), second


@triton.jit
def _tops(x, HALVINGS: tl.constexpr):
    """The largest of neighbours that one thread holds; NaN where there is one."""
    x = x.to(tl.float32)
    for _ in tl.static_range(HALVINGS):
        one, other = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        x = tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _fold(first, second, axis: tl.constexpr, KIND: tl.constexpr):
    """All pairs along an axis made one: a value, in float64 where it is a sum with more digits than fp32, an index."""
    if KIND == "argmax":
        key = _order(first)
        top = tl.max(key, axis)
        none = tl.full(second.shape, 2**63 - 1, tl.int64)
        return _value(top), tl.min(tl.where(key == tl.expand_dims(top, axis), second.to(tl.int64), none), axis)
    elif KIND == "max":
        top = tl.max(_order(first), axis)
        return _value(top), top.to(tl.int64)
    elif KIND == "carried":
        total, rest = tl.reduce((first, second), axis, _add_pairs)
        return total.to(tl.float64) + rest.to(tl.float64), total.to(tl.int64)
    else:
        total = tl.sum(first, axis)
        return total, total.to(tl.int64)


@triton.jit
def _store(value_ptr, index_ptr, place, value, index, mask, KIND: tl.constexpr):
    if KIND == "argmax":
        tl.store(index_ptr + place, index, mask=mask)
    if value_ptr.dtype.element_ty == tl.float64:
        tl.store(value_ptr + place, value.to(tl.float64), mask=mask)
    else:
        tl.store(value_ptr + place, value.to(tl.float32).to(value_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_kernel(
    x_ptr, value_ptr, index_ptr, rows, n, stride, OTHER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (col < n)
    x = tl.load(x_ptr + row[:, None] * stride + col, mask=mask, other=OTHER)
    first, second = _begin([ROWS, BLOCK], 0, KIND)
    first, second = _take(first, second, x, 0, KIND)
    value, index = _fold(first, second + col if KIND == "argmax" else second, 1, KIND)
    _store(value_ptr, index_ptr, row, value, index, row < rows, KIND)


@triton.jit
def _rows_kernel(
    x_ptr, value_ptr, index_ptr, n, stride, parts, each, splits, OTHER: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, VECTOR: tl.constexpr, HALVINGS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """An index is that of 2**HALVINGS neighbours until the end: few instructions for a value that is not the top."""
    piece = tl.program_id(0)
    offset = (piece // splits).to(tl.int64) * stride
    begin = piece % splits * each
    end = tl.minimum(begin + each, parts)
    lane = tl.arange(0, BLOCK)
    lead = tl.zeros_like(offset)
    if VECTOR > 1:
        # a row of odd width starts anywhere: blocks start at the 16-byte boundary before it, whole vectors are taken
        # here and what is left at its two ends below
        lead = offset % VECTOR
        offset = offset // VECTOR * VECTOR
    NEAR: tl.constexpr = 2**HALVINGS
    first, second = _begin([BLOCK // NEAR], begin, KIND)
    for part in tl.range(begin, end, UNROLL):
        for more in tl.static_range(UNROLL):
            step = tl.full([], 0, tl.int32) + part + more  # the interpreter counts in plain numbers
            start = step.to(tl.int64) * BLOCK
            limit = tl.where(step < end, n, 0)
            if VECTOR > 1:
                vector = start + lane // VECTOR * VECTOR
                inside = (vector >= lead) & (vector + VECTOR <= lead + limit)
            else:
                inside = start + lane < limit
            x = tl.load(x_ptr + (offset + start) + lane, mask=inside, other=OTHER)
            first, second = _take(first, second, _tops(x, HALVINGS) if KIND == "argmax" else x, step, KIND)
    if KIND == "argmax":
        second = second.to(tl.int64) * BLOCK + tl.arange(0, BLOCK // NEAR) * NEAR
        if VECTOR > 1:  # those that were not whole were not taken
            second = tl.where((second >= lead) & (second + VECTOR <= lead + n), second, 2**63 - 1)
    value, index = _fold(first, second, 0, KIND)
    if KIND == "argmax":
        place = index + tl.arange(0, NEAR)
        x = tl.load(x_ptr + offset + place, mask=(place >= 0) & (place < lead + n), other=OTHER)
        same = (_order(x.to(tl.float32)) == _order(value)) & (place >= 0)
        index = tl.min(tl.where(same, place - lead, 2**63 - 1), 0)
    if VECTOR > 1:
        near = tl.arange(0, 2 * VECTOR)
        last = (lead + n) // VECTOR * VECTOR  # where the vector begins that the row's end cuts
        place = tl.where(near < VECTOR, near.to(tl.int64), last + near - VECTOR)
        limit = tl.where(near < VECTOR, tl.where(lead > 0, VECTOR, 0), lead + n)
        inside = (place >= lead) & (place < tl.where(begin == 0, limit, 0))
        x = tl.load(x_ptr + offset + place, mask=inside, other=OTHER)
        end_first, end_second = _begin([2 * VECTOR], 0, KIND)
        end_first, end_second = _take(end_first, end_second, x, 0, KIND)
        if KIND == "argmax":
            end_second = tl.where(inside, place - lead, 2**63 - 1)
        end_value, end_index = _fold(end_first, end_second, 0, KIND)
        if KIND == "argmax":
            key, end_key = _order(value), _order(end_value)
            index = tl.where(key == end_key, tl.minimum(index, end_index), tl.where(end_key > key, end_index, index))
            value = _value(tl.maximum(key, end_key))
        elif KIND == "max":
            value = tl.maximum(value, end_value, propagate_nan=tl.PropagateNan.ALL)
        else:
            value += end_value
    _store(value_ptr, index_ptr, piece, value, index, piece >= 0, KIND)


@triton.jit
def _columns_kernel(
    x_ptr, value_ptr, index_ptr, outer, n, inner, outer_stride, stride, each, splits, blocks, OTHER: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr, ONCE: tl.constexpr,
    AHEAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    col = (piece % blocks).to(tl.int64) * COLS + tl.arange(0, COLS)
    split = piece // blocks % splits
    out = (piece // blocks // splits).to(tl.int64) * OUTER + tl.arange(0, OUTER)
    near = tl.arange(0, ROWS)
    begin = split * each
    end = tl.minimum(begin + each, n)
    here = (out[:, None, None] < outer) & (col[None, None, :] < inner)
    tile = out[:, None, None] * outer_stride + near[None, :, None].to(tl.int64) * stride + col[None, None, :]
    first, second = _begin([OUTER, ROWS, COLS], begin, KIND)
    for row in tl.range(begin, ROWS * UNROLL if ONCE else end, ROWS * UNROLL, num_stages=AHEAD):
        for more in tl.static_range(UNROLL):
            start = tl.full([], 0, tl.int32) + row + more * ROWS
            inside = here & (start + near[None, :, None] < end)
            x = tl.load(x_ptr + start.to(tl.int64) * stride + tile, mask=inside, other=OTHER)
            first, second = _take(first, second, x, start, KIND)
    if KIND == "argmax":
        second += near[None, :, None]
    value, index = _fold(first, second, 1, KIND)
    place = (out[:, None] * splits + split) * inner + col[None, :]
    _store(value_ptr, index_ptr, place, value, index, (out[:, None] < outer) & (col[None, :] < inner), KIND)


@triton.jit
def _finish_kernel(
    part_ptr, where_ptr, value_ptr, index_ptr, splits, inner, blocks, OTHER: tl.constexpr,
    SPLITS: tl.constexpr, COLS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Pieces (outer, splits, inner) joined over splits; their indices come with them."""
    out = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(tl.int64) * COLS + tl.arange(0, COLS)
    near = tl.arange(0, SPLITS)
    first, second = _begin([SPLITS, COLS], 0, KIND)
    if KIND == "argmax":
        second = second.to(tl.int64)
    for start in tl.range(0, splits, SPLITS):
        split = start + near[:, None]
        inside = (split < splits) & (col[None, :] < inner)
        place = (out * splits + split) * inner + col[None, :]
        x = tl.load(part_ptr + place, mask=inside, other=OTHER)
        step = start
        if KIND == "argmax":
            step = tl.load(where_ptr + place, mask=inside, other=2**63 - 1)
            second = tl.where(start == 0, step, second)
        first, second = _take(first, second, x, step, KIND)
    value, index = _fold(first, second, 0, KIND)
    _store(value_ptr, index_ptr, out * inner + col, value, index, col < inner, KIND)


def plan_reduction(
    x: torch.Tensor, first: int, last: int, kind: Kind, shape: tuple[int, ...], outputs: tuple[str, ...]
) -> Plan:
    """Values in x's data type and, of `argmax`, indices, both of this shape: what is left of x."""
    plane = plane_of(x, first, last)
    steps = _rows_steps if plane.is_rows else _columns_steps
    pieces, launches = steps(plane, kind, facts(x))
    buffers = {"values": Buffer(shape=shape, dtype=x.dtype)}
    if kind == "argmax":
        buffers["indices"] = Buffer(shape=shape, dtype=torch.int64)
    if pieces:  # of split rows, until they are joined
        wide = torch.float64 if kind in ("carried", "double") else torch.float32
        buffers["pieces"] = Buffer(shape=(pieces,), dtype=wide)
        if kind == "argmax":
            buffers["places"] = Buffer(shape=(pieces,), dtype=torch.int64)
    return Plan(
        provider="sublight",
        reason=f"{plane.outer} x {plane.n} x {plane.inner}: each value read once",
        copies=copies_of(x=plane.is_copy),
        buffers=buffers,
        steps=launches,
        outputs=outputs,
    )


def _other(kind: Kind) -> float:
    return -float("inf") if kind in ("max", "argmax") else 0.0


def _results(kind: Kind) -> str:
    return "values indices" if kind == "argmax" else "values values"  # no other kind looks at the second


def _pieces(kind: Kind) -> str:
    return "pieces places" if kind == "argmax" else "pieces pieces"


def _rows_steps(plane: Plane, kind: Kind, gpu: Facts) -> tuple[int, tuple[Step, ...]]:
    """Pieces that are joined, 0 where no row is split, and the launches for rows that lie together in memory."""
    rows, n, item = plane.outer, plane.n, plane.itemsize
    is_whole = n % 16 == 0 and (rows == 1 or plane.outer_stride % 16 == 0) and plane.is_aligned  # vectors fill rows
    if n <= (TILE_COLS if is_whole or not plane.is_aligned else RAGGED_COLS):
        block = block_for(n)
        rule = Tile(block=block, rows=max(1, TILE_ELEMENTS * 2 // item // block), warps=4)
        tile = tile_for("reduce_tile", n, item, packable=is_whole, capability=gpu.capability, rule=rule)
        step = Step(
            _tile_kernel, (cdiv(rows, tile.rows),), rows, n, plane.outer_stride,
            on=f"x {_results(kind)}", tile=tile,
            OTHER=_other(kind), ROWS=tile.rows, BLOCK=tile.block, KIND=kind, num_warps=tile.warps,
        )  # fmt: skip
        return 0, (step,)
    vector = 1 if is_whole or not plane.is_aligned else 16 // item
    rule = Tile(block=4 * 32 * 16 // item, warps=4, stages=PASS_BYTES // (4 * 32 * 16))
    if kind == "argmax":  # 61 µs instead of 74 for 32768x4096: half as many steps, each with twice the loads
        rule = Tile(block=2 * rule.block, warps=4, stages=2)
    tile = tile_for("reduce_rows", n, item, packable=is_whole, capability=gpu.capability, rule=rule)
    parts = cdiv(n + vector - 1, tile.block)
    each = _each(rows, parts, tile.block * item, gpu.multiprocessors, tile)
    splits = cdiv(parts, each)
    step = Step(
        _rows_kernel, (rows * splits,), n, plane.outer_stride, parts, each, splits,
        on=f"x {_results(kind) if splits == 1 else _pieces(kind)}", tile=tile, OTHER=_other(kind),
        BLOCK=tile.block, UNROLL=min(tile.stages, next_power_of_2(each)), VECTOR=vector,
        HALVINGS={2: 3, 4: 2}[item] if kind == "argmax" else 0, KIND=kind, num_warps=tile.warps,
    )  # fmt: skip
    return (0, (step,)) if splits == 1 else (rows * splits, (step, _finish(rows, splits, 1, kind)))


def _each(rows: int, parts: int, part_bytes: int, multiprocessors: int, tile: Tile) -> int:
    """Blocks of a row that a program takes: all, unless there are too few rows to keep the GPU busy."""
    least, most = PIECE_BYTES
    if tile.programs:  # a trial: this many blocks
        return tile.programs
    if rows >= FULL * multiprocessors or parts * part_bytes <= 4 * least:  # a second launch would cost more
        return parts
    wanted = rows * parts * part_bytes // (FULL * multiprocessors)
    return cdiv(min(max(wanted, least), most), part_bytes)


def _columns_steps(plane: Plane, kind: Kind, gpu: Facts) -> tuple[int, tuple[Step, ...]]:
    """The same where what is reduced lies apart in memory, and columns side by side."""
    outer, n, inner, item = plane.outer, plane.n, plane.inner, plane.itemsize
    full = FULL * gpu.multiprocessors
    elements = TILE_ELEMENTS // item  # with their pairs, what fits in registers four times over
    cols = min(128, next_power_of_2(inner))
    warps = 4
    if n * cols * item <= SMALL_BYTES and outer * inner * n * item >= full * SMALL_BYTES:
        elements, warps = SMALL_BYTES // item // (1 if kind in ("plain", "max") else 4), 1
    rows = min(next_power_of_2(n), elements // cols)
    rule = Tile(block=cols, rows=rows, warps=warps, stages=min(4, next_power_of_2(cdiv(n, rows))))
    tile = tile_for("reduce_columns", inner, item, packable=True, capability=gpu.capability, rule=rule)
    outers = min(next_power_of_2(outer), max(1, elements // (tile.rows * tile.block)))
    blocks, groups = cdiv(inner, tile.block), cdiv(outer, outers)
    rows_at_once = tile.rows * tile.stages
    programs = blocks * groups
    wanted = max(1, COLUMN_PROGRAMS * gpu.multiprocessors // programs)
    if programs >= full or n <= 2 * rows_at_once:  # a second launch would cost more
        wanted = 1
    each = cdiv(cdiv(n, min(wanted, cdiv(n, rows_at_once))), rows_at_once) * rows_at_once
    splits = cdiv(n, each)
    step = Step(
        _columns_kernel, (programs * splits,),
        outer, n, inner, plane.outer_stride, plane.stride, each, splits, blocks,
        on=f"x {_results(kind) if splits == 1 else _pieces(kind)}", tile=tile, OTHER=_other(kind),
        OUTER=outers, ROWS=tile.rows, COLS=tile.block, UNROLL=tile.stages, ONCE=n <= rows_at_once,
        AHEAD=max(1, tile.parts), KIND=kind, num_warps=tile.warps,
    )  # fmt: skip
    return (0, (step,)) if splits == 1 else (outer * splits * inner, (step, _finish(outer, splits, inner, kind)))


def _finish(outer: int, splits: int, inner: int, kind: Kind) -> Step:
    """The launch that joins the pieces."""
    cols = min(JOINED_COLS, next_power_of_2(inner))
    blocks = cdiv(inner, cols)
    return Step(
        _finish_kernel, (outer * blocks,), splits, inner, blocks,
        on=f"{_pieces(kind)} {_results(kind)}", OTHER=_other(kind),
        SPLITS=min(next_power_of_2(splits), JOINED // cols), COLS=cols,
        KIND=kind if kind in ("max", "argmax") else "double", num_warps=8,
    )  # fmt: skip


KERNELS = (
    Kernel(jit=_tile_kernel),
    Kernel(jit=_rows_kernel),
    Kernel(
        jit=_columns_kernel, spills="sm_100's assembler puts one value aside before the loop, at 48 to 71 registers"
    ),
    Kernel(jit=_finish_kernel),
)
