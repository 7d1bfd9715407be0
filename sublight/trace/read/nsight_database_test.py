"""Files that are damaged, cut, or something else: a line, or what is whole of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sublight.errors import BadInput
from sublight.trace.read import nsight, nsight_database
from sublight.trace.read.nsight_test import KERNEL, RUNTIME, call, kernel, only, write
from sublight.trace.record import Kind


def large(path: Path, count: int = 20_000) -> Path:
    return write(
        path,
        {
            RUNTIME: [call(10 * at, 10 * at + 5, at) for at in range(1, count)],
            KERNEL: [kernel(10 * at + 6, 10 * at + 9, at) for at in range(1, count)],
        },
    )


def nothing(path: Path) -> None: ...


def not_a_database(path: Path) -> None:
    path.write_bytes(b"QDSTRM" * 1000)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def another_database(path: Path) -> None:
    write(path, {"people": [{"name": "x"}]})


def no_events(path: Path) -> None:
    write(path, {KERNEL: [kernel(9, 8)]})


def only_the_profiler(path: Path) -> None:
    write(path, {"PROFILER_OVERHEAD": [{"start": 1, "end": 2, "globalTid": 3, "nameId": 7}]})


def a_folder(path: Path) -> None:
    path.mkdir()


def header_alone(path: Path) -> None:
    path.write_bytes(large(path.with_name("whole")).read_bytes()[:100])


def first_page_alone(path: Path) -> None:
    path.write_bytes(large(path.with_name("whole")).read_bytes()[:4096])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (nothing, "No such file"),
        (not_a_database, "not an SQLite file"),
        (empty, "not an SQLite file"),
        (another_database, "no table of CUDA or NVTX events"),
        (no_events, "no CUDA or NVTX events: 1 row of"),
        (only_the_profiler, "no CUDA or NVTX events"),
        (a_folder, "Is a directory"),
        (header_alone, "cannot be read"),
        (first_page_alone, ""),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "bad.sqlite"
    make(path)
    with pytest.raises(BadInput) as caught:
        nsight.load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_gives_what_is_whole(tmp_path: Path) -> None:
    whole = large(tmp_path / "whole.sqlite")
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 4])
    trace = only(path)
    assert 100 < len(trace) < len(only(whole)) / 2
    assert any(RUNTIME in line and "could be read up to its row" in line for line in trace.lost)
    assert trace.end_ns.min() > 0


def test_a_table_that_is_damaged_half_way_gives_its_first_half(tmp_path: Path) -> None:
    path = large(tmp_path / "a.sqlite")
    whole = only(path)
    data = bytearray(path.read_bytes())
    at = len(data) // 4096 * 3 // 4 * 4096  # a page of the kernels, which were written last
    data[at : at + 4096] = b"\xff" * 4096
    path.write_bytes(data)
    trace = only(path)
    counts, before = Counter(trace.kind.tolist()), Counter(whole.kind.tolist())
    assert counts[Kind.RUNTIME] == before[Kind.RUNTIME]
    assert 1_000 < counts[Kind.KERNEL] < before[Kind.KERNEL]
    (line,) = trace.lost
    assert line.startswith(f"{KERNEL} could be read up to its row {counts[Kind.KERNEL]} only: ")


def test_a_table_of_more_rows_than_the_file_can_hold_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.sqlite", {RUNTIME: [call(at, at + 1) for at in range(100)]})
    monkeypatch.setattr(nsight_database, "LEAST_ROW_BYTES", path.stat().st_size // 50)
    monkeypatch.setattr(nsight_database, "CHUNK_ROWS", 10)
    trace = only(path)
    assert 50 <= len(trace) <= 61
    assert trace.lost == (f"{RUNTIME} goes in circles: the file is damaged.",)


def test_mutated_files_give_a_line_or_a_sound_trace(tmp_path: Path) -> None:
    whole = large(tmp_path / "whole.sqlite", count=300).read_bytes()
    path = tmp_path / "a.sqlite"
    chance = random.Random(3)
    outcomes: Counter[str] = Counter()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 3, 30])):
            data[chance.randrange(len(data)) if chance.random() < 0.7 else chance.randrange(4096)] = chance.randrange(
                256
            )
        path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.2 else data)
        try:
            traces = nsight.load(path)
        except BadInput as error:
            assert "\n" not in str(error)
            outcomes["a line"] += 1
            continue
        outcomes["lost" if traces[0].lost else "whole"] += 1
        for trace in traces:
            assert (np.diff(trace.start_ns) >= 0).all() and (trace.end_ns >= trace.start_ns).all()
            assert trace.start_ns[0] == 0 and len(trace.parents) == len(trace)
            assert all(trace.lane_of(row) and trace.name_of(row) for row in range(len(trace)))
    assert min(outcomes[way] for way in ("a line", "lost", "whole")) > 10
