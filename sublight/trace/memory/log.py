"""The allocator's events of a trace, as a ledger.

Where the loader kept no addresses (`trace.meta["memory_addresses"]`, a column beside the log's), a free is taken to end
the latest live allocation of its size. Totals and the peak do not depend on that; which of several equal ones is live
at the peak does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sublight.errors import BadInput
from sublight.trace.intervals import distinct
from sublight.trace.memory.ledger import Ledger
from sublight.trace.memory.snapshot import MOST_BYTES, Frame, printable
from sublight.trace.memory.stacks import NOWHERE, Phase, Site, is_loss, user_frame
from sublight.trace.record import NONE, Ints, Kind, Mask, MemoryLog, Trace

BEFORE = Site(name="live before the recording", phase="before")
UNSEEN = Site(name=NOWHERE)
_PYTHON = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")
_BACKWARD = re.compile(r"Backward\d*$|^torch::autograd::|AccumulateGrad")
_MODULE = "nn.Module: "
_NODE = "autograd::engine::evaluate_function: "
_NO_MODULE = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)", "PyTorch Profiler", "[pytorch|profiler")
Chain = tuple[int, ...]  # rows of a trace, innermost first


def ledgers(trace: Trace) -> dict[int, Ledger]:
    """The ledger of each device; NONE is the host."""
    if trace.memory is None or not len(trace.memory.time_ns):
        raise BadInput(
            f"{trace.source} holds no allocator events: record it with profile(profile_memory=True), or take a "
            "snapshot with torch.cuda.memory._record_memory_history()"
        )
    return {int(device): _ledger(trace, trace.memory, int(device)) for device in distinct(trace.memory.device)}


def _ledger(trace: Trace, log: MemoryLog, device: int) -> Ledger:
    rows = np.flatnonzero((log.device == device) & (np.abs(log.delta_bytes) < MOST_BYTES))
    delta, time_ns = log.delta_bytes[rows], log.time_ns[rows]
    notes = []
    if (lost := int((log.device == device).sum()) - len(rows)) > 0:
        notes.append(f"{lost:,} allocator events have impossible sizes and are left out")
    addresses = _addresses(trace, log)
    keys = np.abs(delta) if addresses is None else addresses[rows]
    first, last, size = _match(keys.tolist(), delta.tolist())
    made = np.array(first)
    base = _base(log.allocated_bytes[rows], delta) - sum(size[row] for row in np.flatnonzero(made == 0).tolist())
    if base > 0:
        first, last, size = [*first, 0], [*last, len(rows) + 1], [*size, base]
        notes.append("the recording began with memory in use: what made that is not known")
    codes: dict[Site, int] = {}
    chains = _chains(trace, time_ns)
    autograd = _autograd_lanes(trace)
    known: dict[Chain, Site] = {}
    column = []
    for moment in first:
        here = BEFORE
        if moment:
            chain = chains[moment - 1]
            here = known[chain] if chain in known else known.setdefault(chain, _site(trace, chain, autograd))
        column.append(codes.setdefault(here, len(codes)))
    if addresses is None:
        notes.append("the trace gave no addresses: each free is matched with the latest allocation of its size")
    reserved = log.reserved_bytes[rows]
    has_reserved = len(reserved) > 0 and bool((reserved >= 0).all()) and bool(reserved.any())
    times = np.maximum.accumulate(time_ns) / 1e9
    return Ledger(
        source=trace.source,
        device=_device_name(trace, device),
        times_s=np.concatenate((times[:1], times)),
        reserved_bytes=np.concatenate((reserved[:1], reserved)) if has_reserved else None,
        first=np.array(first, dtype=np.int64),
        last=np.array(last, dtype=np.int64),
        bytes=np.array(size, dtype=np.int64),
        site=np.array(column, dtype=np.int64),
        sites=tuple(codes),
        notes=tuple(notes),
    )


def _addresses(trace: Trace, log: MemoryLog) -> Ints | None:
    """The address of each allocator event, where the loader kept it."""
    found = trace.meta.get("memory_addresses")
    return found if isinstance(found, np.ndarray) and len(found) == len(log.time_ns) and (found > 0).all() else None


def _match(keys: Sequence[int], delta: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """First moment, last moment and size of each allocation; a free ends the latest with its key.

    >>> _match([8, 8, 8, 4], [8, 8, -8, -4])
    ([1, 2, 0], [5, 3, 4], [8, 8, 4])
    >>> _match([100, 200, 100, 300], [8, 8, -8, -4])
    ([1, 2, 0], [3, 5, 4], [8, 8, 4])
    """
    first: list[int] = []
    last: list[int] = []
    size: list[int] = []
    open_rows: dict[int, list[int]] = {}
    for moment, (key, change) in enumerate(zip(keys, delta, strict=True), 1):
        if change > 0:
            open_rows.setdefault(key, []).append(len(first))
            first.append(moment)
            last.append(len(delta) + 1)
            size.append(change)
        elif change < 0:
            if stack := open_rows.get(key):
                last[stack.pop()] = moment
            else:  # allocated before the recording
                first.append(0)
                last.append(moment)
                size.append(-change)
    return first, last, size


def _base(total: Ints, delta: Ints) -> int:
    """Bytes in use before the first event; 0 where the profiler gave no totals."""
    return max(0, int(total[0] - delta[0])) if len(total) and 0 <= int(total[0]) < MOST_BYTES else 0


def _chains(trace: Trace, time_ns: Ints) -> list[Chain]:
    """By allocator event, the ops, ranges and Python calls around it, on the thread that was deepest at work then."""
    wanted = trace.of_kind(Kind.OP, Kind.RANGE, Kind.PYTHON)
    best = np.full(len(time_ns), NONE, dtype=np.int64)
    for lane in distinct(trace.lane[wanted]):
        rows = wanted[trace.lane[wanted] == lane]
        found = np.searchsorted(trace.start_ns[rows], time_ns, side="right") - 1
        row = np.where(found >= 0, rows[np.maximum(found, 0)], NONE)
        while (over := (row >= 0) & (trace.end_ns[row] < time_ns)).any():
            row[over] = trace.parents[row[over]]
        # the thread whose innermost event began last made the allocation: the others wait in an outer one
        later = (row >= 0) & ((best < 0) | (trace.start_ns[row] > trace.start_ns[best]))
        best[later] = row[later]
    kept = trace.is_kind(Kind.OP, Kind.RANGE, Kind.PYTHON)
    known: dict[int, Chain] = {NONE: ()}
    return [_climb(trace, row, kept, known) for row in best.tolist()]


def _climb(trace: Trace, row: int, kept: Mask, known: dict[int, Chain]) -> Chain:
    if row not in known:
        path, at = [], row
        while at >= 0:
            if kept[at]:
                path.append(at)
            at = int(trace.parents[at])
        known[row] = tuple(path)
    return known[row]


def _autograd_lanes(trace: Trace) -> frozenset[int]:
    """Threads that run backward nodes and did not begin the work: what else they do, such as adding up, is backward."""
    rows = trace.of_kind(Kind.OP, Kind.RANGE, Kind.PYTHON)
    nodes = trace.rows_named(_BACKWARD.search, Kind.OP, Kind.RANGE, Kind.PYTHON)
    begun_by = int(trace.lane[rows[0]]) if len(rows) else NONE
    return frozenset(distinct(trace.lane[nodes]).tolist()) - {begun_by}


def _site(trace: Trace, chain: Chain, autograd: frozenset[int]) -> Site:
    if not chain:
        return UNSEEN
    names = [trace.name_of(row) for row in chain]
    ops = [trace.name_of(row).removeprefix(_NODE) for row in chain if trace.kind[row] == Kind.OP]
    frames = [frame for name in names if (frame := _frame(name))]
    frames += [frame for row in chain for part in _stack_of(trace, row) if (frame := _frame(part))]
    user = user_frame(frames) if frames else None
    return Site(
        name=printable(ops[-1] if ops else names[0]),
        source=printable(f"{user.filename.rpartition('/')[2]}:{user.line}") if user else "",
        module=printable(_module(trace, chain)),
        phase="backward" if int(trace.lane[chain[0]]) in autograd else _phase(names, ops),
        loss=is_loss([name for name in ops if not name.endswith("Backward0")]),
    )


def _phase(names: Sequence[str], ops: Sequence[str]) -> Phase:
    """
    >>> _phase(["aten::empty", "AddmmBackward0"], ["aten::empty", "AddmmBackward0"])
    'backward'
    >>> _phase(["aten::empty", "Optimizer.step#AdamW.step"], ["aten::empty"])
    'optimizer'
    >>> _phase(["aten::empty", "aten::linear"], ["aten::empty", "aten::linear"])
    'forward'
    """
    if any(name.startswith("Optimizer.step") for name in names):
        return "optimizer"
    if any(_BACKWARD.search(op) for op in ops):
        return "backward"
    if any(_frame(name) and re.search(r"\): (_apply|__init__|reset_parameters)$", name) for name in names):
        return "build"
    made_by_hand = ops and ops[-1] in ("aten::to", "aten::empty", "aten::zeros", "aten::randn", "aten::copy_")
    return "forward" if ops and not made_by_hand else "other"


def _module(trace: Trace, chain: Chain) -> str:
    """Modules and the user's ranges, outermost first; else the hierarchy that the op itself names."""
    labels = []
    for row in reversed(chain):
        name = trace.name_of(row)
        if name.startswith(_MODULE):
            labels.append(name.removeprefix(_MODULE))
        elif trace.kind[row] == Kind.RANGE and not name.startswith(_NO_MODULE):
            labels.append(name)
    if labels:
        return " › ".join(labels)
    return next((words for row in chain if (words := trace.detail_of(row).module)), "")


def _stack_of(trace: Trace, row: int) -> list[str]:
    words = trace.detail_of(row).stack
    return [part.strip() for part in reversed(words.split(";"))] if words else []


def _frame(name: str) -> Frame | None:
    match = _PYTHON.fullmatch(name)
    return Frame(match["file"], int(match["line"][:9]), match["name"]) if match else None


def _device_name(trace: Trace, device: int) -> str:
    if device == NONE:
        return "the host's memory"
    found = next((each.name for each in trace.devices if each.index == device), "")
    return f"GPU {device} ({found})" if found else f"GPU {device}"
