"""From a kernel to the op, the module and the line that launched it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sublight.report.explain.trace_fakes import BACKWARD, COMPUTE, MAIN, Tape
from sublight.trace.attribute import DEEPEST, Attribution, attribute
from sublight.trace.record import NONE, Detail, Kind, Trace

NODE = "autograd::engine::evaluate_function: MmBackward0"


def row(trace: Trace, name: str, at: int = 0) -> int:
    return int(trace.rows_named(lambda each: each == name)[at])


def made(tape: Tape, **columns: Any) -> Attribution:
    return attribute(dataclasses.replace(tape.trace(None), **columns))


def names(found: Attribution, rows: list[int]) -> list[str]:
    return [found.trace.name_of(each) for each in rows]


@pytest.fixture
def forward() -> Tape:
    """An op in an op in a module in the user's function, with a call that launches a kernel."""
    tape = Tape()
    tape.add(Kind.PYTHON, "train.py(41): step", MAIN, 0, 1000)
    tape.add(Kind.PYTHON, "torch/nn/modules/module.py(1): _call_impl", MAIN, 5, 900)
    tape.add(Kind.PYTHON, "nn.Module: Net_0", MAIN, 10, 800)
    tape.add(Kind.PYTHON, "nn.Module: Linear_1", MAIN, 20, 700)
    tape.add(Kind.OP, "aten::linear", MAIN, 30, 600, sequence=5)
    tape.add(Kind.OP, "aten::mm", MAIN, 40, 500, external=9)
    tape.add(Kind.RUNTIME, "cudaLaunchKernel", MAIN, 50, 60, correlation=77)
    tape.add(Kind.KERNEL, "gemm", COMPUTE, 90, 190, correlation=77)
    return tape


def test_from_a_kernel_to_its_line(forward: Tape) -> None:
    found = made(forward)
    kernel = row(found.trace, "gemm")
    assert names(found, [int(found.launch[kernel])]) == ["cudaLaunchKernel"]
    assert names(found, found.ops_above(kernel)) == ["aten::mm", "aten::linear"]
    assert found.place(kernel) == ("train.py:41 (step)", "Net_0/Linear_1")
    assert names(found, found.top_ops.tolist()) == ["aten::linear"]
    assert found.forward(kernel) == NONE


def test_a_kernel_without_a_launch_has_no_op(forward: Tape) -> None:
    forward.add(Kind.KERNEL, "lost", COMPUTE, 300, 310, correlation=78)
    forward.add(Kind.KERNEL, "unnumbered", COMPUTE, 320, 330)
    found = made(forward)
    for name in ("lost", "unnumbered"):
        kernel = row(found.trace, name)
        assert (found.launch[kernel], found.op[kernel]) == (NONE, NONE)
        assert found.place(kernel) == ("", "")


def test_of_two_calls_with_one_number_the_first_counts(forward: Tape) -> None:
    forward.add(Kind.RUNTIME, "cudaLaunchKernel", BACKWARD, 700, 710, correlation=77)
    found = made(forward)
    assert found.trace.lane[found.launch[row(found.trace, "gemm")]] == MAIN


def test_numbers_that_most_calls_share_join_nothing(forward: Tape) -> None:
    for start in (700, 800):
        forward.add(Kind.RUNTIME, "cudaLaunchKernel", BACKWARD, start, start + 10, correlation=77)
    found = made(forward)
    assert found.launch[row(found.trace, "gemm")] == NONE


def test_backward_goes_to_the_forward_op_of_its_sequence_number(forward: Tape) -> None:
    forward.add(Kind.OP, NODE, BACKWARD, 1100, 1300, sequence=5)
    forward.add(Kind.OP, "aten::mm", BACKWARD, 1110, 1200)
    forward.add(Kind.RUNTIME, "cudaLaunchKernel", BACKWARD, 1120, 1130, correlation=80)
    forward.add(Kind.KERNEL, "gemm_backward", COMPUTE, 1150, 1160, correlation=80)
    found = made(forward)
    kernel = row(found.trace, "gemm_backward")
    assert names(found, [found.forward(kernel)]) == ["aten::linear"]
    assert found.place(kernel) == ("train.py:41 (step)", "Net_0/Linear_1")


