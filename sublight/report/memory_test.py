"""The memory report says the peak and what lowers it, fits the terminal, and escapes what it did not write."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from sublight.report import memory
from sublight.trace.memory import report as analysis
from sublight.trace.memory import snapshot
from sublight.trace.memory.report import MemoryReport

MB = 1 << 20
HOSTILE = "<script>alert(1)</script>[bold]\x1b[31m"


def report(places: int = 20) -> MemoryReport:
    """One call after the other, each larger; then all but the first are freed."""
    events: list[dict[str, Any]] = []
    blocks = []
    for index in range(places):
        name = HOSTILE if index == places - 1 else "forward"
        frames = [{"filename": f"/me/{HOSTILE if index == 1 else 'net'}.py", "line": index, "name": name}]
        entry = {"addr": index << 32, "size": (index + 1) * MB, "frames": frames}
        events.append({**entry, "action": "alloc", "time_us": 100_000 * index})
        if index == 0:
            blocks.append({"address": 0, "size": MB, "state": "active_allocated", "frames": frames})
    for index in range(1, places):
        entry = {"addr": index << 32, "size": (index + 1) * MB, "frames": []}
        events.append({**entry, "action": "free_completed", "time_us": 100_000 * (places + index)})
    segment = {"address": 0, "total_size": 300 * MB, "device": 0, "blocks": blocks}
    return analysis.from_snapshot(snapshot.parse({"segments": [segment], "device_traces": [events]}, source="s<b>"))


def printed(renderable: Any, columns: int = 100) -> str:
    screen = Console(width=columns, file=io.StringIO(), highlight=False)
    screen.print(renderable)
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_sentence() -> None:
    words = memory.sentence(report())
    assert words.startswith(
        "GPU 0 peaks at 220 MB, 1.90 s into the 3.90 s recorded; 315 MB were reserved then, 30 % of"
    )


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_page_fits_and_says_all(columns: int) -> None:
    text = printed(memory.page(report()), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text
    flat = " ".join(text.split())
    assert "GPU 0 peaks at 220 MB" in flat
    assert "5 more" in flat
    assert "activations are" in flat
    assert "categories are a guess" in flat
    assert re.search(r"net\.py:18 +19\.9 MB +9\.0 % +1 ", text)


def test_the_tables_lines_add_up_to_the_peak() -> None:
    found = report()
    rows = list(memory._shortened(found.rows))
    assert len(rows) == memory.ROWS + 1
    assert sum(row.bytes for row in rows) == found.peak_bytes


def test_charts_names_stand_within_its_columns() -> None:
    lines = memory.chart(report(), columns=40).plain.splitlines()
    assert max(map(len, lines)) <= 40


def test_chart_rises_to_the_peak_and_falls() -> None:
    lines = memory.chart(report(), columns=60).plain.splitlines()
    top = lines[0].split("│")[1]
    assert top.strip() and top.index(top.strip()[0]) in range(15, 35)
    bottom = lines[memory.LINES - 1].split("│")[1]
    assert bottom.count(" ") <= 4
    assert len(lines) == memory.LINES + 2


class Strict(HTMLParser):
    """Collects tags; a script in a name would show as a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)


def test_html_stands_alone_and_escapes_names() -> None:
    found = report()
    page = memory.html(found)
    parser = Strict()
    parser.feed(page)
    assert "script" not in parser.tags and "b" in parser.tags
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=", page)
    assert len(page) < 1_000_000
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        tree = ElementTree.fromstring(svg)
        for path in tree.iter("{http://www.w3.org/2000/svg}path"):
            numbers = [float(each) for each in re.findall(r"-?\d+\.\d+", path.attrib["d"])]
            assert min(numbers) >= 0 and max(numbers) <= memory.WIDTH
    assert len(re.findall(r"<svg", page)) == 2
    assert memory.section(found) in page


def test_areas_lie_on_one_another() -> None:
    found = dataclasses.replace(
        report(2), times_s=(0.0, 1.0), duration_s=1.0, live_bytes=(4, 8), peak_bytes=8, peak_time_s=1.0
    )
    drawn = memory.area(found, {"a": (2, 2), "b": (2, 6)}, "by hand")
    base, scale = memory.HEIGHT - memory.BOTTOM, memory.HEIGHT - memory.TOP - memory.BOTTOM
    a, b = re.findall(r' d="([^"]+)"', drawn)
    assert a.startswith(f"M{memory.LEFT}.0 {base - scale / 4:.1f}H") and f"V{base:.1f}" in a
    assert b.startswith(f"M{memory.LEFT}.0 {base - scale / 2:.1f}H") and f"V{base - scale / 4:.1f}" in b
    assert f"V{base - scale:.1f}" in b


def test_json_holds_the_figures() -> None:
    found = report()
    data = json.loads(json.dumps(memory.to_json(found), allow_nan=False).encode())
    assert data["peak_bytes"] == 210 * MB
    assert data["fragmentation_bytes"] == 90 * MB
    assert max(data["timeline"]["bytes"]) == 210 * MB
    assert {"id", "title", "saving_bytes", "evidence", "fix"} <= set(data["advice"][0])
    assert sum(row["bytes"] for row in data["rows"]) == 210 * MB


def test_nothing_to_say_and_no_time() -> None:
    bare = dataclasses.replace(report(), advice=(), duration_s=0.0, peak_time_s=0.0)
    text = printed(memory.page(bare))
    assert "Nothing stands out" in text and "│" not in text
    assert "<svg" not in memory.html(bare)
    assert "recorded" not in memory.sentence(bare)
