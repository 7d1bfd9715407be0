"""Demonstrations as people see them: on the terminal, as a page, in the docs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from sublight.extensions.demos import DEMOS
from sublight.extensions.demos.demo import Figures, Record, Span, Table, Timeline, read_record
from sublight.report import demo as report
from sublight.report.draw import lanes

DOCS = Path(__file__).parent.parent.parent / "docs"
SPANS = tuple(
    Span(lane=lane, name=str(chunk), start_s=(chunk + shift) * 1e-3, elapsed_s=1e-3)
    for shift, lane in enumerate(("copy in", "kernel"))
    for chunk in range(3)
)
FIGURES = Figures(
    tables=(
        Table(title="A <table>", columns=(("way", ""), ("time", "s")), rows=(("a_b", 1.5e-3), ("c", None)), note="N"),
    ),
    timelines=(Timeline(title="three chunks", spans=SPANS),),
    missing=("counters: no ncu",),
)
RECORD = Record(gpu="H200", driver="580", date="2026-01-02T03", commit="abc", figures={"overlap": FIGURES})


def printed(what: object) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def shown(*, recorded: Record | None, here: Figures | None, why_not: str) -> report.Shown:
    overlap = next(demo for demo in DEMOS if demo.name == "overlap")
    return report.Shown(demo=overlap, here=here, why_not=why_not, recorded=recorded)


def test_the_terminal() -> None:
    text = printed(report.page(shown(recorded=RECORD, here=None, why_not="no driver")))
    for words in (
        "No GPU here: no driver",
        "Recorded on H200, driver 580, 2026-01-02",
        "1.50 ms",
        "–",
        "missing: counters",
    ):
        assert words in text
    none = printed(report.page(shown(recorded=None, here=None, why_not="no driver")))
    assert "No GPU run is recorded yet" in none and "1.50 ms" not in none
    own = printed(report.page(shown(recorded=RECORD, here=FIGURES, why_not="")))
    assert "Recorded" not in own and own.count("1.50 ms") == 1
    assert "demo --all" in printed(report.listing(DEMOS, None)) and "H200" in printed(report.listing(DEMOS, RECORD))
    assert printed(report.whole(RECORD)).count("missing: not run") == len(DEMOS) - 1


def test_lanes_as_text() -> None:
    first, second, axis = lanes.text(SPANS).splitlines()
    assert first.startswith("copy in |0000000000000000111") and first.endswith("                |")
    assert second.startswith("kernel  |                0000") and second.endswith("2222|")
    assert axis.endswith("4.00 ms")


def test_pages() -> None:
    page = report.document(RECORD)
    assert "A &lt;table&gt;" in page and "<svg" in page and page.count("missing: not run") == len(DEMOS) - 1
    picture = ElementTree.fromstring(lanes.svg("three chunks", SPANS))
    assert len(picture.findall("{*}rect")) == 1 + len(SPANS)
    assert "Recorded on H200" in report.one_document(shown(recorded=RECORD, here=None, why_not="no driver"))
    assert "No GPU run is recorded" in report.one_document(shown(recorded=None, here=None, why_not="no driver"))


def test_json() -> None:
    data = report.one_json(shown(recorded=RECORD, here=None, why_not="no driver"))
    assert (
        data["here"] is None and data["recorded"]["missing"] == ("counters: no ncu",) and "H200" in data["recorded_on"]
    )
    own = report.one_json(shown(recorded=RECORD, here=FIGURES, why_not=""))
    assert own["recorded"] is None and own["no_gpu"] is None and own["here"]["tables"]


def test_the_docs() -> None:
    record = read_record()
    assert (DOCS / "demos.md").read_text(encoding="utf-8") == report.docs_page(record), "make docs writes it anew"
    for name, timeline in report.pictures(record) if record else ():
        assert (DOCS / name).read_text(encoding="utf-8") == lanes.svg(timeline.title, timeline.spans)
    text = report.docs_page(RECORD)
    assert "| a\\_b | 1.50 ms |" in text and "![three chunks](images/demo-overlap-1.svg)" in text
    assert "No GPU run is recorded yet" in report.docs_page(None)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "read_record", lambda: RECORD)
    (tmp_path / "images").mkdir()
    assert report.main([str(tmp_path)]) == 0 and (tmp_path / "images/demo-overlap-1.svg").exists()
    assert report.main([]) == 2