def test_a_call_on_another_thread_is_joined_by_the_external_id(forward: Tape) -> None:
    forward.add(Kind.RUNTIME, "hipLaunchKernel", BACKWARD, 700, 710, correlation=81, external=9)
    forward.add(Kind.KERNEL, "other", COMPUTE, 720, 730, correlation=81, external=9)
    found = made(forward)
    assert names(found, found.ops_above(row(found.trace, "other"))) == ["aten::mm", "aten::linear"]


def graph(tape: Tape, *replayed: str) -> Tape:
    tape.add(Kind.OP, "replay", MAIN, 2000, 2100)
    tape.add(Kind.RUNTIME, "cudaGraphLaunch", MAIN, 2010, 2020, correlation=90)
    for at, name in enumerate(replayed):
        tape.add(Kind.KERNEL, name, COMPUTE, 2030 + 10 * at, 2035 + 10 * at, correlation=90)
    return tape


def test_a_replayed_kernel_is_matched_with_the_same_one_outside_of_the_graph(forward: Tape) -> None:
    found = made(graph(forward, "gemm", "never seen"))
    replayed, unseen = row(found.trace, "gemm", 1), row(found.trace, "never seen")
    assert found.op[replayed] == NONE  # the op around the replay is not its op
    assert names(found, found.ops_above(replayed)) == ["aten::mm", "aten::linear"]
    assert found.place(replayed) == ("train.py:41 (step)", "Net_0/Linear_1")
    assert (found.replayed[unseen], found.ops_above(unseen)) == (NONE, [])


def test_a_captured_graph_is_matched_in_the_order_of_its_capture() -> None:
    tape = Tape()
    tape.add(Kind.RUNTIME, "cudaStreamBeginCapture", MAIN, 10, 20)
    for at, op in enumerate(("aten::exp", "aten::sin")):
        tape.add(Kind.OP, op, MAIN, 100 + 100 * at, 180 + 100 * at)
        tape.add(Kind.RUNTIME, "cudaLaunchKernel", MAIN, 110 + 100 * at, 120 + 100 * at, correlation=at)
    tape.add(Kind.RUNTIME, "cudaStreamEndCapture", MAIN, 400, 410)
    graph(tape, "same", "same")
    trace = tape.trace(None)
    nodes = trace.graph_node.copy()
    first, second = trace.rows_named(lambda name: name == "same").tolist()
    nodes[first], nodes[second] = 2, 1  # they ran in another order than they were captured
    found = made(tape, graph_node=nodes)
    assert names(found, [int(found.replayed[first]), int(found.replayed[second])]) == ["aten::sin", "aten::exp"]


def test_the_stack_that_an_old_schema_keeps_with_the_op() -> None:
    tape = Tape()
    stack = "torch/nn/functional.py(9): linear;train.py(7): forward;train.py(30): <module>"
    tape.launch("aten::mm", "gemm", MAIN, 0, (20, 30), Detail(dims=((2, 2),), stack=stack, module="Net.fc"))
    found = made(tape)
    assert found.place(row(found.trace, "gemm")) == ("train.py:7 (forward)", "Net.fc")


def test_lines_that_our_capture_recorded_come_first(forward: Tape) -> None:
    sources = {"ops": ["aten::linear"], "index": [0], "source": ["model.py:3 (f)"], "module": ["net.fc"]}
    assert made(forward, meta={"sources": sources}).place(7) == ("model.py:3 (f)", "net.fc")
    for broken in ([], {"ops": []}, {**sources, "index": [4]}, {**sources, "source": 5}, {**sources, "module": []}):
        assert made(forward, meta={"sources": broken}).place(7) == ("train.py:41 (step)", "Net_0/Linear_1")


def test_events_that_all_enclose_each_other_take_no_time() -> None:
    tape = Tape()
    for at in range(20_000):
        tape.rows.append((int(Kind.OP), 0, MAIN, 0, at, 50_000 - at, NONE, NONE, NONE, NONE))
    tape.names["aten::mm"] = 0
    found = made(tape)
    assert len(found.ops_above(19_999)) == DEEPEST
    assert found.top_ops.tolist() == [0]
