"""Events from any reader become a trace: sorted, counted from the first event, impossible times dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sublight.trace.assemble import FAR_NS, assemble
from sublight.trace.attribute import attribute
from sublight.trace.record import EMPTY, NONE, Detail, Kind, Lane, MemoryLog, Trace

LANES = [Lane(kind="thread", process="1", number=number) for number in "abc"]


def trace(start: list[int], end: list[int], **columns: Any) -> Trace:
    count = len(start)
    given = {"kind": [int(Kind.OP)] * count, "name_ids": list(range(count)), "lane_ids": [0] * count, **columns}
    return assemble(
        source="f",
        tool="pytorch",
        names=[f"e{at}" for at in range(count)],
        lanes=LANES,
        start_ns=np.array(start, dtype=np.int64),
        end_ns=np.array(end, dtype=np.int64),
        **given,
    )


def names(trace: Trace) -> list[str]:
    return [trace.name_of(row) for row in range(len(trace))]


def test_rows_are_sorted_with_the_enclosing_first_and_counted_from_the_first_event() -> None:
    found = trace([1030, 1000, 1000, 1000], [1040, 1010, 1050, 1010], correlation=np.array([1, 2, 3, 4]))
    assert names(found) == ["e2", "e1", "e3", "e0"]  # e1 and e3 are equal: the order of the file
    assert found.start_ns.tolist() == [0, 0, 0, 30]
    assert found.end_ns.tolist() == [50, 10, 10, 40]
    assert found.correlation.tolist() == [3, 2, 4, 1]
    assert (found.base_ns, found.duration_ns, found.lost) == (1000, 50, ())
    assert found.parents.tolist() == [NONE, 0, 1, 0]


def test_what_is_not_given_is_not_known() -> None:
    found = trace([0], [1])
    for column in (found.correlation, found.external, found.sequence, found.bytes, found.graph_node):
        assert column.tolist() == [NONE]
    assert found.detail_of(0) is EMPTY
    assert (found.kind.dtype, found.name.dtype, found.lane.dtype, found.detail.dtype) == (
        np.uint8, np.int32, np.int32, np.int32,
    )  # fmt: skip


def test_impossible_times_are_dropped_and_counted() -> None:
    found = trace([10, 20, -FAR_NS, 30], [5, 25, 40, FAR_NS])
    assert names(found) == ["e1"]
    assert found.names == ("e1",)
    assert found.lost == ("3 events had an impossible time (an end before the start).",)
    assert found.base_ns == 20


def test_lanes_that_nothing_ran_on_are_left_out() -> None:
    found = trace([0, 1, 2], [1, 2, 3], lane_ids=[2, 0, 2])
    assert found.lanes == (LANES[0], LANES[2])
    assert [found.lane_of(row).number for row in range(3)] == ["c", "a", "c"]


def test_no_event_gives_an_empty_trace() -> None:
    found = trace([], [])
    assert (len(found), found.duration_ns, found.base_ns, found.names, found.lanes) == (0, 0, 0, (), ())


def test_the_allocators_log_is_counted_from_the_same_moment() -> None:
    one = np.array([1], dtype=np.int64)
    log = MemoryLog(time_ns=one * 1500, delta_bytes=one, allocated_bytes=one, reserved_bytes=one, device=one)
    memory = trace([1000], [2000], memory=log).memory
    assert memory is not None and memory.time_ns.tolist() == [500]


@pytest.mark.parametrize("column", ["kind", "name_ids", "lane_ids", "detail_ids", "correlation", "bytes"])
@pytest.mark.parametrize("length", [1, 3])
def test_a_column_of_another_length_is_refused(column: str, length: int) -> None:
    with pytest.raises(ValueError, match="length"):
        trace([0, 1], [1, 2], **{column: np.zeros(length, dtype=np.int64)})


def test_the_first_detail_is_the_empty_one() -> None:
    with pytest.raises(ValueError, match="EMPTY"):
        trace([0], [1], detail_ids=[0], details=[Detail(registers=3)])


@pytest.mark.parametrize("seed", range(4))
def test_an_event_is_enclosed_by_what_a_stack_of_open_ones_says(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for count in (0, 1, 2, 5, 40, 300):
        start = draw.integers(0, 2 + count // 2, count)
        found = trace(
            start.tolist(),
            (start + draw.integers(0, 2 + count // 3, count)).tolist(),
            lane_ids=draw.integers(0, 3, count).tolist(),
            kind=draw.choice([int(Kind.OP), int(Kind.PYTHON), int(Kind.RUNTIME)], count).tolist(),
        )
        stacks: dict[int, list[int]] = {}
        parents, ops = [], []
        for row, (lane, begin, end) in enumerate(zip(found.lane, found.start_ns, found.end_ns, strict=True)):
            stack = stacks.setdefault(int(lane), [])
            while stack and (found.end_ns[stack[-1]] <= begin or found.end_ns[stack[-1]] < end):
                stack.pop()
            parents.append(stack[-1] if stack else NONE)
            ops.append(row if found.kind[row] == Kind.OP else NONE if not stack else ops[stack[-1]])
            stack.append(row)
        assert found.parents.tolist() == parents
        assert attribute(found).op.tolist() == ops
