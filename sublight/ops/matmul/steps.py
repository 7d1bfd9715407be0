"""The launches of a product, by each step of the ladder: what `matmul.py` plans, calls and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from sublight.backend.device import Facts, facts
from sublight.backend.jit import cdiv, next_power_of_2
from sublight.backend.launch import Step
from sublight.op import Buffer, Plan
from sublight.ops.matmul import ladder, persistent, skinny, split_k, tensor_core
from sublight.ops.matmul.product import Operand, Product, operands_of, product_of
from sublight.ops.matmul.tiles import INVARIANT_TILE, Split, persistent_tile, plain_tile, split_of

Maybe = torch.Tensor | None
LEAST_SPLIT = 2048  # of k: below, adding the parts up takes longer than is gained


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the steps of the ladder must know of a call."""

    product: Product
    operands: tuple[Operand, Operand]
    dtype: torch.dtype
    gpu: Facts
    epilogue: dict[str, Any]
    is_ieee: bool = False  # fp32 by plain multiply-adds: tensor cores would round it
    scaled: Literal["", "tensor", "row"] = ""  # of codes: what `scale_a` and `scale_b` are for
    out_dtype: torch.dtype | None = None  # where it is not the operands'

    @property
    def on(self) -> str:
        """The tensors of a launch by pointers; what the epilogue does not use may be anything."""
        bias, residual = self.bias_and_residual
        return f"a b {bias} {residual} c"

    @property
    def bias_and_residual(self) -> tuple[str, str]:
        has_bias, has_residual = self.epilogue["HAS_BIAS"], self.epilogue["HAS_RESIDUAL"]
        return "bias" if has_bias else "a", "residual" if has_residual else "a"

    @property
    def scales(self) -> str:
        return "scale_a scale_b" if self.scaled else "a a"

    @property
    def numbers(self) -> tuple[int, ...]:
        p = self.product
        return p.m, p.n, p.k, p.am, p.ak, p.bk, p.bn, p.batch_a, p.batch_b


Steps = tuple[dict[str, Buffer], list[Step]]  # buffers beside the result, launches


def _naive(work: Work) -> Steps:
    p, bm, bn = work.product, 32, 32
    grid = (cdiv(p.m, bm), cdiv(p.n, bn), p.batches)
    tile = {"BM": bm, "BN": bn, "num_warps": 4}
    return {}, [Step(ladder._naive_kernel, grid, *work.numbers, on=work.on, tile=(bm, bn), **work.epilogue, **tile)]


def _coalesced(work: Work) -> Steps:
    p, bm, bn, bk = work.product, 8, 8, 64
    grid = (cdiv(p.m, bm), cdiv(p.n, bn), p.batches)
    tile = {"BM": bm, "BN": bn, "BK": bk, "num_warps": 4}
    step = Step(ladder._coalesced_kernel, grid, *work.numbers, on=work.on, tile=(bm, bn, bk), **work.epilogue, **tile)
    return {}, [step]


def _tiles(*, group: int, in_fp32: bool = False, is_persistent: bool = False, rows: int = 0) -> Callable[[Work], Steps]:
    """`rows`: the tile is that of so many rows, whatever there are."""

    def steps(work: Work) -> Steps:
        p, is_ieee = work.product, work.is_ieee or in_fp32
        tile = plain_tile(rows or p.m, p.n, work.dtype.itemsize, work.gpu, is_ieee=is_ieee)
        constants = work.epilogue | tile.options() | {
            "GROUP": group, "EVEN": p.k % tile.bk == 0, "IN_FP32": in_fp32, "PRECISION": work.gpu.precision(is_ieee),
        }  # fmt: skip
        tiles = tile.count(p.m, p.n)
        if not is_persistent:
            kernel, numbers, grid = tensor_core._tile_kernel, work.numbers, (tiles, p.batches)
        else:
            at_once = work.gpu.multiprocessors * (1 if tile.warps > 4 else 2)
            kernel, numbers = tensor_core._every_tile_kernel, (*work.numbers, p.batches)
            grid = (min(at_once, tiles * p.batches), 1)
        return {}, [Step(kernel, grid, *numbers, on=work.on, tile=tile, **constants)]

    return steps


