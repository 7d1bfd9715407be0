"""The device's work as items: one call of one op, the kernels that it ran, and the least that it could have cost.

On a GPU an item is the innermost op of known cost around a launch, with everything it launched. On a CPU an item is the
outermost op of known cost: its own time is the work.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from sublight.cost import Cost
from sublight.results import Limits
from sublight.trace import costs, intervals
from sublight.trace.attribute import ENGINE, Attribution
from sublight.trace.costs import OpCost
from sublight.trace.record import NONE, Detail, Ints, Kind, Mask, Trace
from sublight.trace.steps import Steps

LOADING = ("enumerate(DataLoader)#",)
COMPILING = ("dynamo", "entire_frame_compile", "compile_inner", "backend_compile", "compile_fx", "async_compile")
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # over the link, beside the device's own work


@dataclass(slots=True, kw_only=True)
class Item:
    """One call of one op, or a kernel that no op launched."""

    row: int  # the op's row, or the device row where there is no op
    name: str
    rows: list[int] = field(default_factory=list)  # device rows; on a CPU, the op itself
    known: OpCost | None = None
    family: str = "other"
    floor_s: float | None = None  # None: not known
    bound: str = ""
    cached: bool = False  # it was faster than memory allows: it read from a cache, and what it took is its floor
    too_good: bool = False  # it was faster than its floor, and no cache explains that

    def took_s(self, trace: Trace) -> float:
        """In the trace, its kernels one after the other."""
        return float((trace.end_ns[self.rows] - trace.start_ns[self.rows]).sum()) * 1e-9

    @property
    def dtype(self) -> str:
        return self.known.dtype if self.known else ""

    @property
    def cost(self) -> Cost | None:
        return self.known.cost if self.known else None


class Book:
    """Costs and floors, each asked once for equal calls."""

    def __init__(self, trace: Trace, limits: Limits) -> None:
        self.trace, self.limits = trace, limits
        self._found: dict[tuple[int, int, tuple[str, ...]], OpCost | None] = {}
        self.family_of = lru_cache(maxsize=None)(costs.kernel_family)

    def cost(self, row: int, kernels: tuple[str, ...]) -> OpCost | None:
        key = (int(self.trace.name[row]), int(self.trace.detail[row]), kernels)
        if key not in self._found:
            self._found[key] = self._ask(self.trace.name_of(row), self.trace.detail_of(row), kernels)
        return self._found[key]

    @staticmethod
    def _ask(name: str, detail: Detail, kernels: tuple[str, ...]) -> OpCost | None:
        try:
            return costs.cost_of(name, detail, kernels=kernels)
        except (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError):
            return None  # shapes that no call of this op can have: a damaged trace

    def has_cost(self, row: int) -> bool:
        return self.cost(row, ()) is not None

    def _settle_in_graph(self, item: Item, ops: list[tuple[str, Detail]]) -> None:
        """The innermost op of known cost gives the item its name."""
        for name, detail in ops:
            if (known := self._ask(name, detail, (item.name,))) is not None:
                item.name, item.known = name, known
                return

    def _lacks_a_rate(self, cost: Cost) -> bool:
        """A product whose rate was never measured has no floor: by its bytes alone it would look slow."""
        return any(name.startswith("matmul") and self.limits.value(name) is None for name in cost.flops)

    def settle(self, item: Item, in_graph: list[tuple[str, Detail]] | None = None) -> None:
        """Fill in cost, family and floor; `in_graph`: the ops that a graph's kernel stands for."""
        kernels = tuple(dict.fromkeys(self.trace.name_of(row) for row in item.rows if row != item.row))
        if self.trace.kind[item.row] == Kind.OP:
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
        elif kernels or self.trace.kind[item.row] == Kind.KERNEL:
            item.family = self.family_of(kernels[0] if kernels else item.name)[0]


def device_rows(attribution: Attribution, found: Steps) -> Ints:
    """What the steps launched, whenever it ran, on the device that they keep busiest."""
    trace, rows = attribution.trace, attribution.trace.device_rows
    rows = rows[~backlog(attribution)[rows]]
    launch = started_by(attribution, rows)
    when = np.where(launch != NONE, trace.start_ns[np.maximum(launch, 0)], trace.start_ns[rows])
    rows = rows[(when >= found.spans_ns[0][0]) & (when < found.spans_ns[-1][1])]
    devices = devices_of(trace)[trace.lane[rows]]
    busy = {
        device: int((trace.end_ns - trace.start_ns)[rows[devices == device]].sum()) for device in set(devices.tolist())
    }
    return rows[devices == max(busy, key=lambda device: busy[device])] if len(busy) > 1 else rows


