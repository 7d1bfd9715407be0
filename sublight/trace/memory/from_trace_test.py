"""Traces of the profiler made by hand: what was allocated, by which op and module, and in which part of the step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sublight.errors import BadInput
from sublight.trace.memory import report as memory
from sublight.trace.record import EMPTY, NONE, Kind, Lane, MemoryLog, Trace

MB = 1 << 20


def trace(rows: list[tuple[Kind, str, int, int, int]], log: list[tuple[int, int, int]], base: int = 0) -> Trace:
    """Rows: kind, name, lane, start, end. Log: time, delta, device."""
    rows = sorted(rows, key=lambda row: (row[3], -row[4]))
    names = list(dict.fromkeys(row[1] for row in rows))
    count = len(rows)
    delta = np.array([entry[1] for entry in log], dtype=np.int64)
    none = np.full(count, NONE, dtype=np.int64)
    return Trace(
        source="t.json",
        tool="pytorch",
        names=tuple(names),
        lanes=tuple(Lane(kind="thread", process="1", number=str(number)) for number in range(2)),
        details=(EMPTY,),
        memory=MemoryLog(
            time_ns=np.array([entry[0] for entry in log], dtype=np.int64),
            delta_bytes=delta,
            allocated_bytes=base + np.cumsum(delta),
            reserved_bytes=np.full(len(log), 64 * MB, dtype=np.int64),
            device=np.array([entry[2] for entry in log], dtype=np.int64),
        ),
        kind=np.array([row[0] for row in rows], dtype=np.uint8),
        name=np.array([names.index(row[1]) for row in rows], dtype=np.int32),
        lane=np.array([row[2] for row in rows], dtype=np.int32),
        detail=np.zeros(count, dtype=np.int32),
        start_ns=np.array([row[3] for row in rows], dtype=np.int64),
        end_ns=np.array([row[4] for row in rows], dtype=np.int64),
        correlation=none,
        external=none,
        sequence=none,
        bytes=none,
        graph_node=none,
    )


STEP = [
    (Kind.RANGE, "ProfilerStep#1", 0, 0, 2000),
    (Kind.PYTHON, "train.py(12): main", 0, 5, 1990),
    (Kind.PYTHON, "nn.Module: Net_0", 0, 10, 500),
    (Kind.PYTHON, "nn.Module: Linear_0", 0, 20, 300),
    (Kind.OP, "aten::linear", 0, 30, 290),
    (Kind.OP, "aten::empty", 0, 40, 60),
    (Kind.OP, "aten::log_softmax", 0, 600, 700),
    (Kind.OP, "autograd::engine::evaluate_function: AddmmBackward0", 1, 800, 1000),
    (Kind.OP, "AddmmBackward0", 1, 810, 990),
    (Kind.OP, "aten::mm", 1, 820, 980),
    (Kind.RANGE, "Optimizer.step#AdamW.step", 0, 1200, 1500),
    (Kind.OP, "aten::zeros_like", 0, 1210, 1300),
]
LOG = [
    (50, 8 * MB, 0),
    (200, 2 * MB, 0),
    (250, -2 * MB, 0),
    (650, 6 * MB, 0),
    (850, 3 * MB, 0),
    (1100, -8 * MB, 0),
    (1110, -6 * MB, 0),
    (1250, 4 * MB, 0),
    (100, 99 * MB, NONE),
]


def test_trace_by_op_and_module() -> None:
    log = sorted(LOG)
    report = memory.from_trace(trace(STEP, log, base=0))
    assert report.device == "GPU 0"
    assert report.live_bytes[-1] == 7 * MB
    assert report.peak_bytes == 17 * MB
    assert report.peak_time_s == pytest.approx(800e-9)
    rows = {row.name: (row.source, row.category, row.bytes) for row in report.rows}
    assert rows == {
        "aten::linear": ("train.py:12", "activations", 8 * MB),
        "aten::log_softmax": ("train.py:12", "activations", 6 * MB),
        "AddmmBackward0": ("", "gradients", 3 * MB),
    }
    assert ("Net_0 › Linear_0", 8 * MB) in [(row.name, row.bytes) for row in report.modules]
    assert report.reserved_peak_bytes == 64 * MB
    assert set(report.by_category) == {"activations", "temporaries", "gradients", "optimizer state"}
    assert "big-logits" in {item.id for item in report.advice}


def test_addresses_tell_equal_sizes_apart() -> None:
    log = [(50, 8 * MB, 0), (650, 8 * MB, 0), (750, -8 * MB, 0), (850, 3 * MB, 0), (900, 9 * MB, 0)]
    guessed = trace(STEP, log)
    known = dataclasses.replace(guessed, meta={"memory_addresses": np.array([7, 8, 7, 9, 10])})
    names = [{row.name for row in memory.from_trace(each).rows} for each in (guessed, known)]
    assert names == [{"aten::linear", "AddmmBackward0"}, {"aten::log_softmax", "AddmmBackward0"}]
    assert any("no addresses" in note for note in memory.from_trace(guessed).notes)
    assert not any("no addresses" in note for note in memory.from_trace(known).notes)


def test_what_autograds_thread_adds_up_is_backward() -> None:
    rows = [*STEP, (Kind.OP, "aten::add", 1, 1010, 1050)]
    report = memory.from_trace(trace(rows, [(50, 8 * MB, 0), (850, 3 * MB, 0), (1020, 9 * MB, 0)]))
    assert report.categories == {"activations": 8 * MB, "gradients": 12 * MB}
    assert report.steps == 1


def test_backward_on_the_thread_that_began_leaves_the_forward_pass_alone() -> None:
    rows = [(kind, name, 0, start, end) for kind, name, _, start, end in STEP]
    report = memory.from_trace(trace(rows, [(50, 8 * MB, 0), (850, 3 * MB, 0)]))
    assert report.categories == {"activations": 8 * MB, "gradients": 3 * MB}


def test_trace_that_begins_with_memory_in_use() -> None:
    report = memory.from_trace(trace(STEP, [(50, 8 * MB, 0), (60, -5 * MB, 0), (70, -8 * MB, 0)], base=30 * MB))
    assert report.live_bytes == (30 * MB, 38 * MB, 33 * MB, 25 * MB)
    assert report.categories["unknown"] == 30 * MB
    assert any("began with memory in use" in note for note in report.notes)


def test_trace_of_the_host_and_without_memory() -> None:
    report = memory.from_trace(trace(STEP, [(50, 8 * MB, NONE)]))
    assert report.device == "the host's memory"
    bare = trace(STEP, [])
    with pytest.raises(BadInput, match="profile_memory=True"):
        memory.from_trace(bare)
    with pytest.raises(BadInput, match="nothing was allocated"):
        memory.from_trace(trace(STEP, [(50, 2**60, 0)]))
