"""What could be one kernel: runs of memory-bound ops over one tensor, hand-written norms, hand-written attention.

A trace records shapes, not tensors, so a run is a stretch of neighbouring ops of one size on one stream, where each is
taken to read what the one before wrote. A fused kernel reads what comes from outside and writes the last result; an
operand that may come from outside or from the run counts half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sublight.cost import Cost
from sublight.diagnose.work import COPIES, Item
from sublight.results import Limits
from sublight.trace.attribute import Attribution
from sublight.trace.record import NONE, Trace

FUSABLE = ("pointwise", "copy", "dropout", "reduction", "softmax", "norm")
REACHED = 0.88  # of the limit, by a good memory-bound kernel
NORM_REACHED = {"forward": 0.45, "backward": 0.36}  # of the limit, by PyTorch's layer_norm: benchmarks/h200.json
LIKE_ITS_LONGEST = 0.8  # a fused kernel still does what its longest part does: it takes at least this much of it
ATTENTION_REACHED = {"forward": 0.5, "backward": 0.38}  # of the matmul limit, by PyTorch's flash kernels on Hopper
# … of the ordinary cores' limit, in float32, whether or not TF32 is allowed: fmha_cutlassF_f32 of
# examples/recorded/h200/fp32_model.json.gz does 25.6 TFLOP/s of causal arithmetic, 9/8 of that with its whole tiles
FP32_ATTENTION_REACHED = {"forward": 0.59, "backward": 0.59}
MOST_BODY, LEAST_REPEATS = 12, 3  # of a loop over slices
MOSTLY = 0.6  # of a run's floor in casts and copies: they are its trouble
SMALL = 8  # an op on a tensor this many times smaller is a row's statistics
Kind = Literal["pointwise", "norm", "attention", "copy", "compiled"]
_ROOTS = ("aten::rsqrt", "aten::sqrt")
CASTS = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::_to_copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Items that one kernel could do."""

    kind: Kind
    items: tuple[int, ...]
    fused_s: float  # a good kernel's time
    floor_s: float  # the fused cost at the limit
    dtype: str = ""  # of attention on a GPU: what its kernel would run in


def numel(dims: Any) -> int:
    """The number of elements in the largest tensor among an op's arguments.

    >>> numel(((4, 8), (), ((2, 2), (64,))))
    64
    """
    if not dims:
        return 0
    if all(isinstance(size, int) for size in dims):
        return math.prod(dims)
    return max((numel(part) for part in dims if isinstance(part, tuple)), default=0)


def groups(
    attribution: Attribution, items: Sequence[Item], order: Sequence[Sequence[int]], limits: Limits
) -> list[Group]:
    """`order`: the items of each stream and step, as they ran."""
    trace = attribution.trace
    detail = trace.detail.tolist()
    size_of = {number: numel(trace.details[number].dims) for number in {detail[item.row] for item in items}}
    sizes = [size_of[detail[item.row]] for item in items]
    runs: dict[tuple[tuple[str, int], ...], tuple[Kind, float]] = {}  # of equal ops in a row: what fusion makes of them
    found: list[Group] = []
    taken: set[int] = set()
    for line in order:
        for members in _attentions(items, sizes, line):
            if not taken & set(members):
                found.append(_attention(trace, items, members, limits))
                taken |= set(members)
        for families in (FUSABLE, ("fused",)):
            for members in _runs(items, sizes, line, taken, families):
                if len(members) > 1:
                    key = tuple((items[at].name, detail[items[at].row]) for at in members)
                    if key not in runs:
                        runs[key] = _run(trace, items, sizes, members, limits)
                    found.append(_fused(items, members, *runs[key]))
                    taken |= set(members)
    return _with_backward(attribution, items, found)


def _runs(
    items: Sequence[Item], sizes: list[int], line: Sequence[int], taken: set[int], families: Sequence[str]
) -> list[list[int]]:
    """Neighbours of one size; statistics of the rows may stand between them."""
    runs: list[list[int]] = [[]]
    size = 0
    for at in line:
        item = items[at]
        fusable = (
            item.family in families
            and item.known is not None
            and at not in taken
            and item.bound in ("memory", "launch")
            and not item.name.startswith(COPIES)
        )
        if not fusable:
            runs.append([])
            continue
        row_statistics = sizes[at] * SMALL <= size and sizes[at] and size % sizes[at] == 0
        if runs[-1] and (sizes[at] == size or row_statistics) and not _apart(items[runs[-1][-1]], item):
            runs[-1].append(at)
        else:
            runs.append([at])
            size = sizes[at]
    return [part for run in runs if run for part in _bodies(items, run)]


