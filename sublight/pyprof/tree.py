"""A profile as trees: one a thread, a node for each function as it was reached, and its spans in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sublight.pyprof.record import Calls, PythonProcess, PythonProfile
from sublight.pyprof.tables import Split, counted_s, split, thread_label
from sublight.sampling import Frame, Samples

Function = tuple[str, str, int]  # file, name, first line
ROOT: Function = ("", "", 0)
BREAK = 3.0  # a thread that was not seen for so many times the usual time between looks was not there


@dataclass(slots=True)
class TreeNode:
    """`own_s` counts (see tables); `idle_s` is all the idle time; `lines` are those of the function that ran."""

    function: Function
    parent: int
    own_s: float = 0.0
    idle_s: float = 0.0
    calls: int = 0
    lines: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A node of the tree, from when to when."""

    node: int
    start_s: float  # since the profile began
    duration_s: float


@dataclass(slots=True)
class ThreadTree:
    """Node 0 is the root; a node's parent comes before it."""

    name: str
    pid: int
    nodes: list[TreeNode] = field(default_factory=lambda: [TreeNode(ROOT, -1)])
    spans: list[Span] = field(default_factory=list)
    children: dict[tuple[int, Function], int] = field(default_factory=dict)

    def child(self, parent: int, function: Function) -> int:
        number = self.children.get((parent, function))
        if number is None:
            number = self.children[(parent, function)] = len(self.nodes)
            self.nodes.append(TreeNode(function, parent))
        return number

    def totals_s(self) -> list[float]:
        totals = [node.own_s for node in self.nodes]
        for at in range(len(self.nodes) - 1, 0, -1):
            totals[self.nodes[at].parent] += totals[at]
        return totals

    def path(self, node: int) -> list[int]:
        found = []
        while node > 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]


def trees(profile: PythonProfile) -> list[ThreadTree]:
    """The threads' trees in which something was seen: the main thread's, then the busiest first."""
    began_ns = min(
        (process.samples.rows[0].time_ns - process.samples.rows[0].wall_ns
         for process in profile.processes if process.samples and process.samples.rows),
        default=0,
    )  # fmt: skip
    found: list[ThreadTree] = []
    for process in profile.processes:
        is_first = process is profile.processes[0]
        if process.samples is not None:
            found += _of_samples(profile, process, process.samples, began_ns, is_first)
        elif process.calls is not None:
            found += _of_calls(profile, process, process.calls)
    main, rest = found[:1], found[1:]
    return main + sorted(rest, key=lambda tree: -sum(node.own_s for node in tree.nodes))


def function_of(frame: Frame) -> Function:
    return (frame.file, frame.function, frame.first_line)


def _of_samples(
    profile: PythonProfile, process: PythonProcess, samples: Samples, began_ns: int, is_first: bool
) -> Iterator[ThreadTree]:
    for number, name in enumerate(samples.threads):
        tree = ThreadTree(thread_label(profile, process, name), process.pid)
        leaves: dict[int, int] = {}
        segments = []
        for row in samples.rows:
            if row.thread != number:
                continue
            if row.stack not in leaves:
                at = 0
                for frame_number in samples.stacks[row.stack]:
                    at = tree.child(at, function_of(samples.frames[frame_number]))
                leaves[row.stack] = at
            leaf = leaves[row.stack]
            part: Split = split(row)
            weight_s = counted_s(part, is_main=is_first and number == 0)
            node = tree.nodes[leaf]
            node.own_s += weight_s
            node.idle_s += part.idle_s
            line = samples.frames[samples.stacks[row.stack][-1]].line
            node.lines[line] = node.lines.get(line, 0.0) + weight_s
            segments.append(((row.time_ns - row.wall_ns - began_ns) * 1e-9, (row.time_ns - began_ns) * 1e-9, leaf))
        if segments:
            tree.spans = list(_spans(tree, segments))
            yield tree


def _spans(tree: ThreadTree, segments: list[tuple[float, float, int]]) -> Iterator[Span]:
    """Neighbouring looks share the spans of the frames that they have in common."""
    opened: list[tuple[int, float]] = []
    ends_s = segments[0][0]
    for start_s, end_s, leaf in segments:
        path = tree.path(leaf)
        common = 0
        if start_s - ends_s <= BREAK * max(end_s - start_s, 1e-4):
            while common < min(len(path), len(opened)) and opened[common][0] == path[common]:
                common += 1
        while len(opened) > common:
            node, began_s = opened.pop()
            yield Span(node, began_s, ends_s - began_s)
        first_s = max(start_s, ends_s) if common else start_s
        opened += [(node, first_s) for node in path[common:]]
        ends_s = end_s
    while opened:
        node, began_s = opened.pop()
        yield Span(node, began_s, ends_s - began_s)


def _of_calls(profile: PythonProfile, process: PythonProcess, calls: Calls) -> Iterator[ThreadTree]:
    for number, thread in enumerate(calls.threads):
        tree = ThreadTree(thread_label(profile, process, thread.name), process.pid)
        inner = [0] * len(thread.nodes)
        for node in thread.nodes[1:]:
            inner[node.parent] += node.total_ns
        numbers = [0]
        for at, node in enumerate(thread.nodes[1:], 1):
            made = tree.child(numbers[node.parent], function_of(calls.functions[node.function]))
            numbers.append(made)
            timed_s = max(node.total_ns - inner[at], 0) * 1e-9
            tree.nodes[made].own_s += timed_s if profile.mode == "trace" else 0.0
            tree.nodes[made].calls += node.calls
        for event in calls.events:
            if event.thread == number:
                span = Span(numbers[event.node], event.start_ns * 1e-9, (event.end_ns - event.start_ns) * 1e-9)
                tree.spans.append(span)
        if profile.mode == "counts":  # a flame of counts: a function is as wide as it was often called
            for made_node in tree.nodes:
                made_node.own_s = float(made_node.calls)
        yield tree
