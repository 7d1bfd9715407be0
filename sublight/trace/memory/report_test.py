"""Snapshots and traces made by hand, with answers worked out by hand."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublight.errors import BadInput
from sublight.trace.memory import report as memory
from sublight.trace.memory import snapshot
from sublight.trace.memory.report import MemoryReport

MB = 1 << 20
TORCH = "/usr/lib/python3.12/site-packages/torch"


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


MAIN = frame("/me/train.py", 9, "<module>")
CALL = frame(f"{TORCH}/nn/modules/module.py", 1750, "_call_impl")
BUILD = [frame(f"{TORCH}/nn/modules/module.py", 900, "_apply"), frame("/me/train.py", 4, "<module>")]
BLOCK = [
    frame("??", 0, "at::empty"),
    frame(f"{TORCH}/nn/modules/linear.py", 125, "forward"),
    CALL,
    frame("/me/gpt.py", 41, "forward"),
    CALL,
    frame("/me/gpt.py", 88, "forward"),
    CALL,
    MAIN,
]
LOSS = [frame(f"{TORCH}/nn/functional.py", 3100, "cross_entropy"), frame("/me/train.py", 12, "<module>")]
BACKWARD: list[dict[str, Any]] = []  # autograd's thread
ENGINE = [frame("Engine.cpp", 0, "torch::autograd::Engine::thread_main")]
OPTIM = [frame(f"{TORCH}/optim/adamw.py", 90, "_init_group"), frame("/me/train.py", 15, "<module>")]
LEAK = [frame("/me/train.py", 17, "remember")]


class Recorder:
    """An allocator that never reuses an address, and writes what torch would."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self.next, self.now = 1 << 30, 1_000_000

    def alloc(self, size: int, frames: list[dict[str, Any]], *, seconds: float = 0.001) -> int:
        address, self.next = self.next, self.next + size
        self._add("alloc", address, size, frames, seconds)
        self.live[address] = (size, frames)
        return address

    def free(self, *addresses: int) -> None:
        for address in addresses:
            size, _ = self.live.pop(address)
            self._add("free_requested", address, size, [], 0)
            self._add("free_completed", address, size, [], 0.001)

    def _add(self, action: str, address: int, size: int, frames: list[dict[str, Any]], seconds: float) -> None:
        self.events.append({"action": action, "addr": address, "size": size, "time_us": self.now, "frames": frames})
        self.now += round(1e6 * seconds)

    def snapshot(self, *, skip: int = 0, reserved: int | None = None) -> dict[str, Any]:
        """The final state, and the history without its first events, as a ring buffer leaves it."""
        blocks = [
            {"address": at, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
            for at, (size, frames) in self.live.items()
        ]
        total = self.next - (1 << 30) if reserved is None else reserved
        segment = {"address": 1 << 30, "total_size": total, "device": 0, "segment_type": "large", "blocks": blocks}
        return {"segments": [segment], "device_traces": [self.events[skip:]]}

    def report(self, **options: Any) -> MemoryReport:
        return memory.from_snapshot(snapshot.parse(self.snapshot(**options)))


def train(steps: int = 3, *, leak: int = 0, keep_gradients: bool = False) -> Recorder:
    """Parameters 10 MB, activations 4 x 20, logits 60, gradients 10, state 20; a temporary in each pass."""
    run = Recorder()
    run.alloc(10 * MB, BUILD)
    gradients: list[int] = []
    for step in range(steps):
        activations = []
        for _ in range(4):
            activations.append(run.alloc(20 * MB, BLOCK))
            run.free(run.alloc(5 * MB, BLOCK))
        if keep_gradients:
            run.free(*gradients)
            gradients = []
        activations.append(run.alloc(60 * MB, LOSS))
        gradients.append(run.alloc(4 * MB, BACKWARD))
        run.free(run.alloc(7 * MB, BACKWARD))
        gradients.append(run.alloc(6 * MB, BACKWARD))
        run.free(*activations)
        if step == 0:
            run.alloc(20 * MB, OPTIM)
        run.free(run.alloc(3 * MB, OPTIM))
        if leak:
            run.alloc(leak, LEAK)
        if not keep_gradients:
            run.free(*gradients)
            gradients = []
    return run


# the first step's backward: 10 + 80 + 60 + 4 + 7; from the second on the optimizer's 20 too
PEAK = (10 + 80 + 60 + 4 + 7 + 20) * MB


def test_peak_and_what_was_live_then() -> None:
    report = train().report()
    assert report.peak_bytes == PEAK
    assert report.categories == {
        "parameters": 10 * MB,
        "gradients": 4 * MB,
        "optimizer state": 20 * MB,
        "activations": 140 * MB,
        "temporaries": 7 * MB,
    }
    first = report.rows[0]
    assert (first.name, first.source, first.bytes, first.count) == ("forward", "gpt.py:41", 80 * MB, 4)
    assert (report.rows[1].source, report.rows[1].category, report.rows[1].bytes) == (
        "train.py:12",
        "activations",
        60 * MB,
    )
    assert sum(row.bytes for row in report.rows) == sum(row.bytes for row in report.modules) == PEAK
    assert ("gpt.py:88 › gpt.py:41 › linear", 80 * MB) in [(row.name, row.bytes) for row in report.modules]
    assert report.steps == 3
    assert "3 steps: a usual one goes from 31.5 MB to 190 MB" in report.notes


def test_curves_add_up_to_the_timeline() -> None:
    report = train(steps=200).report()
    assert len(report.times_s) <= 2000
    assert max(report.live_bytes) == PEAK, "thinning keeps the peak"
    for curves in (report.by_category, report.by_module):
        assert np.sum(list(curves.values()), axis=0).tolist() == list(report.live_bytes)
    assert list(report.times_s) == sorted(report.times_s)


@pytest.mark.parametrize("skip", [1, 8, 25, 30, 40, 55])
def test_replay_from_the_middle_gives_the_same_curve(skip: int) -> None:
    run = train()
    whole, part = run.report(), run.report(skip=skip)
    kept = len(run.events) - skip
    assert part.live_bytes[-kept:] == whole.live_bytes[-kept:]
    assert part.live_bytes[0] == whole.live_bytes[skip]
    assert part.peak_bytes == max(whole.live_bytes[skip:])


def test_what_was_live_before_is_named_where_the_final_state_knows_it() -> None:
    report = train().report(skip=1)  # the parameters' event is gone, their block is not
    assert report.categories["parameters"] == 10 * MB
    assert not any("the recording began" in note for note in report.notes)
    later = train().report(skip=2)  # an activation's event is gone, and so is its block
    assert later.categories["parameters"] == 10 * MB
    assert any("the recording began" in note for note in later.notes)


def test_no_history_is_the_final_state() -> None:
    run = train()
    data = {**run.snapshot(), "device_traces": []}
    report = memory.from_snapshot(snapshot.parse(data))
    assert (report.peak_bytes, report.duration_s) == (30 * MB, 0.0)
    assert report.categories == {"parameters": 10 * MB, "optimizer state": 20 * MB}
    assert "no history was recorded" in report.notes[0]


def test_engine_frames_are_backward_and_no_stacks_at_all_are_unknown() -> None:
    run = Recorder()
    run.alloc(3 * MB, BLOCK)
    run.alloc(2 * MB, ENGINE)
    assert run.report().categories == {"activations": 3 * MB, "gradients": 2 * MB}
    bare = Recorder()
    bare.alloc(2 * MB, [])
    report = bare.report()
    assert report.categories == {"unknown": 2 * MB}
    assert any("no stacks were recorded" in note for note in report.notes)


def test_what_waits_for_a_stream_is_still_live() -> None:
    run = Recorder()
    held = run.alloc(3 * MB, BLOCK)
    run.free(held)
    completed = run.events.pop()
    run.alloc(2 * MB, BLOCK)
    run.events.append({**completed, "time_us": run.now})
    assert run.report().peak_bytes == 5 * MB
    run.events = [event for event in run.events if event["action"] != "free_completed"]
    assert run.report().peak_bytes == 3 * MB, "where completions were not recorded, requests free"


def test_the_device_with_the_highest_peak_is_shown_unless_told() -> None:
    run = train()
    data = run.snapshot()
    small = Recorder()
    small.alloc(MB, BLOCK)
    other = small.snapshot()
    other["segments"][0]["device"] = 1
    data["segments"] += other["segments"]
    data["device_traces"] += other["device_traces"]
    both = snapshot.parse(data)
    assert memory.from_snapshot(both).device == "GPU 0"
    assert "device 1 peaked at 1.05 MB" in memory.from_snapshot(both).notes
    assert memory.from_snapshot(both, 1).peak_bytes == MB
    with pytest.raises(BadInput, match="device 5"):
        memory.from_snapshot(both, 5)


# ------------------------------------------------------------------------------------------------ advice


def advice(report: MemoryReport) -> dict[str, int]:
    return {each.id: each.saving_bytes for each in report.advice}


def test_savings_are_the_fall_of_the_peak() -> None:
    found = advice(train().report())
    assert found["activations"] == 70 * MB  # half of 140: the rest of the curve stays far below
    assert found["big-logits"] == 60 * MB * 7 // 8
    assert "leak" not in found
    assert "kept-gradients" not in found
    assert "spike" not in found


def test_a_saving_stops_at_the_next_peak() -> None:
    run = Recorder()
    run.free(run.alloc(100 * MB, [frame("/me/a.py", 1, "load")]))
    run.free(run.alloc(110 * MB, BLOCK))
    run.free(run.alloc(1 * MB, ENGINE))
    assert advice(run.report())["activations"] == 10 * MB


def test_optimizer_state() -> None:
    run = Recorder()
    run.alloc(10 * MB, BUILD)
    run.alloc(20 * MB, OPTIM)
    report = run.report()
    assert advice(report) == {"optimizer-state": 10 * MB}
    assert "2.0 times the parameters" in report.advice[0].evidence[0]


def test_gradients_kept_through_the_forward_pass() -> None:
    run = Recorder()
    old: list[int] = []
    for _ in range(3):
        held = [run.alloc(20 * MB, BLOCK) for _ in range(4)]
        run.free(*old)
        old = [run.alloc(15 * MB, ENGINE)]
        run.free(*held)
        run.free(run.alloc(MB, OPTIM))
    report = run.report()
    assert report.peak_bytes == 95 * MB
    # without them in the forward pass, the backward's own 80 + 15 is as high: there is nothing to save
    assert "kept-gradients" not in advice(report)
    run = Recorder()
    old = []
    for _ in range(3):
        held = [run.alloc(20 * MB, BLOCK) for _ in range(4)]
        run.free(*old, *held)
        old = [run.alloc(15 * MB, ENGINE)]
        run.free(run.alloc(MB, OPTIM))
    assert advice(run.report())["kept-gradients"] == 15 * MB


def test_leak_is_growth_by_the_same_every_step() -> None:
    report = train(steps=8, leak=3 * MB).report()
    found = next(each for each in report.advice if each.id == "leak")
    assert found.title.startswith("live memory grows by 3.15 MB a step")
    assert "train.py:17 remember" in found.evidence[0]
    assert found.saving_bytes == 6 * 3 * MB  # the peak is in the eighth step; the first step's counts as state
    assert "leak" not in advice(train(steps=8).report())
    assert "leak" not in advice(train(steps=3, leak=3 * MB).report()), "too few steps to tell"
    uneven = Recorder()
    for size in (9, 9, 9, 1, 9, 9, 9, 9):
        held = uneven.alloc(50 * MB, BLOCK)
        uneven.free(uneven.alloc(MB, ENGINE), held)
        uneven.alloc(size * MB, LEAK)
    assert "leak" not in advice(uneven.report()), "growth that is not regular is no leak"


def test_spike() -> None:
    run = Recorder()
    run.alloc(50 * MB, [frame("/me/a.py", 3, "main")], seconds=10)
    run.free(run.alloc(40 * MB, [frame("/me/a.py", 7, "sort")], seconds=0.01))
    run.alloc(MB, [frame("/me/a.py", 9, "main")], seconds=1)
    report = run.report()
    found = next(each for each in report.advice if each.id == "spike")
    assert "a.py:7 sort" in found.evidence[0]
    assert found.saving_bytes == 39 * MB  # from 90 MB to the 51 MB that come after it


def test_fragmentation_and_cache_at_the_peak() -> None:
    block = {"size": 10 * MB, "requested_size": 10 * MB, "state": "active_allocated", "frames": BUILD}
    base = 1 << 30
    far = base + 1000 * MB
    segments = [
        {
            "address": base,
            "total_size": 200 * MB,
            "device": 0,
            "blocks": [{**block, "address": base}, {**block, "address": base + 100 * MB}],
        },
        {"address": far, "total_size": 150 * MB, "device": 0, "blocks": []},
    ]
    report = memory.from_snapshot(snapshot.parse({"segments": segments, "device_traces": []}))
    assert (report.peak_bytes, report.reserved_peak_bytes) == (20 * MB, 350 * MB)
    assert report.fragmentation_bytes == 330 * MB
    assert (report.stuck_bytes, report.cached_bytes) == (180 * MB, 150 * MB)
    # each hole is 90 MB: four pages of 20 MB, of which the first may begin before it
    assert advice(report) == {"unused-cache": 150 * MB, "fragmentation": 2 * 60 * MB}
    segments[0]["is_expandable"] = True
    moot = memory.from_snapshot(snapshot.parse({"segments": segments, "device_traces": []}))
    assert "fragmentation" not in advice(moot)


def test_reserved_is_replayed_backwards() -> None:
    run = train(1)
    run.events.append({"action": "segment_free", "addr": 99 << 30, "size": 40 * MB, "time_us": run.now, "frames": []})
    report = run.report(reserved=300 * MB)
    assert report.reserved_at_peak_bytes == report.reserved_peak_bytes == 340 * MB


def test_out_of_memory_is_said() -> None:
    run = train(1)
    run.events.append({"action": "oom", "size": 7 << 30, "device_free": 3, "time_us": run.now, "frames": []})
    assert any(note.endswith("an allocation of 7.52 GB failed") for note in run.report().notes)


def test_read_decides_by_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps(train().snapshot()))
    assert memory.read(tmp_path / "a").peak_bytes == PEAK
    event = {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 1, "ts": 10.0, "s": "t"}
    args = {"Bytes": 4096, "Total Allocated": 4096, "Total Reserved": 8192, "Device Type": 1, "Device Id": 0}
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 5.0, "dur": 10.0}
    data = json.dumps({"schemaVersion": 1, "traceEvents": [op, {**event, "args": args}]})
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(data.encode()))
    report = memory.read(tmp_path / "t.json.gz")
    assert (report.peak_bytes, report.rows[0].name) == (4096, "aten::add")
