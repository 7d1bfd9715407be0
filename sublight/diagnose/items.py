"""The device's work as items: which op a kernel is counted to, and what the least is that each could have cost.

On a GPU an item is the innermost op of known cost around a launch, with everything it launched. On a CPU an item is the
outermost op of known cost: its own time is the work. Equal calls are judged once; nothing else is done a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from sublight.cost import Cost
from sublight.diagnose.work import COMPILING, COPIES, LOADING, Item
from sublight.results import Limits
from sublight.trace import costs, intervals
from sublight.trace.attribute import DEEPEST, ENGINE, Attribution
from sublight.trace.costs import OpCost
from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, Detail, Ints, Kind, Mask, Trace

_OP, _KERNEL = int(Kind.OP), int(Kind.KERNEL)  # an enum's member is slow to look up


class Book:
    """Costs and floors, each asked once for equal calls."""

    def __init__(self, trace: Trace, limits: Limits) -> None:
        self.trace, self.limits = trace, limits
        self._costs: dict[tuple[int, int, tuple[str, ...]], OpCost | None] = {}
        self._settled: dict[tuple[int, int, tuple[int, ...], int], Item] = {}
        self.family_of = lru_cache(maxsize=None)(costs.family_of)

    def cost(self, row: int, kernels: tuple[str, ...]) -> OpCost | None:
        key = (int(self.trace.name[row]), int(self.trace.detail[row]), kernels)
        if key not in self._costs:
            self._costs[key] = self._ask(self.trace.name_of(row), self.trace.detail_of(row), kernels)
        return self._costs[key]

    @staticmethod
    def _ask(name: str, detail: Detail, kernels: tuple[str, ...]) -> OpCost | None:
        try:
            return costs.cost_of(name, detail, kernels=kernels)
        except (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError):
            return None  # shapes that no call of this op can have: a damaged trace

    def has_cost(self, row: int) -> bool:
        return self.cost(row, ()) is not None

    def _settle_in_graph(self, item: Item, ops: Sequence[tuple[str, Detail]]) -> None:
        """The innermost op of known cost gives the item its name."""
        for name, detail in ops:
            if (known := self._ask(name, detail, (item.name,))) is not None:
                item.name, item.known = name, known
                return

    def _lacks_a_rate(self, cost: Cost) -> bool:
        """A product whose rate was never measured has no floor: by its bytes alone it would look slow."""
        return any(name.startswith("matmul") and self.limits.value(name) is None for name in cost.flops)

    def settle(self, item: Item, ids: tuple[int, ...], in_graph: Sequence[tuple[str, Detail]] = ()) -> None:
        """Fill in cost, family and floor; `ids`: the names of its kernels; `in_graph`: the ops that a graph's kernel
        stands for.
        """
        row, is_op = item.row, int(self.trace.kind[item.row]) == _OP
        key = (
            int(self.trace.name[row]),
            int(self.trace.detail[row]),
            ids,
            int(self.trace.bytes[row]) if not is_op else 0,
        )
        if in_graph or key not in self._settled:
            self._settle(item, tuple(self.trace.names[number] for number in ids), in_graph)
            self._settled[key] = item if not in_graph else self._settled.get(key, item)
            return
        like = self._settled[key]
        item.known, item.family, item.floor_s, item.bound = like.known, like.family, like.floor_s, like.bound

    def _settle(self, item: Item, kernels: tuple[str, ...], in_graph: Sequence[tuple[str, Detail]]) -> None:
        if self.trace.kind[item.row] == _OP:
            item.known = self.cost(item.row, kernels)
        elif in_graph:
            self._settle_in_graph(item, in_graph)
        else:
            item.known = costs.cost_of(item.name, self.trace.detail_of(item.row), bytes=int(self.trace.bytes[item.row]))
        if item.known is not None:
            item.family = item.known.family
            floor = self.limits.floor(item.known.cost)
            if floor and not self._lacks_a_rate(item.known.cost):
                item.floor_s, item.bound = floor.seconds, floor.bound
        else:
            item.family = self.family_of(item.name, kernels)


def gpu_items(attribution: Attribution, rows: Ints, limits: Limits) -> tuple[list[Item], Ints]:
    """The items behind these device rows, in the order in which they first ran, and each row's item."""
    trace, book = attribution.trace, Book(attribution.trace, limits)
    owner, own = _owners(attribution, book, rows)
    number = np.where(own, len(trace) + rows, owner)  # those of a graph: the op's row stands for many kernels
    _, first, inverse = np.unique(number, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    item_of: Ints = rank[inverse.ravel()]
    took = np.bincount(item_of, weights=(trace.end_ns - trace.start_ns)[rows] * 1e-9, minlength=len(first)).tolist()
    order = np.argsort(item_of, kind="stable")
    cuts = np.searchsorted(item_of[order], np.arange(len(first) + 1)).tolist()
    members, names = rows[order].tolist(), trace.name[rows[order]].tolist()
    owners = owner[np.sort(first)].tolist()
    kinds = trace.kind[owner[np.sort(first)]].tolist()
    items = []
    for at, row in enumerate(owners):
        mine = slice(cuts[at], cuts[at + 1])
        item = Item(row=row, name=trace.name_of(row), rows=members[mine], took_s=took[at])
        kernels = tuple(dict.fromkeys(names[mine])) if item.rows != [row] else ()
        book.settle(item, kernels, attribution.ops_in_graph(row) if kinds[at] == _KERNEL else ())
        items.append(item)
    return items, item_of


def _owners(attribution: Attribution, book: Book, rows: Ints) -> tuple[Ints, Mask]:
    """The op that each device row is counted to, itself where there is none; and whether it is an item of its own
    though it has an op.
    """
    trace = attribution.trace
    above = _enclosing(attribution)
    inner = attribution.op[rows]
    replayed = (inner == NONE) & (attribution.replayed[rows] != NONE)
    inner = np.where(replayed, attribution.replayed[rows], inner)
    copies = np.array([name.startswith(COPIES) for name in trace.names], dtype=bool)
    alone = (inner == NONE) | copies[trace.name[rows]] | (trace.tool == "jax")  # XLA's kernels are its ops
    engine = np.array([name.startswith(ENGINE) for name in trace.names], dtype=bool)
    works = np.array([not costs.no_cost(name) for name in trace.names], dtype=bool)
    known = _climb(inner, above, _has_cost(book, distinct(inner[inner != NONE]), above))
    working = _climb(inner, above, works[trace.name])
    outermost = _climb(inner, above, np.asarray(above == NONE))
    owner = np.where(known != NONE, known, np.where(working != NONE, working, outermost))
    owner = np.where(engine[trace.name[owner]] & (above[inner] != NONE), inner, owner)
    owner = np.where(alone, rows, owner)
    is_owner = np.zeros(len(trace), dtype=bool)
    is_owner[owner[~replayed]] = True
    return np.where(alone | replayed, owner, _outermost(owner, above, is_owner)), replayed & ~alone


def _enclosing(attribution: Attribution) -> Ints:
    """For each row the op around that op."""
    parents = attribution.trace.parents
    found: Ints = np.where(parents == NONE, NONE, attribution.op[np.maximum(parents, 0)])
    return found


def _has_cost(book: Book, ops: Ints, above: Ints) -> Mask:
    """By row, for these ops and all around them: whether its cost is known. Equal calls are asked once."""
    trace = book.trace
    wanted = np.zeros(len(trace), dtype=bool)
    at = ops
    for _ in range(DEEPEST):
        at = at[(at != NONE)]
        at = distinct(at[~wanted[at]])
        if not len(at):
            break
        wanted[at] = True
        at = above[at]
    rows = np.flatnonzero(wanted)
    pairs = trace.name[rows].astype(np.int64) * max(len(trace.details), 1) + trace.detail[rows]
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    answers = np.array([book.has_cost(row) for row in rows[first].tolist()], dtype=bool)
    found = np.zeros(len(trace), dtype=bool)
    found[rows] = answers[inverse.ravel()] if len(rows) else False
    return found


def _climb(start: Ints, above: Ints, stops: Mask) -> Ints:
    """From each row outwards, the first enclosing row that stops the climb; NONE where none does."""
    at = start.copy()
    for _ in range(DEEPEST):
        moving = (at != NONE) & ~stops[at]
        if not moving.any():
            return at
        at[moving] = above[at[moving]]
    return np.where(stops[at], at, NONE)


def _outermost(start: Ints, above: Ints, wanted: Mask) -> Ints:
    """From each row outwards, the last that is wanted: an op whose cost counts its inner ops has their kernels too."""
    best, at = start.copy(), above[start]
    for _ in range(DEEPEST):
        moving = at != NONE
        if not moving.any():
            break
        best = np.where(moving & wanted[at], at, best)
        at = np.where(moving, above[at], NONE)
    return best


def _within(trace: Trace, rows: Ints, words: tuple[str, ...]) -> Mask:
    """Which rows start inside an event with one of these words in its name, or are one."""
    found = trace.rows_named(lambda name: any(word in name for word in words))
    found = found[trace.is_kind(Kind.OP, Kind.RANGE)[found]]
    return intervals.contain(intervals.union(trace.start_ns[found], trace.end_ns[found]), trace.start_ns[rows])


def cpu_items(attribution: Attribution, spans_ns: tuple[tuple[int, int], ...], limits: Limits) -> list[Item]:
    """The outermost ops of known cost in these spans, in order of start, on threads that run the steps."""
    trace, book = attribution.trace, Book(attribution.trace, limits)
    children: dict[int, list[int]] = defaultdict(list)
    ops = trace.of_kind(Kind.OP)
    first, last = spans_ns[0][0], spans_ns[-1][1]
    ops = ops[(trace.start_ns[ops] >= first) & (trace.end_ns[ops] <= last)]
    ops = ops[~_within(trace, ops, (*LOADING, *COMPILING))]  # the host's time for a batch or a compilation is no work
    inside = set(ops.tolist())
    tops = []
    for row in ops.tolist():
        parent = int(trace.parents[row])
        above = int(attribution.op[parent]) if parent != NONE else NONE
        if above in inside:
            children[above].append(row)
        else:
            tops.append(row)
    above_known = set()  # ops with one of known cost somewhere inside
    for row in reversed(ops.tolist()):
        if book.has_cost(row) or row in above_known:
            parent = int(trace.parents[row])
            above_known.add(int(attribution.op[parent]) if parent != NONE else NONE)
    items: list[Item] = []
    waiting = tops[::-1]
    while waiting:
        row = waiting.pop()
        name = trace.name_of(row)
        is_op = "::" in name if trace.tool != "jax" else bool(trace.detail_of(row).module)
        unknown = row not in above_known and is_op and not name.startswith(ENGINE) and not costs.no_cost(name)
        if book.has_cost(row) or unknown:
            item = Item(row=row, name=name, rows=[row], took_s=float(trace.end_ns[row] - trace.start_ns[row]) * 1e-9)
            book.settle(item, ())
            items.append(item)
        else:
            waiting += children[row][::-1]
    return sorted(items, key=lambda item: int(trace.start_ns[item.row]))
