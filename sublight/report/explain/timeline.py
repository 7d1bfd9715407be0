"""What of a trace goes into the page: one step, drawn with few enough blocks that the page stays small.

Events lie in tracks (a lane and a depth of nesting) and never overlap within one. Where a step has more events than
the page may hold, runs of the shortest are merged into blocks that say how many they are; the longest stay themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight import units
from sublight.diagnose.record import Explanation
from sublight.report.explain.causes import cause
from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, ON_DEVICE, Detail, Ints, Kind, Mask, MemoryLog, Trace

MOST_BLOCKS = 20_000
MOST_CHARACTERS = 240  # the longest name: C++ templates run to thousands of characters
MOST_DEPTH = {"thread": 14, "stream": 6}
MOST_FRAMES = 6  # the most levels of Python frames in a thread that is too full to show all
MOST_LANES = {"thread": 8, "stream": 12}
MOST_PLACES = 100  # marked places of one finding
WRAPPER = 0.98  # a Python frame is left out where one inner frame fills this share of it
MERGED_SPAN = 8  # a merged block lasts at most this many times the shortest drawn event
WAIT = len(Kind)  # a kind of its own in the picture: API calls in which the host waits
KIND_NAMES = (
    "operator", "API call", "kernel", "copy", "memset", "range", "range on the device", "Python", "profiler", "sync",
    "API call that waits",
)  # fmt: skip
MEMORY_POINTS = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline as plain data for JSON, and notes on it for the reader."""

    data: dict[str, Any]
    notes: tuple[str, ...]  # a sentence for each kind of thing that was merged or left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Drawn blocks, sorted by lane, depth and start; a block stands for `count` events, `row` being the longest."""

    row: Ints
    lane: Ints
    depth: Ints
    start_ns: Ints
    end_ns: Ints
    count: Ints
    busy_ns: Ints  # less than the block's length where its merged events have gaps between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The events that the picture shows, before any are merged."""

    rows: Ints
    depth: Ints
    notes: tuple[str, ...]  # what was left out


def choose(explanation: Explanation) -> Chosen | None:
    """The step of `window_s`, or the whole trace where there is none; None where nothing is to be drawn."""
    trace = explanation.trace
    if trace is None or not len(trace):
        return None
    begin, end = window_ns(explanation)
    inside = (trace.end_ns >= begin) & (trace.start_ns < end) & ~trace.is_kind(Kind.OVERHEAD)
    rows = np.flatnonzero(inside & ~_wrappers(trace, inside, begin, end))
    rows, left_out = _lanes_with_room(trace, rows, begin, end)
    notes = [f"{left_out} lanes with the least in them are left out."] if left_out else []
    depth = _depths(trace, rows)
    deepest = np.array([MOST_DEPTH[lane.kind] for lane in trace.lanes], dtype=np.int64)
    crowded = np.isin(trace.lane[rows], trace.lane[rows][depth >= deepest[trace.lane[rows]]])
    frames = crowded & (trace.kind[rows] == Kind.PYTHON) & (depth >= MOST_FRAMES)
    if frames.any():  # too full: ops and launches are kept before Python frames
        notes.append(f"{int(frames.sum()):,} Python frames nested deeper than {MOST_FRAMES} levels are left out.")
        rows = rows[~frames]
        depth = _depths(trace, rows)
    shown = depth < deepest[trace.lane[rows]]
    if not shown.any():
        return None
    if hidden := int((~shown).sum()):
        notes.append(f"{hidden:,} events nested deeper than {MOST_DEPTH['thread']} levels are left out.")
    return Chosen(rows=rows[shown], depth=depth[shown], notes=tuple(notes))


def timeline(
    explanation: Explanation,
    chosen: Chosen | None,
    *,
    most_blocks: int = MOST_BLOCKS,
    characters: int = MOST_CHARACTERS,
) -> Timeline | None:
    """The chosen events, in at most so many blocks."""
    trace = explanation.trace
    if trace is None or chosen is None:
        return None
    begin, end = window_ns(explanation)
    blocks, shortest_ns = merged(trace, chosen.rows, chosen.depth, end - begin, most_blocks)
    notes = list(chosen.notes)
    if len(blocks.row) < len(chosen.rows):
        many = blocks.count > 1
        shortest = units.text(shortest_ns / 1e9, "s")
        notes.append(
            f"{int(blocks.count[many].sum()):,} of {len(chosen.rows):,} events are shorter than {shortest} and "
            f"are drawn in {int(many.sum()):,} merged blocks; --perfetto writes every event."
        )
    data = _Encoder(trace=trace, begin_ns=begin, characters=characters).encode(blocks)
    data |= {"window_ns": end - begin, "bands": bands(explanation), "kinds": KIND_NAMES}
    return Timeline(data=data, notes=tuple(notes))


