"""A trace as columns: one row an event, sorted by start, whatever profiler wrote it.

Loaders fill it (`chrome`, `nsight`), queries read it, nobody changes it. Times are nanoseconds from the trace's first
event; -1 in an integer column means that the profiler did not say.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NONE = -1  # in an integer column: not known, or does not apply
XLA_CPU = "the CPU, by XLA"  # a device like any other: its threads run ops while Python goes on


class Kind(enum.IntEnum):
    """What an event is, under one name for every schema."""

    OP = 0  # a PyTorch operator, or an autograd node, on a host thread
    RUNTIME = 1  # a CUDA or HIP API call on a host thread
    KERNEL = 2
    MEMCPY = 3
    MEMSET = 4
    RANGE = 5  # a user's annotation on a host thread: record_function, NVTX
    DEVICE_RANGE = 6  # the profiler's projection of a range onto a stream
    PYTHON = 7  # a Python function or nn.Module call, where stacks were recorded
    OVERHEAD = 8  # the profiler's own work
    SYNC = 9  # the device side of a synchronisation


ON_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)

Shape = tuple[int, ...]


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What an event says beside its time; equal ones are stored once.

    An argument that is a list of tensors has its shapes in a nested tuple, and `types` says TensorList.
    """

    dims: tuple[Any, ...] = ()  # by argument: a Shape, or a tuple of Shapes for a list of tensors
    strides: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()  # by argument: "c10::BFloat16", "float", "Scalar", "TensorList", ""
    concrete: tuple[str, ...] = ()  # by argument: what the scalars were
    grid: Shape = ()
    block: Shape = ()
    registers: int = NONE
    shared_bytes: int = NONE
    stack: str = ""  # innermost last, separated by ";"; where the schema gives it with the op
    module: str = ""  # "Module Hierarchy" of the schema
    collective: Mapping[str, Any] = {}  # NCCL: name, in_elements, out_elements, dtype, group_size
    # of an op whose arguments the profiler left out, from other events of the trace (complete.py)
    out: Shape = ()  # what it returned: its gradient has the same shape
    elements: int = NONE  # that its kernels ran over at least, by their grids


EMPTY = Detail()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where an event ran: a host thread, or a stream of a device."""

    kind: Literal["thread", "stream"]
    process: str  # what the trace calls the process; of a stream, its device
    number: str  # the thread's or the stream's
    device: int = NONE  # of a stream
    label: str = ""  # the thread's name where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as the trace describes it."""

    index: int
    name: str
    sms: int | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLog:
    """The allocator's events, where the profiler recorded them; in order of time."""

    time_ns: Ints
    delta_bytes: Ints  # > 0 allocates
    allocated_bytes: Ints  # the total after it; NONE where not recorded
    reserved_bytes: Ints
    device: Ints  # NONE: the host's memory


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All events of one process, or of one rank."""

    source: str  # the file, or "this run"
    tool: Literal["pytorch", "nsight", "jax"]
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    details: tuple[Detail, ...]  # details[0] is EMPTY
    devices: tuple[Device, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    lost: tuple[str, ...] = ()  # what the file held that could not be used, a sentence each
    base_ns: int = 0  # the clock at time 0
    meta: Mapping[str, Any] = field(default_factory=dict)  # of our own captures: unprofiled step times, and the like
    memory: MemoryLog | None = None
    # one row an event, sorted by (start, -end): an event stands before what it encloses
    kind: npt.NDArray[np.uint8]
    name: npt.NDArray[np.int32]  # into names
    lane: npt.NDArray[np.int32]  # into lanes
    detail: npt.NDArray[np.int32]  # into details
    start_ns: Ints
    end_ns: Ints
    correlation: Ints  # the same on a launching API call and on what it launched
    external: Ints  # the same on an op and on the API calls it made
    sequence: Ints  # the same on a forward op and on its autograd node
    bytes: Ints  # of a copy or a memset
    graph_node: Ints  # of a kernel replayed from a CUDA graph

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def duration_ns(self) -> int:
        return int(self.end_ns.max(initial=0))

    def is_kind(self, *kinds: Kind) -> Mask:
        """A mask of the events of these kinds."""
        return np.isin(self.kind, [int(kind) for kind in kinds])

    def of_kind(self, *kinds: Kind) -> Ints:
        """The rows of these kinds, in order of start."""
        return np.flatnonzero(self.is_kind(*kinds))

    def span_s(self, rows: Ints) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Starts and ends of these rows in seconds."""
        return self.start_ns[rows] / 1e9, self.end_ns[rows] / 1e9

    def name_of(self, row: int) -> str:
        return self.names[int(self.name[row])]

    def detail_of(self, row: int) -> Detail:
        return self.details[int(self.detail[row])]

    def lane_of(self, row: int) -> Lane:
        return self.lanes[int(self.lane[row])]

    def rows_named(self, test: Any, *kinds: Kind) -> Ints:
        """The rows whose name passes `test`, of these kinds where any are given; each distinct name is asked once."""
        if not len(self.names):
            return np.empty(0, dtype=np.int64)
        wanted = np.fromiter((bool(test(name)) for name in self.names), dtype=bool, count=len(self.names))
        named = wanted[self.name]
        return np.flatnonzero(named & self.is_kind(*kinds) if kinds else named)

    @functools.cached_property
    def device_rows(self) -> Ints:
        """Kernels, copies and memsets."""
        return self.of_kind(*ON_DEVICE)

    @functools.cached_property
    def on_gpu(self) -> bool:
        return len(self.device_rows) > 0

    @functools.cached_property
    def parents(self) -> Ints:
        """The row that encloses each event on its own lane, or NONE: the stack that the profiler flattened."""
        return enclosing(self.lane, self.start_ns, self.end_ns)


def enclosing(lane: npt.NDArray[np.int32], start_ns: Ints, end_ns: Ints) -> Ints:
    """The row that encloses each event on its own lane, or NONE, of events sorted by (start, -end).

    It is the nearest row before it that ends no earlier, and after it starts. All events look for theirs at once: the
    row before; where that one ends too early, the row that it has come to itself, since what lies between the two ends
    no later than it. So the steps double, and a thousand neighbours are passed in ten rounds.

    >>> rows = np.array([[0, 100], [0, 40], [10, 20], [20, 40], [50, 60]])
    >>> enclosing(np.zeros(5, np.int32), rows[:, 0], rows[:, 1]).tolist()
    [-1, 0, 1, 1, 0]
    """
    order = np.argsort(lane, kind="stable")
    lanes = lane[order]
    ends = np.concatenate(([np.iinfo(np.int64).max], end_ns[order]))  # place 0 encloses all: there is no parent
    wanted = np.concatenate(([0], np.maximum(end_ns, start_ns + 1)[order]))
    above = np.arange(len(order) + 1) - 1
    above[0] = 0
    above[np.flatnonzero(np.diff(lanes)) + 2] = 0  # a lane's first event
    looking = np.flatnonzero(ends[above] < wanted)
    while len(looking):
        above[looking] = above[above[looking]]
        looking = looking[ends[above[looking]] < wanted[looking]]
    parents = np.full(len(order), NONE, dtype=np.int64)
    inside = np.flatnonzero(above[1:])
    parents[order[inside]] = order[above[1:][inside] - 1]
    return parents
