"""The drawing of a layout says where elements lie, in the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

from sublight.report.xray import fakes, lanes
from sublight.xray.lanes import Layout, Spread, layouts, place
from sublight.xray.lanes_test import AMPERE, BLOCKED, SHARED, TTGIR


def drawn(found: list[tuple[object, tuple[Layout, ...]]], *, full: bool = False) -> str:
    import io

    from rich.console import Console

    console = Console(width=80, file=io.StringIO())
    console.print(lanes.page(found, full=full))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_cells_are_what_one_thread_holds_side_by_side() -> None:
    blocked, mma, shared = (place(text, (64, 64), "f16", {}) for text in (BLOCKED, AMPERE, SHARED["swizzled"][0]))
    assert [lanes.run_of(each) for each in (blocked, mma, shared)] == [4, 2, 8]
    assert len(lanes.grid(blocked)) == 64 and len(lanes.grid(blocked)[0]) == 16
    assert [lanes.label(mma, (0, col)) for col in (0, 2, 6, 8, 16)] == ["0.0", "0.1", "0.3", "1.0", "0.0"]
    assert [lanes.label(shared, (line, 0)) for line in range(4)] == ["0", "4", "8", "12"]


def test_the_terminal_draws_whole_layouts_and_names_their_parts() -> None:
    code = replace(fakes.code(), ttgir=TTGIR)
    text = drawn([(code, layouts(TTGIR))])
    assert "blocked 64x32 !tt.ptr<f16>: 4 warps of 32 lanes, 16 elements a thread" in " ".join(text.split())
    assert "48x64 f32: not drawn: 48x64 is no power of two" in " ".join(text.split())
    assert "which --full draws: slice<{dim = 1, parent = mma}> 64" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "slice<{dim = 1, parent = mma}> 64 f32: 4 warps" in " ".join(
        drawn([(code, layouts(TTGIR))], full=True).split()
    )
    assert "no layout" in drawn([(code, ())])


def test_json_and_page() -> None:
    code = replace(fakes.code(), name="<b>", ttgir=TTGIR)
    found = [(code, layouts(TTGIR))]
    rows = json.loads(json.dumps(lanes.to_json(found)))["layouts"]
    assert rows[0]["lane"] == [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    assert len(next(row for row in rows if row["layout"] == "shared")["offsets"]) == 16 * 64
    assert next(row for row in rows if row["shape"] == [48, 64])["unavailable"]
    text = lanes.document(found)
    assert "<b> on" not in text and "&lt;b&gt; on" in text
    where = found[0][1][0].where
    assert isinstance(where, Spread)
    picture = lanes.svg(where)
    ElementTree.fromstring(picture)
    assert "element 0, 4: warp 0 lane 1 register 0" in picture
