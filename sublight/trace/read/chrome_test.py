"""Chrome traces: every kind of event and schema, in pieces of any size, whole or damaged."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublight.errors import BadInput
from sublight.trace.read import chrome, chrome_columns, chrome_fakes, pieces
from sublight.trace.read.chrome_fakes import PID, Json, op, span
from sublight.trace.record import EMPTY, NONE, Device, Kind, Trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def loaded(file: Path, found: Any) -> Trace:
    file.write_bytes(found if isinstance(found, bytes) else json.dumps(found).encode())
    return chrome.load(file)


def rows(trace: Trace) -> list[tuple[str, str, int, int]]:
    columns = zip(trace.kind, trace.name, trace.start_ns, trace.end_ns, strict=True)
    return [(Kind(kind).name, trace.names[name], int(start), int(end)) for kind, name, start, end in columns]


def contents(trace: Trace) -> list[tuple[Any, ...]]:
    ids = zip(trace.correlation, trace.external, trace.sequence, trace.bytes, trace.graph_node, strict=True)
    places = [(trace.lane_of(row), trace.detail_of(row)) for row in range(len(trace))]
    return list(zip(rows(trace), places, map(tuple, ids), strict=True))


def at(trace: Trace, name: str) -> int:
    return int(trace.rows_named(lambda each: each == name)[0])


def test_every_kind_of_event_is_loaded(file: Path) -> None:
    trace = loaded(file, chrome_fakes.text())
    assert Counter(Kind(kind).name for kind in trace.kind.tolist()) == {
        "OP": 36, "RUNTIME": 21, "KERNEL": 15, "RANGE": 12, "PYTHON": 6, "MEMCPY": 3, "MEMSET": 3, "DEVICE_RANGE": 3,
        "OVERHEAD": 3, "SYNC": 3,
    }  # fmt: skip
    assert trace.lost == ()
    assert trace.devices == (
        Device(index=0, name="NVIDIA H200", sms=132, memory_bytes=150_000_000_000, compute_capability=(9, 0)),
    )
    assert (trace.rank, trace.world_size) == (0, 2)
    assert trace.base_ns == 1_700_000_005_000_000_125
    assert {key: trace.meta[key] for key in chrome_fakes.META} == chrome_fakes.META


def test_what_an_event_says_is_kept(file: Path) -> None:
    trace = loaded(file, chrome_fakes.text())
    linear, kernel = at(trace, "aten::linear"), at(trace, "sm80_xmma_gemm_f32_kernel")
    assert (int(trace.start_ns[linear]), int(trace.end_ns[linear])) == (110_000, 170_000)
    assert (trace.sequence[linear], trace.external[linear]) == (9, 2)
    detail = trace.detail_of(linear)
    assert (detail.dims, detail.types) == (((64, 128), (256, 128), ()), ("float", "float", "Scalar"))
    assert (detail.strides, detail.concrete) == (((1, 1), (1, 1), ()), ("", "", "1"))
    assert trace.detail_of(at(trace, "aten::linear")) is trace.details[trace.detail[linear]]
    grid = trace.detail_of(kernel)
    assert (grid.grid, grid.block, grid.registers, grid.shared_bytes) == ((4, 1, 1), (128, 1, 1), 40, 1024)
    assert trace.lane_of(kernel).device == 0 and trace.lane_of(kernel).number == "7"
    assert trace.lane_of(at(trace, "aten::mm")).label == "pt_autograd_0"
    assert trace.lane_of(linear).process == f"python {PID}"
    assert trace.bytes[at(trace, "Memcpy HtoD (Pageable -> Device)")] == 4096
    assert trace.graph_node[at(trace, "void graphed()")] == 2
    assert trace.detail_of(at(trace, "ncclDevKernel_AllReduce_Sum_f32")).collective == {
        "name": "allreduce", "in_elements": 64, "out_elements": 64, "dtype": "Float", "group_size": 2,
    }  # fmt: skip
    assert trace.detail_of(at(trace, "cudaLaunchKernel")) is EMPTY
    begun = at(trace, "by hand")
    assert trace.end_ns[begun] - trace.start_ns[begun] == 10_000


def test_allocator_events_are_in_order_of_time_with_their_addresses(file: Path) -> None:
    def moved(ts: float, size: int, address: Any) -> Json:
        args = {"Bytes": size, "Addr": address, "Device Type": 1, "Device Id": 0, "Total Allocated": 1}
        return {"ph": "i", "name": "[memory]", "ts": ts, "args": args}

    address = 2**62 + 1  # more digits than a float holds
    events = [op("aten::empty", 1, 50), moved(9, -5, 7), moved(3, 5, address), moved(9, 8, 7), moved(9, 1, 2**62)]
    trace = loaded(file, {"traceEvents": events})
    assert trace.memory is not None
    assert trace.memory.time_ns.tolist() == [2000, 8000, 8000, 8000]
    assert trace.memory.delta_bytes.tolist() == [5, -5, 8, 1]  # at one time, the order of the file
    assert trace.meta["memory_addresses"].tolist() == [address, 7, 7, 2**62]
    assert trace.meta["memory_addresses"].dtype == np.int64
    for odd in (0, -3, None, "x", 2**64):
        trace = loaded(file, {"traceEvents": [*events, moved(10, 1, odd)]})
        assert trace.memory is not None and len(trace.memory.time_ns) == 5
        assert "memory_addresses" not in trace.meta


def test_old_schemas_load_the_same(file: Path) -> None:
    stack = "train.py(3): f;train.py(9): <module>"
    events = [
        span("Operator", "ProfilerStep#3", 10, 100, tid="88", **{"Input dims": [], "external id": 1}),
        span("Operator", "aten::mm", 20, 10, tid=88, **{"Input dims": [[2, 3]], "external id": 4, "Call stack": stack}),
        span("Runtime", "cudaLaunchKernel", 22, 5, tid="88", correlation=5, **{"external id": 4}),
        span("Kernel", "gemm", 30, 5, pid=0, tid="stream 7", device=0, stream=7, correlation=5),
        span("Memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 5, pid=0, tid="stream 7"),
    ]
    trace = loaded(file, {"traceEvents": events})
    assert [row[0] for row in rows(trace)] == ["RANGE", "OP", "RUNTIME", "KERNEL", "MEMCPY"]
    assert len({trace.lane_of(row) for row in (0, 1, 2)}) == 1
    assert trace.lane_of(3) == trace.lane_of(4)
    assert trace.external.tolist()[:3] == [1, 4, 4]
    assert (trace.detail_of(1).dims, trace.detail_of(1).stack) == (((2, 3),), stack)


def test_a_trace_of_an_xpu_loads(file: Path) -> None:
    """As Kineto's plugin for Intel's GPUs writes it (by hand, from its source): no device is described, a kernel has a
    SYCL queue where others have a stream, and neither grid nor block; the calls below the runtime are a kind apart."""
    queues = {"device": 0, "sycl_queue": 3, "l0_queue": "0x0000000000000abc"}
    events = [
        span("user_annotation", "ProfilerStep#1", 0, 100),
        span("cpu_op", "aten::mm", 5, 40, External_id=9, Input_Dims=[[2, 3], [3, 4]]),
        span("xpu_runtime", "urEnqueueKernelLaunch", 10, 8, correlation=77, External_id=9),
        span("xpu_driver", "zeCommandListAppendLaunchKernel", 12, 3, correlation=78),
        span("kernel", "gemm_kernel", 30, 20, pid=0, tid=3, correlation=77, kernel_id=5, **queues),
        span("gpu_memcpy", "Memcpy M2D (Memory -> Device)", 60, 5, pid=0, tid=4, correlation=79, bytes=4096,
             **(queues | {"sycl_queue": 4})),
    ]  # fmt: skip
    trace = loaded(file, {"schemaVersion": 1, "deviceProperties": [], "traceEvents": events})
    assert [row[0] for row in rows(trace)] == ["RANGE", "OP", "RUNTIME", "RUNTIME", "KERNEL", "MEMCPY"]
    assert trace.correlation.tolist()[2] == trace.correlation.tolist()[4] == 77  # who launched it
    assert trace.lane_of(4).device == 0 and trace.lane_of(4) != trace.lane_of(5)  # two queues run side by side


def test_times_keep_their_nanoseconds(file: Path) -> None:
    """Microseconds since 1970 with three digits behind the point are more than a float holds."""
    times = ("00000012.001", "00000012.002", "00000012.130", "99999999.999")
    event = '{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 17123456TIME, "dur": 0.001}'
    text = '{"traceEvents": [' + ", ".join(event.replace("TIME", time) for time in times) + "]}"
    trace = loaded(file, text.encode())
    assert trace.start_ns.tolist() == [0, 1, 129, 99_999_987_998]
    assert trace.base_ns == 1_712_345_600_000_012_001
    crossing = text.replace("1712345699999999", "1712350000000000")  # it begins with other digits than the first
    assert loaded(file, crossing.encode()).start_ns.tolist()[:3] == [0, 1, 129]
    assert abs(loaded(file, crossing.encode()).start_ns[3] - 4_399_999_988_998) < 300


def test_of_equal_times_the_likely_outer_event_comes_first(file: Path) -> None:
    both = [span("cuda_runtime", "call", 1, 5), op("op", 1, 5), span("python_function", "f.py(1): f", 1, 5)]
    assert [row[1] for row in rows(loaded(file, {"traceEvents": both}))] == ["f.py(1): f", "op", "call"]


@pytest.mark.parametrize("size", [64, 500, 5000, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_of_any_size_give_the_same(
    file: Path, size: int, indent: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(chrome_fakes.trace(), indent=indent).encode()
    whole = loaded(file, text)
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    monkeypatch.setattr(pieces, "GZIP_BLOCK_BYTES", size)
    cut = loaded(file, gzip.compress(text) if packed else text)
    assert contents(cut) == contents(whole)
    assert (cut.lost, cut.devices, cut.rank, cut.base_ns) == ((), whole.devices, 0, whole.base_ns)
    assert cut.memory is not None and whole.memory is not None
    assert cut.memory.time_ns.tolist() == whole.memory.time_ns.tolist()


def test_a_file_cut_anywhere_gives_what_is_whole(file: Path) -> None:
    found = chrome_fakes.trace(steps=1)
    text = chrome_fakes.text(found)
    whole = len(loaded(file, text))
    ends = [match.end() for match in pieces.open_pieces(file).boundary.finditer(text)]
    first, last = text.index(b'"ph": "X"'), text.rindex(b"]")
    used = []
    for cut in range(0, len(text), 11):
        try:
            trace = loaded(file, text[:cut])
        except BadInput as error:
            assert cut < first + 600, error
            continue
        used.append(len(trace))
        if cut <= last:
            assert any("ends" in line and f"{len(trace):,}" in line for line in trace.lost), trace.lost
        else:
            assert (len(trace), trace.lost) == (whole, ())
    assert used == sorted(used) and used[-1] == whole and len(set(used)) > whole * 0.9
    assert len(ends) > whole


def test_a_cut_gzip_file_gives_what_is_whole(file: Path) -> None:
    data = gzip.compress(chrome_fakes.text(chrome_fakes.trace(steps=20)))
    trace = loaded(file, data[: len(data) // 2])
    assert 0 < len(trace) < 700
    assert "The gzip file ends early" in trace.lost[0] and "in the middle of an event" in trace.lost[1]
    broken = loaded(file, data[: len(data) // 2] + b"\xff" * 99 + data[len(data) // 2 + 99 :])
    assert "gzip data is damaged" in broken.lost[0] and len(broken) > 0


ONE = op("aten::mm", 5, 2, dims=[[2, 3], [3, 4]])
SURE = op("sure", 1, 20)


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (b'{"ph": "X", "cat": "cpu_op", "name": "nan", "ts": 4, "dur": 2, "args": {"x": NaN, "y": -Infinity}}', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "inf", "ts": 4, "dur": 2, "args": {"GB/s": inf, "b": -nan}}', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "null", "ts": 4, "dur": 2, "pid": null, "args": null}', ""),
        (b'{"ph": "X", "cat": "cpu_op", "name": "types", "ts": "4", "dur": "2.0", "args": {"External id": "7"}}', ""),
        (b'{"ph": "X", "cat": "cpu_op", "name": "wrong", "ts": 4, "dur": 2, "args": [1, 2]}', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "ids", "ts": 4, "dur": 2, "args": {"External id": [3]}}', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "big", "ts": 4, "dur": 2, "args": {"External id": 1e400}}', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "huge", "ts": 4, "dur": 2, "tid": ' + b"9" * 60 + b"}", ""),
        (b'{"ph": "X", "cat": "cpu_op", "name": "bytes\xff\xfe", "ts": 4, "dur": 2}', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "half \\ud800", "ts": 4, "dur": 2}', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "comma", "ts": 4, "dur": 2, }', "part"),
        (b'{"ph": "X", "cat": "cpu_op", "name": "first", "name": "last", "ts": 9, "ts": 4, "dur": 2}', ""),
        (b'{"ph": "X", "cat": "cpu_op", "name": "deep", "ts": 4, "dur": 2, "a": ' + b"[" * 100 + b"]" * 100 + b"}", ""),
    ],
)  # fmt: skip
def test_an_odd_event_is_used_as_far_as_it_can_be(file: Path, damage: bytes, lost: str) -> None:
    text = b'{"traceEvents": [%b, %b, %b]}' % (json.dumps(SURE).encode(), damage, json.dumps(ONE).encode())
    trace = loaded(file, text)
    assert len(trace) == 3
    assert rows(trace)[1][2:] == (3000, 5000)
    assert trace.detail_of(2).dims == ((2, 3), (3, 4))
    assert trace.lost == (("1 event could be read only in part.",) if lost else ())
    "".join(trace.names).encode()


@pytest.mark.parametrize(
    "damage",
    [b'{"ph": "X", "name"', b"garbage", b'{"ph": "X", "a": ' + b"[" * 200_000, b'{"ph": "X" "cat": "cpu_op"}', b"\0"],
)
def test_a_broken_event_costs_one_event(file: Path, damage: bytes) -> None:
    one = json.dumps(ONE).encode()
    text = b'{"traceEvents": [%b, %b, %b]}' % (json.dumps(SURE).encode(), damage, one)
    trace = loaded(file, text.replace(one, one + b"," + one))
    assert 2 <= len(trace) <= 3  # what it swallowed, at most
    assert trace.lost == ("1 event could not be read.",)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda text: b"\xef\xbb\xbf" + text, ()),
        (lambda text: text.replace(b"\n", b"\r\n"), ()),
        (lambda text: text.replace(b"]}", b",]}"), ()),
        (lambda text: text.replace(b"]}", b"\n,\n]\n}\n\n"), ()),
        (lambda text: text[text.index(b"[") : text.rindex(b"]") + 1], ()),
        (lambda text: text[text.index(b"[") : text.rindex(b"]")], ()),  # Chrome's array may stay open
        (lambda text: text[:-1], ()),
        (lambda text: text[:-2], ("The file ends without closing its events: the 2 in it were used.",)),
        (lambda text: text[:-1] + b', "traceEvents": []}', ()),
        (
            lambda text: text[:-1] + b', "traceEvents": [{"ph": "X"}]}',
            ("The file has traceEvents twice: the first were used.",),
        ),
        (lambda text: text[:-1] + b', "k": [{"a": [{}]}], "sublight": {"x": [{"y": [{}]}]}}', ()),
    ],
)
def test_files_are_written_in_many_ways(file: Path, change: Any, lost: tuple[str, ...]) -> None:
    trace = loaded(file, change(b'{"traceEvents": [%b,\n%b]}' % tuple(json.dumps(e).encode() for e in (SURE, ONE))))
    assert [row[1] for row in rows(trace)] == ["sure", "aten::mm"]
    assert trace.lost == lost


def test_keys_on_both_sides_of_the_events_are_read(file: Path) -> None:
    text = (
        '{"deviceProperties": [{"id": 2, "name": "A"}], "traceEvents": [%s], "sublight": {"a": [{"b": [1]}]}, "x": 1}'
    )
    trace = loaded(file, (text % json.dumps(ONE)).encode())
    assert trace.devices[0].name == "A" and trace.meta == {"a": [{"b": [1]}]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "it is empty"),
        (b" \n ", "it is blank"),
        (b"[]", "it is an empty trace"),
        (b'{"traceEvents": []}', "it is an empty trace"),
        (b'{"traceEvents": null}', "it has no traceEvents"),
        (b'{"a": 1}', "it has no traceEvents"),
        (b"hello", "it has no traceEvents"),
        (b"\x80\x04\x95pickle", "it has no traceEvents"),
        (b'[{"ph": "X", "cat": "unheard of", "ts": 1}]', "holds no event that can be used"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k"}]', "1 event had no time"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -2}]', "1 event had a negative duration"),
        (b'[{"ph": "B", "cat": "kernel", "name": "k", "ts": 1}]', "1 event began and never ended"),
        (b"[[[[", "holds no event"),
        (b"\x1f\x8b", "ends early"),
        (gzip.compress(b"", mtime=0), "it is empty"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(file: Path, text: bytes, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        loaded(file, text)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_impossible_times_cost_their_events_and_are_said(file: Path) -> None:
    events = [op("a", 100, 5), op("b", 110, -5), op("c", 1e15, 5), op("d", 120, 1e18), op("e", 130, 5)]
    trace = loaded(file, {"traceEvents": events})
    assert [row[1] for row in rows(trace)] == ["a", "e"]
    assert trace.lost == (
        "1 event had a negative duration.",
        "2 events had a time far from the others (a clock jump).",
    )


def test_begins_and_ends_that_do_not_pair(file: Path) -> None:
    def half(phase: str, ts: float, name: str = "") -> Json:
        return {"ph": phase, "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts}

    events = [half("E", 1), half("B", 2, "outer"), half("B", 3, "inner"), half("E", 5), half("E", 9), half("E", 10)]
    assert rows(loaded(file, events)) == [("OP", "outer", 0, 7000), ("OP", "inner", 1000, 3000)]
    assert loaded(file, events[:-2]).lost == ("1 event began and never ended.",)


BOMB = gzip.compress(b" " * (16 << 20), 9)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (b"", BOMB, "it is blank"),
        (b"", gzip.compress(b"\0" * (16 << 20)), "it has no traceEvents"),
        (b'{"a": "', BOMB, "it has no traceEvents"),
        (b'{"traceEvents": [', BOMB, "No event ends in"),
        (b'{"traceEvents": [{"ph": "X", "name": "', BOMB, "No event ends in"),
    ],
)
def test_a_bomb_is_refused_soon(file: Path, first: bytes, then: bytes, said: str) -> None:
    file.write_bytes(gzip.compress(first) + then * 640)  # ten gigabytes
    assert file.stat().st_size < 12e6
    with pytest.raises(BadInput, match=said):
        chrome.load(file)


def test_a_bomb_behind_events_leaves_the_events(file: Path) -> None:
    text = gzip.compress(chrome_fakes.text())
    file.write_bytes(text + BOMB * 640)
    trace = chrome.load(file)
    assert len(trace) == 105 and "what follows was not read" in trace.lost[0]


def test_more_events_than_anybody_looks_at_are_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2000)
    monkeypatch.setattr(chrome_columns, "MOST_EVENTS", 50)
    trace = loaded(file, chrome_fakes.text(chrome_fakes.trace(steps=20)))
    assert 50 < len(trace) < 100
    assert trace.lost[0].startswith("The file holds more than 50 events: the first")


def test_a_trace_of_63_megabytes_takes_little_memory(file: Path) -> None:
    events = json.dumps(chrome_fakes.trace(steps=100)["traceEvents"], indent=1)[1:-1].encode()
    with file.open("wb") as out:
        out.write(b'{"traceEvents": [')
        out.write(b",".join([events] * (63_000_000 // len(events))))
        out.write(b"]}")
    script = (  # VmHWM: ru_maxrss would count what the process that started this one holds
        "import re, sys, pathlib; from sublight.trace.read import chrome\n"
        "count = len(chrome.load(pathlib.Path(sys.argv[1])))\n"
        "print(count, re.search('VmHWM:\\\\s+(\\\\d+)', pathlib.Path('/proc/self/status').read_text())[1])"
    )
    command = [sys.executable, "-c", script, str(file)]
    count, kibibytes = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert count > 100_000
    assert kibibytes * 1024 < 600e6


def test_the_ids_that_no_profiler_gives_are_not_known(file: Path) -> None:
    trace = loaded(file, [op("a", 1, 1, External_id=2**63), op("b", 2, 1, External_id=8, Sequence_number=-(2**70))])
    assert trace.external.tolist() == [NONE, 8] and trace.sequence.tolist() == [NONE, NONE]
