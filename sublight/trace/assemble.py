"""Columns in any order become a Trace: impossible times dropped, sorted, counted from the first event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sublight.trace.record import EMPTY, NONE, Detail, Device, Ints, Lane, MemoryLog, Trace

FAR_NS = 2**62  # no clock is there before the year 2116, and the difference of two such times fits in an int64


def assemble(
    *,
    source: str,
    tool: Literal["pytorch", "nsight", "jax"],
    kind: npt.ArrayLike,
    name_ids: npt.ArrayLike,
    names: Sequence[str],
    lane_ids: npt.ArrayLike,
    lanes: Sequence[Lane],
    start_ns: Ints,  # on the profiler's clock
    end_ns: Ints,
    detail_ids: npt.ArrayLike | None = None,
    details: Sequence[Detail] = (EMPTY,),
    correlation: Ints | None = None,
    external: Ints | None = None,
    sequence: Ints | None = None,
    bytes: Ints | None = None,
    graph_node: Ints | None = None,
    devices: Sequence[Device] = (),
    rank: int | None = None,
    world_size: int | None = None,
    lost: Sequence[str] = (),
    meta: Mapping[str, Any] | None = None,
    memory: MemoryLog | None = None,  # its times on the same clock
) -> Trace:
    """A Trace of these events; a column that is not given is NONE throughout. Unused names and lanes are left out."""
    if not details or details[0] != EMPTY:
        raise ValueError("details[0] must be EMPTY")
    start, end = np.asarray(start_ns, dtype=np.int64), np.asarray(end_ns, dtype=np.int64)
    sane = (start <= end) & (start > -FAR_NS) & (end < FAR_NS)
    if dropped := len(start) - int(np.count_nonzero(sane)):
        lost = (*lost, f"{dropped} event{'s' * (dropped > 1)} had an impossible time (an end before the start).")
    order = _order(start, end)
    order = order[sane[order]] if dropped else order
    base_ns = int(start[order[0]]) if len(order) else 0

    def column(values: npt.ArrayLike | None, dtype: Any = np.int64) -> Any:
        if values is None:
            return np.full(len(order), NONE, dtype=dtype)
        return np.asarray(values, dtype=dtype)[order]  # a column of another length raises here, or below

    columns = (kind, name_ids, lane_ids, detail_ids, end, correlation, external, sequence, bytes, graph_node)
    if any(values is not None and np.size(values) != len(start) for values in columns):
        raise ValueError("the columns differ in length")
    used_names, used = _used(column(name_ids, np.int32), len(names)), _used(column(lane_ids, np.int32), len(lanes))
    if memory is not None:
        memory = dataclasses.replace(memory, time_ns=memory.time_ns - base_ns)
    return Trace(
        source=source, tool=tool, devices=tuple(devices), rank=rank, world_size=world_size, lost=tuple(lost),
        base_ns=base_ns, meta=dict(meta or {}), memory=memory, details=tuple(details),
        names=tuple(names[i] for i in used_names[1]), name=used_names[0],
        lanes=tuple(lanes[i] for i in used[1]), lane=used[0],
        kind=column(kind, np.uint8), start_ns=start[order] - base_ns, end_ns=end[order] - base_ns,
        detail=column(detail_ids, np.int32) if detail_ids is not None else np.zeros(len(order), dtype=np.int32),
        correlation=column(correlation), external=column(external), sequence=column(sequence), bytes=column(bytes),
        graph_node=column(graph_node),
    )  # fmt: skip


def _order(start: Ints, end: Ints) -> Ints:
    """The order of events: by start, of equal starts the longest first; stable, so equals keep the file's order."""
    order = np.argsort(start, kind="stable")
    same = np.diff(start[order]) == 0
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))  # few: cheaper than to sort all by two keys
    rows = order[tied]
    order[tied] = rows[np.lexsort((-end[rows], start[rows]))]
    return order


def _used(ids: npt.NDArray[np.int32], size: int) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Ids counted anew over those that occur, and what each stood for."""
    occurs = np.bincount(ids, minlength=size) > 0
    return (np.cumsum(occurs, dtype=np.int32) - 1)[ids].astype(np.int32), np.flatnonzero(occurs).tolist()
