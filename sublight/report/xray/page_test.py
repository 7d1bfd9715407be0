"""The page shows what it was given, links what belongs together, and is harmless whatever a kernel holds."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.report.explain.page_test import Reader
from sublight.report.xray import code as xray_code
from sublight.report.xray import fakes as xray_fakes
from sublight.report.xray import page as xray_page
from sublight.report.xray import tables as xray_tables
from sublight.report.xray.fakes import SASS
from sublight.report.xray.view import KernelView, MixRow, RoofRow
from sublight.xray.record import Access


def words(document: str) -> str:
    return " ".join(" ".join(Reader(document).words).split())


def linked(panes: xray_code.Panes, name: Any) -> dict[str, tuple[int, ...]]:
    """Number of a row -> the lines that it comes from."""
    return {row.number: panes.keys[row.key].lines for row in panes.listings[name] if row.key is not None}


def test_rows_of_all_panes_meet_in_the_same_keys() -> None:
    panes = xray_code.panes(xray_fakes.code(), xray_fakes.SOURCE)
    assert linked(panes, "sass") == {
        "0000": (7,), "0010": (8,), "0020": (9,), "0030": (10,), "0040": (10,), "0050": (4, 10), "0060": (4, 11),
        "0070": (4, 11), "0080": (11,), "0090": (11,),
    }  # fmt: skip
    assert set(linked(panes, "ptx").values()) == {(7,), (8,), (9,), (10,), (4, 10), (11,)}
    assert set(linked(panes, "ttgir").values()) == {(7,), (8,), (9,), (10,), (4, 10), (4, 11), (11,)}
    assert len(panes.keys) == len({key.lines for key in panes.keys}) == 7
    assert next(key.through for key in panes.keys if key.lines == (10,)) == ("standard.py:314", "standard.py:287")
    assert panes.weights() == {7: 1, 8: 1, 9: 1, 10: 2, 4: 3, 11: 2}


def test_debug_lines_and_other_kernels_are_left_out() -> None:
    panes = xray_code.panes(xray_fakes.code(), xray_fakes.SOURCE)
    ptx = "\n".join(row.text for row in panes.listings["ptx"])
    assert "another" not in ptx and ".loc" not in ptx and ".b8" not in ptx and "$L__tmp" not in ptx
    assert ".func helper" in ptx and "$L__BB0_1:" in ptx and "  st.global.b32 [%rd1], %r8;" in ptx
    assert not any("loc(" in row.text or row.text.startswith("#loc") for row in panes.listings["ttgir"])
    sass = [row.text for row in panes.listings["sass"]]
    assert (
        sass[:2] == ["_double:", "LDC R1, c[0x0][0x28]"]
        and sass[-2:] == [".L_x_0:", "BRA `(.L_x_0)"]
        and len(sass) == 12
    )


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("sass", "@!P0 LDG.E.128 R4, desc[UR4][R2.64]", "global"),
        ("sass", "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]", "global"),
        ("sass", "UTMALDG.2D [UR8], [UR6]", "global"),
        ("sass", "LDS.128 R4, [R2]", "shared"),
        ("sass", "LDSM.16.MT88.4 R4, [R2]", "shared"),
        ("sass", "STL.64 [R1], R2", "local"),
        ("sass", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]", "tensor"),
        ("sass", "UTCHMMA gdesc[UR4], gdesc[UR6]", "tensor"),
        ("sass", "HFMA2.MMA R5, -RZ, RZ, 0, 0", ""),
        ("sass", "LDGDEPBAR", "barrier"),
        ("sass", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "barrier"),
        ("sass", "MUFU.EX2 R1, R2", "special"),
        ("sass", "LDC R1, c[0x0][0x28]", ""),
        ("ptx", "@%p1 ld.global.v4.b32 { %r2 }, [ %rd1 ];", "global"),
        ("ptx", "ld.param.b64 %rd1, [p];", ""),
        ("ptx", "cp.async.cg.shared.global [%r1], [%rd1], 16;", "global"),
        ("ptx", "cp.async.wait_group 0;", "barrier"),
        ("ptx", "st.shared.b32 [%r1], %r2;", "shared"),
        ("ptx", "ld.local.b32 %r1, [%rd2];", "local"),
        ("ptx", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {", "tensor"),
        ("ptx", "wgmma.fence.sync.aligned;", "barrier"),
        ("ttgir", "    %x_8 = tt.load %x_7, %mask : tensor<4xf32>", "global"),
        ("ttgir", '    %top_9 = "tt.reduce"(%top) <{axis = 0 : i32}> ({', "shuffle"),
        ("ttgir", "    %a:2 = scf.for %i = %b to %c {", "control"),
        ("ttgir", "    %d = ttng.warp_group_dot %a, %b, %c", "tensor"),
        ("ttgir", "    %d:3 = ttng.warp_group_dot_wait %a, %b", "barrier"),
        ("ttgir", "    %d = ttg.local_load %a", "shared"),
    ],
)
def test_instructions_have_the_colour_of_what_they_do(name: Any, text: str, kind: str) -> None:
    made = {
        "sass": {"sass": f"        /*0000*/ {text} ;"}, "ptx": {"sass": "", "ptx": f"\t{text}"},
        "ttgir": {"sass": "", "ttgir": text},
    }[name]  # fmt: skip
    (row,) = xray_code.panes(xray_fakes.code(**{"ptx": "", "ttgir": "", **made})).listings[name]
    assert row.kind == kind
    assert row.opcode is not None and row.text[slice(*row.opcode)].split(".")[0] in text


def test_the_page_has_every_part_and_figure() -> None:
    document = xray_page.document([xray_fakes.view()])
    read, told = Reader(document), words(document)
    ids = [attrs["id"] for attrs in read.having("section") if "id" in attrs]
    assert ids == ["kernels", "panes-0", "roof-0", "mix-0", "occupancy-0", "accesses-0"]
    for expected in (
        "_double on H200 SXM", "sm_90", "8 B", "1.5 KiB", "4 warps a block", "75 %", "limited by registers",
        "x_ptr: *fp32", "y_ptr: *fp32 · N=512 num_warps=4 grid=256x2",
        "8 bytes do not fit into registers.", "48 MB at 4.8 TB/s", "10.0 µs",
        "· 1.50 × floor", "not known", "issues in ≥ 8 cycles", "8-way", "its address depends on data", "One note.",
        "4.10 kB", "512 B", "12 %",
    ):  # fmt: skip
        assert expected in told, expected
    assert [attrs["data-pane"] for attrs in read.having("div") if "data-pane" in attrs] == [
        "source",
        "ttgir",
        "ptx",
        "sass",
    ]
    assert told.index("8 bytes do not fit") < told.index("Enough bytes in flight")  # what is wrong comes first
    assert {attrs["data-line"] for attrs in read.having("a") if "data-line" in attrs} == {"4", "9", "10", "11"}
    for name in ("warp", "wave", "sector", "bank", "occupancy", "wavefront", "spill"):
        assert f"<summary>{name}</summary>" in document
    assert not re.search(r'(src|href)="(?!#)', document) and "@import" not in document and "url(" not in document


def test_missing_parts_do_not_show() -> None:
    document = xray_page.document([KernelView(code=xray_fakes.code(ttgir="", ptx="", file="/nowhere/a.py"))])
    read, told = Reader(document), words(document)
    assert [attrs["id"] for attrs in read.having("section") if "id" in attrs] == ["kernels", "panes-0"]
    assert [attrs["data-pane"] for attrs in read.having("div") if "data-pane" in attrs] == ["source", "sass"]
    assert "The source (/nowhere/a.py) is not at hand." in told
    assert "blocks per SM" not in told and "tensor cores" not in told and "Notes" not in told
    with pytest.raises(BadInput, match="no kernel"):
        xray_page.document([])


def test_gpus_stand_side_by_side_and_shared_findings_once() -> None:
    other = xray_fakes.view("a100", occupancy=0.5)
    other = dataclasses.replace(other, findings=other.findings[:1])
    document = xray_page.document([xray_fakes.view(), other])
    table = document[document.index('<div class="wide compare">') :]
    table = table[: table.index("</table>")]
    rows = dict(re.findall(r'<tr class="(?:differs)?"><th scope="row">(.*?)</th>(.*?)</tr>', table))
    assert re.findall(r"<b>(.*?)</b>", rows["occupancy"]) == ["75 %", "50 %"]
    assert re.findall(r"<b>(.*?)</b>", rows["registers"]) == ["40", "40"]
    assert (
        'class="differs"><th scope="row">occupancy' in table
        and 'class="differs"><th scope="row">registers' not in table
    )
    assert re.findall(r'data-pick="(\d)"', table) == ["0", "1"]
    findings = document[document.index('<ul class="findings">') : document.index('<div class="terms"')]
    assert (
        findings.count("<li") == 2 and findings.count("<em>(H200 SXM)</em>") == findings.count("<em>") == 1
    )  # the spill is on one of them
    assert document.count("<template>") == 4  # the second kernel's panes wait


def test_several_kernels_have_a_table_and_a_sheet_each() -> None:
    other = xray_fakes.view(code=xray_fakes.code(name="_other"), accesses=(), findings=())
    document = xray_page.document([xray_fakes.view(), other, xray_fakes.view("a100", limited_by="threads")])
    table = document[document.index('<div class="wide tall summary">') : document.index('<div class="sheets">')]
    rows = re.findall(r'<tr data-k="(\d)" data-pick="\1">(.*?)</tr>', table)
    cells = [(at, re.sub("<.*?>", " ", row.replace("</td><td", "</td>|<td")).split("|")) for at, row in rows]
    result = [(at, *(cell.strip() for cell in row)) for at, row in cells]
    assert result == [
        ("0", "_double", "h200", "40", "8 B", "1.5 KiB", "75 %", "registers", "8 ×", "8-way", "1"),
        ("2", "_double", "a100", "40", "8 B", "1.5 KiB", "75 %", "threads", "8 ×", "8-way", "1"),
        ("1", "_other", "h200", "40", "8 B", "1.5 KiB", "75 %", "registers", "–", "–", "none"),
    ]
    assert table.count('class="poor"') == 4 + 4 + 1 and table.count('class="pick again"') == 1
    assert document.count('<div class="sheet">') == 2
    assert "summary" not in re.findall(r'<div class="wide[^>]*>', xray_page.document([xray_fakes.view()]))[0]


def test_constants_that_differ_by_gpu_are_told_by_gpu() -> None:
    tiles = xray_fakes.code("a100", constants={"N": 1024})
    document = xray_page.document([xray_fakes.view(), xray_fakes.view(code=tiles)])
    assert document.count('<div class="sheet">') == 1
    given = re.findall(r'<td data-k="(\d)" class="given">(.*?)</td>', document)
    assert given == [("0", "N=512 num_warps=4 grid=256x2"), ("1", "N=1024 num_warps=4 grid=256x2")]
    assert '<p class="signature">x_ptr: *fp32, y_ptr: *fp32</p>' in document


def test_badges_say_the_worst_of_a_line() -> None:
    given: dict[str, Any] = {
        "place": xray_fakes.place(9),
        "space": "global",
        "kind": "load",
        "bytes_per_thread": 4,
        "requests": 2,
    }
    rows = [Access(**given, sectors=sectors, ideal_sectors=8) for sectors in (8, 64, 16)]
    badges = xray_code.badges("double.py", [*rows, *xray_fakes.accesses()[1:]], xray_fakes.view().findings)
    assert {line: [re.sub("<.*?>", "", mark) for mark in marks] for line, marks in badges.items()} == {
        9: ["32 sectors"], 10: ["8-way"], 11: ["32 sectors"], 4: ["spill"],
    }  # fmt: skip
    assert 'class="poor"' in badges[9][0] and "32 sectors a request where 4 would do" in badges[9][0]
    assert 'class="wrong"' in badges[4][0]
    assert xray_code.badges("other.py", rows, ()) == {}


def test_heat_is_drawn_against_the_hottest_line() -> None:
    panes = xray_code.panes(xray_fakes.code(), xray_fakes.SOURCE)
    drawn = xray_code.html(panes, "source", heat={9: 30.0, 10: 10.0}, badges={})
    bar = r'data-n="(\d+)"><i>\d+</i><u class="c\d"><s style="--h:([\d.]+)" data-tip="([\d.]+) %'
    assert re.findall(bar, drawn) == [("9", "1.000", "75.0"), ("10", "0.333", "25.0")]
    assert drawn.count('<div class="l"') == 12
    assert "<em># &lt;b&gt;all&lt;/b&gt; of them // 2</em>" in drawn
    assert "<b>return</b> x + x" in drawn


def test_a_division_is_no_comment_and_an_include_is_none_either() -> None:
    code = xray_fakes.code()
    for file, line, expected in (
        ("/home/me/double.py", "a = b // 2", "a = b // <var>2</var>"),
        ("/home/me/double.cu", "int a; // two", "<b>int</b> a; <em>// two</em>"),
        ("/home/me/double.cu", "#include <a.h>", "#include &lt;a.h&gt;"),
    ):
        panes = xray_code.panes(dataclasses.replace(code, file=file), line)
        assert f"<code>{expected}</code>" in xray_code.html(panes, "source", heat={}, badges={})


def test_instructions_are_grouped_by_what_they_do() -> None:
    rows = (MixRow(name="a", counts={"global load": 4, "bulk copy": 1, "fp32": 5, "unheard of": 2, "nop": 0}),)
    drawn = xray_tables.sections(xray_fakes.view(mix=rows, roof=(), accesses=(), occupancy_rows=()), 0)
    found = re.findall(r'<span class="k-(\w+)" style="flex-grow:(\d+)"', drawn)
    assert found == [("global", "5"), ("float", "5"), ("other", "2")]
    assert "12 instructions a warp" in drawn and "4 global load\n1 bulk copy" in drawn and "nop" not in drawn


def test_times_are_drawn_against_the_longest() -> None:
    rows = (RoofRow(name="floor", seconds=1e-6, kind="floor"), RoofRow(name="measured", seconds=4e-6, kind="measured"))
    drawn = xray_tables.sections(xray_fakes.view(roof=rows, mix=(), accesses=(), occupancy_rows=()), 0)
    assert re.findall(r'class="bar-of (\w+)" style="width:([\d.]+)%', drawn) == [
        ("floor", "25.00"),
        ("measured", "100.00"),
    ]
    assert "4.00 × floor" in drawn


def test_the_source_is_read_from_disk(tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text("one\ntwo\n", encoding="utf-8")
    assert xray_code.source_text(xray_fakes.code(file=str(file))) == "one\ntwo\n"
    assert xray_code.source_text(xray_fakes.code(file=str(tmp_path))) is None
    assert xray_code.source_text(xray_fakes.code(file="")) is None
    path = tmp_path / "page.html"
    xray_page.write([xray_fakes.view()], path)
    assert path.read_text(encoding="utf-8") == xray_page.document([xray_fakes.view()])


def test_nothing_a_kernel_holds_is_markup() -> None:
    document = xray_page.document([xray_fakes.hostile(), xray_fakes.view(), xray_fakes.hostile()])
    read = Reader(document)
    assert [attrs for attrs in read.having("script") if "type" not in attrs] == [{}]
    assert not read.having("img") and not any("onerror" in attrs for _, attrs in read.tags)
    assert "<script>alert" not in document
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', document, flags=re.S)
    assert data and len(json.loads(data[1])["kernels"]) == 3


def test_a_large_kernel_is_drawn_in_good_time() -> None:
    body = SASS.split("\n", 4)[4]
    code = xray_fakes.code(sass=SASS.split("\n", 4)[3] + "\n" + body * 600)
    begin = time.perf_counter()
    document = xray_page.document([xray_fakes.view(code=code)])
    assert time.perf_counter() - begin < 5
    assert len(document) < 2_000_000 and document.count('class="l global"') > 1200


def test_a_figure_to_worry_about_is_marked() -> None:
    assert "tile poor" in xray_page.document([xray_fakes.view()])
    used = dataclasses.replace(xray_fakes.code().resources, spill_bytes=0, stack_bytes=0)
    document = xray_page.document([xray_fakes.view(code=xray_fakes.code(resources=used))])
    assert "tile poor" not in document and "none" in words(document)