def by_engine(work: Work, split: Split) -> Steps:
    """Through Hopper's copy engine; operands that it cannot read are copied first."""
    p, gpu, tile, out_bytes = work.product, work.gpu, split.tile, (work.out_dtype or work.dtype).itemsize
    if work.epilogue["HAS_RESIDUAL"] and tile.bm * tile.bn > 128 * 128:
        tile = replace(tile, stages=3)  # the residual changes hands through shared memory
    buffers, steps, (a, b) = align(work.operands, work.dtype)
    stores_by_engine = out_bytes == 2 and p.n * out_bytes % 16 == 0
    c = Operand(name="c", rows=p.m, k=p.n, row_stride=p.n, k_stride=1, itemsize=out_bytes, is_aligned=True)
    bias, residual = work.bias_and_residual
    is_split = split.pieces > 1
    # on its way out a part of a tile changes hands through shared memory, a residual and pieces of sums once more
    c_cols = tile.bn // (4 if is_split or work.epilogue["HAS_RESIDUAL"] else 2)
    views = {0: a.view(tile.bm, tile.bk), 1: b.view(tile.bn, tile.bk), 2: c.view(tile.bm, c_cols)}
    constants = work.epilogue | tile.options() | {
        "GROUP": tile.group, "A_TURNED": a.is_turned, "B_TURNED": not b.is_turned,
        "BY_ENGINE": stores_by_engine, "SCALED": work.scaled,
    }  # fmt: skip
    if not stores_by_engine:
        views[2] = views[0]  # nothing is stored through it
    on = f"{a.name} {b.name} {'c' if stores_by_engine else a.name} {bias} {residual} c {work.scales}"
    tiles = tile.count(p.m, p.n)
    if not is_split:
        grid = (min(gpu.multiprocessors, tiles),)
        kernel = persistent._persistent_kernel
        steps.append(
            Step(kernel, grid, *p[:3], on=on, views=views, tile=tile, FLAT=tile.is_flat, C_COLS=c_cols, **constants)
        )
        return buffers, steps
    blocks = cdiv(p.k, tile.bk)
    pieces = cdiv(blocks, cdiv(blocks, split.pieces))  # none without work
    first_left, rows = split.rounds * gpu.multiprocessors, 16
    left = tiles - first_left
    steps += [
        Step(
            split_k._split_kernel, (gpu.multiprocessors if split.rounds else left * pieces,), *p[:3],
            split.rounds, pieces, on=f"{on} parts", views=views, tile=split, C_COLS=c_cols,
            PART_COLS=c_cols // 2, **constants,
        ),
        Step(
            split_k._add_pieces_kernel, (left, tile.bm // rows), p.m, p.n, first_left, pieces,
            on=f"parts {bias} {residual} c {work.scales}", tile=(rows, tile.bn), **work.epilogue,
            BM=tile.bm, BN=tile.bn, GROUP=tile.group, SCALED=work.scaled, ROWS=rows, num_warps=4,
        ),
    ]  # fmt: skip
    buffers["parts"] = Buffer(shape=(left * pieces, tile.bm, tile.bn), dtype=torch.float32)
    return buffers, steps


def align(
    operands: tuple[Operand, Operand], dtype: torch.dtype
) -> tuple[dict[str, Buffer], list[Step], tuple[Operand, Operand]]:
    """Operands as the copy engine can read them, and the copies that this takes."""
    buffers: dict[str, Buffer] = {}
    steps: list[Step] = []
    readable = []
    for operand in operands:
        if not operand.is_readable:
            copy = operand.aligned()
            buffers[copy.name] = Buffer(shape=(copy.outer, copy.apart), dtype=dtype)
            steps.append(_align(operand, copy))
            operand = copy
        readable.append(operand)
    a, b = readable
    return buffers, steps, (a, b)


def _align(x: Operand, y: Operand) -> Step:
    unit = next(unit for unit in (8, 4, 2, 1) if x.inner % unit == 0 and x.apart % unit == 0 and y.apart % unit == 0)
    rows, cols = 16, 256
    numbers = (x.outer, x.inner // unit, x.apart // unit, y.apart // unit)
    grid = (cdiv(x.outer, rows), cdiv(x.inner, cols))
    constants = {"UNIT": unit, "ROWS": rows, "COLS": cols, "num_warps": 4}
    return Step(persistent._align_kernel, grid, *numbers, on=f"{x.name} {y.name}", tile=(rows, cols), **constants)


def _persistent(work: Work) -> Steps:
    if why_no_engine(work):
        return _tiles(group=8, is_persistent=True)(work)
    return by_engine(work, Split(tile=persistent_tile(work.product.m, work.product.n, work.gpu)))


def _split_k(work: Work) -> Steps:
    if why_no_engine(work):
        return _tiles(group=8, is_persistent=True)(work)
    p = work.product
    return by_engine(work, split_of(p.m, p.n, p.k, work.gpu))


def _skinny(work: Work, *, is_atomic: bool = False) -> Steps:
    """At most 64 rows; of one row, where both operands lie along k, without tensor cores. `is_atomic`: parts of a sum
    are added as they come."""
    p, itemsize = work.product, work.dtype.itemsize
    bias, residual = work.bias_and_residual
    if p.m == 1 and p.ak == 1 and p.bk == 1:
        bn, bk = 4, min(4096 // itemsize, next_power_of_2(p.k))
        constants = {"BN": bn, "BK": bk, "EVEN": p.k % bk == 0 and p.n % bn == 0, "num_warps": 4}
        step = Step(
            skinny._row_kernel, (cdiv(p.n, bn),), p.n, p.k, p.bn, on=work.on, tile=(bn, bk),
            **work.epilogue, **constants,
        )  # fmt: skip
        return {}, [step]
    bm, bk = max(16, next_power_of_2(p.m)), 32 if work.is_ieee else 256 // itemsize
    bn = 128 if p.m > 32 and p.n >= 96 * 128 and itemsize == 2 else 64
    stages = work.gpu.stages(4 if itemsize == 2 else 2, (bm + bn) * bk * itemsize)
    tiles, blocks = cdiv(p.n, bn), cdiv(p.k, bk)
    splits = max(1, min(2 * work.gpu.multiprocessors // tiles, blocks, cdiv(p.k, LEAST_SPLIT)))
    per_split = cdiv(blocks, splits) * bk
    splits = cdiv(p.k, per_split)  # none without work
    constants = work.epilogue | {
        "BM": bm, "BN": bn, "BK": bk, "IS_PART": splits > 1, "ATOMIC": is_atomic, "EVEN": p.k % bk == 0,
        "PRECISION": work.gpu.precision(work.is_ieee), "num_warps": 4, "num_stages": stages,
    }  # fmt: skip
    numbers = (p.m, p.n, p.k, p.am, p.ak, p.bk, p.bn, per_split)
    to = "c" if splits == 1 else "parts"
    on = f"a b {bias} {residual} {to}"
    step = Step(skinny._rows_kernel, (tiles, splits), *numbers, on=on, tile=(bm, bn, bk), **constants)
    if splits == 1:
        return {}, [step]
    block, parts = 1024, 1 if is_atomic else splits
    add = Step(
        skinny._add_parts_kernel, (p.m, cdiv(p.n, block)), p.m, p.n, parts, on=f"parts {bias} {residual} c",
        tile=(block,), BLOCK=block, num_warps=4, **work.epilogue,
    )  # fmt: skip
    return {"parts": Buffer(shape=(parts, p.m, p.n), dtype=torch.float32, is_zero=is_atomic)}, [step, add]


def why_no_engine(work: Work) -> str:
    """Why Hopper's copy engine does not load these operands; empty where it does."""
    if work.gpu.capability // 10 != 9:
        return "tiles come by Hopper's copy engine, and this is another GPU"
    if work.dtype.itemsize != 2:
        return "the copy engine's kernel is for 16-bit operands"
    if work.product.batches > 1:
        return "the copy engine's kernel takes one product, not a batch"
    if not all(operand.is_whole for operand in work.operands):
        return "an operand has no dimension that lies in one piece"
    return ""


def _invariant(work: Work) -> Steps:
    """By n and k alone: which tile, in which order along k. So a row's sums are the same bits in any batch."""
    if why_no_engine(work):
        return _tiles(group=8, is_persistent=True, rows=INVARIANT_TILE.bm)(work)
    return by_engine(work, Split(tile=INVARIANT_TILE))


LADDER: dict[str, tuple[Callable[[Work], Steps], str]] = {
    "naive": (_naive, "every element of A and B from memory, one step of k at a time"),
    "coalesced": (_coalesced, "lanes of a warp read neighbours along k: sectors are used in full"),
    "tiled": (_tiles(group=1, in_fp32=True), "blocks of A and B come through shared memory, once a tile"),
    "tensor_core": (_tiles(group=1), "tensor cores multiply the blocks"),
    "swizzled": (_tiles(group=8), "tiles in an order in which programs share operands in the L2"),
    "skinny": (_skinny, "few rows: weights stream past them, k split where tiles are few"),
    "persistent": (_persistent, "one program a multiprocessor, tile after tile, loaded by Hopper's copy engine"),
    "split_k": (_split_k, "the last round's tiles in pieces along k, where few are left for it"),
}

INVARIANT = "batch_invariant: one tile for every number of rows, so that a row's bits do not depend on its batch"
ATOMIC = "deterministic=False: programs that share k add their parts to the sums as they come"
WAYS: dict[str, tuple[Callable[[Work], Steps], str]] = {
    **LADDER,
    "invariant": (_invariant, INVARIANT),
    "atomic": (partial(_skinny, is_atomic=True), ATOMIC),
}


def why_not_skinny(a: torch.Tensor, b: torch.Tensor, *_: Any) -> str:
    product = product_of(a, b)
    if product is None or product.batches > 1:
        return "it takes one product, not a batch"
    return "" if product.m <= skinny.MOST_ROWS else f"it is for at most {skinny.MOST_ROWS} rows"


def plan_by(
    provider: str, a: torch.Tensor, b: torch.Tensor, bias: Maybe, residual: Maybe, activation: str, tf32: bool
) -> Plan:
    """The plan of one step of the ladder."""
    copies = [name for name, x in (("bias", bias), ("residual", residual)) if x is not None and not x.is_contiguous()]
    product = product_of(a, b)
    if product is None:
        copies += ["a", "b"]
        a, b = _contiguous(a), _contiguous(b)
        product = product_of(a, b)
    assert product is not None
    work = Work(
        product=product,
        operands=operands_of(product, a, b),
        dtype=a.dtype,
        gpu=facts(a),
        epilogue={
            "HAS_BIAS": bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "ACTIVATION": "gelu_16" if activation == "gelu" and a.dtype.itemsize == 2 else activation,
        },
        is_ieee=a.dtype == torch.float32 and not tf32,
    )
    steps_of, summary = WAYS[provider]
    buffers, steps = steps_of(work)
    return Plan(
        provider=provider,
        reason=summary,
        copies=tuple(copies),
        buffers={"c": Buffer(shape=(*a.shape[:-1], b.shape[-1]), dtype=a.dtype), **buffers},
        steps=tuple(steps),
        outputs=("c",),
    )


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """As it will lie when it was copied, without the copy."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_cuda else x.contiguous()
