"""The k largest of a softmax and where they are; the logits are read once and the other probabilities never written.

Sorting costs far more than reading, so almost nothing is sorted. The pass over the logits adds up the softmax's sum and
keeps the largest of every group of 64 neighbours. The k largest logits lie in the k groups whose own largest are the
greatest: a group outside those is beaten by k others. So finding them is four small sorts a row, of groups of groups,
of groups, of eighths of a group and of single logits, whatever the data: there is no bad case. Equal logits go by
their place, and groups of neighbours keep that order.

The sorts are a second launch: the row's last program could make them while others still read, but the registers that
it needs for that are missing to those that read (84 against 82 µs for 1024x131072 on an H200, k = 8).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sublight.backend.device import Facts, facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.softmax import TOP_K as K
from sublight.cost.softmax import softmax_topk as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import copies_of, generator_for, random_rows, rows_of, sum_of, sums_of, why_torch
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered
from sublight.ops.record.tuning import Tile, tile_for
from sublight.ops.softmax.plans import in_python
from sublight.ops.softmax.softmax import exp_below, share_of

MAX_K = 64
GROUP_COLS = 64  # neighbours of which the pass over the logits keeps the largest
BUNDLE_GROUPS = 4  # that the first sort takes as one
FINISH_WARPS = 4  # that sort a row
GROUP = tl.constexpr(GROUP_COLS)
BUNDLE = tl.constexpr(BUNDLE_GROUPS)
PIECE = tl.constexpr(8)  # logits of a group that the third sort takes as one
LOWEST = tl.constexpr(-32768)  # below -inf and everything else that `rank_of` gives, in 16 bits …
LOWEST_FLOAT = tl.constexpr(-2147483648)  # … and in 32


def reference(x: torch.Tensor, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    values, index = torch.topk(torch.softmax(x, -1), k)
    return values, index


@triton.jit
def rank_of(x, inside):
    """A whole number with the order of x, 16 bits for 16-bit x; both zeros alike, NaN above all, what is outside
    below."""
    if x.dtype == tl.float32:
        bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return tl.where(inside, tl.where(x != x, 0x7FFFFFFF, rank), LOWEST_FLOAT)
    else:
        wide = x.to(tl.float32)
        bits = tl.where(wide == 0.0, 0, x.to(tl.int16, bitcast=True).to(tl.int32))
        rank = bits ^ ((bits >> 31) & 0x7FFF)
        return tl.where(inside, tl.where(wide != wide, 0x7FFF, rank), LOWEST)


@triton.jit
def key_of(x, place, inside, WIDE: tl.constexpr):
    """A rank, and the place behind it so that of equal ones the first is the largest; 32 bits where both fit."""
    if WIDE:
        return (rank_of(x, inside).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    else:
        return (rank_of(x, inside) << 16) | (0xFFFF - place)


@triton.jit
def place_of(key, WIDE: tl.constexpr):
    if WIDE:
        return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    else:
        return 0xFFFF - (key & 0xFFFF)


@triton.jit
def value_of(key, kind: tl.constexpr, WIDE: tl.constexpr):
    """What `key_of` was given, but for the sign of a zero and the bits of a NaN."""
    rank = (key >> (32 if WIDE else 16)).to(tl.int32)
    if kind == tl.float32:
        return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        return (rank ^ ((rank >> 31) & 0x7FFF)).to(tl.int16).to(kind, bitcast=True)


@triton.jit
def _largest(x_ptr, most_ptr, cols, groups, K: tl.constexpr, BUNDLES: tl.constexpr, WIDE: tl.constexpr):
    """Keys of a row's K largest logits, the largest first."""
    LONG: tl.constexpr = x_ptr.dtype.element_ty == tl.float32  # until the last sort a place has at most 15 bits
    inner = tl.arange(0, BUNDLE)[None, :]
    if BUNDLES > K:
        bundle = tl.arange(0, BUNDLES)
        group = bundle[:, None] * BUNDLE + inner
        most = tl.load(most_ptr + group, mask=group < groups, other=-float("inf"))
        highest = tl.max(most.to(tl.float32), 1).to(most.dtype)
        keys = tl.topk(key_of(highest, bundle, bundle * BUNDLE < groups, LONG), K)
        bundle = place_of(keys, LONG)
    else:
        bundle = tl.arange(0, K)
    group = bundle[:, None] * BUNDLE + inner
    most = tl.load(most_ptr + group, mask=group < groups, other=-float("inf"))
    keys = tl.topk(tl.reshape(key_of(most, group, group < groups, LONG), [K * BUNDLE]), K)
    group = place_of(keys, LONG)
    piece = group[:, None] * (GROUP // PIECE) + tl.arange(0, GROUP // PIECE)[None, :]
    col = piece[:, :, None] * PIECE + tl.arange(0, PIECE)[None, None, :]
    x = tl.load(x_ptr + col, mask=col < cols, other=-float("inf"))
    highest = tl.max(x.to(tl.float32), 2).to(x.dtype)
    keys = key_of(highest, piece, piece * PIECE < cols, LONG)
    keys = tl.topk(tl.reshape(keys, [K * (GROUP // PIECE)]), K)
    col = place_of(keys, LONG)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x = tl.load(x_ptr + col, mask=col < cols, other=-float("inf"))
    return tl.topk(tl.reshape(key_of(x, col, col < cols, WIDE), [K * PIECE]), K)


@triton.jit
def _groups_kernel(
    x_ptr, most_ptr, top_ptr, total_ptr, cols, x_stride, parts, groups,
    BLOCK: tl.constexpr, PROBABILITY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    row, part = (unit // parts).to(tl.int64), unit % parts  # rows * cols may pass 2**31
    group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf"))
    most = tl.max(x.to(tl.float32), 1)
    tl.store(most_ptr + row * groups + group, most.to(most_ptr.dtype.element_ty), mask=group < groups)
    if PROBABILITY:
        top = tl.max(most, 0)
        base = tl.where(top == -float("inf"), 0.0, top)  # a masked part adds nothing
        total = sum_of(exp_below(x, base), None, SUMS)
        tl.store(top_ptr + unit, top)
        tl.store(total_ptr + unit, total)


@triton.jit
def _finish_kernel(
    x_ptr, most_ptr, top_ptr, total_ptr, value_ptr, index_ptr, cols, x_stride, parts, groups, k,
    K: tl.constexpr, BUNDLES: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, PROBABILITY: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows * cols may pass 2**31
    keys = _largest(x_ptr + row * x_stride, most_ptr + row * groups, cols, groups, K, BUNDLES, WIDE)
    value = value_of(keys, x_ptr.dtype.element_ty, WIDE)
    if PROBABILITY:
        part = tl.arange(0, PARTS)
        tops = tl.load(top_ptr + row * parts + part, mask=part < parts, other=-float("inf"))
        totals = tl.load(total_ptr + row * parts + part, mask=part < parts, other=0.0)
        top = tl.max(tops, 0)
        total = sum_of(totals * exp_below(tops, top), 0, SUMS)
        value = share_of(exp_below(value, top), total, value.dtype)
    slot = tl.arange(0, K)
    tl.store(value_ptr + row * k + slot, value.to(value_ptr.dtype.element_ty), mask=slot < k)
    tl.store(index_ptr + row * k + slot, place_of(keys, WIDE).to(tl.int64), mask=slot < k)


KERNELS = (
    Kernel(jit=_groups_kernel),
    Kernel(
        jit=_finish_kernel,
        narrow="a row's maxima, 1/64 of its logits, begin anywhere; candidates lie where the data has them",
    ),
)


class Largest(NamedTuple):
    """The launches that find the k largest of each row, and what they hand to one another."""

    steps: tuple[Step, Step]
    buffers: dict[str, Buffer]


def find_largest(x: torch.Tensor, name: str, k: int, *, probability: bool, values: str, index: str) -> Largest:
    """The k largest of each row of the argument `name` into the buffers `values` and `index`, as probabilities or as
    they are."""
    check(x, k)
    layout = rows_of(x)
    rows, cols, item = layout.rows, layout.cols, layout.itemsize
    tile = tile_of(rows, cols, item, facts(x))
    parts, groups = cdiv(cols, tile.block), cdiv(cols, GROUP_COLS)
    buffers = {
        values: Buffer(shape=(*x.shape[:-1], k), dtype=x.dtype),
        index: Buffer(shape=(*x.shape[:-1], k), dtype=torch.int64),
        "most": Buffer(shape=(rows, groups), dtype=x.dtype),
    }
    sums = "most most"  # what is not used is not looked at
    if probability:
        buffers |= dict.fromkeys(("top", "total"), Buffer(shape=(rows * parts,), dtype=torch.float32))
        sums = "top total"
    slots = max(2, next_power_of_2(k))
    whole = {"PROBABILITY": probability, "SUMS": sums_of(x)}
    sizes = (cols, layout.apart, parts, groups)
    find = Step(
        _groups_kernel, (rows * parts,), *sizes,
        on=f"{name} most {sums}", tile=tile, BLOCK=tile.block, **whole, **tile.options(),
    )  # fmt: skip
    finish = Step(
        _finish_kernel, (rows,), *sizes, k,
        on=f"{name} most {sums} {values} {index}",
        K=slots, BUNDLES=max(slots, next_power_of_2(cdiv(groups, BUNDLE_GROUPS))),
        PARTS=next_power_of_2(parts), WIDE=item == 4 or cols > 2**16, **whole, num_warps=FINISH_WARPS,
    )  # fmt: skip
    return Largest((find, finish), buffers)


def tile_of(rows: int, cols: int, itemsize: int, gpu: Facts) -> Tile:
    """16 KB of a row a program, 128 bytes a thread: sums and sorts cost a warp the same whatever it holds. Less where
    that would leave multiprocessors idle."""
    block = 16384 // itemsize
    while block > 1024 and rows * cdiv(cols, block) < 2 * gpu.multiprocessors:
        block //= 2
    while block > 256 and block // 2 >= cols:
        block //= 2
    rule = Tile(block=block, warps=4)
    return tile_for("softmax_topk", cols, itemsize, packable=True, capability=gpu.capability, rule=rule)


def plan_topk(x: torch.Tensor, k: int) -> Plan:
    """One pass over the logits, then the sorts."""
    steps, buffers = find_largest(x, "x", k, probability=True, values="values", index="index")
    return Plan(
        provider="sublight",
        reason="one pass over the logits, then sorts of few",
        copies=copies_of(x=rows_of(x).is_copy),
        buffers=buffers,
        steps=steps,
        outputs=("values", "index"),
    )


def _gradient(dvalues: torch.Tensor, dindex: None, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A probability's gradient goes to its own logit, and less its share of all to every logit: in PyTorch's ops, which
    can be differentiated again, and which need the whole softmax once more."""
    y = torch.softmax(x, -1, dtype=torch.promote_types(x.dtype, torch.float32))
    dy = dvalues.to(y.dtype)
    along = (y.gather(-1, index) * dy).sum(-1, keepdim=True)
    return (y * (torch.zeros_like(y).scatter(-1, index, dy) - along)).to(x.dtype)


def _fake(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.new_empty(*x.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)


_softmax_topk = Registered(
    schema="softmax_topk(Tensor x, int k) -> (Tensor values, Tensor index)",
    reference=reference,
    theirs="torch.softmax, torch.topk",
    why_torch=lambda x, k: why_torch(x),
    plan=plan_topk,
    fake=_fake,
    gradient=Gradient(
        by=in_python(_gradient),  # index has no gradient, and the native path would give it one
        saves=("x", "index"),
        gives=("x",),
        by_torch=lambda saved, grads: (_gradient(grads[0], None, saved["x"], saved["index"]),),
    ),
)


def check(x: torch.Tensor, k: int) -> None:
    if not 1 <= k <= MAX_K:
        raise BadInput(f"k is {k}: give 1 to {MAX_K}, or use torch.topk")
    if x.dim() == 0 or x.shape[-1] < k:
        raise BadInput(f"k is {k}, but x has the shape {tuple(x.shape)}: give a k of at most its last dimension")


def softmax_topk(x: torch.Tensor, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of softmax(x) over the last dimension, the largest first, and their indices (int64).

    Ours orders by the logits, of equal ones the first before the others; PyTorch's, where the call goes there, orders
    equal probabilities as it likes. k is 1 to 64.
    """
    check(x, k)
    return _softmax_topk.call(x, k)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, k: int = K) -> Plan:
    """What `softmax_topk(x, k)` runs, and why."""
    check(x, k)
    return _softmax_topk.decide(x, k)


def launch(x: torch.Tensor, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """Our kernels, whether or not they win."""
    return _softmax_topk.by_kernels(x, k)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (logits_with_distinct_tops(shape, dtype, device, seed),)


def logits_with_distinct_tops(shape: Shape, dtype: str, device: str, seed: int) -> torch.Tensor:
    """Noise below 7.5 and, in random places, up to 128 values above it that differ in every data type: there is one
    right answer. Plain noise of 131,072 16-bit values is full of equal ones."""
    x = random_rows(shape, dtype, device, seed, scale=1.5).clamp_(max=7.5)
    rows, cols = x.shape
    generator, count = generator_for(device, seed + 7), min(2 * MAX_K, cols)
    room = cols // count
    slot = torch.arange(count, device=device)
    place = slot * room + torch.randint(room, (rows, count), generator=generator, device=device)
    first = torch.randint(count, (rows, 1), generator=generator, device=device)
    step = 37 if count == 2 * MAX_K else 1  # shares no factor with the count, so that every value comes up once
    high = 15.9375 - ((slot * step + first) % count) / 16
    return x.scatter_(1, place, high.to(x.dtype))


SOFTMAX_TOPK = Op(
    name="softmax_topk",
    summary="the k largest of a softmax, and their indices",
    reference=reference,
    call=softmax_topk,
    plan=plan,
    providers={"sublight": Provider(launch=launch, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=tuple(
        {"rows": rows, "cols": cols}
        for rows, cols in (
            *((1024, 131072), (1024, 32000), (1024, 128256), (1024, 151936)),
            *((128, 128256), (16, 128256), (1, 128256)),
        )
    ),
    test_shapes=tuple({"rows": rows, "cols": cols} for rows, cols in ((2, 1000), (3, 4097), (2, 16385), (2, 70000))),
    directions=("fwd",),
    library_args=lambda x: (x, K),
)
