"""What Perfetto gets: valid JSON in order of time, every event once, tracks that nest, findings on their own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.report.explain import fakes as explain_fakes
from sublight.report.explain import perfetto, trace_fakes
from sublight.trace.record import Kind


def written(tmp_path: Path, name: str = "out.json", **changes: object) -> dict[str, Any]:
    path = tmp_path / name
    perfetto.write(explain_fakes.explanation(**changes), path)
    return json.loads(gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes())


@pytest.mark.parametrize("name", ["out.json", "out.json.gz", "folder/out.json"])
def test_every_event_is_there_once_and_in_order(tmp_path: Path, name: str) -> None:
    events = written(tmp_path, name)["traceEvents"]
    trace = trace_fakes.trace()
    own = [event for event in events if event["ph"] == "X" and event["cat"] != "sublight"]
    assert [event["name"] for event in own] == [trace.name_of(row) for row in range(len(trace))]
    assert [round(1000 * event["ts"]) for event in own] == trace.start_ns.tolist()
    assert [round(1000 * event["dur"]) for event in own] == (trace.end_ns - trace.start_ns).tolist()
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name], "a temporary file was left"


def test_a_links_target_is_written_and_a_device_is_never_replaced(tmp_path: Path) -> None:
    """By root --perfetto /dev/null would otherwise leave a file there."""
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    written(tmp_path, "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "target.json").is_file()
    (tmp_path / "device").symlink_to("/dev/null")
    perfetto.write(explain_fakes.explanation(), tmp_path / "device")
    assert (tmp_path / "device").is_symlink() and Path("/dev/null").is_char_device()


def test_tracks_have_names_and_numbers(tmp_path: Path) -> None:
    events = written(tmp_path)["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "thread 4117 · MainThread · python 4117" in named.values()
    assert "stream 7 · GPU 0 · NVIDIA H200" in named.values()
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(processes.values()) == {"sublight", "python 4117", "GPU 0"}
    for event in events:
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in named
            assert event["pid"] in processes
            assert isinstance(event["pid"], int) and isinstance(event["tid"], int)


def test_findings_have_a_track_and_steps_have_markers(tmp_path: Path) -> None:
    events = written(tmp_path)["traceEvents"]
    ours = [event for event in events if event.get("cat") == "sublight"]
    tids = {event["tid"] for event in ours if event["ph"] == "X"}
    names = {
        event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["tid"] in tids and event["pid"] == 1
    }
    assert names == {"sublight findings"}
    places = [(finding.id, place) for finding in explain_fakes.findings() for place in finding.places]
    found = [event for event in ours if event["ph"] == "X"]
    assert sorted(event["name"] for event in found) == sorted(name for name, _ in places)
    first = next(event for event in found if event["name"] == "data-loading")
    assert first["ts"] == pytest.approx(20_020, abs=0.01)
    assert first["dur"] == pytest.approx(6_180, abs=0.01)
    assert "num_workers=4" in first["args"]["fix"]
    steps = [event["ts"] for event in ours if event["ph"] == "i"]
    assert steps == [0, 20_000, 40_000]
    noted = written(tmp_path, meta={"steps_s": [(0.001, 0.002)]})["traceEvents"]
    assert [event["ts"] for event in noted if event["ph"] == "i"] == [1000]


def test_events_say_what_the_profiler_said(tmp_path: Path) -> None:
    document = written(tmp_path)
    events = document["traceEvents"]
    op = next(event for event in events if event["name"] == "aten::linear")
    assert op["cat"] == "cpu_op"
    assert op["args"]["Input Dims"][0] == [8192, 1024]
    kernel = next(event for event in events if event.get("cat") == "kernel" and event["ph"] == "X")
    assert (kernel["args"]["grid"], kernel["args"]["device"], kernel["args"]["stream"]) == ([132, 1, 1], 0, 7)
    copy = next(event for event in events if event.get("cat") == "gpu_memcpy" and event["ph"] == "X")
    assert copy["args"]["bytes"] == 12_582_912
    assert document["deviceProperties"] == [{"id": 0, "name": "NVIDIA H200", "numSms": 132}]


def test_arrows_go_from_calls_to_kernels(tmp_path: Path) -> None:
    events = written(tmp_path)["traceEvents"]
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert set(begins) == set(ends)
    assert len(begins) == len([event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")])
    assert all(begins[at] <= ends[at] for at in begins)


def test_what_overlaps_without_nesting_gets_a_track_beside(tmp_path: Path) -> None:
    tape = trace_fakes.Tape()
    for start, end in ((0, 100), (50, 150), (60, 70), (200, 300)):
        tape.add(Kind.KERNEL, "k", trace_fakes.COMPUTE, start, end)
    events = written(tmp_path, trace=tape.trace(None))["traceEvents"]
    tids = [event["tid"] for event in events if event.get("cat") == "kernel"]
    assert tids == [400, 401, 400, 400]


def test_overlapping_findings_are_all_seen(tmp_path: Path) -> None:
    first = explain_fakes.findings()[0]
    found = [event for event in written(tmp_path, findings=(first, first))["traceEvents"] if event["name"] == first.id]
    assert len({event["tid"] for event in found}) == 2


def test_an_empty_trace_is_still_valid(tmp_path: Path) -> None:
    events = written(tmp_path, trace=trace_fakes.Tape().trace(None), findings=())["traceEvents"]
    assert [event["ph"] for event in events if event["ph"] != "M"] == ["i"]


def test_no_trace_and_no_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no trace was kept"):
        perfetto.write(explain_fakes.explanation(trace=None), tmp_path / "x.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        perfetto.write(explain_fakes.explanation(), tmp_path / "file" / "x.json")
