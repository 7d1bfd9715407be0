"""The terminal's page says everything in order and fits; the timeline keeps the longest events and loses no time."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sublight import units
from sublight.diagnose.diff import diff
from sublight.diagnose.record import BREAKDOWN, Explanation
from sublight.diagnose.rules import RULES
from sublight.report.explain import causes, op_roofline, timeline, trace_fakes
from sublight.report.explain import diff as report_diff
from sublight.report.explain import fakes as explain_fakes
from sublight.report.explain import terminal as explain
from sublight.trace.record import NONE, Kind, Lane


def printed(explanation: Explanation, columns: int = 100, **more: Any) -> list[str]:
    screen = Console(width=columns, file=io.StringIO(), highlight=False, **more)
    screen.print(explain.page(explanation))
    return screen.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("columns", [80, 100, 120, 160])
@pytest.mark.parametrize("made", [explain_fakes.explanation, explain_fakes.on_cpu])
def test_the_page_fits_and_cuts_no_figure(made: Any, columns: int) -> None:
    explanation = made()
    lines = printed(explanation, columns)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    first = explanation.ops[0]
    for value in (first.cpu_s, first.device_s, first.floor_s):
        assert units.text(value, "s") in text
    heads = [line for line in lines if line.startswith("op ")]
    assert len(heads) == 1
    for name in ("calls", "CPU", "floor", "of limit", "bound"):
        assert name in heads[0]


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_two_runs_side_by_side_cut_no_figure(columns: int) -> None:
    before = explain_fakes.explanation()
    slow = dataclasses.replace(before.ops[0], name="aten::" + 50 * "x", shape=40 * "1", device_s=1.234)
    found = diff(before, dataclasses.replace(before, ops=(slow, *before.ops[1:])))
    screen = Console(width=columns, file=io.StringIO(), highlight=False)
    screen.print(report_diff.page(found))
    assert "+1.23 s" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_the_verdict_comes_first_and_each_time_has_its_floor() -> None:
    lines = printed(explain_fakes.explanation())
    assert lines[0] == "The GPU waits 6.2 ms a step for the next batch: fixing it saves 6.10 of 20.0 ms (31 %)"
    assert lines[1].startswith("! The machine was busy"), "what limits trust comes next"
    step = next(line for line in lines if line.startswith("step "))
    assert step.startswith("step 20.0 ms ± 210 µs · floor 3.60 ms · 18 % of the limit · 3 steps (optimizer steps)")
    assert "NVIDIA H200 · limits: measured on this machine 2026-11-15" in lines
    assert lines.index(step) < next(at for at, line in enumerate(lines) if "data-loading" in line)


def test_findings_stand_by_saving_and_the_rest_are_counted() -> None:
    text = "\n".join(printed(explain_fakes.explanation(), 120))
    numbered = re.findall(r"^(\d)  (\S+)  saves (.+?) \((.+?) of the step\)", text, flags=re.M)
    full = explain_fakes.findings()[: explain.FULL_FINDINGS]
    assert [(number, name) for number, name, *_ in numbered] == [
        (str(at + 1), finding.id) for at, finding in enumerate(full) if at
    ]
    assert re.search(r"^1  data-loading$", text, flags=re.M), "its title and saving are the headline, and stand once"
    assert text.count("6.10") == 1 and text.count(full[0].title) == 1
    assert numbered[0][2:] == ("900 µs", "4.5 %")
    assert "and 1 more, each saving 50.0 µs or less: small-grid" in text
    assert "All fixed together: saves 7.90 ms (40 % of the step), leaving 12.1 ms (floor 3.60 ms)." in text
    assert "Each alone would add up to 8.32 ms: they overlap." in " ".join(text.split())
    assert "      loader = DataLoader(dataset" in text
    assert "                          persistent_workers=True" in text, "code lost its indent"


def test_the_users_line_stands_as_it_is_and_as_it_could_be() -> None:
    lines = [line.strip() for line in printed(explain_fakes.explanation(), 120)]
    at = lines.index("train.py:52, 1 a step:")
    assert lines[at + 1 : at + 3] == ["- total += loss.item()", "+ total += loss.detach()"]


def test_a_floor_that_is_not_known_is_no_figure() -> None:
    whole = explain_fakes.explanation()
    parts = {**whole.breakdown, "floor": 0.0, "unknown": whole.breakdown["unknown"] + whole.breakdown["floor"]}
    text = "\n".join(printed(dataclasses.replace(whole, breakdown=parts)))
    assert "floor unknown: no cost is known for 18 % of the step" in text
    assert "of the limit" not in text and "(floor" not in text
    assert "floor unknown: no limits" in "\n".join(
        printed(dataclasses.replace(whole, limits=dataclasses.replace(whole.limits, limits=())))
    )


def test_a_step_of_which_nothing_is_left() -> None:
    """And no nanoseconds that are rounding."""
    whole = explain_fakes.explanation()
    rounded = dataclasses.replace(whole, combined_saving_s=whole.step_s * (1 - 1e-12), floor_s=0.0, fixed_floor_s=0.0)
    assert "leaving next to nothing: there is no other work in it" in explain.combined_text(rounded)


def test_what_is_left_is_held_against_the_floor_after_the_fixes() -> None:
    words = explain.combined_text(explain_fakes.explanation(combined_saving_s=18e-3, fixed_floor_s=1.5e-3))
    assert "leaving 2.00 ms (floor then 1.50 ms, as some work goes)" in words


def test_equal_calls_are_one_row_and_rows_of_nothing_none() -> None:
    row = dataclasses.replace(explain_fakes.ops()[0], source="net.py:7", floor_s=1e-3)
    rows = [dataclasses.replace(row, module=str(n), device_s=2e-3 - n * 1e-5) for n in range(24)]
    nothing = dataclasses.replace(row, name="aten::view", device_s=0.0)
    ((whole, members),) = explain.together([*rows, nothing])
    assert len(members) == 24 and whole.calls == pytest.approx(24 * row.calls)
    assert whole.device_s == pytest.approx(sum(each.device_s for each in rows)) and whole.floor_s == pytest.approx(
        24e-3
    )
    assert explain.where_text(whole) == "net.py:7, 24 modules"


def test_places_are_whole_and_no_number_stands_before_a_file() -> None:
    path = "examples/a_folder_with_a_long_name/another_folder/a_script_with_a_long_name.py:31 (a_function)"
    row = dataclasses.replace(explain_fakes.ops()[0], module="0", source=path)
    assert explain.where_text(row) == f"{path} in module 0"
    lines = printed(explain_fakes.explanation(ops=(row,)), 160)
    head = next(line for line in lines if line.startswith("op "))
    column = head.index("where")
    cells = [line[column:].strip() for line in lines[lines.index(head) + 2 :]]
    assert f"{path} in module 0".replace(" ", "") in "".join(cells).replace(" ", "")


def test_each_finding_has_the_colour_of_its_cause() -> None:
    assert {causes.cause(rule.id) for rule in RULES} <= set(BREAKDOWN)
    whole = explain_fakes.explanation()
    for number, finding in enumerate(whole.findings, 1):
        head = next(iter(explain._finding(number, finding, whole)))
        assert f"bold {explain.COLOURS[causes.cause(finding.id)]}" in [span.style for span in head.spans]  # type: ignore[union-attr]


def test_the_bar_is_as_wide_as_its_parts_and_told_without_colours() -> None:
    explanation = explain_fakes.explanation()
    lines = printed(explanation, 100)
    letters = "".join(explain.LETTERS.values())
    bar = next(line for line in lines if len(line) == 100 and set(line) <= set(letters))
    data = bar.count(explain.LETTERS["data"])
    assert data == pytest.approx(100 * explanation.breakdown["data"] / explanation.step_s, abs=3)
    assert "allocator" not in "\n".join(lines), "a part under 0.5 % has no line"
    assert any(re.search(r"D idle: data loading +6\.20 ms +31 %", line) for line in lines)
    coloured = printed(explanation, 100, force_terminal=True, color_system="256")
    assert any("█" in line and "\x1b[" in line for line in coloured)


@pytest.mark.parametrize("cells", [1, 3, 12, 80, 121])
def test_cells_add_up(cells: int) -> None:
    values = [5.0, 0.01, 2.0]
    counts = explain.cells_of(values, cells)
    assert sum(counts) == max(cells, len(values))
    assert min(counts) >= 1


def test_every_part_has_a_colour_and_a_letter() -> None:
    assert set(explain.COLOURS) == set(explain.LETTERS) == set(BREAKDOWN)
    assert len(set(explain.LETTERS.values())) == len(BREAKDOWN)


def test_the_cpu_is_no_gpu() -> None:
    text = "\n".join(printed(explain_fakes.on_cpu()))
    assert "GPU" not in text
    assert "No change that can be named" in text
    assert re.search(r"calls +CPU +device +floor", text)


def test_names_are_neither_markup_nor_commands() -> None:
    finding = dataclasses.replace(explain_fakes.findings()[0], title="[bold]x[/] \x1b[2J", id="[red]id")
    text = "\n".join(printed(explain_fakes.explanation(findings=(finding,), notes=("[/nope] \x9b",))))
    assert "[bold]x[/] �[2J" in text
    assert "[red]id" in text
    assert "note: [/nope] �" in text
    assert "\x1b" not in text


def test_the_line_that_has_us_do_it_stands_below_the_fix() -> None:
    finding = dataclasses.replace(explain_fakes.findings()[0], fix="first\nsecond", cure="sublight.patch(model)")
    text = "\n".join(printed(explain_fakes.explanation(findings=(finding,))))
    assert re.search(r"second\s+# or, in one line:\s+sublight\.patch\(model\)", text)
    assert dataclasses.replace(finding, cure="second").code == "first\nsecond", "not said twice"
    assert finding.to_json()["cure"] == "sublight.patch(model)"


def test_unknown_costs_are_told_as_such() -> None:
    rows = tuple(row for row in explain_fakes.ops() if row.floor_s is None)
    text = "\n".join(printed(explain_fakes.explanation(ops=rows), 120))
    assert re.search(r"90\.0 µs +– +– +cost unknown", text)


# the timeline


def drawn_of(explanation: Explanation) -> timeline.Timeline | None:
    return timeline.timeline(explanation, timeline.choose(explanation))


def test_all_events_of_a_small_step_are_drawn() -> None:
    explanation = explain_fakes.explanation()
    trace = explanation.trace
    assert trace is not None
    drawn = drawn_of(explanation)
    assert drawn is not None
    assert drawn.notes == ()
    begin, end = timeline.window_ns(explanation)
    inside = (trace.end_ns >= begin) & (trace.start_ns < end)
    assert sum(len(track["s"]) for track in drawn.data["tracks"]) == inside.sum()
    assert drawn.data["window_ns"] == trace_fakes.STEP_NS
    assert [lane["kind"] for lane in drawn.data["lanes"]] == ["thread", "thread", "stream", "stream"]


def test_a_kernel_knows_who_launched_it() -> None:
    drawn = drawn_of(explain_fakes.explanation())
    assert drawn is not None
    texts = drawn.data["texts"]
    stream = next(track for track in drawn.data["tracks"] if track["lane"] == trace_fakes.COMPUTE)
    gemm = next(at for at, name in enumerate(stream["n"]) if texts[name].startswith("sm90"))
    assert texts[stream["o"][gemm]] == "aten::linear"
    assert 0 <= stream["l"][gemm] < stream["s"][gemm]
    host = next(track for track in drawn.data["tracks"] if any(texts[name] == "aten::linear" for name in track["n"]))
    op = next(at for at, name in enumerate(host["n"]) if texts[name] == "aten::linear")
    assert texts[host["x"][op]] == "8192×1024 BFloat16, 1024×4096 BFloat16, 4096 BFloat16"


@pytest.mark.parametrize("most", [50, 500, 5000])
def test_merging_keeps_the_longest_and_every_nanosecond(most: int) -> None:
    trace = trace_fakes.crowd(20_000)
    rows = np.arange(len(trace))
    depth = timeline._depths(trace, rows)
    blocks, shortest_ns = timeline.merged(trace, rows, depth, trace.duration_ns, most)
    assert len(blocks.row) <= most
    assert blocks.count.sum() == len(trace)
    lasts = trace.end_ns - trace.start_ns
    assert blocks.busy_ns.sum() == lasts.sum()
    alone = blocks.row[blocks.count == 1]
    assert set(np.flatnonzero(lasts >= shortest_ns).tolist()) <= set(alone.tolist()), "a long event was merged"
    for lane in np.unique(blocks.lane):
        of_lane = blocks.lane == lane
        assert (blocks.start_ns[of_lane][1:] >= blocks.end_ns[of_lane][:-1]).all(), "blocks of a track overlap"


def test_no_two_blocks_of_a_track_overlap_even_if_kernels_do() -> None:
    tape = trace_fakes.Tape()
    for start, end in ((0, 100), (50, 150), (60, 70), (120, 130), (151, 160)):
        tape.add(Kind.KERNEL, "k", trace_fakes.COMPUTE, start, end)
    trace = tape.trace(None)
    drawn = drawn_of(explain_fakes.explanation(trace=trace, window_s=(0.0, 0.0), findings=()))
    assert drawn is not None
    assert sum(len(track["s"]) for track in drawn.data["tracks"]) == 5
    for track in drawn.data["tracks"]:
        ends = [start + lasts for start, lasts in zip(track["s"], track["d"], strict=True)]
        assert all(start >= end for start, end in zip(track["s"][1:], ends, strict=False))


def test_wrapping_python_frames_and_idle_lanes_are_left_out() -> None:
    tape = trace_fakes.Tape()
    for depth in range(30):  # main calls main_ calls main__ …: the last is the one that works
        tape.add(Kind.PYTHON, f"frame {depth}", 0, depth, 1_000_000 - depth)
    lanes = tuple(Lane(kind="thread", process="p", number=str(at)) for at in range(20))
    for lane in range(1, 20):
        tape.add(Kind.OP, "aten::mm", lane, 10, 10 + 1000 * lane)
    drawn = drawn_of(explain_fakes.explanation(trace=tape.trace(None, lanes), window_s=(0.0, 1e-3), findings=()))
    assert drawn is not None
    names = {drawn.data["texts"][name] for track in drawn.data["tracks"] for name in track["n"]}
    assert names == {"frame 29", "aten::mm"}
    assert {lane["id"] for lane in drawn.data["lanes"]} == {0, *range(13, 20)}, "the busiest lanes have room"
    assert drawn.notes == ("12 lanes with the least in them are left out.",)


def test_deep_python_gives_way_to_the_ops_below_it() -> None:
    tape = trace_fakes.Tape()
    tape.add(Kind.OP, "aten::earlier", 1, 0, 5)
    for depth in range(20):  # each half of the one above: no wrapper
        tape.add(Kind.PYTHON, f"frame {depth}", 0, 10, 10 + (1 << (30 - depth)))
    tape.add(Kind.OP, "aten::mm", 0, 11, 300)
    drawn = drawn_of(explain_fakes.explanation(trace=tape.trace(None), window_s=(0.0, 0.0), findings=()))
    assert drawn is not None
    names = [drawn.data["texts"][name] for track in drawn.data["tracks"] for name in track["n"]]
    assert "aten::mm" in names
    assert sum(name.startswith("frame") for name in names) == timeline.MOST_FRAMES
    assert drawn.notes == ("14 Python frames nested deeper than 6 levels are left out.",)
    assert [lane["id"] for lane in drawn.data["lanes"]] == [1, 0], "the thread that begins first stands first"


def test_no_trace_no_timeline() -> None:
    assert drawn_of(explain_fakes.explanation(trace=None)) is None
    empty = trace_fakes.Tape().trace(None)
    assert drawn_of(explain_fakes.explanation(trace=empty)) is None
    assert drawn_of(explain_fakes.explanation(window_s=(5.0, 6.0))) is None


def test_places_outside_the_step_have_no_band() -> None:
    inside = timeline.bands(explain_fakes.explanation())
    assert {band["f"] for band in inside} == {0, 1, 2, 3}
    assert timeline.bands(explain_fakes.explanation(window_s=(0.0, 0.02))) == []


def test_memory_keeps_its_peak_when_thinned() -> None:
    explanation = explain_fakes.explanation()
    assert explanation.trace is not None
    log = explanation.trace.memory
    assert log is not None
    count = 100_000
    total = np.full(count, 10**9, dtype=np.int64)
    total[70_123] = 7 * 10**9
    long = dataclasses.replace(
        log,
        time_ns=np.arange(count, dtype=np.int64) * 500,
        delta_bytes=np.diff(total, prepend=0),
        allocated_bytes=total,
        reserved_bytes=np.full(count, NONE, dtype=np.int64),
        device=np.zeros(count, dtype=np.int64),
    )
    made = timeline.memory(dataclasses.replace(explanation, trace=dataclasses.replace(explanation.trace, memory=long)))
    assert made is not None
    assert len(made["t"]) < 3 * timeline.MEMORY_POINTS
    assert (made["peak_bytes"], made["peak_ns"], made["reserved_bytes"]) == (7 * 10**9, 70_123 * 500, None)
    assert made["b"][made["t"].index(70_123 * 500)] == 7 * 10**9
    unknown = dataclasses.replace(long, allocated_bytes=np.full(count, NONE, dtype=np.int64))
    summed = timeline.memory(
        dataclasses.replace(explanation, trace=dataclasses.replace(explanation.trace, memory=unknown))
    )
    assert summed is not None
    assert (summed["peak_bytes"], summed["from_deltas"]) == (7 * 10**9, True)


def test_roofline_has_the_roofs_that_ops_meet() -> None:
    chart = op_roofline.chart(explain_fakes.explanation())
    assert chart is not None
    assert [roof["label"] for roof in chart["roofs"]] == [
        "memory 4.00 TB/s", "matmul_bf16 770 TFLOP/s", "vector_fp32 60.0 TFLOP/s",
    ]  # fmt: skip
    counted = [row for row in explain_fakes.ops() if row.bytes > 0]
    assert len(chart["dots"]) == len(counted)
    first = chart["dots"][0]
    assert first["rate"] == pytest.approx(counted[0].flops / counted[0].device_s)
    assert "floor 1.07 ms, 47 % of the limit (matmul_bf16)" in first["label"][1]
    copy = next(dot for dot in chart["dots"] if dot["label"][0].startswith("aten::copy_"))
    assert copy["intensity"] is None
    assert copy["label"][2].endswith("no arithmetic")
    assert op_roofline.chart(explain_fakes.explanation(ops=())) is None
