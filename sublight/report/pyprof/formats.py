"""A Python profile for other viewers: speedscope, Perfetto and chrome://tracing, and collapsed stacks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from sublight.pyprof.record import PythonProfile
from sublight.pyprof.tree import Function, ThreadTree, trees
from sublight.report.pyprof.names import label
from sublight.results import write_file


def write_speedscope(profile: PythonProfile, path: Path) -> None:
    _write(json.dumps(speedscope(profile)), path)


def write_chrome(profile: PythonProfile, path: Path) -> None:
    _write(json.dumps(chrome(profile)), path)


def write_collapsed(profile: PythonProfile, path: Path) -> None:
    _write(collapsed(profile), path)


def _write(text: str, path: Path) -> None:
    write_file(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text, path)


def speedscope(profile: PythonProfile) -> dict[str, Any]:
    """One profile a thread: stacks by their weight; speedscope itself orders them by time or by weight."""
    numbers: dict[Function, int] = {}
    profiles = []
    for tree in trees(profile):
        samples, weights = [], []
        for leaf, weight in _leaves(tree):
            samples.append([numbers.setdefault(tree.nodes[at].function, len(numbers)) for at in tree.path(leaf)])
            weights.append(weight)
        unit = "none" if profile.mode == "counts" else "seconds"
        profiles.append(
            {"type": "sampled", "name": tree.name, "unit": unit, "startValue": 0, "endValue": sum(weights),
             "samples": samples, "weights": weights}
        )  # fmt: skip
    frames = [_frame(function) for function in numbers]
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": frames},
        "profiles": profiles,
        "name": profile.command,
        "activeProfileIndex": 0,
        "exporter": "sublight pyprof",
    }


def _frame(function: Function) -> dict[str, Any]:
    file, name, line = function
    return {"name": name, "file": file, "line": line} if file else {"name": name}


def _leaves(tree: ThreadTree) -> list[tuple[int, float]]:
    """Own times: in time order where spans are known and complete, else in the tree's order."""
    whole_s = sum(node.own_s for node in tree.nodes)
    ordered = _own_in_time(tree)
    if ordered and abs(sum(own_s for _, own_s in ordered) - whole_s) <= 0.01 * whole_s:
        return ordered
    return [(at, node.own_s) for at, node in enumerate(tree.nodes) if node.own_s > 0]


def _own_in_time(tree: ThreadTree) -> list[tuple[int, float]]:
    """Each span's own time, that is between the spans inside it."""
    moments = sorted({moment for span in tree.spans for moment in (span.start_s, span.start_s + span.duration_s)})
    if len(moments) > 200_000:
        return []
    depth = {at: len(tree.path(at)) for at in {span.node for span in tree.spans}}
    starts = sorted(tree.spans, key=lambda span: (span.start_s, depth[span.node]))
    out: list[tuple[int, float]] = []
    opened: list[tuple[int, float]] = []  # node, end
    at_s = 0.0

    def until(moment_s: float) -> None:
        nonlocal at_s
        while opened and opened[-1][1] <= moment_s + 1e-12:
            node, end_s = opened.pop()
            if end_s > at_s:
                out.append((node, end_s - at_s))
                at_s = end_s
        if opened and moment_s > at_s:
            out.append((opened[-1][0], moment_s - at_s))
        at_s = max(at_s, moment_s)

    for span in starts:
        until(span.start_s)
        opened.append((span.node, span.start_s + span.duration_s))
    until(moments[-1] if moments else 0.0)
    return out


def chrome(profile: PythonProfile) -> dict[str, Any]:
    """Complete events in µs, a track for each thread, a group for each process."""
    events: list[dict[str, Any]] = []
    for number, tree in enumerate(trees(profile), 1):
        events.append({"ph": "M", "name": "thread_name", "pid": tree.pid, "tid": number, "args": {"name": tree.name}})
        for span in sorted(tree.spans, key=lambda one: (one.start_s, -one.duration_s)):
            file, name, line = tree.nodes[span.node].function
            start_us, duration_us = round(span.start_s * 1e6, 3), round(span.duration_s * 1e6, 3)
            event = {"ph": "X", "cat": "python", "name": name, "pid": tree.pid, "tid": number}
            where = {"file": file, "line": line} if file else {"file": "builtin"}
            events.append({**event, "ts": start_us, "dur": duration_us, "args": where})
    for process in profile.processes:
        events.append({"ph": "M", "name": "process_name", "pid": process.pid, "args": {"name": process.command}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"command": profile.command}}


def collapsed(profile: PythonProfile) -> str:
    """`thread;outer;inner weight` a line, in µs (calls, where only they were counted): flamegraph.pl, inferno."""
    scale = 1.0 if profile.mode == "counts" else 1e6
    lines = []
    for tree in trees(profile):
        for at, node in enumerate(tree.nodes):
            weight = round(node.own_s * scale)
            if weight > 0:
                names = [label(tree.nodes[one].function).replace(";", ":") for one in tree.path(at)]
                lines.append(f"{';'.join([tree.name.replace(';', ':'), *names])} {weight}")
    return "\n".join(lines) + "\n" if lines else ""
