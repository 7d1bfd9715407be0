"""The page is whole, small and harmless, whatever names a trace holds."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from sublight.diagnose.record import BREAKDOWN
from sublight.report.explain import fakes as explain_fakes
from sublight.report.explain import page as explain_page
from sublight.report.explain import trace_fakes
from sublight.report.explain.causes import cause


class Reader(html.parser.HTMLParser):
    """Which elements a document really has, and what its text is."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def having(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag and wanted.items() <= attrs.items()]


def embedded(document: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', document, flags=re.S)
    assert match
    return json.loads(match[1])  # type: ignore[no-any-return]


def test_the_page_has_every_section_and_figure() -> None:
    explanation = explain_fakes.explanation()
    document = explain_page.document(explanation)
    read = Reader(document)
    text = " ".join(" ".join(read.words).split())
    assert {attrs["id"] for attrs in read.having("section") if "id" in attrs} == {
        "findings", "timeline", "ops", "roofline", "memory", "ranges", "notes",
    }  # fmt: skip
    for words in (
        explanation.sentence,
        "20.0 ms",
        "3.60 ms",
        "18 %",
        explanation.limits_from,
        "3 steps (optimizer steps)",
    ):
        assert words in text
    close = "".join(text.split())  # keywords of code are elements of their own
    for finding in explanation.findings:
        assert text.count(finding.title) == 1, "the first one's is the headline"
        assert all("".join(line.split()) in close for line in (*finding.evidence, *finding.fix.splitlines()))
    for name, words in BREAKDOWN.items():
        assert (words in text) == (explanation.breakdown[name] > 0)
    assert len(read.having("details", **{"class": "card"})) == len(explanation.findings)
    assert text.count("show in timeline") == 4, "a link for each finding that has a place in this step"
    rows = re.search(r'<table id="optable">.*?<tbody>(.*?)</tbody>', document, flags=re.S)
    assert rows and rows[1].count("<tr") == len(explanation.ops)


def test_what_limits_trust_stands_between_the_headline_and_the_figures() -> None:
    document = explain_page.document(explain_fakes.explanation())
    order = [document.index(words) for words in ("<h1>", "fixing it saves", "The machine was busy", 'class="tile"')]
    assert order == sorted(order)
    assert "caveats" not in explain_page.document(explain_fakes.on_cpu()).partition("<body>")[2]


def test_a_card_shows_the_users_line_before_and_after_then_the_advice() -> None:
    document = explain_page.document(explain_fakes.explanation())
    card = re.search(r'<details class="card" data-finding="2">.*?</details>', document, flags=re.S)
    assert card
    order = [card[0].index(words) for words in ("train.py:52", 'class="line was"', 'class="line now"', "In general")]
    assert order == sorted(order)
    text = " ".join("".join(Reader(card[0]).words).split())
    assert "loss.backward() −total += loss.item() +total += loss.detach()" in text


def test_one_colour_a_cause() -> None:
    explanation = explain_fakes.explanation()
    document = explain_page.document(explanation)
    part = cause(explanation.findings[0].id)
    for pattern in (f'class="seg c-{part}"', f'class="number c-{part}">1', f'<h1><i class="c-{part}"'):
        assert pattern in document
    assert {band["c"] for band in embedded(document)["timeline"]["bands"] if band["f"] == 0} == {part}
    styles = explain_page.asset("explain.css")
    assert all(f".c-{name}{{background-color:var(--c-{name})}}" in styles for name in BREAKDOWN)


def test_equal_ops_are_one_row_that_opens() -> None:
    first, *rest = explain_fakes.explanation().ops
    layers = tuple(dataclasses.replace(first, module=f"layer.{n}", source="net.py:7") for n in range(24))
    nothing = dataclasses.replace(first, name="aten::of_no_time", device_s=0.0)
    document = explain_page.document(explain_fakes.explanation(ops=(*layers, *rest, nothing)))
    rows = re.findall(r"<tr ([^>]*)>", document)
    assert sum("data-group" in row for row in rows) == len(rest) + 1
    assert sum("data-of" in row and "hidden" in row for row in rows) == 24
    assert "net.py:7, 24 modules" in document and "layer.23" in document and "aten::of_no_time" not in document


def test_nothing_is_fetched_and_no_foreign_script_may_run() -> None:
    document = explain_page.document(explain_fakes.explanation())
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:|//)""", document)
    assert not re.search(r"url\(|@import", document)
    read = Reader(document)
    (policy,) = read.having("meta", **{"http-equiv": "Content-Security-Policy"})
    assert "default-src 'none'" in (policy["content"] or "")
    assert len(read.having("script")) == 2
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", explain_page.script())


def test_hostile_names_stay_names() -> None:
    document = explain_page.document(explain_fakes.hostile())
    read = Reader(document)
    assert not read.having("img")
    assert [attrs for tag, attrs in read.tags if any(name.startswith("on") for name in attrs)] == []
    assert len(read.having("script")) == 2
    assert trace_fakes.HOSTILE in " ".join(read.words)
    assert any(trace_fakes.HOSTILE in name for name in embedded(document)["timeline"]["texts"])
    assert "\u2028" not in document.split('id="data">')[1].split("</script>")[0]


def test_a_broken_surrogate_does_not_stop_the_writing(tmp_path: Path) -> None:
    explain_page.write(explain_fakes.explanation(notes=("half \ud800 a pair",)), tmp_path / "x.html")
    assert "half ? a pair" in (tmp_path / "x.html").read_text(encoding="utf-8")


@pytest.mark.alone
@pytest.mark.parametrize("distinct_names", [False, True])
def test_300_000_events_make_a_small_page_soon(distinct_names: bool) -> None:
    trace = trace_fakes.crowd(300_000, distinct_names=distinct_names)
    explanation = explain_fakes.explanation(trace=trace, window_s=(0.0, 0.0))
    begin = time.perf_counter()
    document = explain_page.document(explanation)
    assert time.perf_counter() - begin < 3
    assert len(document.encode()) < explain_page.MOST_BYTES
    drawn = embedded(document)["timeline"]
    blocks = sum(len(track["s"]) for track in drawn["tracks"])
    assert 1000 < blocks <= 20_000
    merged = sum(count for track in drawn["tracks"] for count, _ in track["m"].values())
    assert merged + blocks - sum(len(track["m"]) for track in drawn["tracks"]) == 300_000
    assert "merged blocks" in document


def test_the_page_stays_small_whatever_it_holds() -> None:
    """Thousands of ops with endless names, which escaping makes six times as long."""
    explanation = explain_fakes.explanation()
    row = dataclasses.replace(
        explanation.ops[0], name="<" * 9000, module="&" * 9000, shape="<" * 9000, kernels=("<" * 9000,)
    )
    finding = dataclasses.replace(
        explanation.findings[0], title="<" * 99_000, evidence=("<" * 99_000,) * 50, fix="&" * 99_000
    )
    big = dataclasses.replace(explanation, ops=(row,) * 5000, findings=(finding,) * 200, notes=("<" * 99_000,) * 300)
    assert len(explain_page.document(big).encode()) < explain_page.MOST_BYTES


def test_what_is_missing_is_said() -> None:
    text = " ".join(Reader(explain_page.document(explain_fakes.on_cpu())).words)
    assert "no allocator events" in text
    assert "GPU" not in text.split("Keys:")[0]
    without = " ".join(Reader(explain_page.document(explain_fakes.explanation(trace=None, ops=()))).words)
    for words in ("no trace was kept", "No op was seen", "no op with a known cost", "no allocator events"):
        assert words in without


def test_a_notebook_gets_the_page_in_a_frame() -> None:
    explanation = explain_fakes.explanation()
    (frame,) = Reader(explain_page.repr_html(explanation)).having("iframe")
    assert frame["srcdoc"] == explain_page.document(explanation)
    assert frame["sandbox"] == "allow-scripts"
