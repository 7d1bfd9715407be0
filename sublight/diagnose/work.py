"""The device's work as items: one call of one op, the kernels that it ran, and the least that it could have cost.

On a GPU an item is the innermost op of known cost around a launch, with everything it launched. On a CPU an item is the
outermost op of known cost: its own time is the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sublight.cost import Cost
from sublight.trace.attribute import Attribution
from sublight.trace.costs import OpCost
from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, Ints, Mask, Trace
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
    took_s: float = 0.0  # in the trace, its kernels one after the other
    known: OpCost | None = None
    family: str = "other"
    floor_s: float | None = None  # None: not known
    bound: str = ""
    cached: bool = False  # it was faster than memory allows: it read from a cache, and what it took is its floor
    too_good: bool = False  # it was faster than its floor, and no cache explains that

    @property
    def dtype(self) -> str:
        return self.known.dtype if self.known else ""

    @property
    def cost(self) -> Cost | None:
        return self.known.cost if self.known else None


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
    for device in distinct(devices).tolist():
        mine = devices == device
        if launched.all() or 2 * np.count_nonzero(launched & mine) <= np.count_nonzero(mine):
            continue
        on_device, known = rows[mine], launched[mine]
        first_of_all = int(trace.start_ns[on_device[known]].min())
        for lane in distinct(trace.lane[on_device[~known]]).tolist():
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
