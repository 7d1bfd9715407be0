"""Where lanes go, drawn: banks under one another, unrolled copies once."""

from __future__ import annotations

import io
import json
from xml.etree import ElementTree

from rich.console import Console

from sublight.report.xray import fakes, reach
from sublight.xray.ptx.reach import Reach, Reached
from sublight.xray.record import Place

LOAD = Reach(
    place=Place(file="/a/transpose.cu", line=24),
    instruction="ld.shared.f32",
    space="shared",
    kind="load",
    width=4,
    offsets=tuple(1024 + 128 * lane for lane in range(32)),
)
SIDE = Reach(
    place=Place(file="/a/transpose.cu", line=20),
    instruction="ld.global.f32",
    space="global",
    kind="load",
    width=4,
    argument="x",
    offsets=tuple(4 * lane if lane < 16 else None for lane in range(32)),
)
COPY = Reach(**{name: getattr(LOAD, name) for name in ("place", "instruction", "space", "kind", "width")},
             offsets=tuple(1056 + 128 * lane for lane in range(32)))  # fmt: skip
LOST = Reach(place=None, instruction="ld.global.f32", space="global", kind="load", width=4, unknown="no data")
FOUND = [(fakes.code(), Reached(instructions=(SIDE, LOAD, COPY, LOST), stopped="a branch depends on n"))]


def drawn() -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(reach.page(FOUND))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal() -> None:
    text = drawn()
    plain = " ".join(text.split())
    assert "transpose.cu:24: shared load of 4 bytes (ld.shared.f32), warp 0: each lane 128 bytes behind" in plain
    assert "the last (2 such)" in plain and "16 of 32 lanes: side by side" in plain and "not known: no data" in plain
    assert f"      +1152 01{'··' * 31}\n"[1:] in text and "… 24 lines more" in text
    assert f"+0 {''.join(f'{lane:02d}' for lane in range(16))}{'··' * 16}" in text
    assert "could not be followed to its end: a branch depends on n" in plain
    assert max(map(len, text.splitlines())) <= 80


def test_json_has_every_instruction_and_the_page_every_word() -> None:
    rows = json.loads(json.dumps(reach.to_json(FOUND)))["instructions"]
    assert [len(row["offsets"]) for row in rows] == [32, 32, 32, 0]
    assert rows[1]["place"]["line"] == 24
    page = reach.document(FOUND)
    assert "a branch depends on n" in page
    assert "Where the lanes of a warp go" in page and page.count("<svg") == 2
    titles = [each.text for each in ElementTree.fromstring(reach.svg(LOAD)).iter("{http://www.w3.org/2000/svg}title")]
    assert (
        len(titles) == 32 * 32
        and titles[32] == "byte 1152, bank 0: lane 1"
        and titles[33] == "byte 1156, bank 1: no lane"
    )


def test_a_block_without_an_access_is_said() -> None:
    assert reach.notes(Reached(instructions=())) == ["The block that was followed comes to no memory instruction."]
