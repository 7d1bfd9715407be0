"""A profile for people and for other viewers: the same time in each, names that do no harm, 80 columns."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sublight.pyprof import compare
from sublight.pyprof.device import ELSEWHERE, DeviceLine, DeviceProfile, device_profile
from sublight.pyprof.fakes import hostile, sampled, traced
from sublight.pyprof.record import PythonProfile
from sublight.report.pyprof import device as device_report
from sublight.report.pyprof import diff, formats, terminal
from sublight.trace.load import load

ROOT = Path(__file__).parents[3]


def printed(shown: Any, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    console.print(shown)
    return console.export_text()


@pytest.mark.parametrize("made", [sampled, traced, hostile])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits(made: Any, width: int) -> None:
    words = printed(terminal.page(made()), width)
    assert max(map(len, words.splitlines())) <= width
    assert "\x1b" not in words


def test_the_table_says_who_takes_the_time() -> None:
    words = printed(terminal.page(sampled()), 120)
    hot = next(line for line in words.splitlines() if " hot " in line)
    assert hot.split()[:5] == ["60", "%", "60.0", "ms", "60.0"] and "train.py:12" in hot
    cold = next(line for line in words.splitlines() if " cold " in line)
    assert cold.count("50 %") == 2, "half of it ran, half waited for the lock"
    assert "10 looks at 100 Hz" in words and "worker" in words
    counts = printed(terminal.page(traced()), 120)
    assert next(line for line in counts.splitlines() if " fib " in line).split()[6:7] == ["3"]


def test_of_calls_more_are_listed_where_more_are_wanted() -> None:
    """`len` takes less than a thousandth here: not worth a row of the usual few, and one of all calls."""
    profile = traced()
    (process,) = profile.processes
    assert process.calls is not None
    (thread,) = process.calls.threads
    nodes = (*thread.nodes[:-1], thread.nodes[-1]._replace(total_ns=1))
    calls = replace(process.calls, threads=(replace(thread, nodes=nodes),))
    made = replace(profile, processes=(replace(process, calls=calls),))
    assert "len" not in printed(terminal.page(made), 120)
    assert "len" in printed(terminal.page(made, most=100), 120)


def test_counts_have_no_times() -> None:
    words = printed(terminal.page(replace(traced(), mode="counts")), 80)
    assert "Functions, by calls" in words and "Threads" not in words and "own time" not in words


def test_an_empty_profile_says_so() -> None:
    empty = PythonProfile(mode="sample", command="python x.py", hz=100)
    assert "nothing was seen" in printed(terminal.page(empty))
    assert formats.collapsed(empty) == "" and formats.speedscope(empty)["profiles"] == []


def test_speedscope_holds_all_of_the_time() -> None:
    data = formats.speedscope(sampled())
    main = data["profiles"][0]
    names = [frame["name"] for frame in data["shared"]["frames"]]
    stacks = [[names[number] for number in stack] for stack in main["samples"]]
    assert stacks[0] == ["<module>", "hot"] and main["weights"][0] == pytest.approx(0.06)
    assert sum(main["weights"]) == pytest.approx(0.1) == main["endValue"]
    traced_weights = formats.speedscope(traced())["profiles"][0]["weights"]
    assert sum(traced_weights) == pytest.approx(0.1)


def test_chrome_events_lie_inside_each_other() -> None:
    events = [event for event in formats.chrome(traced())["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["fib", "fib", "builtins.len"]
    for outer, inner in itertools.pairwise(events):
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert any(event["name"] == "thread_name" for event in formats.chrome(sampled())["traceEvents"])


def test_collapsed_stacks_are_in_microseconds(tmp_path: Path) -> None:
    lines = formats.collapsed(sampled()).splitlines()
    assert "MainThread;<module> (train.py:1);hot (train.py:10) 60000" in lines
    assert all(";" not in name for name in formats.collapsed(hostile()).split(" ")[0].split(";")[2:])
    formats.write_collapsed(sampled(), tmp_path / "a.txt.gz")
    assert gzip.decompress((tmp_path / "a.txt.gz").read_bytes()).decode().splitlines() == lines
    formats.write_speedscope(sampled(), tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["exporter"] == "sublight pyprof"


def test_differences_are_ranked_and_signed() -> None:
    words = printed(diff.page(compare.compare(sampled(), sampled(slower=2.0)), most=20))
    assert "+60.0 ms" in words and "cold" not in words
    assert "−60.0 ms" in printed(diff.page(compare.compare(sampled(slower=2.0), sampled()), most=20))
    assert "no function" in printed(diff.page(compare.compare(sampled(), sampled()), most=20))
    counts = replace(traced(), mode="counts")
    assert "every count is as it was" in printed(diff.page(compare.compare(counts, counts), most=20))


def test_the_device_time_of_all_lines_is_that_of_the_trace() -> None:
    """On a trace from an H200: kernels of the backward pass count for the forward's lines."""
    (trace,) = load(ROOT / "examples/recorded/h200/host_sync.json.gz")
    found = device_profile(trace)
    assert sum(line.device_s for line in found.lines) == pytest.approx(found.device_s)
    assert found.on_gpu and found.lines[0].place.startswith("examples/host_sync.py:")
    assert sum(line.device_s for line in found.lines if line.place == ELSEWHERE) < 0.05 * found.device_s
    assert sum(line.launches for line in found.lines) > 10
    words = printed(device_report.page(found, most=5))
    assert "host_sync.py" in words and max(map(len, words.splitlines())) <= 80


def test_device_time_without_a_line_is_said() -> None:
    lines = (DeviceLine("train.py:3", 0.001), DeviceLine(ELSEWHERE, 0.003))
    found = DeviceProfile(lines=lines, steps=2, step_s=0.01, device_s=0.004, on_gpu=True)
    assert "75 % of the device's time has no line" in printed(device_report.page(found, most=5))


def test_without_a_step_or_a_device_the_page_says_so() -> None:
    whole = DeviceProfile(
        lines=(DeviceLine(ELSEWHERE, host_s=2.0),), steps=1, step_s=2.1, device_s=0.0, on_gpu=False, whole_run=True
    )
    words = printed(device_report.page(whole, most=5))
    assert words.startswith("the whole run takes the host 2.10 s") and "call sublight.step()" in words
    assert "kernel" not in words and "launches" not in words  # columns of a device