def _apart(one: Item, other: Item) -> bool:
    """Two reductions or `cat` in a row read two tensors, and what reads nothing (constants, random numbers) needs
    nothing from the one before: neither feeds the other.
    """
    fills = other.cost is not None and not other.cost.read_bytes
    alike = one.family == "reduction" or one.name == "aten::cat"  # cat gives more than the next one reads
    return fills or (alike and one.name == other.name)


def _bodies(items: Sequence[Item], run: list[int]) -> list[list[int]]:
    """A loop that goes over slices one by one looks like one long run: its body, with a reduction in it, repeats."""
    names = [items[at].name for at in run]
    for period in range(1, min(MOST_BODY, len(run) // LEAST_REPEATS) + 1):
        if all(name == names[place % period] for place, name in enumerate(names)):
            body = {items[at].family for at in run[:period]}
            if body & {"reduction", "softmax", "norm"}:
                return [run[place : place + period] for place in range(0, len(run), period)]
            break
    return [run]


def _run(
    trace: Trace, items: Sequence[Item], sizes: list[int], members: list[int], limits: Limits
) -> tuple[Kind, float]:
    """What a run is, and its floor as one kernel."""
    size = max(sizes[at] for at in members)
    large = [at for at in members if sizes[at] == size]
    costs = [items[at].known for at in large]
    element = max((known.cost.write_bytes // size for known in costs if known and size), default=4)
    extra = 0.0
    live = 0
    for place, at in enumerate(large):
        operands = sum(math.prod(dims) == size for dims in trace.detail_of(items[at].row).dims if _is_shape(dims))
        if place and operands > 1 and live < 2:
            extra += 0.5 * element * size  # from the run, or from outside: half
        live = max(live - max(operands, 1), 0) + 1
    first, last = costs[0], costs[-1]
    writes = max(last.cost.write_bytes if last else 0, 1)
    reads = (first.cost.read_bytes if first else 0) + extra
    everything = sum(known.cost.bytes for known in costs if known)
    share = min(1.0, (reads + writes) / everything) if everything else 1.0
    cost = Cost(
        read_bytes=int(everything * share * reads / (reads + writes)),
        write_bytes=int(everything * share * writes / (reads + writes)),
    )
    floor = limits.floor(cost)
    return _kind(items, members), floor.seconds if floor else 0.0


def _fused(items: Sequence[Item], members: list[int], kind: Kind, seconds: float) -> Group:
    longest = max(items[at].took_s for at in members)
    fused = seconds / NORM_REACHED["forward"] if kind == "norm" else max(seconds / REACHED, LIKE_ITS_LONGEST * longest)
    return Group(kind=kind, items=tuple(members), fused_s=fused, floor_s=seconds)


def _is_shape(dims: Any) -> bool:
    return bool(dims) and all(isinstance(size, int) for size in dims)


def _kind(items: Sequence[Item], members: list[int]) -> Kind:
    names = [items[at].name.rstrip("_") for at in members]
    if "reduction" in {items[at].family for at in members} and any(name in _ROOTS for name in names):
        return "norm"
    if items[members[0]].family == "fused":
        return "compiled"
    copies = sum(items[at].floor_s or 0.0 for at in members if items[at].name in CASTS)
    return "copy" if copies > MOSTLY * sum(items[at].floor_s or 0.0 for at in members) else "pointwise"


def _attentions(items: Sequence[Item], sizes: list[int], line: Sequence[int]) -> list[list[int]]:
    """A product, a softmax over its whole result, and another product that reads it, with little between them."""
    found: list[list[int]] = []
    for place, at in enumerate(line):
        if items[at].family != "softmax" or not sizes[at] or "backward" in items[at].name:
            continue
        before = _product(items, line, range(place - 1, max(place - 8, -1), -1))
        after = _product(items, line, range(place + 1, min(place + 6, len(line))))
        if before is not None and after is not None:
            found.append(list(line[before : after + 1]))
    return found


def _product(items: Sequence[Item], line: Sequence[int], places: range) -> int | None:
    """The next product in this direction, if everything between is memory-bound work."""
    for place in places:
        item = items[line[place]]
        if item.family == "matmul":
            return place
        if item.family not in FUSABLE and item.family not in ("memset", "other"):
            return None
    return None


def _attention(trace: Trace, items: Sequence[Item], members: Sequence[int], limits: Limits) -> Group:
    """The products' arithmetic and the outer tensors' bytes: the scores stay on chip."""
    products = [items[at] for at in members if items[at].family == "matmul" and items[at].known is not None]
    flops: dict[str, float] = {}
    outer = 0
    scores = max(
        (numel(trace.detail_of(items[at].row).dims) for at in members if items[at].family == "softmax"), default=0
    )
    for product in products:
        cost = product.cost
        assert cost is not None
        for name, count in cost.flops.items():
            flops[name] = flops.get(name, 0.0) + count
        element = 2 if product.dtype in ("bfloat16", "float16") else 4
        outer += max(cost.bytes - scores * element, 0)
    fused = Cost(read_bytes=outer * 3 // 4, write_bytes=outer // 4, flops=flops)
    floor = limits.floor(fused)
    seconds = floor.seconds if floor else 0.0
    if limits.kind != "cuda":
        return Group(kind="attention", items=tuple(members), fused_s=seconds / 0.7, floor_s=seconds)
    dtype = max((product.dtype for product in products), default="", key=lambda name: name == "float32")
    single = limits.floor(replace(fused, flops={"matmul_fp32": sum(flops.values())})) if dtype == "float32" else None
    took = single.seconds / FP32_ATTENTION_REACHED["forward"] if single else seconds / ATTENTION_REACHED["forward"]
    return Group(kind="attention", items=tuple(members), fused_s=took, floor_s=seconds, dtype=dtype)


def _with_backward(attribution: Attribution, items: Sequence[Item], found: list[Group]) -> list[Group]:
    """Items of the backward pass go with the group of their forward op; a run of them keeps its own time otherwise."""
    group_of: dict[int, int] = {}
    for number, group in enumerate(found):
        if group.kind in ("attention", "norm"):
            for at in group.items:
                for op in (items[at].row, *attribution.ops_above(items[at].row)):
                    group_of[op] = number
    if not group_of:
        return found
    behind: dict[int, list[int]] = {}
    for at, item in enumerate(items):
        forward = attribution.forward(item.row) if item.row != NONE else NONE
        if forward == NONE:
            continue
        mine = next((group_of[op] for op in (forward, *attribution.ops_above(forward)) if op in group_of), None)
        if mine is not None:
            behind.setdefault(mine, []).append(at)
    claimed = {at for members in behind.values() for at in members}
    kept = [
        group if not claimed & set(group.items) or number in behind else _less(group, claimed)
        for number, group in enumerate(found)
    ]
    result = [group for group in kept if group is not None]
    for number, members in behind.items():
        group = found[number]
        # a norm's backward reads x and dy and writes dx: three tensors where the forward moves two
        work = 2.5 if group.kind == "attention" else 1.5
        reached = _reached(group)
        fused = group.fused_s * work * reached["forward"] / reached["backward"]
        result.append(replace(group, items=tuple(members), fused_s=fused, floor_s=group.floor_s * work))
    return result


def _reached(group: Group) -> dict[str, float]:
    if group.kind == "norm":
        return NORM_REACHED
    return FP32_ATTENTION_REACHED if group.dtype == "float32" else ATTENTION_REACHED


def _less(group: Group, claimed: set[int]) -> Group | None:
    """A run of which a part belongs to the backward of something else: left out if that is most of it."""
    left = tuple(at for at in group.items if at not in claimed)
    if len(left) < 2:
        return None
    share = len(left) / len(group.items)
    return Group(kind=group.kind, items=left, fused_s=group.fused_s * share, floor_s=group.floor_s * share)


def saved(items: Sequence[Item], found: Sequence[Group]) -> np.ndarray:
    """What fusion takes off each item's floor."""
    result = np.zeros(len(items))
    for group in found:
        floors = np.array([items[at].floor_s or 0.0 for at in group.items])
        total = float(floors.sum())
        if total > group.floor_s:
            result[list(group.items)] = floors * (1 - group.floor_s / total)
    return result