def backlog(attribution: Attribution) -> Mask:
    """By row: work that the device still had to do when the recording began. Its launch was not recorded, though most
    others of the device were, and nothing that was launched in the recording ran before it on its stream.
    """
    trace, rows = attribution.trace, attribution.trace.device_rows
    old = np.zeros(len(trace), dtype=bool)
    launched = attribution.launch[rows] != NONE
    devices = devices_of(trace)[trace.lane[rows]]
    for device in np.unique(devices).tolist():
        mine = devices == device
        if launched.all() or 2 * np.count_nonzero(launched & mine) <= np.count_nonzero(mine):
            continue
        on_device, known = rows[mine], launched[mine]
        first_of_all = int(trace.start_ns[on_device[known]].min())
        for lane in np.unique(trace.lane[on_device[~known]]).tolist():
            here = trace.lane[on_device] == lane
            first = int(trace.start_ns[on_device[here & known]].min()) if (here & known).any() else first_of_all
            early = on_device[here & ~known]
            old[early[trace.start_ns[early] < first]] = True
    return old


def started_by(attribution: Attribution, rows: Ints) -> Ints:
    """The call behind each device row; a kernel without one, as those that a kernel launches, goes with the kernel
    before it on its stream. NONE where there is none either.
    """
    trace, launch = attribution.trace, attribution.launch[rows]
    if (launch != NONE).all() or not len(rows):
        return launch
    order = np.lexsort((trace.start_ns[rows], trace.lane[rows]))
    lane = trace.lane[rows][order]
    known = np.where(launch[order] != NONE, np.arange(len(order)), -1)
    opens = np.append(True, lane[1:] != lane[:-1])
    first = np.maximum.accumulate(np.where(opens, np.arange(len(order)), 0))  # of its stream
    last = np.maximum.accumulate(known)
    found = launch.copy()
    found[order] = np.where(last >= first, launch[order][np.maximum(last, 0)], NONE)
    return found


def of_device(trace: Trace, rows: Ints) -> Ints:
    """Everything that ran on the device of these rows."""
    if not len(rows):
        return rows
    everything, devices = trace.device_rows, devices_of(trace)
    found: Ints = everything[devices[trace.lane[everything]] == devices[trace.lane[rows[0]]]]
    return found


def devices_of(trace: Trace) -> Ints:
    """The device of each lane."""
    return np.array([lane.device for lane in trace.lanes], dtype=np.int64)


def gpu_items(attribution: Attribution, rows: Ints, limits: Limits) -> tuple[list[Item], Ints]:
    """The items behind these device rows, and each row's item."""
    trace, book = attribution.trace, Book(attribution.trace, limits)
    items: dict[tuple[int, int], Item] = {}
    item_of = np.zeros(len(rows), dtype=np.int64)
    numbers: dict[tuple[int, int], int] = {}
    keys = [_owner(attribution, book, row) for row in rows.tolist()]
    owners = {owner for (_, row), owner in keys if row == NONE}
    for at, row in enumerate(rows.tolist()):
        key, owner = keys[at]
        if key[1] == NONE and owner != row:  # an op whose cost counts its inner ops has their kernels too
            owner = next((op for op in reversed(attribution.ops_above(owner)) if op in owners), owner)
            key = (owner, NONE)
        if key not in items:
            numbers[key] = len(items)
            items[key] = Item(row=owner, name=trace.name_of(owner))
        items[key].rows.append(row)
        item_of[at] = numbers[key]
    for item in items.values():
        lonely = trace.kind[item.row] == Kind.KERNEL
        book.settle(item, attribution.ops_in_graph(item.row) if lonely else None)
    return list(items.values()), item_of


def _owner(attribution: Attribution, book: Book, row: int) -> tuple[tuple[int, int], int]:
    """The op that a device row is counted to, and what makes its item distinct."""
    trace = attribution.trace
    if trace.name_of(row).startswith(COPIES) or trace.tool == "jax":  # XLA's kernels are its ops
        return (row, NONE), row
    chain = attribution.ops_above(row)
    if not chain:
        return (row, NONE), row
    known = next((op for op in chain if book.has_cost(op)), None)
    owner = (
        known if known is not None else next((op for op in chain if not costs.no_cost(trace.name_of(op))), chain[-1])
    )
    if trace.name_of(owner).startswith(ENGINE) and len(chain) > 1:
        owner = chain[0]
    if attribution.op[row] == NONE:  # from a graph: the op's row stands for many kernels
        return (owner, row), owner
    return (owner, NONE), owner


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
            item = Item(row=row, name=trace.name_of(row), rows=[row])
            book.settle(item)
            items.append(item)
        else:
            waiting += children[row][::-1]
    return sorted(items, key=lambda item: int(trace.start_ns[item.row]))
