"""From a kernel to the call that launched it, the op that made the call, the module and the line of source.

The correlation id joins a kernel with its launch; the launch lies inside its op on the host's thread. A kernel that a
CUDA graph replays has only the graph's launch: it is matched with the same kernel launched by an op elsewhere in the
trace, or, node by node, with the launches that the graph was captured from.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import msgspec
import numpy as np

from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, Detail, Ints, Kind, Trace

_FRAME = re.compile(r"^(?P<file>[^(]+)\((?P<line>\d+)\): (?P<function>.+)$")
_NOT_USER = ("torch/", "<frozen", "<built-in", "<string>", "runpy.py", "contextlib.py", "threading.py", "sublight/")
ENGINE = "autograd::engine::evaluate_function"
DEEPEST = 1000  # ops inside ops: a damaged trace may nest all of its events
_PYTHON, _OP = int(Kind.PYTHON), int(Kind.OP)  # an enum's member is slow to compare with a number of numpy's
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """For every row of a trace the op, module and line behind it."""

    trace: Trace
    launch: Ints  # of a device row: the API call's row, or NONE
    op: Ints  # of any row: the innermost op that encloses it, or for a device row its launch; or NONE
    replayed: Ints  # of a kernel in a graph: the op row that it stands for, or NONE

    def ops_in_graph(self, row: int) -> list[tuple[str, Detail]]:
        """For a kernel of a graph: the ops around the same kernel in the graph's warm-up, innermost first."""
        known = self.trace.meta.get("graph_kernels")
        ops = known.get(kernel_key(self.trace, row)) if isinstance(known, dict) else None
        try:
            return [(str(name), msgspec.convert(detail, Detail)) for name, detail in ops or ()]
        except (msgspec.ValidationError, TypeError, ValueError):
            return []

    def ops_above(self, row: int) -> list[int]:
        """The ops around a row, innermost first."""
        chain: list[int] = []
        at = int(self.op[row])
        if at == NONE and self.replayed[row] != NONE:
            at = int(self.replayed[row])
        while at != NONE and len(chain) < DEEPEST:
            chain.append(at)
            parent = int(self.trace.parents[at])
            at = int(self.op[parent]) if parent != NONE else NONE
        return chain

    @functools.cached_property
    def forward_of(self) -> dict[int, int]:
        """A sequence number's forward op: the last one on a thread that is not the autograd engine's."""
        found: dict[int, int] = {}
        trace = self.trace
        rows = np.flatnonzero((trace.sequence != NONE) & (trace.kind == Kind.OP))
        for row in rows.tolist():
            name = trace.name_of(row)
            if not name.startswith(ENGINE) and "Backward" not in name:
                found[int(trace.sequence[row])] = row
        return found

    def forward(self, row: int) -> int:
        """The forward op behind a row of the backward pass, or NONE."""
        for op in self.ops_above(row):
            name = self.trace.name_of(op)
            if (name.startswith(ENGINE) or "Backward" in name) and self.trace.sequence[op] != NONE:
                return self.forward_of.get(int(self.trace.sequence[op]), NONE)
        return NONE

    @functools.cached_property
    def has_places(self) -> bool:
        """Whether the trace says anything of source or modules."""
        detailed = any(detail.stack or detail.module for detail in self.trace.details)
        return detailed or bool(self._recorded) or bool((self.trace.kind == _PYTHON).any())

    @functools.cached_property
    def _recorded(self) -> dict[int, tuple[str, str]]:
        """Source and module by top-level op row, from a step that our capture recorded with stacks."""
        sources = self.trace.meta.get("sources")
        if not isinstance(sources, dict) or not {"ops", "index", "source", "module"} <= sources.keys():
            return {}
        queues: dict[str, list[tuple[str, str]]] = defaultdict(list)
        try:
            for index, source, module in zip(sources["index"], sources["source"], sources["module"], strict=True):
                queues[sources["ops"][index]].append((str(source), str(module)))
        except (TypeError, IndexError, KeyError, ValueError):
            return {}
        at: Counter[str] = Counter()
        found = {}
        for row in self.top_ops.tolist():
            name = self.trace.name_of(row)
            if queue := queues.get(name):  # the k-th call of this name in a step has the k-th line
                found[row] = queue[at[name] % len(queue)]
                at[name] += 1
        return found

    @functools.cached_property
    def top_ops(self) -> Ints:
        """The ops that no other op encloses."""
        rows = self.trace.of_kind(Kind.OP)
        parents = self.trace.parents[rows]
        above = np.where(parents == NONE, NONE, self.op[np.maximum(parents, 0)])
        found: Ints = rows[above == NONE]
        return found

    def place(self, row: int) -> tuple[str, str]:
        """The source line and the module of a row; empty where the trace does not tell."""
        own = self.trace.detail_of(row)
        if self.trace.tool == "jax" and (own.stack or own.module):  # XLA writes it with each kernel
            return user_frame(own.stack), own.module
        if not self.has_places:
            return "", ""
        chain = self.ops_above(row)
        start = chain[-1] if chain else row
        source, module = self._recorded.get(start, ("", ""))
        forward = NONE
        if not source and not module and (forward := self.forward(row)) != NONE:
            tops = self.ops_above(forward)
            source, module = self._recorded.get(tops[-1] if tops else forward, ("", ""))
        if not source and not module:
            source, module = self._from_python(forward if forward != NONE else start)
        return source, module

    def _from_python(self, row: int) -> tuple[str, str]:
        """From the Python functions recorded around an op, or the stack that an old schema keeps with it."""
        trace, source = self.trace, ""
        modules: list[str] = []
        at = row
        for _ in range(DEEPEST):
            if at == NONE:
                break
            if trace.kind[at] == _PYTHON:
                name = trace.name_of(at)
                if name.startswith("nn.Module: "):
                    modules.append(name.removeprefix("nn.Module: "))
                elif not source:
                    source = user_frame(name)
            elif detail := trace.detail_of(at):
                source = source or next((f for f in map(user_frame, detail.stack.split(";")) if f), "")
                modules += [detail.module] if detail.module and not modules else []
            at = int(trace.parents[at])
        return source, "/".join(reversed(modules))


