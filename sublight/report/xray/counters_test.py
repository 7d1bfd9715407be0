"""Counters in a table, and beside them what was predicted."""

from __future__ import annotations

import dataclasses

from sublight.report.xray import counters as xray_counters
from sublight.report.xray import fakes as xray_fakes
from sublight.report.xray.terminal_test import drawn, row
from sublight.xray.counters.record import Counters

COUNTED = Counters(
    kernel="_double", grid=(256, 2, 1), duration_s=1.5e-5, occupancy=0.71, sm_throughput=0.2, memory_throughput=0.93,
    load_requests=100, load_sectors=1600, store_requests=100, store_sectors=800,
    stalls={"long_scoreboard": 0.6, "selected": 0.25, "wait": 0.1, "barrier": 0.04, "drain": 0.01},
)  # fmt: skip


def test_a_row_for_each_launch() -> None:
    bare = Counters(kernel="void ns::copy<float>(float *, int)")
    text = drawn(xray_counters.page([COUNTED, bare]))
    assert row(text, "_double") == [
        "_double", "15.0 µs", "71 %", "20 %", "93 %", "16", "8", "long_scoreboard 60 %, wait 10 %, barrier 4.0 %",
    ]  # fmt: skip
    assert row(text, "copy") == ["copy"]
    assert xray_counters.to_json([COUNTED])["counters"][0]["duration_s"] == 1.5e-5


def test_a_narrow_terminal_cuts_the_stalls_alone() -> None:
    text = drawn(xray_counters.page([COUNTED]), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert row(text, "_double")[:5] == ["_double", "15.0 µs", "71 %", "20 %", "93 %"]


def test_predicted_beside_counted() -> None:
    pages = [xray_fakes.page(accesses=xray_fakes.accesses()[:3])]
    pairs = xray_counters.compared(pages, [COUNTED])
    text = drawn(xray_counters.against(pairs, pages, [COUNTED]))
    # the load has 16 sectors a request as predicted, the store a quarter of the 32
    assert row(text, "_double  global load") == ["_double", "global load, sectors per request", "16", "16", "+0.0 %"]
    assert row(text, "_double  global store")[2:] == ["32", "8", "+300.0 %"]
    result = {(each["what"], each["unit"]): each for each in xray_counters.rows_of(pairs)}
    store = result["global store", "sectors per request"]
    assert (store["predicted"], store["counted"], store["gpu"], store["note"]) == (32.0, 8.0, "h200", None)


def test_where_nothing_can_be_compared_it_says_what_the_report_has() -> None:
    pages = [xray_fakes.page()]
    other = dataclasses.replace(COUNTED, kernel="void gemm<2>(int)")
    pairs = xray_counters.compared(pages, [other])
    assert pairs == []
    text = drawn(xray_counters.against(pairs, pages, [other]))
    assert text.strip() == "the report has nothing to compare with _double: it has gemm"