def window_ns(explanation: Explanation) -> tuple[int, int]:
    """Begin and end of the drawn step, in the trace's nanoseconds."""
    begin, end = (round(1e9 * edge) for edge in explanation.window_s)
    if end > begin:
        return begin, end
    return 0, max(1, explanation.trace.duration_ns if explanation.trace is not None else 1)


def bands(explanation: Explanation) -> list[dict[str, Any]]:
    """The places of each finding, counted from the window's start."""
    begin, end = window_ns(explanation)
    places = []
    for number, finding in enumerate(explanation.findings):
        for index, place in enumerate(finding.places[:MOST_PLACES]):
            start_ns, end_ns = round(1e9 * place.start_s), round(1e9 * place.end_s)
            if end_ns >= begin and start_ns <= end:
                words = place.label[:MOST_CHARACTERS]
                band = {"f": number, "p": index, "c": cause(finding.id), "s": start_ns - begin, "e": end_ns - begin}
                places.append({**band, "label": words})
    return places


def _wrappers(trace: Trace, inside: Mask, begin: int, end: int) -> Mask:
    """Python frames that only call another: `main`, `_call_impl` and their like."""
    python = trace.is_kind(Kind.PYTHON)
    out = np.zeros(len(trace), dtype=bool)
    children = np.flatnonzero(python & inside)
    if not len(children):
        return out
    seen_ns = np.clip(trace.end_ns, begin, end) - np.clip(trace.start_ns, begin, end)
    parents = trace.parents[children]
    fills = (parents != NONE) & python[parents] & (seen_ns[children] >= WRAPPER * seen_ns[parents])
    out[parents[fills]] = True
    return out


def _lanes_with_room(trace: Trace, rows: Ints, begin: int, end: int) -> tuple[Ints, int]:
    """The rows of the lanes that are drawn, and how many lanes are not: the busiest have room."""
    seen_ns = np.clip(trace.end_ns[rows], begin, end) - np.clip(trace.start_ns[rows], begin, end)
    busy = np.bincount(trace.lane[rows], weights=seen_ns + 1, minlength=len(trace.lanes))
    kept = np.zeros(len(trace.lanes), dtype=bool)
    for kind, room in MOST_LANES.items():
        of_kind = [index for index, lane in enumerate(trace.lanes) if lane.kind == kind and busy[index] > 0]
        kept[sorted(of_kind, key=lambda index: -busy[index])[:room]] = True
    left_out = int(((busy > 0) & ~kept).sum())
    return rows[kept[trace.lane[rows]]], left_out


def _depths(trace: Trace, rows: Ints) -> Ints:
    """How deep each event lies on its lane, so that no two of one depth overlap: nested, or side by side."""
    depths: list[int] = []
    open_ends: list[list[int]] = [[] for _ in trace.lanes]
    columns = (trace.lane[rows].tolist(), trace.start_ns[rows].tolist(), trace.end_ns[rows].tolist())
    for lane, start, end in zip(*columns, strict=True):
        ends = open_ends[lane]
        while ends and ends[-1] <= start:
            ends.pop()
        depths.append(len(ends))
        ends.append(end)
    return np.array(depths, dtype=np.int64)