def kernel_key(trace: Trace, row: int) -> str:
    """A kernel by its name and its launch: the same work in a graph and outside of it."""
    detail = trace.detail_of(row)
    return f"{trace.name_of(row)} {detail.grid} {detail.block}"


def user_frame(frame: str) -> str:
    """The user's own `train.py:41 (step)`; empty for a frame of torch or Python.

    >>> user_frame("train.py(41): step"), user_frame("torch/nn/functional.py(3): linear")
    ('train.py:41 (step)', '')
    >>> user_frame("/opt/lib/python3.11/site-packages/torch/optim/adam.py(3): step")
    ''
    """
    found = _FRAME.match(frame.strip())
    if not found or "site-packages" in frame or "dist-packages" in frame:
        return ""
    file = found["file"]
    if file.startswith(_NOT_USER) or "/torch/" in file or "/lib/python" in file:
        return ""
    return f"{file}:{found['line']} ({found['function']})"


def attribute(trace: Trace) -> Attribution:
    """Join every event with what is behind it."""
    op = _enclosing_ops(trace)
    launch = np.full(len(trace), NONE, dtype=np.int64)
    device = trace.device_rows
    calls = trace.of_kind(Kind.RUNTIME)
    calls = calls[trace.correlation[calls] != NONE]
    numbers = len(distinct(trace.correlation[calls]))
    if len(device) and 0 < len(calls) <= 2 * numbers:  # with fewer numbers than that they join nothing
        order = calls[np.argsort(trace.correlation[calls], kind="stable")]
        ids = trace.correlation[order]
        at = np.minimum(np.searchsorted(ids, trace.correlation[device]), len(ids) - 1)
        launch[device] = np.where(ids[at] == trace.correlation[device], order[at], NONE)
        launched = device[launch[device] != NONE]
        op[launched] = op[launch[launched]]
    _by_external(trace, op, device)
    replayed = _replayed(trace, op, launch, device)
    return Attribution(trace=trace, launch=launch, op=op, replayed=replayed)


def _enclosing_ops(trace: Trace) -> Ints:
    """The op itself for an op, else the nearest one above on the same lane."""
    is_op = trace.kind == _OP
    op = np.where(is_op, np.arange(len(trace)), trace.parents)
    looking = np.flatnonzero((op != NONE) & ~is_op)
    while len(looking):  # each round goes as far again as all before it
        looking = looking[~is_op[op[looking]]]
        op[looking] = op[op[looking]]
        looking = looking[op[looking] != NONE]
    return op


def _by_external(trace: Trace, op: Ints, device: Ints) -> None:
    """Schemas whose API calls lie on another thread than their op still give both the same external id."""
    orphans = device[(op[device] == NONE) & (trace.external[device] > 0)]
    if len(orphans):
        rows = trace.of_kind(Kind.OP)
        by_id = dict(zip(trace.external[rows].tolist(), rows.tolist(), strict=True))
        op[orphans] = [by_id.get(number, NONE) for number in trace.external[orphans].tolist()]


def _replayed(trace: Trace, op: Ints, launch: Ints, device: Ints) -> Ints:
    replayed = np.full(len(trace), NONE, dtype=np.int64)
    graph = np.zeros(len(trace), dtype=bool)
    graph[trace.rows_named(lambda name: name.startswith(GRAPH_LAUNCHES))] = True
    in_graph = device[(launch[device] != NONE) & graph[np.maximum(launch[device], 0)]]
    if not len(in_graph):
        return replayed
    op[in_graph] = NONE  # the op around the replay is not the op that the kernel belongs to
    captures = _captures(trace)
    known: dict[tuple[int, int], int] = {}
    for row in device.tolist():
        if op[row] != NONE:
            known.setdefault((int(trace.name[row]), int(trace.detail[row])), int(op[row]))
    by_call = in_graph[np.argsort(launch[in_graph], kind="stable")]
    for rows in np.split(by_call, np.flatnonzero(np.diff(launch[by_call])) + 1):  # those of one graph launch
        nodes = rows[np.argsort(trace.graph_node[rows], kind="stable")]
        same = [capture for capture in captures if len(capture) == len(nodes)]
        if len(same) == 1 and (trace.graph_node[nodes] != NONE).all():  # two of one length cannot be told apart
            replayed[nodes] = op[same[0]]
        else:
            replayed[rows] = [known.get((int(trace.name[row]), int(trace.detail[row])), NONE) for row in rows.tolist()]
    return replayed


def _captures(trace: Trace) -> list[list[int]]:
    """The launches of each capture, in order: they made a graph's nodes."""
    begins = trace.rows_named(lambda name: "StreamBeginCapture" in name)
    ends = trace.rows_named(lambda name: "StreamEndCapture" in name)
    rows = trace.rows_named(lambda name: "LaunchKernel" in name or "MemcpyAsync" in name or "MemsetAsync" in name)
    captures = []
    for begin in begins.tolist():
        later = ends[(trace.start_ns[ends] > trace.start_ns[begin]) & (trace.lane[ends] == trace.lane[begin])]
        if len(later):
            inside = (trace.start_ns[rows] > trace.start_ns[begin]) & (trace.end_ns[rows] < trace.end_ns[later[0]])
            captures.append(rows[inside & (trace.lane[rows] == trace.lane[begin])].tolist())
    return captures
