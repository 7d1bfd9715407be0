"""Reports hold every row and every warning, fit their columns, and escape what they did not write."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from sublight import gpus, results
from sublight.errors import BadInput
from sublight.report import bench, fakes, limits, markdown, pictures
from sublight.report import gpus as gpus_report
from sublight.report.draw import canvas, console, page, plot, roofline, svg
from sublight.results import write_file


def printed(renderable: Any, columns: int = 100) -> list[str]:
    screen = Console(width=columns, file=io.StringIO(), highlight=False)
    screen.print(renderable)
    return screen.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def many() -> results.Run:
    """Every provider, a name that is markup in any language, a row above the limit, a wrong answer."""
    other = {"op": "layer_norm", "flops": 1.5e8}
    names = ("sublight", "torch", "compile", "liger", "quack", "[bold]<b>|x")
    rows = [fakes.row(name, 20e-6 + index * 1e-6, **other) for index, name in enumerate(names)]
    return fakes.run(*rows, fakes.row("compile", 12e-6, op="add"), fakes.row("quack", 30e-6, op="add", error=2.5))


@pytest.mark.parametrize("columns", [80, 100, 140])
@pytest.mark.parametrize(
    "renderable",
    [
        limits.page(fakes.limits()),
        bench.everything(many(), [], plot.terminal(many())),
        gpus_report.overview(gpus.all_gpus()),
    ],
    ids=["limits", "bench", "gpus"],
)
def test_tables_fit_and_cut_only_notes(renderable: Any, columns: int) -> None:
    lines = printed(renderable, columns)
    assert max(map(len, lines)) <= columns
    for line in lines:
        assert "…" not in line.rstrip()[:-1], "a figure was cut"


def test_limits_table_says_what_there_is_to_say() -> None:
    text = "\n".join(printed(limits.page(fakes.limits())))
    for words in ("knee at 132 blocks of 8 warps", "throttled (power cap)", "8192×8192×8192", "one GPU: no peer link"):
        assert words in text
    assert re.search(r"hbm_copy +4\.00 TB/s +4\.80 TB/s +83 % +low ", text)
    assert " 8 warps  ▁▁▂▄██  1 to 264 blocks, 32.6 GB/s to 4.30 TB/s" in text
    assert "verdict –: no figure of this device is known to compare with" in text


def test_families_stand_together() -> None:
    names = [[line.name for line in group] for group in limits.groups(fakes.limits())]
    assert names == [["hbm_read", "hbm_copy"], ["matmul_bf16", "vector_fp32", "launch_graph_node", "peer_copy"]]


def test_tables_say_that_the_machine_was_not_well() -> None:
    run = dataclasses.replace(many(), unwell=("another process on it (7 python; 1.00 GB)",))
    for shown in ("\n".join(printed(bench.page(run), 140)), page.bench(run, "")):
        assert "measured while the GPU was not well: another process on it" in shown
    assert "not well" not in "\n".join(printed(bench.page(many()), 140))
    first, *others = fakes.limits().limits
    unwell = dataclasses.replace(first, detail={"unwell": ["link runs at PCIe 5.0 x8, not PCIe 5.0 x16"]})
    found = dataclasses.replace(fakes.limits(), limits=(unwell, *others))
    text = "\n".join(printed(limits.page(found), 140))
    for shown in (text, page.limits(found)):
        assert f"not well (link runs at PCIe 5.0 x8, not PCIe 5.0 x16): {first.name}" in shown


def test_bench_table_marks_the_fastest_and_the_errors() -> None:
    run = many()
    text = "\n".join(printed(bench.page(run), 140))
    assert "2.5× error" in text
    assert "1 row is faster than 1.02 × the limit" in text
    assert "1 row gives a wrong answer" in text
    assert "[bold]<b>|x" in text
    case = next(case for case in bench.cases(run.rows) if case[0].op == "layer_norm")
    assert bench.fastest(case) is case[0]
    wrong = [fakes.row("torch", 20e-6), fakes.row("quack", 18e-6, error=9.0), fakes.row("compile", 1e-6)]
    assert bench.fastest(wrong) is wrong[0], "a wrong answer or an impossible time is not the fastest"


def test_notes_tell_what_really_ran() -> None:
    assert bench.note(fakes.row("sublight", 1e-3, ours=False, kernel="aten::softmax")) == "by PyTorch"
    assert bench.note(fakes.row("sublight", 1e-3, bound="launch", cache="warm")) == "bound by launch; inputs in cache"
    assert bench.note(fakes.row("liger", None, unavailable="not installed")) == "not installed"


def test_compare_page() -> None:
    old = fakes.run().rows
    new = [
        dataclasses.replace(row, median_s=2 * row.median_s if row.provider == "torch" else row.median_s)
        for row in old
        if row.median_s
    ]
    text = "\n".join(printed(bench.compare_page(results.compare(old, new))))
    assert "+100.0 %" in text
    assert "4 rows in both runs: 2 slower, 0 faster, 2 within noise" in text
    assert "no row is in both runs" in "\n".join(printed(bench.compare_page([])))


# ------------------------------------------------------------------------------------------------ roofline


def test_points_lie_where_the_arithmetic_puts_them() -> None:
    chart = roofline.chart(fakes.run())
    assert chart is not None
    first = chart.points[0]
    assert first.intensity == pytest.approx(83_886_080 / 67_108_864)
    assert first.rate == pytest.approx(83_886_080 / 17.4e-6)
    assert len(chart.points) == 4  # the row of a peer that is not installed has no time
    assert chart.x[0] < first.intensity < chart.x[1]
    assert chart.y[0] < first.rate < chart.y[1]
    slope = next(roof for roof in chart.roofs if not roof.flat)
    assert slope.at(2.0) == 2 * 4.0e12
    assert {roof.name for roof in chart.roofs} == {"hbm_copy", "vector_fp32"}  # the matrix peak is out of view
    fp32 = dataclasses.replace(fakes.run(), rows=(fakes.row("torch", 20e-6, dtype="float32"),))
    assert "matmul_bf16" not in {roof.name for roof in roofline.roofs(fp32)}, "no roof of fp32 rows"
    assert "matmul_bf16" in {roof.name for roof in roofline.roofs(fakes.run())}


def test_no_arithmetic_no_chart(tmp_path: Path) -> None:
    run = fakes.run()
    bare = dataclasses.replace(run, rows=tuple(dataclasses.replace(row, flops=0.0) for row in run.rows))
    assert roofline.chart(bare) is None
    assert plot.terminal(bare) is None
    with pytest.raises(BadInput, match="nothing to plot"):
        plot.write(bare, tmp_path / "x.svg")
    assert not list(tmp_path.iterdir())


def test_svg_is_well_formed_and_places_the_points() -> None:
    chart = roofline.chart(many())
    assert chart is not None
    root = ElementTree.fromstring(svg.roofline(chart))
    marks = [item for item in root.iter() if item.tag.endswith(("circle", "rect")) and len(item)]
    assert len(marks) == len(chart.points)
    titles = [mark[0].text or "" for mark in marks]
    assert any("[bold]<b>|x: 25.0 µs, floor 16.8 µs, 67 % of the limit" in title for title in titles)
    faster, slower = (
        next(mark for mark in marks if words in (mark[0].text or "")) for words in ("sublight: 17.4", "torch: 21.9")
    )
    assert float(faster.get("cy", "")) < float(slower.get("cy", "")), "faster is higher up"


@pytest.mark.parametrize(
    "document", [svg.roofline(roofline.chart(many())), page.limits(fakes.limits()), page.bench(many(), "")]
)  # type: ignore[arg-type]
def test_documents_are_self_contained(document: str) -> None:
    without_names = document.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|<script|<link|@import|url\(", without_names)
    assert "prefers-color-scheme" in document
    assert "<b>" not in document
    assert "<H200>" not in document


def test_page_shows_every_row() -> None:
    run = many()
    document = page.bench(run, "<svg/>")
    assert document.count("<tr") == len(run.rows) + 1
    assert document.count('class="error"') + document.count('class="top error"') >= 2 + 2  # two rows, two sentences


def test_terminal_chart_fits_and_marks_every_provider() -> None:
    chart = roofline.chart(many())
    assert chart is not None
    text = canvas.roofline(chart, columns=96, lines=20)
    lines = text.plain.splitlines()
    assert max(map(len, lines)) <= 96
    plot = "\n".join(lines[:20])
    assert plot.count("●") >= 4  # some of the forward points share a cell
    assert plot.count("■") >= 1
    assert all(name in lines[-2] for name in chart.providers)
    assert "vector_fp32 60.0 TFLOP/s" in text.plain


def test_terminal_chart_is_drawn_for_the_terminals_width() -> None:
    """A wider one is broken in the middle of its rows."""
    drawing = plot.terminal(many())
    assert drawing is not None
    rows = printed(drawing, 80)[: drawing.lines]
    assert all(row[canvas.MARGIN - 1] in "│┤" for row in rows)


def test_png_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(BadInput, match=r"pip install 'sublight\[plot\]'"):
        plot.check("x.png")


# ------------------------------------------------------------------------------------------------ docs and files


def test_docs_page_counts_losses() -> None:
    text = markdown.page(fakes.run())
    assert "| softmax | fwd | 1 | 1.26 | 1.26 | 1.26 | 0 | 0 |" in text
    assert "| softmax | bwd | 1 | 0.98 | 0.98 | 0.98 | 1 | 0 |" in text
    wide = {"shape": {"rows": 64, "cols": 262144}}
    two = fakes.run(fakes.row("sublight", 30e-6, **wide), fakes.row("torch", 25.2e-6, **wide))
    assert "| softmax | fwd | 2 | 0.84 | 1.03 | 1.26 | 1 | 0 |" in markdown.page(two), "shapes of one op count together"
    handed_on = fakes.run(fakes.row("sublight", 9e-6, ours=False, op="add"), fakes.row("torch", 18e-6, op="add"))
    assert "| add | fwd | 0 | – | – | – | – | 1 |" in markdown.page(handed_on), "a call that PyTorch served is no win"
    widths = [len(line.replace("\\|", "").split("|")) for line in markdown.page(many()).splitlines() if "|x" in line]
    assert widths == [10]  # the hostile name broke no table


def test_versus() -> None:
    assert markdown.versus([fakes.row("sublight", 2e-6), fakes.row("torch", 4e-6), fakes.row("liger", 3e-6)]) == 1.5
    assert markdown.versus([fakes.row("sublight", 2e-6), fakes.row("liger", 1e-6, error=9.0)]) is None
    assert markdown.versus([fakes.row("torch", 2e-6)]) is None


def test_pictures_are_written_and_hold_the_figures(tmp_path: Path) -> None:
    results.write_json(many().to_json(), tmp_path / "run.json")
    assert pictures.main([str(tmp_path / "run.json"), str(tmp_path / "docs")]) == 0
    names = {path.name for path in (tmp_path / "docs" / "images").iterdir()}
    assert names == {"bench-dark.svg", "bench-light.svg", "limits-dark.svg", "limits-light.svg"}
    for name in names:
        text = (tmp_path / "docs" / "images" / name).read_text()
        ElementTree.fromstring(text)
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "17.4&#160;µs" in (tmp_path / "docs" / "images" / "bench-dark.svg").read_text()
    assert "# Benchmarks" in (tmp_path / "docs" / "benchmarks.md").read_text()


def test_pictures_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert pictures.main([str(tmp_path / "nowhere.json"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("sublight: cannot read")
    assert pictures.main([]) == 2


def test_a_picture_takes_the_largest_case() -> None:
    run = fakes.run(fakes.row("sublight", 1e-3, bytes=10**9), fakes.row("torch", 2e-3, bytes=10**9))
    shown = pictures.one_of_each(run)
    assert [row.median_s for row in shown.rows if row.direction == "fwd"] == [1e-3, 2e-3]


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_file("new", tmp_path / "a" / "b.html")
    assert (tmp_path / "a" / "b.html").read_text() == "new"
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="cannot write"):
        write_file("x", tmp_path / "folder")
    with pytest.raises(BadInput, match="cannot write"):
        write_file("x", tmp_path / "a" / "b.html" / "c.html")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b.html", "folder"]


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress("limits") as update:
        assert update is None
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.progress("limits") as update:
        assert update is not None
        update("hbm_copy", 3, 9)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "limits: hbm_copy" in shown.err
    assert "3/9" in shown.err