def merged(trace: Trace, rows: Ints, depth: Ints, window_ns: int, most: int) -> tuple[Blocks, int]:
    """At most so many blocks, and the duration under which events were merged: the smallest that is enough.

    Runs of short events merge where the gaps between them are short too, so the picture keeps its gaps.
    """
    order = np.lexsort((trace.start_ns[rows], depth, trace.lane[rows]))
    rows, depth = rows[order], depth[order]
    lane, start, end = trace.lane[rows].astype(np.int64), trace.start_ns[rows], trace.end_ns[rows]
    new_track = np.ones(len(rows), dtype=bool)
    new_track[1:] = (lane[1:] != lane[:-1]) | (depth[1:] != depth[:-1])
    gap = np.zeros(len(rows), dtype=np.int64)
    gap[1:] = start[1:] - end[:-1]
    shortest = 0
    while True:
        tiny = end - start < shortest
        joined = tiny.copy()
        piece = start // max(1, MERGED_SPAN * shortest)  # a long run becomes many blocks: zooming in still shows where
        joined[1:] &= tiny[:-1] & (gap[1:] < shortest) & (piece[1:] == piece[:-1])
        first = np.flatnonzero(new_track | ~joined)
        tracks = int(new_track.sum())
        if len(first) <= max(most, tracks) or MERGED_SPAN * shortest > 4 * trace.duration_ns:
            break
        shortest = max(3 * shortest // 2, window_ns // 200_000, 2)
    group = np.cumsum(new_track | ~joined) - 1
    longest = np.lexsort((start - end, group))[first]  # within a group the longest comes first
    last = np.append(first[1:], len(rows)) - 1
    blocks = Blocks(
        row=rows[longest],
        lane=lane[first],
        depth=depth[first],
        start_ns=start[first],
        end_ns=end[last],
        count=np.diff(np.append(first, len(rows))),
        busy_ns=np.add.reduceat(end - start, first),
    )
    return blocks, shortest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoder:
    """Blocks as columns of small integers; each text is stored once."""

    trace: Trace
    begin_ns: int
    characters: int

    def encode(self, blocks: Blocks) -> dict[str, Any]:
        trace, rows = self.trace, blocks.row
        waits = np.array(["Synchronize" in trace.names[at] for at in trace.name[rows].tolist()], dtype=bool)
        kind = np.where((trace.kind[rows] == Kind.RUNTIME) & waits, WAIT, trace.kind[rows])
        launch, op = _launches(trace, rows)
        texts: dict[str, int] = {"": 0}

        def stored(words: str) -> int:
            words = words if len(words) <= self.characters else f"{words[: self.characters - 1]}…"
            return texts.setdefault(words, len(texts))

        name = [stored(trace.names[at]) for at in trace.name[rows].tolist()]
        detail = [stored(self._detail_of(row)) for row in rows.tolist()]
        launcher = [stored(trace.name_of(row)) if row != NONE else 0 for row in op.tolist()]
        since = (blocks.start_ns - self.begin_ns).tolist()
        lasts = (blocks.end_ns - blocks.start_ns).tolist()
        launched = np.where(launch == NONE, NONE, trace.start_ns[launch] - self.begin_ns).tolist()
        track = np.flatnonzero((np.diff(blocks.lane, prepend=-1) != 0) | (np.diff(blocks.depth, prepend=-1) != 0))
        tracks = []
        for first, past in zip(track.tolist(), [*track[1:].tolist(), len(rows)], strict=True):
            part = slice(first, past)
            many = np.flatnonzero(blocks.count[part] > 1)
            columns: dict[str, Any] = {
                "lane": int(blocks.lane[first]), "depth": int(blocks.depth[first]),
                "s": since[part], "d": lasts[part], "n": name[part], "k": kind[part].tolist(), "x": detail[part],
                "m": {at: [int(blocks.count[first + at]), int(blocks.busy_ns[first + at])] for at in many.tolist()},
            }  # fmt: skip
            if any(op_text or at != NONE for op_text, at in zip(launcher[part], launched[part], strict=True)):
                columns |= {
                    "l": [at if row != NONE else None for at, row in zip(launched[part], launch[part], strict=True)]
                }
                columns |= {"o": launcher[part]}
            tracks.append(columns)
        return {"tracks": tracks, "texts": list(texts), "lanes": self._lanes(tracks)}

    def _lanes(self, tracks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Threads in the order in which they begin, then streams by device; each with the name in its header."""
        lanes = self.trace.lanes
        begins: dict[int, int] = {}
        for track in tracks:
            begins[track["lane"]] = min(track["s"][0], begins.get(track["lane"], track["s"][0]))
        threads = sorted((at for at in begins if lanes[at].kind == "thread"), key=lambda at: (begins[at], at))
        streams = sorted((at for at in begins if lanes[at].kind == "stream"), key=lambda at: (lanes[at].device, at))
        used = threads + streams
        return [{"id": at, "kind": lanes[at].kind, "name": lane_text(self.trace, at)[: self.characters]} for at in used]

    def _detail_of(self, row: int) -> str:
        trace = self.trace
        size, lasts_ns = int(trace.bytes[row]), int(trace.end_ns[row] - trace.start_ns[row])
        if size > 0:
            rate = f", {units.text(1e9 * size / lasts_ns, 'B/s')}" if lasts_ns > 0 else ""
            return f"{units.text(size, 'B')}{rate}"
        return detail_text(trace.detail_of(row))


def lane_text(trace: Trace, at: int) -> str:
    """What people call the lane."""
    lane = trace.lanes[at]
    if lane.kind == "stream":
        device = next((device.name for device in trace.devices if device.index == lane.device), "")
        where = f"GPU {lane.device}" if lane.device != NONE else lane.process
        return " · ".join(filter(None, (f"stream {lane.number}", where, device)))
    process = "" if lane.process == lane.number else lane.process
    number = "" if lane.number and lane.number in lane.label else f"thread {lane.number}"  # some labels hold it
    return " · ".join(filter(None, (number, lane.label, process)))


def detail_text(detail: Detail) -> str:
    """Shapes of an op, or the launch of a kernel.

    >>> detail_text(Detail(dims=((8, 16), (), ((4,), (5, 6))), types=("c10::BFloat16", "Scalar", "TensorList")))
    '8×16 BFloat16, [4, 5×6]'
    >>> detail_text(Detail(grid=(132, 1, 1), block=(256, 1, 1), registers=64, shared_bytes=49152))
    'grid 132×1×1, block 256×1×1, 64 registers, 49.2 kB shared'
    """
    notes = []
    for index, dims in enumerate(detail.dims):
        if not dims:
            continue
        dtype = detail.types[index].removeprefix("c10::") if index < len(detail.types) else ""
        nested = isinstance(dims[0], tuple | list)
        shape = (
            f"[{', '.join(_times(each) for each in dims[:8])}{', …' if len(dims) > 8 else ''}]"
            if nested
            else _times(dims)
        )
        notes.append(shape if nested else f"{shape} {dtype}".strip())
    notes += [f"{word} {_times(size)}" for word, size in (("grid", detail.grid), ("block", detail.block)) if size]
    notes += [f"{detail.registers} registers"] if detail.registers > 0 else []
    notes += [f"{units.text(detail.shared_bytes, 'B')} shared"] if detail.shared_bytes > 0 else []
    return ", ".join(notes)


def _times(dims: tuple[Any, ...]) -> str:
    return "×".join(map(str, dims))


def _launches(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """For what ran on the device: the row of the API call that launched it, and of the op around that call."""
    launch, op = np.full(len(rows), NONE, dtype=np.int64), np.full(len(rows), NONE, dtype=np.int64)
    calls = trace.of_kind(Kind.RUNTIME)
    calls = calls[trace.correlation[calls] != NONE]
    if not len(calls):
        return launch, op
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    known = trace.correlation[calls]
    wanted = trace.correlation[rows]
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    has_launch = np.isin(trace.kind[rows], [int(kind) for kind in ON_DEVICE]) & (wanted != NONE) & (known[at] == wanted)
    launch[has_launch] = calls[at[has_launch]]
    around = launch.copy()
    for _ in range(8):  # API calls seldom nest deeper
        around = np.where(around != NONE, trace.parents[around], NONE)
        here = (around != NONE) & (trace.kind[around] == Kind.OP) & (op == NONE)
        op[here] = around[here]
    return launch, op


def memory(explanation: Explanation) -> dict[str, Any] | None:
    """The allocator's total over the whole trace, for the device that held most; None where none was recorded."""
    trace = explanation.trace
    log = trace.memory if trace is not None else None
    if trace is None or log is None or not len(log.time_ns):
        return None
    devices = distinct(log.device)
    on_gpu = devices[devices != NONE]
    candidates = on_gpu if len(on_gpu) else devices
    device = max(candidates.tolist(), key=lambda index: int(_total(log, log.device == index).max()))
    chosen = log.device == device
    time, total = log.time_ns[chosen], _total(log, chosen)
    reserved = log.reserved_bytes[chosen]
    span = max(1, trace.duration_ns, int(time[-1]))
    peak = int(np.argmax(total))
    begin, end = window_ns(explanation)
    points = _thinned(time, total, span)
    where = f"GPU {device}" if device != NONE else "host"
    return {
        "where": where, "span_ns": span, "peak_bytes": int(total[peak]), "peak_ns": int(time[peak]),
        "reserved_bytes": int(reserved.max()) if (reserved != NONE).any() else None,
        "t": points[0].tolist(), "b": points[1].tolist(), "window": [begin, end],
        "from_deltas": bool((log.allocated_bytes[chosen] == NONE).any()),
    }  # fmt: skip


def _total(log: MemoryLog, chosen: Mask) -> Ints:
    """Allocated after each event; summed from the first one seen where the profiler gave no totals."""
    recorded = log.allocated_bytes[chosen]
    if (recorded != NONE).all():
        return recorded
    total = np.cumsum(log.delta_bytes[chosen])
    return np.asarray(total - min(0, int(total.min(initial=0))), dtype=np.int64)


def _thinned(time: Ints, total: Ints, span: int) -> tuple[Ints, Ints]:
    """In each stretch of time the largest and the last value: peaks survive."""
    if len(time) <= 2 * MEMORY_POINTS:
        return time, total
    stretch = time * MEMORY_POINTS // (span + 1)
    largest = np.lexsort((-total, stretch))[np.flatnonzero(np.diff(stretch, prepend=-1))]
    last = np.flatnonzero(np.diff(stretch, append=stretch[-1] + 1))
    kept = distinct(np.concatenate((largest, last)))
    return time[kept], total[kept]
